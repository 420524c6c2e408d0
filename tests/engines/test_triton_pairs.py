"""Bias tensors and dense masks in every memory layout.

TMA loads them if it can; otherwise the kernels compute addresses.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import headwise as hw
from tests.engines.test_triton import DEVICE, check, normal

pytest.importorskip("triton", reason="the engine's kernels are written in Triton")

from headwise.core.options import Options
from headwise.core.problem import pose
from headwise.engines.triton.host.operands import operands, pair_tiles
from tests.thinned import thinned

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # as in test_triton
B, H, N, M = 2, 2, 48, 96
Make = Callable[..., Tensor]

LYING: dict[str, Callable[[Make], Tensor]] = {
    "whole": lambda make: make(B, H, N, M),
    "one for all heads": lambda make: make(B, 1, N, M),
    "one for all entries": lambda make: make(1, H, N, M),
    "repeated": lambda make: make(1, H, N, M).expand(B, H, N, M),
    "of a larger one": lambda make: make(B, H, N + 4, 2 * M)[:, :, 4:, :M],
    "heads last": lambda make: make(B, N, H, M).transpose(1, 2),
    "transposed": lambda make: make(B, H, M, N).mT,
    "at an odd address": lambda make: make(B * H * N * M + 1)[1:].view(B, H, N, M),
    "in odd rows": lambda make: make(B, H, N, M + 1)[..., :M],
    "of keys": lambda make: make(B, H, 1, M),
    "of rows": lambda make: make(B, 1, N, 1),
}
COPIED = [*LYING][:6]
CAUSAL = hw.mask.causal()
MASKS = {
    "none": None,
    "causal": CAUSAL,
    "even offset": hw.mask.causal(offset=16),
    "even window": CAUSAL & hw.mask.window(32),
    "offset": hw.mask.causal(offset=5),
    "window": CAUSAL & hw.mask.window(21),
    "documents": hw.mask.documents(torch.arange(M) // 25),
}
BEGINNING = [*MASKS][:4]  # the masks whose tiles all begin at multiples of 16 keys


@pytest.fixture(params=["here", pytest.param("device", marks=pytest.mark.gpu)])
def place() -> None:
    """Run under the interpreter, and on a GPU if there is one."""


def three() -> list[Tensor]:
    return [normal(B, H, N, 16), normal(B, 1, M, 16), normal(B, 1, M, 16)]


def shown(*shape: int) -> Tensor:
    return normal(*shape) > 0


def agrees(**options: object) -> None:
    check(*three(), 1e-5 if DEVICE == "cpu" else 1e-4, **options)


def tiles(mask: hw.mask.Mask | None = None, bias: Tensor | None = None) -> tuple[bool, bool]:
    """Return whether TMA loads the bias, and the dense mask."""
    q, k, v = three()
    terms = pose("attention", q, k, v, Options(bias=bias, mask=mask)).terms(banded=True)
    bias_tiles, dense_tiles = pair_tiles(operands(q, k, v, terms), 32, 32)
    return bias_tiles is not None, dense_tiles is not None


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("lying", thinned(LYING))
def test_a_bias_is_added_and_a_dense_mask_hides_in_every_layout(lying: str) -> None:
    agrees(bias=LYING[lying](normal), mask=hw.mask.dense(LYING[lying](shown)), softcap=3.0)


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("mask", MASKS)
def test_tiles_that_begin_anywhere_agree(mask: str) -> None:
    agrees(bias=normal(B, H, N, M), mask=MASKS[mask])


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("mask", [name for name in MASKS if name != "none"])
def test_tiles_of_a_dense_mask_that_begin_anywhere_agree(mask: str) -> None:
    agrees(bias=normal(B, H, N, M, dtype=torch.bfloat16), mask=MASKS[mask] & dense())


def dense() -> hw.mask.Mask:
    return hw.mask.dense(shown(B, H, N, M))


@pytest.mark.parametrize("lying", LYING)
def test_tma_loads_what_it_can(lying: str) -> None:
    mask = hw.mask.dense(LYING[lying](shown))
    assert tiles(mask, LYING[lying](normal)) == (lying in COPIED, lying in COPIED)


@pytest.mark.parametrize("mask", MASKS)
def test_tma_loads_what_begins_at_16_bytes(mask: str) -> None:
    assert tiles(MASKS[mask], normal(B, H, N, M)) == (mask in BEGINNING, False)


def test_tma_loads_a_dense_mask_that_is_part_of_another() -> None:
    assert tiles(MASKS["offset"] & dense()) == (False, True)
