"""Kernels that compute parts of the attention matrix, and sums over them."""
