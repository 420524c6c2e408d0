"""Tensors of all pairs, biases and dense masks, in every way that they can lie in memory.

Where the copy engine can load them it does; elsewhere the kernels compute addresses.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import headwise as hw
from tests.engines.test_triton import DEVICE, check, normal

pytest.importorskip("triton", reason="the engine's kernels are written in Triton")

from headwise.engines.triton.launch import operands, pair_tiles
from headwise.problem import pose

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # as in test_triton
B, H, N, M = 2, 2, 40, 72

LYING: dict[str, Callable[[], Tensor]] = {
    "whole": lambda: normal(B, H, N, M),
    "one for all heads": lambda: normal(B, 1, N, M),
    "one for all entries": lambda: normal(1, H, N, M),
    "repeated": lambda: normal(1, H, N, M).expand(B, H, N, M),
    "of a larger one": lambda: normal(B, H, N + 4, 2 * M)[:, :, 4:, :M],
    "in 16 bits": lambda: normal(B, H, N, M, dtype=torch.bfloat16),
    "transposed": lambda: normal(B, H, M, N).mT,
    "at an odd address": lambda: normal(B * H * N * M + 1)[1:].view(B, H, N, M),
    "in odd rows": lambda: normal(B, H, N, M + 1)[..., :M],
    "of keys": lambda: normal(B, H, 1, M),
    "of rows": lambda: normal(B, 1, N, 1),
}
MASKS = {  # tiles of keys begin at multiples of 16 bytes, or anywhere
    "none": None,
    "causal": hw.mask.causal(),
    "documents": hw.mask.documents(torch.arange(M) // 25),
    "window": hw.mask.causal() & hw.mask.window(21),
    "offset": hw.mask.causal(offset=5),
}
COPIED = ("whole", "one for all heads", "one for all entries", "repeated", "of a larger one")


@pytest.fixture(params=["here", pytest.param("device", marks=pytest.mark.gpu)])
def place() -> None:
    """The interpreter here, and a device's compiled kernels where there is one."""


def three() -> list[Tensor]:
    return [normal(B, H, N, 16), normal(B, 1, M, 16), normal(B, 1, M, 16)]


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("lying", LYING)
def test_a_bias_is_added_wherever_it_lies(lying: str) -> None:
    options = {"bias": LYING[lying](), "mask": hw.mask.causal()}
    check(*three(), 1e-5 if DEVICE == "cpu" else 1e-4, **options)


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("lying", LYING)
def test_a_dense_mask_hides_wherever_it_lies(lying: str) -> None:
    shown = LYING[lying]() > 0
    shown[..., -1] = True
    check(*three(), 1e-5 if DEVICE == "cpu" else 1e-4, mask=hw.mask.dense(shown), softcap=3.0)


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", ["bias", "dense"])
def test_tiles_that_begin_anywhere_agree(kind: str, mask: str) -> None:
    options, pairs = {"mask": MASKS[mask]}, normal(B, H, N, M)
    if kind == "bias":
        options["bias"] = pairs
    elif MASKS[mask] is not None:
        options["mask"] = MASKS[mask] & hw.mask.dense(pairs > 0)
    check(*three(), 1e-5 if DEVICE == "cpu" else 1e-4, **options)


@pytest.mark.parametrize("mask", MASKS)
def test_the_copy_engine_is_asked_for_tiles_that_begin_where_it_can_only(mask: str) -> None:
    q, k, v = three()
    problem = pose("attention", q, k, v, bias=normal(B, H, N, M), mask=MASKS[mask])
    bias, _ = pair_tiles(operands(q, k, v, problem.terms(banded=True)), 32, 32)
    assert (bias is not None) == (mask in ("none", "causal"))


@pytest.mark.parametrize("lying", LYING)
def test_the_copy_engine_loads_what_it_can(lying: str) -> None:
    q, k, v = three()
    problem = pose("attention", q, k, v, bias=LYING[lying]())
    bias, dense = pair_tiles(operands(q, k, v, problem.terms(banded=True)), 32, 32)
    assert (bias is not None) == (lying in COPIED or lying == "in 16 bits")
    assert dense is None
