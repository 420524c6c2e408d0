"""Attention that a model writes out: a softmax, followed until it meets values."""
