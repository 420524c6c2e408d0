"""Fused attention that sees, in Triton: kernels for NVIDIA GPUs, a second forward for Hopper.

`engine` and `hopper` are the engines, `host` is the code that launches kernels, `kernels` the code
that runs on the GPU.
"""
