"""The edges behind a prediction: the effect of removing each, from one backward pass."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise import Edge, EffectMap
from headwise.apps.interface.reply import number
from headwise.apps.look.predictions import Predictor
from headwise.apps.look.scene import Group, Head, Input
from headwise.watching import Watch, runner_up, watch

CELLS = 96
"""Cells on a side of a map of effects."""


class ReasonEdge(NamedTuple):
    """An edge of a head, its weight, and what the prediction's lead owes to it.

    `support` is what the lead over the second most probable answer would lose without the edge, to
    first order: edges that speak against the prediction have a negative one.
    """

    group: str
    layer: int
    head: int
    query: int
    key: int
    weight: float
    support: float


class ReasonHead(NamedTuple):
    """A head, and what the prediction's lead owes to all of its output, to first order."""

    group: str
    layer: int
    head: int
    support: float


@dataclass(frozen=True, eq=False)
class Reasons:
    """The prediction of a row, its lead over the runner-up, and what each edge gave to it.

    Of a recording, what somebody differentiated takes the lead's place, and there is no answer.
    """

    read: Input
    row: int
    seen: Watch
    batch: int = 0
    answer: str = ""
    probability: float = math.nan
    second: str = ""
    lead: float = math.nan
    _opened: dict[tuple[int, int], EffectMap] = field(default_factory=dict)  # the last head's

    @classmethod
    def of(cls, read: Input, predictor: Predictor, row: int) -> Reasons:
        """Run the model forward and backward once."""
        learnt = [x for x in predictor.model.parameters() if x.grad is None]
        try:
            with torch.enable_grad(), watch(predictor.model, effects=True) as seen:
                logits = predictor.logits(row)
                lead = runner_up(logits)
                lead.backward()
        finally:
            for parameter in learnt:
                parameter.grad = None
        first, second = (int(x) for x in logits.detach().topk(2).indices)
        probability = float(logits.detach().double().softmax(-1)[first])
        names = predictor.name(first), predictor.name(second)
        return cls(read, row, seen, 0, names[0], probability, names[1], float(lead.detach()))

    def edges(self, count: int) -> list[ReasonEdge]:
        """The edges of the shown heads that matter most, for and against."""
        groups = {(head.layer, head.number): group for group in self.read.groups
                  for head in group.heads}  # fmt: skip
        found = []
        for row in self.seen.edges(4 * count, batch=self.batch):
            group = groups.get((int(row["layer"]), int(row["head"])))
            if group is not None:
                layer, head, query, key = (
                    int(row[name]) for name in ("layer", "head", "query", "key")
                )
                weight, effect = float(row["weight"]), float(row["effect"])
                found.append(ReasonEdge(group.id, layer, head, query, key, weight, -effect))
        return found[:count]

    def heads(self) -> list[ReasonHead]:
        """The shown heads, those that matter most first: the sum of grad · out over their rows.

        It is what switching the head off would take from the lead if the lead were linear in its
        output.
        """
        found = []
        for group in self.read.groups:
            for head in group.heads:
                given = self.seen.effects(head.layer, head.number, self.batch).totals().product
                found.append(ReasonHead(group.id, head.layer, head.number, float(given.sum())))
        return sorted(found, key=lambda head: -abs(head.support))

    def map(self, head: Head, size: int = CELLS) -> Tensor:
        """What a head's edges gave to the lead, pooled by their largest, (rows, keys)."""
        return -self._effects(head).pool(size, how="max")[0, 0].detach()

    def tile(self, head: Head, level: int, x: int, y: int) -> tuple[Tensor, float]:
        """A tile of the zoomable map of what a head's edges gave to the lead, by their largest.

        With the largest magnitude of the whole map.
        """
        effects = self._effects(head)
        largest = effects.tile(0, 0, 0, how="max").abs().max().item()
        return -effects.tile(level, x, y, how="max").detach(), largest

    def _effects(self, head: Head) -> EffectMap:
        """The effects of a head's edges; those of the last head are kept with their totals."""
        at = head.layer, head.number
        found = self._opened.get(at)
        if found is None:
            found = self.seen.effects(*at, self.batch)
            self._opened.clear()
            self._opened[at] = found
        return found

    def to_dict(self, count: int) -> dict[str, Any]:
        """The answer that the page asks for."""
        return {
            "row": self.row,
            "answer": self.answer,
            "probability": number(self.probability),
            "second": self.second,
            "lead": number(self.lead),
            "edges": [edge._asdict() for edge in self.edges(count)],
            "heads": [head._asdict() for head in self.heads()],
        }


def hidden(groups: dict[str, Group], written: str) -> list[Edge]:
    """The edges to hide of a text: self:5.1:30:12 is head, query and key, self:4.0 a whole head."""
    found = []
    for each in written.split(","):
        id, name, *at = each.split(":")
        head = groups[id].head(name)
        module = head.module.partition("#")[0]
        if at:
            query, key = (int(x) for x in at)
            found.append(Edge(module, head.number, key, (query, query + 1)))
        else:
            found.append(Edge(module, head.number, (0, len(groups[id].columns))))
    return found
