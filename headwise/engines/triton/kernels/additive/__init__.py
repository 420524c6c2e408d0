"""The kernels of additive scores."""
