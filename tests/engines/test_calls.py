"""A call of a known description runs from the cache, and no other call is mistaken for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import headwise as hw
from headwise import api
from headwise.engines import calls
from tests.engines.test_citizen import their_warnings

CAUSAL = hw.mask.causal()


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    calls.forget()
    yield
    calls.forget()


def three(*shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return list(torch.randn(3, *(shape or (2, 4, 6, 8))).to(dtype).unbind(0))


@pytest.mark.parametrize("mask", [None, CAUSAL], ids=str)
@pytest.mark.parametrize("engine", ["auto", "sdpa"])
def test_the_second_call_is_served_without_a_plan(
    engine: str, mask: hw.mask.Mask | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    hw.attention(*three(), mask=mask, engine=engine)
    given = three()
    expected = hw.attention(*given, mask=mask, engine="reference")
    monkeypatch.delattr(api, "pose")
    torch.testing.assert_close(hw.attention(*given, mask=mask, engine=engine), expected)


def test_a_repeated_call_has_gradients_too() -> None:
    for _ in range(2):
        leaves = [x.requires_grad_() for x in three()]
        found = torch.autograd.grad(hw.attention(*leaves, mask=CAUSAL).sin().sum(), leaves)
    out = hw.attention(*leaves, mask=CAUSAL, engine="reference")
    for x, y in zip(found, torch.autograd.grad(out.sin().sum(), leaves), strict=True):
        torch.testing.assert_close(x, y)


OTHERS = {
    "a scale": {"score": hw.Dot(0.7)},
    "an offset": {"mask": hw.mask.causal(2)},
    "an offset an entry": {"mask": hw.mask.causal([1, 2])},
    "a window": {"mask": CAUSAL & hw.mask.window(1)},
    "a temperature": {"score": hw.Cosine(3.0)},
    "a bias": {"bias": torch.linspace(-1, 1, 6)},
    "a cap": {"softcap": 1.0},
    "sinks": {"sinks": torch.ones(4)},
}


@pytest.mark.parametrize("case", OTHERS)
def test_another_option_is_another_call(case: str) -> None:
    options = OTHERS[case]
    for _ in range(2):
        given = three()
        hw.attention(*given)
        hw.attention(*given, mask=CAUSAL)
        found = hw.attention(*given, **options)
        torch.testing.assert_close(found, hw.attention(*given, engine="reference", **options))


def test_another_shape_or_dtype_is_another_call() -> None:
    hw.attention(*three(), mask=CAUSAL)
    q, k, v = three(dtype=torch.float64)
    for given in ((q, k, v), (q, k[:, :2], v[:, :2]), (q[:, :, :3], k, v), (q[0], k[0], v[0])):
        found = hw.attention(*given, mask=CAUSAL)
        torch.testing.assert_close(found, hw.attention(*given, mask=CAUSAL, engine="reference"))


def test_modes_and_transforms_still_see_the_call() -> None:
    q, k, v = three()
    hw.attention(q, k, v)
    for wrong, word in (({"engine": "sdp"}, "unknown"), ({"mask": q > 0}, r"hw\.mask\.dense")):
        with pytest.raises(ValueError, match=word):
            hw.attention(q, k, v, **wrong)
    with pytest.raises(ValueError, match="different dtypes"):
        hw.attention(q, k.double(), v)
    with torch.autocast("cpu", torch.bfloat16):
        assert hw.attention(q, k, v).dtype == torch.bfloat16
    with FlopCounterMode(display=False) as counter:
        hw.attention(q, k, v)
    assert counter.get_total_flops() == 2 * 4 * 36 * 2 * 16
    with their_warnings(), forward_ad.dual_level():
        out = hw.attention(forward_ad.make_dual(q, torch.ones_like(q)), k, v)
        assert forward_ad.unpack_dual(out).tangent is not None
    grad = torch.func.grad(lambda x: hw.attention(x, k, v).pow(2).sum())(q)
    assert grad.abs().sum() > 0


def test_mixed_dtypes_are_refused_without_autocast() -> None:
    q, k, v = three()
    with torch.autocast("cpu", torch.bfloat16):
        hw.attention(q.bfloat16(), k, v)
    with pytest.raises(ValueError, match="different dtypes"):
        hw.attention(q.bfloat16(), k, v)


def test_the_cache_of_prepared_calls_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "KEPT", 3)
    for n in range(1, 9):
        hw.attention(*three(1, 1, n, 8))
    assert 0 < len(calls._PREPARED) <= 3
