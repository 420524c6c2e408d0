"""Dropout is a function of seed, batch entry, head, query and key: random, and repeatable."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import headwise as hw
from headwise.dropout import keep, mix, row_hash, threshold
from tests import oracle
from tests.problems import Call, Recipe, recipes

ENGINES = ("streaming", "reference")


def kept(
    rate: float, seed: int = 0, batch: int = 2, heads: int = 3, queries: int = 64, keys: int = 64
) -> Tensor:
    """Which weights stay, bool (B, H, N, M), as an engine shows it."""
    q = torch.zeros(batch, heads, queries, 4)
    k = torch.zeros(batch, heads, keys, 4)
    v = torch.eye(keys).expand(batch, heads, keys, keys)
    return hw.attention(q, k, v, dropout=hw.Dropout(rate, seed), engine="reference") != 0


@given(
    st.integers(0, 2**63 - 1),
    st.integers(0, 10_000),
    st.integers(0, 500),
    st.integers(-100, 1 << 20),
    st.integers(0, 1 << 20),
    st.sampled_from((0.0, 0.1, 0.5, 0.999)),
)
def test_a_weight_is_kept_where_the_published_hash_says(
    seed: int, batch: int, head: int, i: int, j: int, rate: float
) -> None:
    numbers = [torch.tensor(x) for x in (seed, batch, head, i)]
    found = keep(row_hash(*numbers)[None], torch.tensor([j]), rate)
    assert bool(found) == oracle.kept(seed, batch, head, i, j, rate)


def test_the_mixer_is_a_permutation_of_32_bit_words() -> None:
    x = torch.arange(1 << 16) * 65537 & 0xFFFFFFFF
    mixed = mix(x)
    assert int(mixed.min()) >= 0
    assert int(mixed.max()) < 1 << 32
    assert len(torch.unique(mixed)) == 1 << 16


def test_the_threshold_leaves_the_rate_below_it() -> None:
    assert threshold(0.0) == 0
    assert threshold(0.5) == 1 << 31
    assert threshold(1 - 2**-40) <= (1 << 32) - 1


@pytest.mark.parametrize("rate", [0.05, 0.1, 0.5, 0.9])
def test_the_share_of_weights_kept_is_one_minus_the_rate(rate: float) -> None:
    stays = kept(rate, queries=128, keys=128)
    # a binomial's deviation; 5 of them happen once in two million
    deviation = math.sqrt(rate * (1 - rate) / stays.numel())
    assert abs(float(stays.float().mean()) - (1 - rate)) < 5 * deviation


@pytest.mark.parametrize("axis", range(4), ids=["batch", "head", "query", "key"])
def test_the_share_is_the_same_along_every_axis(axis: int) -> None:
    stays = kept(0.3, batch=4, heads=8)
    others = [a for a in range(4) if a != axis]
    share = stays.double().mean(others)
    deviation = math.sqrt(0.3 * 0.7 / (stays.numel() / stays.shape[axis]))
    assert (share - 0.7).abs().max() < 5 * deviation


def agreement(a: Tensor, b: Tensor) -> float:
    """How far apart two masks of rate 1/2 are from independence, in deviations."""
    return abs(float((a == b).double().mean()) - 0.5) * 2 * math.sqrt(a.numel())


def test_rows_heads_entries_and_keys_are_dropped_independently() -> None:
    stays = kept(0.5, batch=3, heads=4)
    for axis in range(4):
        for step in (1, 2):
            a = stays.narrow(axis, 0, stays.shape[axis] - step)
            b = stays.narrow(axis, step, stays.shape[axis] - step)
            assert agreement(a, b) < 5, (axis, step)
    # neighbours on the diagonals too: a hash of i + j or of i - j would fail here
    assert agreement(stays[..., 1:, 1:], stays[..., :-1, :-1]) < 5
    assert agreement(stays[..., 1:, :-1], stays[..., :-1, 1:]) < 5
    assert agreement(stays, stays.transpose(2, 3)) < 5


def test_heads_and_entries_do_not_share_masks() -> None:
    stays = kept(0.5, batch=8, heads=8, queries=16, keys=16).flatten(0, 1).flatten(1)
    assert len(torch.unique(stays, dim=0)) == 64
    for a, b in itertools.islice(itertools.combinations(stays, 2), 300):
        assert agreement(a, b) < 6


def test_neighbouring_seeds_give_independent_masks() -> None:
    masks = [kept(0.5, seed) for seed in (0, 1, 2, 1 << 30)]
    for a, b in itertools.combinations(masks, 2):
        assert agreement(a, b) < 5


def test_any_eight_neighbouring_weights_take_every_pattern_equally_often() -> None:
    stays = kept(0.5, batch=2, heads=4, queries=128, keys=128).reshape(-1, 8)
    pattern = (stays.long() << torch.arange(8)).sum(-1)
    count = torch.bincount(pattern, minlength=256).double()
    expected = len(pattern) / 256
    chi = float(((count - expected) ** 2 / expected).sum())
    assert abs(chi - 255) < 5 * math.sqrt(2 * 255)


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_what_stays_is_scaled_so_that_the_mean_is_the_undropped_output(rate: float) -> None:
    q, k, v = torch.randn(3, 1, 2, 8, 16, dtype=torch.float64).unbind(0)
    plain = hw.attention(q, k, v)
    outs = [hw.attention(q, k, v, dropout=hw.Dropout(rate, seed)) for seed in range(400)]
    mean, deviation = torch.stack(outs).mean(0), torch.stack(outs).std(0) / math.sqrt(400)
    assert ((mean - plain).abs() < 5 * deviation).all()


@given(recipes(dropout="dropout", longest=24))
def test_every_engine_drops_the_same_weights(recipe: Recipe) -> None:
    # Values that are unit vectors show the weights themselves, and so which of them are gone.
    call = recipe.call()
    keys = call.sizes.keys
    eye = torch.eye(keys, dtype=call.q.dtype)
    eye = eye.expand(call.sizes.batch, call.sizes.key_heads, keys, keys)
    options = call.options()
    with torch.no_grad():
        found = [hw.attention(call.q, call.k, eye, engine=e, **options) for e in ENGINES]
        truth = oracle.answer(call)
    seen = truth.p * truth.kept
    for out in found:
        large = truth.p > 1e-2
        assert torch.equal((out != 0) & large, (seen != 0) & large), str(recipe)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_gradient_drops_what_the_output_dropped(engine: str) -> None:
    q, k, v = torch.randn(3, 1, 2, 6, 8, dtype=torch.float64).unbind(0)
    v.requires_grad_()
    out = hw.attention(q, k, v, dropout=hw.Dropout(0.5, seed=2), engine=engine)
    grad = torch.randn_like(out)
    out.backward(grad)
    eye = torch.eye(6, dtype=torch.float64).expand(1, 2, 6, 6)
    weights = hw.attention(q, k, eye, dropout=hw.Dropout(0.5, seed=2), engine=engine)
    torch.testing.assert_close(v.grad, weights.transpose(-1, -2) @ grad)


@pytest.mark.parametrize("engine", ENGINES)
def test_without_a_seed_every_call_draws_one_from_pytorchs_generator(engine: str) -> None:
    q, k, v = torch.randn(3, 1, 2, 16, 8).unbind(0)
    torch.manual_seed(1)
    first, second = (hw.attention(q, k, v, dropout=0.5, engine=engine) for _ in range(2))
    torch.manual_seed(1)
    again = hw.attention(q, k, v, dropout=0.5, engine=engine)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_a_seed_may_be_a_number_or_a_tensor() -> None:
    q, k, v = torch.randn(3, 1, 2, 16, 8).unbind(0)
    a = hw.attention(q, k, v, dropout=hw.Dropout(0.5, 12))
    b = hw.attention(q, k, v, dropout=hw.Dropout(0.5, torch.tensor(12)))
    assert torch.equal(a, b)


def test_a_rate_of_zero_is_no_dropout_and_draws_nothing() -> None:
    q, k, v = torch.randn(3, 1, 2, 16, 8).unbind(0)
    before = torch.get_rng_state()
    out = hw.attention(q, k, v, dropout=0.0)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(out, hw.attention(q, k, v))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_dropped_weight_depends_on_where_it_stands_and_on_nothing_else(engine: str) -> None:
    # The last queries of a sequence drop what they dropped when all of it was there.
    q, k, v = torch.randn(3, 2, 2, 12, 8, dtype=torch.float64).unbind(0)
    dropout, mask = hw.Dropout(0.4, 9), hw.mask.causal()
    whole = hw.attention(q, k, v, mask=mask, dropout=dropout, engine=engine)
    late = hw.attention(q[:, :, 8:], k, v, mask=mask, dropout=dropout, engine=engine)
    torch.testing.assert_close(late, whole[:, :, 8:])


@pytest.mark.parametrize("engine", [*ENGINES, "triton"])
def test_a_part_of_the_batch_and_the_heads_drops_what_the_whole_drops(engine: str) -> None:
    if engine == "triton":
        pytest.importorskip("triton", reason="the kernels are written in Triton")
    device = "cuda" if torch.cuda.is_available() and engine == "triton" else "cpu"
    whole = [torch.randn(2, 4, 18, 16, device=device, requires_grad=True) for _ in range(3)]
    part = [x.detach()[1:, 2:].requires_grad_() for x in whole]
    out = hw.attention(*whole, dropout=hw.Dropout(0.5, 7), engine=engine)
    some = hw.attention(*part, dropout=hw.Dropout(0.5, 7, first=(1, 2)), engine=engine)
    close = {"rtol": 1e-2, "atol": 1e-2} if device == "cuda" else {}
    torch.testing.assert_close(some, out[1:, 2:], **close)
    (out[1:, 2:].square().sum() + some.square().sum()).backward()
    for x, y in zip(part, whole, strict=True):
        torch.testing.assert_close(x.grad, y.grad[1:, 2:], **close)


def test_the_place_of_a_part_is_two_numbers() -> None:
    with pytest.raises(ValueError, match="the first batch entry"):
        hw.Dropout(0.5, first=(0, -1))


SEEDS = (5, 5 + 2**32, 5 + 2**33, 5 - 2**32, 2**63 + 5, -5, 2**64 - 1)


@pytest.mark.parametrize("engine", ["streaming", "reference"])
def test_every_bit_of_a_seed_matters(engine: str) -> None:
    q, k, v = torch.randn(3, 1, 2, 20, 4).unbind(0)
    outs = [hw.attention(q, k, v, dropout=hw.Dropout(0.5, seed), engine=engine) for seed in SEEDS]
    for (a, x), (b, y) in itertools.combinations(zip(SEEDS, outs, strict=True), 2):
        assert not torch.equal(x, y), (a, b)
    again = hw.attention(q, k, v, dropout=hw.Dropout(0.5, torch.tensor([5 + 2**32])), engine=engine)
    assert torch.equal(again, outs[1])


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1, 1.5, "1", torch.zeros(2).long(), True])
def test_a_seed_is_an_integer_of_64_bits(seed: object) -> None:
    with pytest.raises(ValueError, match="an integer of 64 bits"):
        hw.Dropout(0.5, seed)


@pytest.mark.parametrize("seed", [7, 7 + 2**32, -3, 2**64 - 1])
def test_triton_drops_the_same_weights_for_every_seed(seed: int) -> None:
    pytest.importorskip("triton", reason="the kernels are written in Triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = torch.randn(3, 1, 2, 18, 16).unbind(0)
    wanted = hw.attention(q, k, v, dropout=hw.Dropout(0.5, seed), engine="reference")
    there = (x.to(device) for x in (q, k, v))
    found = hw.attention(*there, dropout=hw.Dropout(0.5, seed), engine="triton")
    torch.testing.assert_close(found.cpu(), wanted, rtol=1e-2, atol=1e-2)


# Against the oracle: what is dropped, from every side


def against_the_oracle(call: Call, engine: str, close: dict[str, float]) -> None:
    """Assert that out, gradients, lse and entropy are the oracle's; statistics know no dropout."""
    truth, made = call.copy(torch.float64), call.copy()
    known, (out, seen) = oracle.answer(truth), made.observe(engine, stats=("lse", "entropy"))
    for name in ("lse", "entropy"):
        torch.testing.assert_close(getattr(seen, name).double(), getattr(known, name), **close)
    torch.testing.assert_close(out.double(), known.out, **close)
    grad = torch.randn(known.out.shape, generator=torch.Generator().manual_seed(5)).double()
    for result in (known.out, out):
        result.backward(grad.to(result.dtype))
    for name, x in truth.learnable().items():
        found = made.learnable()[name].grad
        wanted = torch.zeros_like(x) if x.grad is None else x.grad
        found = torch.zeros_like(wanted) if found is None else found.double()
        torch.testing.assert_close(found, wanted, **close)


