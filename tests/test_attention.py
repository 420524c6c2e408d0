"""`attention` is what its formula says, what PyTorch computes, and 0 where nothing is seen."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import headwise as hw
from tests.oracle import answer
from tests.problems import Recipe, recipes
from tests.rounding import Grads, bounds, close, gradient_bounds

ENGINES = ("auto", "sdpa", "streaming", "reference")
ANYTHING = ("streaming", "reference")  # engines that take every problem
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
NAN, INF = math.nan, math.inf


def some(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    numbers = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=numbers, dtype=torch.float64).to(dtype)


def three(
    queries: int = 5, keys: int = 5, dtype: torch.dtype = torch.float64, batch: int = 2
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of two heads, 8 wide."""
    q = some(batch, 2, queries, 8, dtype=dtype, seed=1)
    return q, some(batch, 2, keys, 8, dtype=dtype, seed=2), some(batch, 2, keys, 8, dtype=dtype)


# The formula


@given(recipes(dtype="float64", longest=20))
def test_the_reference_is_the_formula(recipe: Recipe) -> None:
    call, exact = recipe.call().copy(), recipe.call().copy()
    out, found = call.attention("reference"), answer(exact)
    grad = torch.randn_like(out)
    out.backward(grad)
    found.out.backward(grad)
    assert not close(out, found.out, bounds(call, found)["out"]), str(recipe)
    none = torch.zeros_like(found.lse)
    allowed = gradient_bounds(call, found, Grads(grad, none, none))
    for name, x in call.learnable().items():
        wanted = exact.learnable()[name].grad
        grad_found = torch.zeros_like(x) if x.grad is None else x.grad
        wanted = torch.zeros_like(x) if wanted is None else wanted
        assert not close(grad_found, wanted, allowed[name]), f"{name} on {recipe}"


def test_a_logit_is_the_capped_score_plus_the_bias() -> None:
    q = torch.tensor([[[[3.0]]]], dtype=torch.float64)
    k = torch.tensor([[[[1.0], [2.0]]]], dtype=torch.float64)
    v = torch.tensor([[[[0.0], [1.0]]]], dtype=torch.float64)
    bias = torch.tensor([0.5, -0.25], dtype=torch.float64)
    logits = [4 * math.tanh(2 * 3 * x / 4) + b for x, b in ((1, 0.5), (2, -0.25))]
    wanted = math.exp(logits[1]) / (math.exp(logits[0]) + math.exp(logits[1]) + math.exp(0.1))
    for engine in ANYTHING:
        out = hw.attention(
            q, k, v, score=hw.Dot(2.0), softcap=4.0, bias=bias, engine=engine,
            sinks=torch.tensor([0.1], dtype=torch.float64),
        )  # fmt: skip
        assert out.item() == pytest.approx(wanted, rel=1e-14)


def test_the_usual_slopes_of_alibi_are_those_of_its_paper() -> None:
    assert hw.ALiBi(8).slopes.tolist() == [2.0**-n for n in range(1, 9)]
    # For 6 heads: those of 4, then every second one of 8.
    wanted = [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]
    assert hw.ALiBi(6).slopes.tolist() == pytest.approx(wanted)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_relative_buckets_are_those_of_t5(bidirectional: bool) -> None:
    # As published: 32 buckets up to distance 128, the logarithm in float32.
    distance = torch.arange(-300, 301)
    buckets, base = 32, torch.zeros_like(distance)
    away = -distance  # T5 counts from the query to the key
    if bidirectional:
        buckets //= 2
        base = (away > 0).long() * buckets
        away = away.abs()
    else:
        away = -torch.minimum(away, torch.zeros_like(away))
    exact = buckets // 2
    far = exact + (torch.log(away.float() / exact) / math.log(128 / exact) * (buckets - exact)).to(
        torch.long
    )
    far = torch.minimum(far, torch.full_like(far, buckets - 1))
    wanted = base + torch.where(away < exact, away, far)
    bias = hw.RelativeBuckets(torch.randn(32, 2), bidirectional, 128)
    assert torch.equal(bias.bucket(distance), wanted)


