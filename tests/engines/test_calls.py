"""A call of a known description runs from the cache, and no other call is mistaken for it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

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
    "a prefix": {"mask": CAUSAL | hw.mask.prefix(3)},
    "a longer prefix": {"mask": CAUSAL | hw.mask.prefix(5)},
    "a window or a prefix": {"mask": hw.mask.window(1) | hw.mask.prefix(2)},
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


def gradients(leaves: list[Tensor], engine: str, **options: Any) -> list[Tensor]:
    """Return out, lse and entropy of a call, and the gradients of all three together."""
    out, seen = hw.observe(*leaves, engine=engine, **options)
    learnt = [*leaves, *(x for x in options.values() if isinstance(x, Tensor) and x.requires_grad)]
    loss = out.sin().sum() + seen.lse.sum() + seen.entropy.cos().sum()
    return [out, seen.lse, seen.entropy, *torch.autograd.grad(loss, learnt)]


LEARNING: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": CAUSAL},
    "a window": {"mask": CAUSAL & hw.mask.window(2)},
    "a cap and sinks": {"softcap": 2.0, "sinks": torch.ones(4, requires_grad=True)},
    "some rows": {"mask": CAUSAL, "rows": 3},
}


@pytest.mark.parametrize("case", LEARNING)
def test_calls_with_gradients_are_prepared(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def leaves() -> list[Tensor]:
        return [x.requires_grad_() for x in three()]

    options = LEARNING[case]
    gradients(leaves(), "streaming", **options)
    given = leaves()
    wanted = gradients(given, "reference", **options)
    known = len(calls._PREPARED)
    monkeypatch.delattr(api, "pose")
    for found, truth in zip(gradients(given, "streaming", **options), wanted, strict=True):
        torch.testing.assert_close(found, truth)
    assert len(calls._PREPARED) == known


def test_a_call_with_gradients_and_one_without_are_two() -> None:
    q, k, v = three()
    for learns in (False, True, False, True):
        found = hw.observe(q.clone().requires_grad_(learns), k, v, stats=("entropy",))
        assert found[0].requires_grad == found[1].entropy.requires_grad == learns
    with torch.no_grad():
        assert not hw.observe(q.clone().requires_grad_(), k, v)[0].requires_grad
    assert len(calls._PREPARED) == 3


def test_masks_with_tensors_of_their_own_are_never_mixed_up() -> None:
    for length in (1, 2, 3):
        leaves = [x.requires_grad_() for x in three()]
        mask = CAUSAL & hw.mask.documents(torch.arange(6)[None] // length)
        found, wanted = (gradients(leaves, name, mask=mask) for name in ("streaming", "reference"))
        for x, y in zip(found, wanted, strict=True):
            torch.testing.assert_close(x, y)


def test_a_prepared_call_keeps_nothing_of_the_first() -> None:
    leaves = [x.requires_grad_() for x in three()]
    watched = [weakref.ref(x) for x in leaves]
    gradients(leaves, "streaming", mask=CAUSAL, sinks=torch.ones(4, requires_grad=True))
    hw.observe(*leaves, mask=CAUSAL, rows=2)
    assert calls._PREPARED
    leaves.clear()
    gc.collect()
    assert all(x() is None for x in watched)


def test_saved_tensors_may_come_back_in_another_layout() -> None:
    leaves = [x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in three()]
    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(Tensor.tolist, torch.tensor):
            out, _ = hw.observe(*leaves, mask=CAUSAL)
        found = torch.autograd.grad(out.sum(), leaves)
    out = hw.attention(*leaves, mask=CAUSAL, engine="reference")
    for x, y in zip(found, torch.autograd.grad(out.sum(), leaves), strict=True):
        torch.testing.assert_close(x, y)


def test_rows_that_are_named_one_by_one_are_not_mistaken_for_others() -> None:
    q, k, v = three()
    for rows in (torch.tensor([0, 1]), torch.tensor([4, 5]), 2):
        found, wanted = (
            hw.observe(q, k, v, mask=CAUSAL, rows=rows, engine=engine)[1]
            for engine in ("streaming", "reference")
        )
        assert torch.equal(found.rows, wanted.rows)
        torch.testing.assert_close(found.entropy, wanted.entropy)


def test_sampled_rows_belong_to_the_output_that_dropped_weights() -> None:
    q, k, v = three()
    state = []
    for rows in (None, 2):
        torch.manual_seed(0)
        out, seen = hw.observe(q, k, v, dropout=0.5, rows=rows)
        state.append(torch.get_rng_state())
        norms = out.norm(dim=-1)
        wanted = norms if rows is None else norms.index_select(2, seen.rows)
        torch.testing.assert_close(seen.output_norm, wanted)
    assert torch.equal(*state)
