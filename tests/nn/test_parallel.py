"""Tensor parallelism over two processes, by PyTorch's own plan: columns thrice, then rows."""

import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import headwise as hw


def layer() -> hw.nn.MultiHeadAttention:
    torch.manual_seed(0)
    return hw.nn.MultiHeadAttention(
        32, 8, kv_heads=4, mask=hw.mask.causal(), position=hw.nn.Rotary()
    )


def inputs() -> torch.Tensor:
    return torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(1))


def worker(rank: int, port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.set_num_threads(1)
    columns = {name: ColwiseParallel() for name in ("query", "key", "value")}
    attn = parallelize_module(
        layer(), init_device_mesh("cpu", (2,)), {**columns, "out": RowwiseParallel()}
    )
    out = attn(inputs())
    out.square().sum().backward()
    grads = {name: p.grad.full_tensor() for name, p in attn.named_parameters()}
    found = {name: torch.as_tensor(x.tolist()) for name, x in {**grads, "whole": out}.items()}
    if rank == 0:
        torch.save(found, Path(folder) / "found.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_with_half_of_the_heads_each_compute_the_same(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(worker, (port, str(tmp_path)), nprocs=2)
    found = torch.load(tmp_path / "found.pt")
    attn = layer()
    out = attn(inputs())
    out.square().sum().backward()
    torch.testing.assert_close(found["whole"], out.detach(), rtol=1e-5, atol=1e-5)
    for name, parameter in attn.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-5)