# What PyTorch computes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("mask", ["none", "causal", "dense", "bias"])
def test_attention_agrees_with_pytorch_where_pytorch_can_do_it(
    engine: str, dtype: torch.dtype, mask: str
) -> None:
    q, k, v = (x.requires_grad_() for x in three(7, 7, dtype))
    twins = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    seen, bias = some(7, 7) > 0, some(7, 7, dtype=dtype)
    seen[:, 0] = True
    ours: dict[str, object] = {
        "none": {},
        "causal": {"mask": hw.mask.causal()},
        "dense": {"mask": hw.mask.dense(seen)},
        "bias": {"bias": bias},
    }[mask]
    theirs = {
        "none": {},
        "causal": {"is_causal": True},
        "dense": {"attn_mask": seen},
        "bias": {"attn_mask": bias},
    }[mask]
    out = hw.attention(q, k, v, engine=engine, **ours)
    wanted = F.scaled_dot_product_attention(*twins, **theirs)
    grad = torch.randn_like(out)
    out.backward(grad)
    wanted.backward(grad)
    # Both round: seven weights of logits that are sums of eight products, and the result.
    slack = {"rtol": 0.0, "atol": 16 * torch.finfo(dtype).eps}
    torch.testing.assert_close(out, wanted, **slack)
    for mine, other in zip((q, k, v), twins, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, **slack)


@pytest.mark.parametrize("engine", ENGINES)
def test_grouped_heads_agree_with_pytorch(engine: str) -> None:
    q, k, v = some(2, 6, 5, 8), some(2, 2, 5, 8, seed=1), some(2, 2, 5, 8, seed=2)
    wanted = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(hw.attention(q, k, v, engine=engine), wanted)


@pytest.mark.parametrize("engine", ENGINES)
def test_attention_is_the_heart_of_multihead_attention(engine: str) -> None:
    layer = nn.MultiheadAttention(16, 2, batch_first=True, dtype=torch.float64)
    x, length = some(3, 6, 16), torch.tensor([6, 4, 1])
    padded = torch.arange(6) >= length[:, None]
    later = torch.ones(6, 6, dtype=torch.bool).triu(1)
    wanted, weights = layer(
        x, x, x, key_padding_mask=padded, attn_mask=later, average_attn_weights=False
    )
    q, k, v = F.linear(x, layer.in_proj_weight, layer.in_proj_bias).chunk(3, -1)
    q, k, v = (y.unflatten(-1, (2, 8)).transpose(1, 2) for y in (q, k, v))
    mask = hw.mask.causal() & hw.mask.lengths(length)
    out = hw.attention(q, k, v, mask=mask, engine=engine)
    torch.testing.assert_close(layer.out_proj(out.transpose(1, 2).flatten(2)), wanted)
    eye = torch.eye(6, dtype=torch.float64).expand(3, 2, 6, 6)
    mine = hw.attention(q, k, eye, mask=mask, engine="reference")
    torch.testing.assert_close(mine, weights)


# Shapes


@pytest.mark.parametrize("engine", ENGINES)
def test_without_a_batch_the_answer_has_none(engine: str) -> None:
    q, k, v = three()
    out = hw.attention(q[0], k[0], v[0], mask=hw.mask.causal(), engine=engine)
    wanted = hw.attention(q, k, v, mask=hw.mask.causal(), engine=engine)[0]
    assert out.shape == (2, 5, 8)
    torch.testing.assert_close(out, wanted)


