"""The comparison of an engine's answer with the reference's, on one generated problem."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import headwise as hw
from tests.oracle import answer
from tests.problems import Call, Recipe
from tests.rounding import Grads, bounds, close, gradient_bounds


@dataclass(frozen=True)
class Outcome:
    """The results of a call: out, every statistic, and the gradient of every learnable input."""

    values: dict[str, Tensor]
    gradients: dict[str, Tensor]


def outcome(call: Call, engine: str, grads: Grads, stats: tuple[str, ...]) -> Outcome:
    """Run a call forward and, if it learns, back on its own leaves."""
    if stats:
        out, seen = call.observe(engine, stats=stats)
        values = {"out": out} | seen.values
    else:
        values = {"out": call.attention(engine)}
    if any(x.requires_grad for x in call.learnable().values()):
        backward(values, grads)
    gradients = {
        name: torch.zeros_like(x) if x.grad is None else x.grad
        for name, x in call.learnable().items()
        if x.requires_grad
    }
    return Outcome(
        {name: x.detach().cpu() for name, x in values.items()},
        {name: x.cpu() for name, x in gradients.items()},
    )


def backward(values: dict[str, Tensor], grads: Grads) -> None:
    """Backpropagate the gradients of out and, if observed, of lse and entropy."""
    named = {"out": grads.out, "lse": grads.lse, "entropy": grads.entropy}
    given = [(values[name], grad) for name, grad in named.items() if name in values]
    given = [(x, grad.to(x)) for x, grad in given if x.requires_grad]
    torch.autograd.backward([x for x, _ in given], [grad for _, grad in given])


def some_grads(call: Call, observed: bool | tuple[str, ...]) -> Grads:
    """Return incoming gradients that are exact in the call's dtype; 0 for what is not observed."""
    seen = (("lse", "entropy") if observed else ()) if isinstance(observed, bool) else observed
    numbers = torch.Generator().manual_seed(7)
    rows = call.sizes.batch, call.sizes.heads, call.sizes.queries

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=numbers).to(call.q.dtype).double()

    out, lse, entropy = normal(*rows, call.sizes.value_width), normal(*rows), normal(*rows)
    return Grads(out, lse * ("lse" in seen), entropy * ("entropy" in seen))


def assert_agrees(
    recipe: Recipe,
    engine: str,
    device: str = "cpu",
    stats: tuple[str, ...] | None = None,
    learn: bool = True,
) -> None:
    """Assert that the engine agrees with the reference in float64 on a CPU, up to rounding.

    It observes these statistics, or all of them; with none it only attends.
    """
    call = recipe.call()
    if stats is None:
        stats = () if engine == "sdpa" else hw.STATISTICS
    grads = some_grads(call, stats)
    leaves = call.copy(device=device, learn=learn)
    if engine == "sdpa" and leaves.table is not None:
        leaves.table.requires_grad_(False)
    found = outcome(leaves, engine, grads, stats)
    truth = outcome(call.copy(torch.float64, learn=learn), "reference", grads, stats)
    with torch.no_grad():
        exact = answer(call)
        allowed = bounds(call, exact)
        allowed_gradients = gradient_bounds(call, exact, grads)
    wrong = {name: close(x, truth.values[name], allowed[name]) for name, x in found.values.items()}
    wrong |= {
        f"gradient of {name}": close(x, truth.gradients[name], allowed_gradients[name])
        for name, x in found.gradients.items()
    }
    wrong = {name: text for name, text in wrong.items() if text}
    assert not wrong, f"{engine} on {recipe}: {wrong}"
    wide = torch.promote_types(call.q.dtype, torch.float32)
    assert found.values.pop("out").dtype == call.q.dtype
    assert all(x.dtype == wide for x in found.values.values())
    assert all(x.dtype == leaves.learnable()[n].dtype for n, x in found.gradients.items())
