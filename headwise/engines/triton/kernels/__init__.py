"""Triton and Gluon kernels: the code that runs on the GPU."""
