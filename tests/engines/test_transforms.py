"""Derivatives of derivatives, vmap and torch.func: right, or refused in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, hessian, jacrev, stack_module_state, vmap

import headwise as hw
from tests.engines.test_citizen import their_warnings
from tests.problems import Recipe

WIDE = torch.float64
SECOND = "no second derivative; use engine='reference'"


def three(copies: int = 0) -> tuple[Tensor, ...]:
    shape = (copies, 1, 2, 5, 4) if copies else (1, 2, 5, 4)
    return torch.randn(3, *shape, dtype=WIDE).unbind(0)


# The second derivative


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(mask="causal", sinks="sinks", bias="tensor", longest=4),
        Recipe(score="additive", bias="buckets", longest=4),
        Recipe(score="general", bias="alibi", softcap="cap", longest=4),
        Recipe(score="cosine", dropout="dropout", heads="grouped", longest=4),
    ],
    ids=["dot", "additive", "general", "cosine"],
)
def test_the_reference_has_second_derivatives_of_every_part(recipe: Recipe) -> None:
    call = recipe.call().copy()
    parts = call.learnable()

    def run(*given: Tensor) -> tuple[Tensor, ...]:
        named = dict(zip(parts, given, strict=True))
        out, seen = replace(call, **named).observe("reference", stats=("lse", "entropy"))
        return out, seen.lse, seen.entropy

    assert torch.autograd.gradgradcheck(run, tuple(parts.values()), fast_mode=True)


@pytest.mark.parametrize("mask", [None, hw.mask.causal(), hw.mask.lengths([3])])
@pytest.mark.parametrize("engine", ["auto", "sdpa", "streaming", "triton"])
def test_a_second_derivative_is_refused_with_what_has_one(engine: str, mask: hw.mask.Mask) -> None:
    dtype = torch.float32 if engine == "triton" else WIDE
    if engine == "triton":
        pytest.importorskip("triton", reason="the kernels are written in Triton")
    device = "cuda" if engine == "triton" and torch.cuda.is_available() else "cpu"
    leaves = [x.to(device, dtype).requires_grad_() for x in three()]
    for _ in range(2):  # the second call is prepared
        out = hw.attention(*leaves, mask=mask, engine=engine)
        first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        for each in first:
            with pytest.raises(NotImplementedError, match=SECOND):
                each.sum().backward(retain_graph=True)


@pytest.mark.parametrize("what", ["out", "lse", "entropy", "part"])
def test_statistics_and_parts_refuse_it_too(what: str) -> None:
    leaves = [x.requires_grad_() for x in three()]
    if what == "part":
        found = hw.merge(hw.partial(*leaves)).finish()
    else:
        out, seen = hw.observe(*leaves, stats=("lse", "entropy"))
        found = {"out": out, "lse": seen.lse, "entropy": seen.entropy}[what]
    (first,) = torch.autograd.grad(found.square().sum(), leaves[0], create_graph=True)
    with pytest.raises(NotImplementedError, match=SECOND):
        first.sum().backward()


def test_a_graph_of_the_backward_that_nobody_differentiates_costs_nothing() -> None:
    leaves = [x.requires_grad_() for x in three()]
    found = torch.autograd.grad(hw.attention(*leaves).sum(), leaves, create_graph=True)
    wanted = torch.autograd.grad(hw.attention(*leaves).sum(), leaves)
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)


def test_pytorchs_plain_kernel_keeps_its_second_derivative() -> None:
    q, k, v = (x.requires_grad_() for x in three())
    found = []
    for engine in ("sdpa", "reference"):
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            out = hw.attention(q, k, v, engine=engine)
            (first,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
            found.append(torch.autograd.grad(first.square().sum(), k)[0])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("twice", [hessian, lambda f: jacrev(jacrev(f))], ids=["hessian", "jacrev"])
@pytest.mark.parametrize("observed", [False, True])
def test_transforms_within_transforms_are_served_by_the_reference(
    twice: Callable[..., Callable[..., Tensor]], observed: bool
) -> None:
    q, k, v = three()

    def run(x: Tensor, engine: str = "auto") -> Tensor:
        if observed:
            out, seen = hw.observe(x, k, v, engine=engine, stats=("entropy",))
            return out.square().sum() + seen.entropy.sum()
        return hw.attention(x, k, v, engine=engine).square().sum()

    with their_warnings():
        found = twice(run)(q)
    wanted = torch.autograd.functional.hessian(lambda x: run(x, "reference"), q)
    torch.testing.assert_close(found, wanted)


def test_sdpa_says_that_transforms_differentiate_it_twice() -> None:
    q, k, v = three()
    once = grad(lambda x: hw.attention(x, k, v, engine="sdpa").sum())
    with pytest.raises(ValueError, match="it has no second derivative"):
        grad(lambda x: once(x).sum())(q)


# vmap

OVER: dict[str, tuple[Tensor, Callable[[Tensor], dict[str, object]]]] = {
    "lengths": (torch.tensor([[3], [5], [1]]), lambda x: {"mask": hw.mask.lengths(x)}),
    "documents": (
        torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 2, 2], [0, 0, 0, 0, 1]]),
        lambda x: {"mask": hw.mask.documents(x)},
    ),
    "a dense mask": (torch.eye(5).bool().expand(3, 5, 5), lambda x: {"mask": hw.mask.dense(x)}),
    "offsets": (torch.tensor([[0], [2], [1]]), lambda x: {"mask": hw.mask.causal(x)}),
    "sinks": (torch.linspace(-1, 1, 6, dtype=WIDE).view(3, 2), lambda x: {"sinks": x}),
    "a bias": (torch.linspace(-1, 1, 75, dtype=WIDE).view(3, 5, 5), lambda x: {"bias": x}),
    "a score": (
        torch.linspace(-1, 1, 12, dtype=WIDE).view(3, 4),
        lambda x: {"score": hw.Additive(x)},
    ),
    "seeds": (torch.tensor([1, 2, 2**40]), lambda x: {"dropout": hw.Dropout(0.5, x)}),
}


@pytest.mark.parametrize("engine", ["auto", "streaming", "reference"])
@pytest.mark.parametrize("over", OVER)
def test_vmap_over_an_option_agrees_with_a_loop(over: str, engine: str) -> None:
    tensors, (given, options) = three(), OVER[over]

    def run(x: Tensor, engine: str = engine) -> Tensor:
        return hw.attention(*tensors, engine=engine, **options(x))

    with their_warnings():
        found = vmap(run)(given)
    torch.testing.assert_close(found, torch.stack([run(x, "reference") for x in given]))


def test_parts_with_sinks_merge_inside_vmap() -> None:
    q, k, v = three(3)
    sinks = torch.randn(3, 2, dtype=WIDE)

    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        early = hw.partial(q, k[:, :, :2], v[:, :, :2], sinks=sinks)
        late = hw.partial(q, k[:, :, 2:], v[:, :, 2:], first_key=2, sinks=sinks)
        return hw.merge(early, late).finish()

    with their_warnings():
        found = vmap(run)(q, k, v, sinks)
    wanted = [hw.attention(*x, sinks=s) for *x, s in zip(q, k, v, sinks, strict=True)]
    torch.testing.assert_close(found, torch.stack(wanted))


def test_parts_say_which_calls_have_the_derivative() -> None:
    q, k, v = three()
    with pytest.raises(ValueError, match=r"part of this call's keys.*hw\.attention and hw\.obs"):
        grad(lambda x: hw.partial(x, k, v).finish().sum())(q)


def test_a_map_inside_vmap_is_refused_in_words() -> None:
    q, k, _ = three(3)
    with pytest.raises(ValueError, match=r"can't be made inside torch\.vmap"):
        vmap(lambda q, k: hw.attention_map(q, k)[0, 1])(q, k)
    beside = hw.attention_map(q[0], k[0])[0, 1]
    found = grad(lambda x: (x.square().sum(), hw.attention_map(x, k[0])[0, 1]), has_aux=True)(q[0])
    assert torch.equal(found[1], beside)


@pytest.mark.parametrize("engine", ["auto", "streaming", "reference"])
def test_vmap_decides_whether_entries_drop_the_same_weights(engine: str) -> None:
    q, k, v = three()

    def run(x: Tensor) -> Tensor:
        return hw.attention(x, k, v, dropout=0.5, engine=engine)

    alike = q.expand(2, *q.shape)
    with their_warnings():
        same, other = (vmap(run, randomness=x)(alike) for x in ("same", "different"))
        assert torch.equal(same[0], same[1])
        assert not torch.equal(other[0], other[1])
        with pytest.raises(RuntimeError, match="randomness error mode"):
            vmap(run)(alike)


def test_ensembles_and_gradients_per_sample_of_a_module() -> None:
    models = [hw.nn.MultiHeadAttention(8, 2).double() for _ in range(2)]
    x = torch.randn(3, 5, 8, dtype=WIDE)
    state = stack_module_state(models)
    with their_warnings():
        found = vmap(lambda *state: functional_call(models[0], state, (x,)))(*state)
    torch.testing.assert_close(found, torch.stack([model(x) for model in models]))

    def loss(parameters: dict[str, Tensor], one: Tensor) -> Tensor:
        return functional_call(models[0], parameters, (one[None],)).square().sum()

    parameters = dict(models[0].named_parameters())
    with their_warnings():
        each = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    for at, one in enumerate(x):
        wanted = torch.autograd.grad(loss(parameters, one), list(parameters.values()))
        for name, value in zip(parameters, wanted, strict=True):
            torch.testing.assert_close(each[name][at], value)