@pytest.mark.parametrize("mask", [None, hw.mask.causal(), hw.mask.lengths(3), "dense"])
@pytest.mark.parametrize("shape", ["no batch entries", "no queries", "no keys", "no values"])
@pytest.mark.parametrize("engine", ["auto", *ANYTHING])
def test_empty_axes_are_answered_too(engine: str, shape: str, mask: object) -> None:
    sizes = {"no batch entries": 0, "no queries": 1, "no keys": 2, "no values": 3}
    B, N, M, Dv = (0 if axis == sizes[shape] else size for axis, size in enumerate((2, 4, 5, 8)))
    q, k, v = (x.requires_grad_() for x in (some(B, 2, N, 8), some(B, 2, M, 8), some(B, 2, M, Dv)))
    if mask == "dense":
        mask = hw.mask.dense(torch.ones(N, M, dtype=torch.bool))
    out = hw.attention(q, k, v, mask=mask, engine=engine)
    assert out.shape == (B, 2, N, Dv)
    assert (out == 0).all()
    out.sum().backward()
    assert all(x.grad.shape == x.shape for x in (q, k, v))
    if engine != "auto":
        _, seen = hw.observe(q, k, v, mask=mask, engine=engine)
        assert all(getattr(seen, name).shape == (B, 2, N) for name in hw.STATISTICS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("engine", ENGINES)
def test_the_answer_has_the_dtype_of_the_queries(engine: str, dtype: torch.dtype) -> None:
    assert hw.attention(*three(dtype=dtype), engine=engine).dtype == dtype


# Rows that see nothing


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("how", ["interval", "dense", "bias"])
def test_a_row_that_sees_nothing_gives_zero_and_takes_zero(
    engine: str, dtype: torch.dtype, how: str
) -> None:
    q, k, v = (x.requires_grad_() for x in three(dtype=dtype))
    hidden = torch.tensor([True, False, True, False, True])[:, None]
    options: dict[str, object] = {
        "interval": {"mask": hw.mask.between(torch.tensor(0), torch.where(hidden, 0, 5)[:, 0])},
        "dense": {"mask": hw.mask.dense(~hidden)},
        "bias": {"bias": torch.where(hidden, -INF, 0.0).to(dtype).expand(5, 5)},
    }[how]
    out = hw.attention(q, k, v, engine=engine, **options)
    out.sum().backward()
    assert (out[:, :, ::2] == 0).all()
    assert (q.grad[:, :, ::2] == 0).all()
    assert all(x.grad.isfinite().all() for x in (q, k, v))
    assert (out[:, :, 1::2] != 0).any()


@pytest.mark.parametrize("engine", ENGINES)
def test_where_every_row_sees_nothing_everything_is_zero(engine: str) -> None:
    q, k, v = (x.requires_grad_() for x in three())
    out = hw.attention(q, k, v, mask=hw.mask.lengths([0, 0]), engine=engine)
    out.sum().backward()
    assert (out == 0).all()
    assert all((x.grad == 0).all() for x in (q, k, v))


@pytest.mark.parametrize("engine", ANYTHING)
def test_a_row_that_sees_nothing_gives_all_its_weight_to_the_sink(engine: str) -> None:
    q, k, v = (x.requires_grad_() for x in three())
    sinks = torch.tensor([0.5, -1.0], dtype=torch.float64, requires_grad=True)
    out, seen = hw.observe(q, k, v, mask=hw.mask.lengths(0), sinks=sinks, engine=engine)
    (out.sum() + seen.lse.sum() + seen.entropy.sum()).backward()
    assert (out == 0).all()
    torch.testing.assert_close(seen.lse, sinks.detach()[None, :, None].expand(2, 2, 5))
    assert (seen.entropy == 0).all()
    torch.testing.assert_close(sinks.grad, torch.full_like(sinks, 10.0))
    assert all((x.grad == 0).all() for x in (q, k, v))


@pytest.mark.parametrize("engine", ANYTHING)
def test_a_sink_of_minus_infinity_is_no_sink(engine: str) -> None:
    q, k, v = (x.requires_grad_() for x in three())
    sinks = torch.tensor([-INF, 0.5], dtype=torch.float64, requires_grad=True)
    mask = hw.mask.causal(-1)  # the first row sees nothing
    out, seen = hw.observe(q, k, v, mask=mask, sinks=sinks, engine=engine)
    plain, wanted = hw.observe(q.detach(), k, v, mask=mask, engine=engine)
    torch.testing.assert_close(out[:, 0], plain[:, 0])
    for name in ("lse", "entropy", "top_prob"):
        torch.testing.assert_close(getattr(seen, name)[:, 0], getattr(wanted, name)[:, 0])
    loss = out.sum() + seen.entropy.sum() + seen.lse.masked_fill(seen.lse == -INF, 0).sum()
    loss.backward()
    assert sinks.grad[0] == 0
    assert all(x.grad.isfinite().all() for x in (q, k, v, sinks))


# NaN and infinity


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_not_finite_in_a_query_stays_in_its_row(engine: str, poison: float) -> None:
    q, k, v = three()
    wanted = hw.attention(q, k, v, mask=hw.mask.causal(), engine=engine)
    q = q.clone()
    q[0, 1, 2, 3] = poison
    out = hw.attention(q, k, v, mask=hw.mask.causal(), engine=engine)
    touched = torch.zeros_like(out, dtype=torch.bool)
    touched[0, 1, 2] = True
    torch.testing.assert_close(out[~touched], wanted[~touched])
    assert not torch.equal(out[touched], wanted[touched])


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_not_finite_in_a_key_or_value_reaches_the_rows_that_see_it(
    engine: str, poison: float
) -> None:
    for which in (1, 2):
        tensors = list(three())
        wanted = hw.attention(*tensors, mask=hw.mask.causal(), engine=engine)
        tensors[which] = tensors[which].clone()
        tensors[which][:, :, 3] = poison
        out = hw.attention(*tensors, mask=hw.mask.causal(), engine=engine)
        assert not out[:, :, 3:].isfinite().any() or which == 1
        assert (out[:, :, 3:] != wanted[:, :, 3:]).any()


UNWRITTEN = {  # masks that leave the last three of eight keys outside every row's interval
    "lengths": lambda: hw.mask.lengths(5),
    "lengths of each": lambda: hw.mask.lengths([5, 3]),
    "causal": lambda: hw.mask.causal(1),
    "causal of each": lambda: hw.mask.causal([1, 0]),
    "window": lambda: hw.mask.window(2, 0, offset=1),
    "documents": lambda: (
        hw.mask.documents(torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1]])) & hw.mask.lengths(5)
    ),
    "two intervals": lambda: hw.mask.window(0, 0, offset=1) | hw.mask.prefix(1),
    "dense": lambda: hw.mask.dense(torch.arange(8) < 5),
}


