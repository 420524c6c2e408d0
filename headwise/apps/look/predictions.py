"""A model's predictions at a row, with and without edges between its tokens."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from headwise import Edge
from headwise.watching import knock_out

Predicted = Literal["next", "same", "class"]
"""The prediction of a row: the token after it, the one in its own place, or an image's class."""

SHOWN = 8
"""The most probable outcomes that are listed, of each of the two predictions."""


class Outcome(NamedTuple):
    """A token or a class, and its probability before and after keys were hidden."""

    name: str
    before: float
    after: float


@dataclass(frozen=True, eq=False)
class Predictor:
    """Predicts an input's tokens, or the class of an image, by running its model again."""

    model: nn.Module
    logits: Callable[[int], Tensor]  # of a row, (V,)
    name: Callable[[int], str]  # of a token or class
    predicts: Predicted = "next"
    groups: tuple[str, ...] = ("self",)  # those whose rows are the rows of the logits

    def compare(self, row: int, edges: list[Edge]) -> tuple[list[Outcome], float]:
        """The most probable outcomes with and without edges, and how far the two are apart.

        The distance is the total variation: the share of probability that has moved.
        """
        before, after = self._probabilities(row, []), self._probabilities(row, edges)
        count = min(SHOWN, len(before))
        shown = {int(i) for p in (before, after) for i in p.topk(count).indices}
        found = [Outcome(self.name(i), float(before[i]), float(after[i])) for i in shown]
        found.sort(key=lambda outcome: -max(outcome.before, outcome.after))
        return found, float((before - after).abs().sum() / 2)

    def _probabilities(self, row: int, edges: list[Edge]) -> Tensor:
        with torch.no_grad(), knock_out(self.model, edges) if edges else nullcontext():
            return self.logits(row).double().softmax(-1).cpu()
