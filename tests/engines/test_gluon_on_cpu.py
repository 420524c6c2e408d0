"""The emulator of Gluon kernels: it computes what they say, and finds what is wrong with them."""

# A kernel is Gluon's language, not Python's: its arguments have no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Gluon is a part of Triton")

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tests.engines.gluon_on_cpu import Fault, run

async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@gluon.jit
def produce(x, tiles, full, empty, blocks, STAGES: gl.constexpr, FAULT: gl.constexpr):
    for n in range(blocks):
        at, turn = n % STAGES, (n // STAGES) & 1
        if FAULT != "no empty":
            mbarrier.wait(empty.index(at), turn ^ 1)
        bytes: gl.constexpr = x.block_type.nbytes * (2 if FAULT == "bytes" else 1)
        mbarrier.expect(full.index(at), bytes)
        async_load(x, [n * 16, 0], full.index(at), tiles.index(at))


@gluon.jit
def consume(out, tiles, result, full, empty, blocks, STAGES: gl.constexpr, FAULT: gl.constexpr):
    """Sum x xᵀ over blocks of rows x (16, 16), and copy it out."""
    sums = gl.zeros([16, 16], gl.float32, None)
    for n in range(blocks):
        at, turn = n % STAGES, (n // STAGES) & 1
        if FAULT != "no full":
            mbarrier.wait(full.index(at), turn)
        tile = tiles.index(at)
        made = warpgroup_mma(tile.permute((1, 0)), tile, sums, is_async=True)
        if FAULT == "early":
            mbarrier.arrive(empty.index(at), count=1)
        sums = warpgroup_mma_wait(0, deps=(made,))
        if FAULT == "no wait":
            sums = made + 0.0
        if FAULT != "early" and FAULT != "no arrive":
            mbarrier.arrive(empty.index(at), count=1)
    result.store(sums)
    if FAULT != "no fence":
        fence_async_shared()
    async_store(out, [0, 0], result)
    if FAULT == "no store wait":
        result.store(sums)
    tma.store_wait(0)


@gluon.jit
def squares(x, out, blocks, STAGES: gl.constexpr, FAULT: gl.constexpr):
    tiles = gl.allocate_shared_memory(x.dtype, [STAGES, 16, 16], x.layout)
    result = gl.allocate_shared_memory(gl.float32, [16, 16], out.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(STAGES):
        mbarrier.init(full.index(n), count=1)
        mbarrier.init(empty.index(n), count=1)
    gl.warp_specialize(
        [
            (consume, (out, tiles, result, full, empty, blocks, STAGES, FAULT)),
            (produce, (x, tiles, full, empty, blocks, STAGES, FAULT)),
        ],
        [1],
        [24],
    )


def tiled(x: Tensor) -> TensorDescriptor:
    kind = gl.float16 if x.dtype == torch.float16 else gl.float32
    layout = gl.NVMMASharedLayout.get_default_for([16, 16], kind)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [16, 16], layout)


def squared(fault: str = "", seed: int = 0, stages: int = 2) -> tuple[Tensor, Tensor]:
    x, out = torch.randn(75, 16).half(), torch.full((16, 16), torch.nan)
    run(squares, (1, 1, 1), (tiled(x), tiled(out), 5), seed, STAGES=stages, FAULT=fault)
    return out, x.float().T @ x.float()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_correct_kernel_computes_the_same_in_any_order(seed: int, stages: int) -> None:
    torch.testing.assert_close(*squared(seed=seed, stages=stages), atol=1e-4, rtol=1e-5)


FAULTS = {
    "no full": "read",
    "no empty": "written|arrivals",
    "early": "written",
    "no wait": "before warpgroup_mma_wait",
    "no arrive": "deadlock",
    "bytes": "deadlock",
    "no fence": "fence_async_shared",
    "no store wait": "written while",
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_in_every_order(fault: str, seed: int) -> None:
    with pytest.raises(Fault, match=FAULTS[fault]):
        squared(fault, seed)