@pytest.mark.parametrize("poison", [NAN, INF])
@pytest.mark.parametrize("mask", UNWRITTEN)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_key_that_no_row_sees_may_hold_anything(engine: str, mask: str, poison: float) -> None:
    q, k, v = three(4, 8)
    made = UNWRITTEN[mask]()
    wanted = hw.attention(q, k, v, mask=made, engine=engine)
    k, v = k.clone(), v.clone()
    k[:, :, 5:], v[:, :, 5:] = poison, poison
    for x in (q, k, v):
        x.requires_grad_()
    out = hw.attention(q, k, v, mask=made, engine=engine)
    torch.testing.assert_close(out, wanted)
    out.sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))
    assert all((x.grad[:, :, 5:] == 0).all() for x in (k, v))
    if engine in ANYTHING:
        _, seen = hw.observe(q, k, v, mask=made, engine=engine)
        assert not any(getattr(seen, name).isnan().any() for name in hw.STATISTICS)


def test_padding_between_the_entries_of_a_batch_may_hold_anything() -> None:
    # Entry 0 uses keys that entry 1 does not: what entry 1 holds there is still never read.
    q, k, v = three(4, 8)
    mask = hw.mask.lengths([8, 3])
    for engine in ENGINES:
        wanted = hw.attention(q, k, v, mask=mask, engine=engine)
        dirty = [x.clone() for x in (k, v)]
        for x in dirty:
            x[1, :, 3:] = NAN
        torch.testing.assert_close(hw.attention(q, *dirty, mask=mask, engine=engine), wanted)


