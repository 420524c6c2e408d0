"""Moments of logits without visiting pairs: from mean and scatter of the keys, by blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.core.options import Options
from headwise.core.problem import pose

pytest.importorskip("triton", reason="the kernels are written in Triton")

from headwise.engines.triton.host import moments_call as moments
from headwise.engines.triton.host.operands import operands

APART = not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] == 9
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(not APART, reason="on other GPUs than Hopper's loops take the moments"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STATS = ("logit_mean", "logit_var")
CUTS = moments.CUTS


@pytest.fixture(autouse=True)
def small_calls_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let short calls use blocks, which a GPU uses for long calls only."""
    for limit in ("LEAST", "LEAST_KEYS", "LEAST_ROWS"):
        monkeypatch.setattr(moments, limit, 0)
    small = {n: replace(cut, block=128, whole_block=128) for n, cut in CUTS.items()}
    monkeypatch.setattr(moments, "CUTS", small)


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def served(q: Tensor, k: Tensor, **options: object) -> bool:
    posed = pose("observe", q, k, k, Options(**options))
    call = operands(posed.q, posed.k, posed.v, posed.terms(banded=True))
    return moments.cut_of(call) is not None


def seen_by(engine: str, q: Tensor, k: Tensor, **options: object) -> dict[str, Tensor]:
    wide = torch.float64 if engine == "reference" else q.dtype
    q, k = q.to(wide), k.to(wide)
    return hw.observe(q, k, k, stats=STATS, engine=engine, **options)[1].values


USUAL = 1e-5 if DEVICE == "cpu" else 3e-5  # on a GPU the parts of a scatter are 16-bit


def check(q: Tensor, k: Tensor, tolerance: float = USUAL, **options: object) -> None:
    """Compare with the reference in float64; the kernels of moments must serve the call."""
    assert served(q, k, **options)
    found, truth = seen_by("triton", q, k, **options), seen_by("reference", q, k, **options)
    for name in STATS:
        off = float((found[name].double() - truth[name]).norm())
        assert off <= tolerance * float(truth[name].norm()) + 1e-12, name
    assert found["logit_var"].min() >= 0


CALLS = {  # queries, keys, mask: blocks have 64 keys under the interpreter
    "every key": (70, 150, None),
    "causal": (150, 150, hw.mask.causal()),
    "more keys": (40, 203, hw.mask.causal()),
    "more queries, of which some see nothing": (150, 70, hw.mask.causal()),
    "queries past the keys": (100, 70, hw.mask.causal(offset=60)),
    "keys that none sees": (70, 150, hw.mask.causal(offset=3)),
    "one key": (40, 1, None),
    "one key, causal": (40, 1, hw.mask.causal()),
}


@pytest.mark.parametrize("call", CALLS)
def test_whole_blocks_and_the_keys_after_them_agree_with_the_reference(call: str) -> None:
    queries, keys, mask = CALLS[call]
    check(normal(1, 2, queries, 24), normal(1, 1, keys, 24), mask=mask)


def test_key_heads_serve_their_query_heads_in_every_batch_entry() -> None:
    check(normal(2, 4, 70, 16), normal(2, 2, 70, 16), mask=hw.mask.causal())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask", [None, hw.mask.causal()], ids=str)
def test_a_large_common_offset_of_the_keys_keeps_the_variance_exact(
    mask: hw.mask.Mask | None, dtype: torch.dtype
) -> None:
    q, k = normal(1, 1, 150, 16, dtype=dtype), normal(1, 1, 150, 16) * 8
    check(q, (k + 8000).to(dtype), 1e-3, mask=mask)


def test_keys_whose_squares_overflow_are_computed_pair_by_pair() -> None:
    q, k = normal(1, 1, 100, 16) * 1e-20, normal(1, 1, 100, 16) * 1e20
    check(q, k, mask=hw.mask.causal())
    check(q, k)


@pytest.mark.parametrize("place", [70, 127])  # inside a block, and at its end
def test_a_nan_key_reaches_no_row_before_it(place: int) -> None:
    q, k = normal(1, 1, 150, 16), normal(1, 1, 150, 16)
    clean = seen_by("triton", q, k, mask=hw.mask.causal())
    k[:, :, place] = torch.nan
    found = seen_by("triton", q, k, mask=hw.mask.causal())
    for name in STATS:
        assert torch.equal(found[name][..., :place], clean[name][..., :place])
        assert found[name][..., 128:].isnan().all()


def test_keys_that_no_row_sees_may_hold_anything() -> None:
    q, k = normal(1, 1, 40, 16), normal(1, 1, 150, 16)
    k[:, :, 100:] = torch.nan
    check(q, k, mask=hw.mask.causal(offset=60))


@pytest.mark.parametrize("limit", [("SCRATCH", 1), ("GRID", 2)])
def test_heads_take_turns_if_memory_is_short(
    limit: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k = normal(1, 4, 70, 16), normal(1, 2, 70, 16)
    together = seen_by("triton", q, k, mask=hw.mask.causal())
    monkeypatch.setattr(moments, *limit)
    alone = seen_by("triton", q, k, mask=hw.mask.causal())
    assert all(torch.equal(together[name], alone[name]) for name in STATS)


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 5.0},
        {"bias": hw.ALiBi(torch.ones(2))},
        {"mask": hw.mask.causal() & hw.mask.window(8)},
        {"mask": hw.mask.lengths([9])},
        {"mask": hw.mask.dense(torch.ones(16, 16, dtype=torch.bool))},
        {"mask": hw.mask.causal(offset=-16)},
    ],
    ids=["cap", "bias", "window", "lengths", "dense", "blind"],
)
def test_other_scores_and_masks_stay_in_the_loop(
    options: dict[str, object],
) -> None:
    q = normal(1, 2, 16, 16)
    assert not served(q, q, **options)
    assert served(q, q, mask=hw.mask.causal())


@pytest.mark.gpu
@pytest.mark.parametrize("mask", [None, hw.mask.causal()], ids=str)
@pytest.mark.parametrize("width", [64, 80, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_blocks_of_the_usual_size_agree_and_give_the_same_bits(
    dtype: torch.dtype, width: int, mask: hw.mask.Mask | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moments, "CUTS", CUTS)
    q, k = normal(2, 4, 2100, width, dtype=dtype), normal(2, 2, 3001, width, dtype=dtype)
    check(q, k, 1e-4, mask=mask)
    first, second = (seen_by("triton", q, k, mask=mask) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in STATS)
