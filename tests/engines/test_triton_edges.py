"""Edge cases of the kernels: NaN, no keys, no heads, and numbers or batches that are too large."""

from __future__ import annotations

import pytest
import torch

import headwise as hw
from tests.engines.test_triton import DEVICE, normal

pytest.importorskip("triton", reason="the engine's kernels are written in Triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # as in test_triton


@pytest.mark.parametrize("kind", ["lengths", "between", "dense"])
def test_a_key_that_no_row_sees_may_hold_anything(kind: str) -> None:
    q, k, v = normal(1, 2, 40, 16), normal(1, 2, 100, 16), normal(1, 2, 100, 16)
    unseen = torch.zeros(100, dtype=torch.bool, device=DEVICE)
    unseen[70:] = True
    if kind == "between":  # a hole inside one block, between the rows' intervals
        unseen[34:37] = True
        even = torch.arange(40, device=DEVICE) % 2 == 0
        first, last = torch.where(even, 0, 37), torch.where(even, 34, 70)
        mask = hw.mask.between(first, last)
    elif kind == "lengths":
        mask = hw.mask.lengths(70)
    else:
        mask = hw.mask.dense(~unseen)
    finite = [x.clone().requires_grad_() for x in (q, k, v)]
    poisoned = [x.clone() for x in (q, k, v)]
    for x in poisoned[1:]:
        x[:, :, unseen] = torch.nan
    poisoned = [x.requires_grad_() for x in poisoned]
    grads = []
    for leaves in (finite, poisoned):
        out = hw.attention(*leaves, mask=mask, engine="triton")
        grads.append((out, *torch.autograd.grad(out.sin().sum(), leaves)))
    for clean, dirty in zip(*grads, strict=True):
        assert torch.equal(clean, dirty)


@pytest.mark.parametrize("score", ["dot", "additive"])
def test_a_row_that_sees_nothing_and_has_no_sink_takes_no_gradient(score: str) -> None:
    leaves = [normal(1, 2, 5, 8).requires_grad_() for _ in range(3)]
    sinks = torch.tensor([-torch.inf, 0.5], device=DEVICE, requires_grad=True)
    options = {"score": hw.Additive(normal(8))} if score == "additive" else {}
    out, seen = hw.observe(
        *leaves, sinks=sinks, mask=hw.mask.causal(-2), engine="triton", **options
    )
    (out.sum() + seen.entropy.sum()).backward()
    assert all(x.grad.isfinite().all() for x in (*leaves, sinks))
    assert (leaves[0].grad[:, :, :2] == 0).all()


@pytest.mark.parametrize("place", ["here", pytest.param("device", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("queries", [1, 40])  # the decoding kernels, and the forward
def test_a_dominant_sink_is_lse_to_the_bit(queries: int, place: str) -> None:
    q, k, v = normal(1, 4, queries, 16), normal(1, 4, 70, 16), normal(1, 4, 70, 16)
    sinks = torch.tensor([93.7, 228.447, 178.13, 1e4], device=DEVICE)
    _, seen = hw.observe(q, k, v, sinks=sinks, stats=("lse", "entropy"), engine="triton")
    amap = hw.attention_map(q, k, sinks=sinks)
    assert (seen.lse == sinks[:, None]).all()
    assert (amap.lse == sinks[:, None]).all()


@pytest.mark.parametrize("engine", ["streaming", "triton"])
@pytest.mark.parametrize("queries", [2, 40])  # the decoding kernels, and the forward
@pytest.mark.parametrize("sink", [1e30, 1e38, 3e38, torch.inf])
def test_a_very_large_sink_leaves_no_entropy(sink: float, queries: int, engine: str) -> None:
    leaves = [normal(1, 1, n, 16).requires_grad_() for n in (queries, 40, 40)]
    sinks = torch.tensor([sink], device=DEVICE, requires_grad=True)
    out, seen = hw.observe(*leaves, sinks=sinks, engine=engine)
    (out.sum() + seen.entropy.sum()).backward()
    assert (seen.entropy == 0).all()
    assert all((x.grad == 0).all() for x in (*leaves, sinks))


@pytest.mark.parametrize("engine", ["reference", "streaming", "triton"])
@pytest.mark.parametrize("queries", [2, 40])
def test_an_infinite_sink_takes_all_the_weight(queries: int, engine: str) -> None:
    q, k = normal(1, 1, queries, 16), normal(1, 1, 40, 16)
    sinks = torch.tensor([torch.inf], device=DEVICE)
    out, seen = hw.observe(q, k, k, sinks=sinks, engine=engine)
    assert (seen.lse == torch.inf).all()
    for x in (out, seen.entropy, seen.top_prob, seen.sink_mass, seen.distance):
        assert (x == 0).all()


@pytest.mark.parametrize("engine", ["streaming", "triton"])
def test_one_query_may_be_sampled_more_than_once(engine: str) -> None:
    q, k, v = normal(2, 1, 1, 16), normal(2, 1, 5, 16), normal(2, 1, 5, 16)
    options = {"mask": hw.mask.lengths([3, 5]), "rows": torch.tensor([0, 0, 0], device=DEVICE)}
    _, found = hw.observe(q, k, v, engine=engine, **options)
    _, wanted = hw.observe(q.double(), k.double(), v.double(), engine="reference", **options)
    for name, x in found.values.items():
        torch.testing.assert_close(x.double(), getattr(wanted, name), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("queries", [2, 40])
def test_a_variance_that_is_too_large_is_infinite(queries: int) -> None:
    q = torch.full((1, 1, queries, 1), 1e10, device=DEVICE)
    k = torch.tensor([1e10, -1e10] * 4, device=DEVICE).view(1, 1, 8, 1)
    _, seen = hw.observe(q, k, k, engine="triton")
    assert (seen.logit_var == torch.inf).all()


@pytest.mark.parametrize("engine", ["streaming", "triton"])
def test_an_additive_score_without_heads_gives_empty_tensors(engine: str) -> None:
    q, k = normal(2, 0, 3, 8), normal(2, 1, 4, 8)
    out, seen = hw.observe(q, k, k, score=hw.Additive(normal(8)), engine=engine)
    assert out.shape == (2, 0, 3, 8)
    assert seen.entropy.shape == seen.self_mass.shape == (2, 0, 3)


def test_more_batch_entries_than_a_grid_holds_are_refused() -> None:
    q = torch.zeros(65536, 1, 1, 1, device=DEVICE)
    with pytest.raises(ValueError, match="a GPU's grid has room for 65535"):
        hw.attention(q, q, q, engine="triton")
    assert hw.attention(q, q, q, softcap=1.0).shape == q.shape


CALLS = {  # each by its own kernels
    "rows": (40, 40, None),
    "masked rows": (40, 40, hw.mask.causal()),
    "few rows, many keys": (2, 40, None),
    "additive": (4, 40, None),
}


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("call", CALLS)
def test_a_nan_query_is_told_from_one_that_sees_nothing(call: str, poison: float) -> None:
    queries, keys, mask = CALLS[call]
    q, k, v = normal(1, 1, queries, 16), normal(1, 1, keys, 16), normal(1, 1, keys, 16)
    score = hw.Additive(normal(16)) if call == "additive" else None
    q[0, 0, 1, 3] = poison
    names = ("lse", "max_logit", "entropy", "top_prob", "self_mass", "distance", "logit_mean")
    out, seen = hw.observe(q, k, v, score=score, mask=mask, stats=names, engine="triton")
    wide = [x.double() for x in (q, k, v)]
    score = None if score is None else hw.Additive(score.weight.double())
    right, saw = hw.observe(*wide, score=score, mask=mask, stats=names, engine="reference")
    assert torch.equal(out.isnan(), right.isnan())
    for name in names:
        assert torch.equal(seen.values[name].isfinite(), saw.values[name].isfinite()), name
    assert torch.equal(seen.lse.isnan(), saw.lse.isnan())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_lowest_number_of_a_dtype_hides_a_key_beside_others_and_nothing_alone(
    dtype: torch.dtype,
) -> None:
    # as in masks of transformers, whose padding rows are full of it
    q, k, v = (normal(1, 2, 6, 16) for _ in range(3))
    bias = torch.zeros(6, 6, device=DEVICE, dtype=dtype)
    bias[:, 4:], bias[0] = torch.finfo(dtype).min, torch.finfo(dtype).min
    names = ("lse", "top_prob", "self_mass", "distance")
    results = []
    for engine, wide in (
        ("triton", torch.float32),
        ("streaming", torch.float32),
        ("reference", torch.float64),
    ):
        leaves = [x.to(wide).requires_grad_() for x in (q, k, v)]
        out, seen = hw.observe(*leaves, bias=bias, engine=engine)
        grads = torch.autograd.grad(out[:, :, 1:].sum() + seen.entropy[:, :, 1:].sum(), leaves)
        rows = [seen.values[name][:, :, 1:] for name in names]
        results.append([out, seen.entropy, *rows, *grads])
    for found in results[:2]:
        for x, y in zip(found, results[2], strict=True):
            torch.testing.assert_close(x.double(), y, atol=2e-5, rtol=2e-4)
