"""Attention block by block on any device, in memory linear in the length."""
