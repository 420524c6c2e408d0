"""Every engine gives the reference's answer: values, statistics and gradients, problem by problem.

The truth is `reference` in float64. The dtype of an engine decides its tolerance: see
`tests/rounding.py`. What is tested is read from the plan: another engine needs no line here.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import headwise as hw
from headwise.engines import plan
from tests.engines.agreement import assert_agrees, some_grads
from tests.oracle import answer
from tests.problems import KINDS, Recipe, every_pair, recipes, small_blocks
from tests.rounding import bounds, close, gradient_bounds


def takes(engine: str, recipe: Recipe) -> bool:
    """True if an engine takes all kinds of a recipe together."""
    return recipe.call().explain().reasons[engine] is None


def taken_alone(engine: str) -> dict[str, tuple[str, ...]]:
    """The kinds that an engine takes where all else is plain, of what it does not take all of."""
    taken = {
        axis: tuple(kind for kind in kinds if takes(engine, Recipe(**{axis: kind})))
        for axis, kinds in KINDS.items()
    }
    return {axis: kinds for axis, kinds in taken.items() if kinds != KINDS[axis]}


def observes(engine: str) -> bool:
    return Recipe().call().explain(observed=True).reasons[engine] is None


# Every engine of the plan that runs on a CPU; those of a GPU have tests of their own.
ENGINES = {engine.name: taken_alone(engine.name) for engine in reversed(plan.ENGINES)}
ENGINES = {engine: kinds for engine, kinds in ENGINES.items() if all(kinds.values())}
OBSERVING = tuple(filter(observes, ENGINES))


pairs = [
    pytest.param(engine, recipe, id=f"{engine}-{recipe.seed}")
    for engine, kinds in ENGINES.items()
    for recipe in every_pair(partial(takes, engine), **kinds)
]


@pytest.mark.parametrize(("engine", "recipe"), pairs)
def test_every_pair_of_options_agrees_with_the_reference(engine: str, recipe: Recipe) -> None:
    with small_blocks():
        assert_agrees(recipe, engine)


@pytest.mark.gpu
@pytest.mark.parametrize(("engine", "recipe"), pairs)
def test_every_pair_of_options_agrees_on_a_gpu_too(engine: str, recipe: Recipe) -> None:
    there = recipe.call().copy(device="cuda", learn=engine != "sdpa")
    reason = there.explain(observed=engine in OBSERVING).reasons[engine]
    if engine == "sdpa" and reason is not None:  # kernels on a GPU refuse other things
        pytest.skip(reason)
    assert_agrees(recipe, engine, "cuda")


@pytest.mark.parametrize("engine", ENGINES)
@given(data=st.data())
def test_any_problem_agrees_with_the_reference(engine: str, data: st.DataObject) -> None:
    recipe = data.draw(recipes(**ENGINES[engine]))
    assume(takes(engine, recipe))
    sizes = st.sampled_from(((16, 8, 1), (16, 5, 1 << 10), (32, 16, 1 << 19), (256, 1024, 1 << 19)))
    with small_blocks(*data.draw(sizes)):
        assert_agrees(recipe, engine)


LONG = ("none", "causal", "window", "prefix-lm", "documents", "sinks and window", "padding")


@pytest.mark.parametrize("mask", LONG)
@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "reference"])
def test_problems_longer_than_a_real_block_agree(engine: str, mask: str) -> None:
    # Long enough for a second block of rows and of keys, with block sizes as in practice.
    queries, keys = 300, 1100
    numbers = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=numbers)

    q, k, v = normal(1, 4, queries, 16), normal(1, 2, keys, 16), normal(1, 2, keys, 16)
    made = {
        "none": None,
        "causal": hw.mask.causal(),
        "window": hw.mask.causal() & hw.mask.window(70),
        "prefix-lm": hw.mask.causal(0) | hw.mask.prefix(500),
        "documents": hw.mask.documents(torch.arange(keys)[None] // 190),
        "sinks and window": hw.mask.causal() & (hw.mask.window(70) | hw.mask.prefix(4)),
        "padding": hw.mask.lengths(1050),
    }[mask]
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    grad = normal(1, 4, queries, 16)
    found = hw.attention(*leaves, mask=made, engine=engine)
    truth, wanted = hw.observe(*wide, mask=made, engine="reference")
    found.backward(grad)
    truth.backward(grad.double())
    # Rows mix up to 1100 keys whose logits are sums of 16 products: a few dozen units of rounding.
    unit = torch.finfo(torch.float32).eps
    assert not close(found, truth, 40 * unit * truth.abs().max())
    for leaf, exact in zip(leaves, wide, strict=True):
        assert not close(leaf.grad, exact.grad, 200 * unit * exact.grad.abs().max())
    if engine not in OBSERVING:
        return
    out, seen = hw.observe(*leaves, mask=made, engine=engine)
    assert not close(out, truth, 40 * unit * truth.abs().max())
    for name, x in wanted.values.items():
        size = x.abs().masked_fill(x.isinf(), 0).max()
        assert not close(getattr(seen, name), x, 200 * unit * size), name


@pytest.mark.parametrize("part", ["out", "lse", "entropy"])
@pytest.mark.parametrize("engine", [name for name in OBSERVING if name != "reference"])
@given(recipe=recipes(dtype="float64", longest=20))
def test_out_lse_and_entropy_each_have_a_gradient_of_their_own(
    engine: str, part: str, recipe: Recipe
) -> None:
    call = recipe.call()
    grads = some_grads(call, observed=True)
    zeros = {n: 0 * getattr(grads, n) for n in ("out", "lse", "entropy") if n != part}
    grads = replace(grads, **zeros)
    leaves, wide = call.copy(), call.copy()
    for copy, name in ((leaves, engine), (wide, "reference")):
        out, seen = copy.observe(name)
        value = out if part == "out" else getattr(seen, part)
        value.backward(getattr(grads, part).to(value.dtype))
    with torch.no_grad():
        allowed = gradient_bounds(call, answer(call), grads)
    for name, leaf in leaves.learnable().items():
        grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        exact = wide.learnable()[name].grad
        exact = torch.zeros_like(leaf) if exact is None else exact
        assert not close(grad, exact, allowed[name]), f"{name} on {recipe}"


@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "reference"])
@given(data=st.data())
def test_an_input_that_alone_requires_a_gradient_gets_the_same(
    engine: str, data: st.DataObject
) -> None:
    recipe = data.draw(recipes(dtype="float64", longest=20, **ENGINES[engine]))
    assume(takes(engine, recipe))
    call = recipe.call()
    parts = [x for x in call.learnable() if not (engine == "sdpa" and x == "table")]
    part = data.draw(st.sampled_from(parts))
    grads = some_grads(call, observed=False)
    leaves, wide = call.copy(learn=False), call.copy()
    leaves.learnable()[part].requires_grad_()
    leaves.attention(engine).backward(grads.out)
    wide.attention("reference").backward(grads.out)
    with torch.no_grad():
        allowed = gradient_bounds(call, answer(call), grads)[part]
    grad, exact = leaves.learnable()[part].grad, wide.learnable()[part].grad
    assert not close(grad, exact, allowed), f"{part} on {recipe}"
    assert [name for name, x in leaves.learnable().items() if x.grad is not None] == [part]


@given(recipe=recipes(dtype=("float64", "bfloat16")), engine=st.sampled_from(OBSERVING))
def test_the_answer_is_the_same_with_and_without_observation(recipe: Recipe, engine: str) -> None:
    call = recipe.call()
    looked, _ = call.observe(engine)
    few, _ = call.observe(engine, stats=("max_logit",))
    sampled, _ = call.observe(engine, rows=2)
    plain = call.attention(engine)
    with torch.no_grad():
        allowed = bounds(call, answer(call))["out"]
    for out in (looked, few, sampled):
        assert not close(out, plain, allowed)


@pytest.mark.parametrize("how", ["dense", "bias", "interval"])
@pytest.mark.parametrize("engine", ENGINES)
def test_rows_that_see_only_late_keys_of_low_logits_agree(engine: str, how: str) -> None:
    # The first blocks are hidden, then logits are near -1800: far below a base of zero.
    numbers = torch.Generator().manual_seed(5)
    q = torch.full((2, 1, 20, 4), 30.0)
    k = torch.randn(2, 1, 40, 4, generator=numbers) / 20 - 30.0
    v = torch.randn(2, 1, 40, 4, generator=numbers)
    late = torch.arange(40) >= torch.arange(20)[:, None] + 12
    options: dict[str, object] = {
        "dense": {"mask": hw.mask.dense(late)},
        "bias": {"bias": torch.zeros(20, 40).masked_fill(~late, -torch.inf)},
        "interval": {"mask": hw.mask.between(torch.arange(20) + 12, torch.tensor(40))},
    }[how]
    with small_blocks():
        out = hw.attention(q, k, v, engine=engine, **options)
    truth = hw.attention(q.double(), k.double(), v.double(), engine="reference", **options)
    # logits of 1800 are sums of four products: half a dozen units of rounding
    assert not close(out, truth, 20 * 1800 * torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("engine", ENGINES)
@given(data=st.data())
def test_rows_that_see_nothing_have_zero_output_and_gradient(
    engine: str, data: st.DataObject
) -> None:
    kinds = ENGINES[engine] | {"mask": ("blind rows", "between", "any", "dense", "padding")}
    recipe = data.draw(recipes(dtype=("float64", "float32", "bfloat16"), **kinds))
    assume(takes(engine, recipe))
    call = recipe.call().copy()
    if engine == "sdpa" and call.table is not None:
        call.table.requires_grad_(False)
    with torch.no_grad():
        blind = ~answer(call).seen.any(-1)
    out = call.attention(engine)
    (out * torch.randn_like(out)).sum().backward()
    assert (out[blind] == 0).all()
    assert (call.q.grad[blind] == 0).all()
    assert all(x.grad is None or x.grad.isfinite().all() for x in call.learnable().values())


def test_every_pair_of_kinds_is_among_the_problems() -> None:
    for engine, kinds in ENGINES.items():
        made = [param.values[1] for param in pairs if param.values[0] == engine]
        axes = KINDS | kinds
        for a, b in itertools.combinations(axes, 2):
            met = {(getattr(recipe, a), getattr(recipe, b)) for recipe in made}
            refused = set(itertools.product(axes[a], axes[b])) - met
            assert not any(takes(engine, Recipe(**{a: x, b: y})) for x, y in refused), (a, b)