# Precision


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_bias_more_precise_than_the_queries_is_not_rounded_to_them(
    engine: str, dtype: torch.dtype
) -> None:
    q, k, v = three(3, 6, dtype)
    bias = 1000 + some(3, 6).float()  # steps of 4 in bfloat16
    if engine == "sdpa":
        with pytest.raises(ValueError, match="bias"):
            hw.attention(q, k, v, bias=bias, engine=engine)
        return
    out = hw.attention(q, k, v, bias=bias, engine=engine)
    wanted = hw.attention(q.double(), k.double(), v.double(), bias=bias, engine="reference")
    torch.testing.assert_close(out.double(), wanted, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("engine", ANYTHING)
def test_half_precision_is_summed_in_float32(engine: str, dtype: torch.dtype) -> None:
    # 4096 equal weights: a sum of halves stops growing at 256 in bfloat16 and at 2048 in float16.
    q, k = torch.zeros(2, 1, 1, 1, 8, dtype=dtype).unbind(0)
    k = k.expand(1, 1, 4096, 8)
    v = torch.ones(1, 1, 4096, 8, dtype=dtype)
    assert torch.equal(hw.attention(q, k, v, engine=engine), torch.ones_like(q))


@pytest.mark.parametrize("engine", ["auto", *ANYTHING])
def test_a_heads_weight_adds_up_its_batch_before_float16_ends(engine: str) -> None:
    # Each entry's share of the gradient is ±200,000, beyond float16; together they are 1,000.
    weight = torch.zeros(1, 2, 2, dtype=torch.float16, requires_grad=True)
    q = torch.tensor([200.0, -199.0]).half().reshape(2, 1, 1, 1).expand(2, 1, 1, 2)
    k = torch.tensor([100.0, -100.0]).half().reshape(1, 1, 2, 1).expand(2, 1, 2, 2)
    hw.attention(q, k, k / 20, score=hw.General(weight), engine=engine).sum().backward()
    assert (weight.grad == 1000).all()


@given(st.sampled_from(ANYTHING), st.integers(0, 2**20))
def test_no_logit_is_too_large_or_too_small(engine: str, seed: int) -> None:
    numbers = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 1, 2, 6, 8, generator=numbers).unbind(0)
    for size in (1e-20, 1e4, 1e9):
        leaves = [x.clone().requires_grad_() for x in (size * q, size * k, v)]
        out, seen = hw.observe(*leaves, engine=engine)
        (out.sum() + seen.entropy.sum()).backward()
        assert out.isfinite().all()
        assert (seen.entropy >= 0).all()
        assert all(x.grad.isfinite().all() for x in leaves)


@pytest.mark.parametrize("engine", ["auto", *ANYTHING])
@pytest.mark.parametrize("scale", [-0.7, 0.0])
def test_a_scale_may_be_negative_or_zero(engine: str, scale: float) -> None:
    # PyTorch's kernel on the CPU hides keys before it scales: -inf times -0.7 is no way to hide.
    q, k, v = (x.requires_grad_() for x in three())
    out = hw.attention(q, k, v, score=hw.Dot(scale), mask=hw.mask.causal(), engine=engine)
    out.sum().backward()
    s = (scale * q @ k.transpose(-1, -2)).masked_fill(torch.ones(5, 5).triu(1).bool(), -INF)
    torch.testing.assert_close(out, s.softmax(-1) @ v)
    assert all(x.grad.isfinite().all() for x in (q, k, v))


@pytest.mark.parametrize("size", [1.0, 60.0])
@pytest.mark.parametrize("mask", [None, hw.mask.causal()])
def test_no_weight_is_above_one(size: float, mask: hw.mask.Mask | None) -> None:
    # Where a logit of thousands is computed twice, rounding alone makes exp(s - lse) 1.001.
    q, k, v = (x.float() for x in three(64, 64))
    _, seen = hw.observe(size * q, size * q + k, v, mask=mask, engine="streaming")
    for name in ("top_prob", "self_mass", "previous_mass", "sink_mass"):
        assert (getattr(seen, name) <= 1).all()
        assert (getattr(seen, name) >= 0).all()
    assert seen.self_mass.max() > 0.5


# Masks that hide nothing


def test_where_the_queries_stand_does_not_depend_on_whether_the_mask_hides_a_key() -> None:
    q, k, v = three(3, 6)
    bias = hw.ALiBi(2)
    for mask in (hw.mask.causal(9), hw.mask.causal(1) | hw.mask.prefix(6), hw.mask.window(9, 9, 2)):
        hidden_later = hw.mask.dense(torch.ones(6, dtype=torch.bool)) & mask
        wanted = hw.attention(q, k, v, bias=bias, mask=hidden_later, engine="reference")
        for engine in ("auto", *ANYTHING):
            out = hw.attention(q, k, v, bias=bias, mask=mask, engine=engine)
            torch.testing.assert_close(out, wanted)


def test_an_offset_of_each_entry_may_place_queries_that_see_everything() -> None:
    q, k, v = three(3, 6)
    bias = hw.ALiBi(2)
    each = hw.mask.causal([9, 9]) | hw.mask.prefix(6)
    wanted = hw.attention(q, k, v, bias=bias, mask=hw.mask.causal(9), engine="reference")
    torch.testing.assert_close(hw.attention(q, k, v, bias=bias, mask=each), wanted)
