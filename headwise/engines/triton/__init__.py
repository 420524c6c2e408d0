"""Fused attention with statistics, in Triton: for NVIDIA GPUs, with a second forward for Hopper.

`engine` and `hopper` are the engines, `host` is the code that launches kernels, `kernels` the code
that runs on the GPU.
"""

__all__ = ["tuning"]
