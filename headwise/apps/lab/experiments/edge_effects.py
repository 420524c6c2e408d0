"""Do predicted effects of edges agree with real ones, and do weights?

Every edge that is drawn is hidden, one at a time, and the change of a scalar is compared with what
each measure says of the edge: its effect to first order, its weight, gradient × weight, and
attention rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwise import Watch, knock_out, watch
from headwise.watching import runner_up

MEASURES = ("effect", "weight", "gradient × weight", "rollout")
SHARES = (0.0, 0.005, 0.01, 0.02, 0.05)
"""Of all edges, how many are hidden together."""


HEAVY = 0.5
"""A weight from here on makes its edge a heavy one."""

NOISE = 1e-5
"""Smaller changes are rounding, relative to the scalar if that is above 1."""

Scalar = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True)
class Subject:
    """A model with an input: `logits` are those of the answer, (V,) or (1, V)."""

    name: str
    model: nn.Module
    logits: Callable[[], Tensor]


def compared(
    subject: Subject, drawn: int, seed: int = 0, scalar: Scalar = runner_up
) -> dict[str, Any]:
    """Measures and real changes of drawn edges, and what is left as more and more are hidden.

    Edges are drawn by the root of their weight, which favours no measure but the weight.
    """
    answer = int(subject.logits().detach().reshape(-1).argmax())

    def target() -> Tensor:
        return scalar(subject.logits().reshape(1, -1), answer)

    with watch(subject.model, effects=True) as seen:
        before = target()
        before.backward()
    measures = measured(seen)
    numbers = torch.Generator().manual_seed(seed)
    draw = measures["weight"].sqrt()
    chosen = torch.multinomial(draw, min(drawn, int((draw > 0).sum())), generator=numbers)
    places = [measures["places"][x].tolist() for x in chosen]
    start = float(before.detach())
    real = torch.tensor([changed(subject, target, [place]) - start for place in places])
    real[real.abs() < NOISE * max(1, abs(start))] = 0  # of edges that reach nothing
    found = {name: measures[name][chosen] for name in MEASURES if name in measures}
    layers = measures["places"][chosen, 0]
    probability = float(subject.logits().detach().reshape(-1).softmax(0)[answer])
    return {
        "subject": subject.name,
        "probability": probability,
        "target": start,
        "edges": len(places),
        "spearman": {name: spearman(x.abs(), real.abs()) for name, x in found.items()},
        "signed_spearman": spearman(found["effect"], real),
        "pearson": pearson(found["effect"], real),
        "overlap": {name: overlap(x, real, max(1, len(places) // 10)) for name, x in found.items()},
        "by_layer": {
            int(layer): spearman(found["effect"][layers == layer], real[layers == layer])
            for layer in layers.unique()
            if int((real[layers == layer] != 0).sum()) >= 8
        },
        "by_weight": {
            name: {
                "edges": int(some.sum()),
                "pearson": pearson(found["effect"][some], real[some]),
                "slope": slope(found["effect"][some], real[some]),
            }
            for name, some in (
                ("light", found["weight"] < HEAVY),
                ("heavy", found["weight"] >= HEAVY),
            )
        },
        "hidden": hidden(subject, target, measures, numbers),
    }


def measured(seen: Watch) -> dict[str, Tensor]:
    """Every measure of every visible edge of a watched model, and where the edges are."""
    found: dict[str, list[Tensor]] = {name: [] for name in (*MEASURES, "places")}
    later = rollout(seen)
    for layer in seen.layers:
        held = layer.held
        assert held is not None
        assert held.call is not None
        assert held.grad is not None
        emap = held.map()
        weight = emap.weights().to_tensor()[0]  # (H, N, M)
        v = held.call.v[0].repeat_interleave(weight.shape[0] // held.call.v.shape[1], 0)
        at = (weight > 0).nonzero()
        index = tuple(at.T)
        found["weight"].append(weight[index])
        found["effect"].append(emap.to_tensor()[0][index])
        found["gradient × weight"].append((weight * (held.grad[0] @ v.mT))[index])
        if later is not None:
            found["rollout"].append((later[layer.number][None, :, None] * weight)[index])
        found["places"].append(torch.cat([torch.full_like(at[:, :1], layer.number), at], 1))
    return {name: torch.cat(x).float().cpu() for name, x in found.items() if x} | {
        "places": torch.cat(found["places"]).cpu()
    }


def rollout(seen: Watch) -> dict[int, Tensor] | None:
    """How much of each row's output reaches the last row, by attention rollout; None across.

    Layers are averaged over heads, with half of each row for the residual stream.
    """
    if any(layer.kind != "self" for layer in seen.layers):
        return None
    reaching, share = {}, None
    for layer in reversed(seen.layers):
        mean = layer.map().to_tensor()[0].mean(0)
        if share is None:
            share = torch.zeros(len(mean), dtype=mean.dtype, device=mean.device)
            share[0 if bool((mean.triu(1) > 0).any()) else -1] = 1  # where the answer is read
        reaching[layer.number] = share
        share = share @ (mean + torch.eye(len(mean), dtype=mean.dtype, device=mean.device)) / 2
    return reaching


def changed(
    subject: Subject, target: Callable[[], Tensor], places: Sequence[Sequence[int]]
) -> float:
    """The target without these edges (layer, head, row, key)."""
    edges = [(layer, head, key, row) for layer, head, row, key in places]
    with torch.no_grad(), knock_out(subject.model, edges):
        return float(target())


def hidden(
    subject: Subject,
    target: Callable[[], Tensor],
    measures: dict[str, Tensor],
    numbers: torch.Generator,
) -> dict[str, list[float]]:
    """The target as more and more edges are hidden together, in the order of some measures."""
    orders = {
        "effect": measures["effect"].argsort(),  # those that hold the answer up come first
        "weight": measures["weight"].argsort(descending=True),
        "random": torch.randperm(len(measures["weight"]), generator=numbers),
    }
    found: dict[str, list[float]] = {}
    for name, order in orders.items():
        counts = [round(share * len(order)) for share in SHARES]
        found[name] = [
            changed(subject, target, measures["places"][order[:count]].tolist())
            if count
            else float(target().detach())
            for count in counts
        ]
    return found


def spearman(x: Tensor, y: Tensor) -> float:
    """The correlation of ranks; equal numbers share theirs."""
    return pearson(ranks(x), ranks(y))


def ranks(x: Tensor) -> Tensor:
    """How many numbers are smaller than each, ties counting half."""
    smaller, equal = x[:, None] > x, x[:, None] == x
    return smaller.double().sum(1) + equal.double().sum(1) / 2


def pearson(x: Tensor, y: Tensor) -> float:
    """The correlation of two samples; 0 if one of them is constant."""
    x, y = x.double() - x.double().mean(), y.double() - y.double().mean()
    size = float(x.norm() * y.norm())
    return float(x @ y) / size if size else 0.0


def slope(predicted: Tensor, real: Tensor) -> float:
    """The factor between what was predicted and what came, by least squares; 1 is exact."""
    square = float(predicted.double().square().sum())
    return float(predicted.double() @ real.double()) / square if square else 0.0


def overlap(x: Tensor, y: Tensor, count: int) -> float:
    """The share of the `count` largest magnitudes of y that are among those of x."""
    here, there = (set(z.abs().topk(count).indices.tolist()) for z in (x, y))
    return len(here & there) / count
