"""The softcap of the kernels: equally accurate by both of its formulas."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import headwise as hw
from tests.engines.test_triton import DEVICE, compare, everything

pytest.importorskip("triton", reason="the engine's kernels are written in Triton")

import triton
import triton.language as tl

from headwise.engines.triton.host.operands import cap_of
from headwise.engines.triton.kernels.cap import LIMIT, capped, together

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # as in test_triton


@pytest.fixture(autouse=True, params=["here", pytest.param("device", marks=pytest.mark.gpu)])
def place() -> None:
    """Run on a GPU too: the interpreter has both formulas, but not the assembly that chooses."""


@triton.jit
def cap_all(x, found, ratio, COUNT: tl.constexpr, CAP: tl.constexpr):
    i = tl.arange(0, COUNT)
    tl.store(found + i, capped(tl.load(x + i), ratio, CAP))


def cap(x: Tensor, ratio: float = 1.0, warps: int = 1) -> Tensor:
    """Return tanh(ratio · x) from a kernel; x has a power of two of numbers."""
    found = torch.empty_like(x)
    cap_all[(1,)](x, found, ratio, COUNT=x.numel(), CAP=cap_of(ratio, 1.0), num_warps=warps)
    return found


def error(x: Tensor, ratio: float = 1.0, warps: int = 1) -> float:
    return float((cap(x, ratio, warps).double() - torch.tanh(x.double() * ratio)).abs().max())


def spread(least: float, most: float, count: int = 1024) -> Tensor:
    """Return numbers of both signs with magnitudes between two powers of ten."""
    size = torch.logspace(least, most, count // 2, device=DEVICE, dtype=torch.float64)
    return torch.stack([size, -size], 1).flatten().float()


RANGES = {"tiny": (-45, -3), "small": (-3, math.log10(LIMIT.value)), "any": (-3, 3), "far": (1, 38)}


@pytest.mark.parametrize("sizes", RANGES.values(), ids=RANGES.keys())
@pytest.mark.parametrize("warps", [1, 4, 8])  # a thread has 32, 8 and 4 of the numbers
def test_tanh_is_off_by_less_than_a_four_millionth(sizes: tuple[float, float], warps: int) -> None:
    assert error(spread(*sizes), warps=warps) < 2.5e-7


def test_tanh_is_as_exact_on_both_sides_of_the_limit() -> None:
    around = LIMIT.value + torch.linspace(-1e-5, 1e-5, 1024, device=DEVICE)
    assert error(around) < 2.5e-7
    assert error(-around) < 2.5e-7


@pytest.mark.parametrize("ratio", [1e-12, 1e-5, 1e-3, 1.0, 1e3, 1e5, 1e12])
def test_tanh_is_as_exact_for_any_scale_and_cap(ratio: float) -> None:
    assert error(spread(-3, 2) / ratio, ratio) < 3e-7  # including the rounding of the product


def test_small_scores_keep_their_relative_precision() -> None:
    x = spread(-30, -1)
    assert float((cap(x) / torch.tanh(x.double()) - 1).abs().max()) < 5e-7


def test_infinities_reach_the_cap_and_nan_stays_where_it_is() -> None:
    x = spread(-3, 1)
    x[[3, 300]], x[[4, 500]], x[[5, 700]] = torch.inf, -torch.inf, torch.nan
    found, there = cap(x), x.isnan()
    assert (found[x == torch.inf] == 1).all()
    assert (found[x == -torch.inf] == -1).all()
    assert torch.equal(found.isnan(), there)
    assert (found[~there].double() - torch.tanh(x[~there].double())).abs().max() < 2.5e-7


def test_a_thread_takes_no_more_scores_than_it_has() -> None:
    assert [together(n, 128) for n in (64, 128, 1024, 8192)] == [1, 1, 8, 64]


@pytest.mark.parametrize("size", [0.3, 3.0, 60.0])
def test_gradients_agree_for_scores_below_at_and_far_beyond_the_cap(size: float) -> None:
    q, k, v = (torch.randn(1, 2, 40, 16, device=DEVICE) for _ in range(3))
    options = {"softcap": 2.0, "mask": hw.mask.causal()}
    found = everything("triton", q * size, k, v, **options)
    wide = (x.double() for x in (q * size, k, v))
    tolerance = 1e-5 if DEVICE == "cpu" else 1e-4  # three tf32 products are less exact than float32
    compare(found, everything("reference", *wide, **options), tolerance)


@pytest.mark.parametrize("softcap", [1e-7, 1e7])
def test_extreme_caps_are_allowed(softcap: float) -> None:
    q, k, v = (torch.randn(1, 1, 20, 16, device=DEVICE) for _ in range(3))
    options = {"mask": hw.mask.causal() & hw.mask.window(5), "softcap": softcap}
    found = hw.attention(q, k, v, engine="triton", **options)
    truth = hw.attention(*(x.double() for x in (q, k, v)), engine="reference", **options)
    assert (found - truth).abs().max() < 1e-5


@pytest.mark.parametrize("rows", [1, 40])  # by the decoding kernels, and by the others
def test_two_runs_give_the_same_bits(rows: int) -> None:
    q, k, v = torch.randn(3, 1, 2, 600 if DEVICE == "cuda" else 60, 16, device=DEVICE)
    one, two = (hw.attention(3 * q[:, :, :rows], k, v, softcap=4.0, engine="triton") for _ in "ab")
    assert torch.equal(one, two)
