"""Devices: their rates by data sheet or by measurement, and the speeds that times follow from."""
