"""Calls without batch entries, heads, queries or keys have the shapes they should, and zeros."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import headwise as hw
from tests.problems import KINDS, Sizes, rule

ENGINES = ("auto", "streaming", "reference")
FULL = Sizes(batch=2, heads=4, key_heads=2, queries=3, keys=5, width=8, value_width=6)
EMPTY = {
    "no batch": replace(FULL, batch=0),
    "no query heads": replace(FULL, heads=0),
    "no queries": replace(FULL, queries=0),
    "no keys": replace(FULL, keys=0),
    "no values": replace(FULL, value_width=0),
    "nothing to see, and nobody to see it": replace(FULL, queries=0, keys=0),
}
cases = [(kind, case) for kind in KINDS["mask"] for case in EMPTY]


def three(sizes: Sizes, learn: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(sizes.batch, sizes.heads, sizes.queries, sizes.width)
    k = torch.randn(sizes.batch, sizes.key_heads, sizes.keys, sizes.width)
    v = torch.randn(sizes.batch, sizes.key_heads, sizes.keys, sizes.value_width)
    return tuple(x.requires_grad_(learn) for x in (q, k, v))


def options(kind: str, sizes: Sizes) -> dict[str, object]:
    mask = rule(kind, sizes, random.Random(1)).mask
    return {} if mask is None else {"mask": mask}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("kind", "case"), cases)
def test_attention_and_statistics_have_their_shapes(kind: str, case: str, engine: str) -> None:
    sizes = EMPTY[case]
    q, k, v = three(sizes, learn=True)
    given = options(kind, sizes)
    rows = (sizes.batch, sizes.heads, sizes.queries)
    out = hw.attention(q, k, v, engine=engine, **given)
    assert out.shape == (*rows, sizes.value_width)
    looked, seen = hw.observe(q, k, v, engine=engine, sink_keys=2, **given)
    assert looked.shape == out.shape
    assert all(x.shape == rows for x in seen.values.values())
    if sizes.keys == 0:
        assert (out == 0).all()
        assert (seen.entropy == 0).all()
        assert not seen.sees.any()
    (out.sum() + looked.sum() + seen.entropy.sum()).backward()
    assert all(x.grad is None or x.grad.shape == x.shape for x in (q, k, v))
    figures = seen.heads()
    assert all(x.shape == (sizes.heads,) for x in figures.values())
    assert set(figures) == set(hw.observe(*three(FULL))[1].heads())


@pytest.mark.parametrize(("kind", "case"), cases)
def test_maps_and_parts_have_their_shapes(kind: str, case: str) -> None:
    sizes = EMPTY[case]
    q, k, v = three(sizes)
    given = options(kind, sizes)
    rows = (sizes.batch, sizes.heads, sizes.queries)
    amap = hw.attention_map(q, k, v, **given)
    assert amap.lse.shape == rows
    assert amap.to_tensor().shape == amap.shape == (*rows, sizes.keys)
    assert amap.received().shape == (*rows[:2], sizes.keys)
    assert amap.top(2)[1].shape == (*rows, 2)
    assert amap.pool(2).shape == (*rows[:2], min(2, sizes.queries), min(2, sizes.keys))
    assert str(hw.explain(q, k, v, **given))
    part = hw.partial(q, k, v, **given)
    assert hw.merge(part).finish().shape == (*rows, sizes.value_width)


@pytest.mark.parametrize("case", [case for case in EMPTY if case != "no values"])
@pytest.mark.parametrize("bias", ["alibi", "buckets", "tensor"])
def test_biases_and_sinks_take_them_too(bias: str, case: str) -> None:
    sizes = EMPTY[case]
    made = {
        "alibi": hw.ALiBi(torch.rand(sizes.heads)),
        "buckets": hw.RelativeBuckets(torch.randn(8, sizes.heads)),
        "tensor": torch.randn(sizes.queries, sizes.keys),
    }[bias]
    q, k, v = three(sizes)
    sinks = torch.zeros(sizes.heads)
    for engine in ENGINES:
        out, _ = hw.observe(q, k, v, bias=made, sinks=sinks, softcap=3.0, engine=engine)
        assert out.shape == (sizes.batch, sizes.heads, sizes.queries, sizes.value_width)
        assert out.isfinite().all()