@pytest.mark.parametrize("engine", ENGINES)
@given(recipes(dropout="dropout", dtype="float64", longest=10))
def test_outputs_and_gradients_are_the_oracles(engine: str, recipe: Recipe) -> None:
    against_the_oracle(recipe.call(), engine, {"rtol": 1e-7, "atol": 1e-7})


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(dropout="dropout", mask="causal", heads="grouped", sinks="sinks"),
        Recipe(dropout="dropout", mask="documents", bias="tensor"),
        Recipe(dropout="dropout", mask="sinks and window", bias="alibi", softcap="cap"),
        Recipe(dropout="dropout", score="additive", mask="padding"),
        Recipe(dropout="dropout", score="cosine", mask="dense"),
    ],
    ids=str,
)
def test_triton_drops_as_the_oracle_in_outputs_and_gradients(recipe: Recipe) -> None:
    pytest.importorskip("triton", reason="the kernels are written in Triton")
    if torch.cuda.is_available():
        pytest.skip("test_agreement compares the kernels on a GPU")
    small = replace(recipe, dtype="float32", longest=6)
    against_the_oracle(small.call(), "triton", {"rtol": 1e-3, "atol": 1e-4})


@given(
    recipes(
        dropout="dropout", dtype="float64", longest=10, lengths="square", bias="none", mask="causal"
    )
)
def test_parts_of_the_keys_drop_what_the_whole_drops(recipe: Recipe) -> None:
    call = recipe.call().copy()
    q, k, v, options = call.q, call.k, call.v, call.options()
    parts = [
        hw.partial(
            q, k[:, :, at : at + 3], v[:, :, at : at + 3], first_key=at,
            **options,
        )
        for at in range(0, call.sizes.keys, 3)
    ]  # fmt: skip
    found = hw.merge(*parts).finish()
    torch.testing.assert_close(found, oracle.answer(call).out, rtol=1e-7, atol=1e-7)
