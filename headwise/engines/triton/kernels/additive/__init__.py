"""The kernels of additive (Bahdanau) scores."""
