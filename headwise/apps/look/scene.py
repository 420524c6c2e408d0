"""The model, the inputs it has read, and the heads that read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from headwise import AttentionMap
from headwise.apps.look.predictions import Predictor
from headwise.extend import SPAN_PREFIX
from headwise.messages import say
from headwise.watching import Watch

InputKind = Literal["text", "translation", "image"]

LEADS = (
    ("previous_mass_mean", "looks most at the token before"),
    ("induction_mean", "looks most at what followed the same token last time"),
    ("self_mass_mean", "looks most at itself"),
    ("sink_mass_mean", "looks most at the first token"),
    ("top_prob_mean", "is most decided"),
    ("effective_keys_mean", "spreads most widely"),
    ("max_logit_max", "has the largest logit"),
)
"""The figures in which a head can lead. Only the last three apply to cross-attention."""


@dataclass(frozen=True, eq=False)
class Head:
    """One head: its place, its figures, two statistics of each row, and its map (1, 1, N, M)."""

    layer: int
    number: int
    module: str
    figures: dict[str, float]
    map: AttentionMap
    entropy: Tensor  # (N,)
    top_prob: Tensor  # (N,)
    type: str | None = None
    scores: dict[str, float] = field(default_factory=dict)  # by the type that they speak for

    def marked(self, spans: Mapping[str, tuple[int, int]]) -> Head:
        """The same with the mean weight on each of the spans."""
        found = {
            f"{SPAN_PREFIX}{name}_mean": float(self.map.mass(*span).mean())
            for name, span in spans.items()
        }
        return replace(self, figures=self.figures | found)

    def in_patches(self, between: Tensor) -> Head:
        """The same with its mean distance in patches (patch_distance_mean), not along the row.

        `between` holds the distance of every two patches; the tokens before them do not count.
        """
        first = self.map.shape[3] - len(between)
        total = weight = 0.0
        for start in range(0, len(between), 256):
            rows = slice(first + start, min(first + start + 256, self.map.shape[2]))
            weights = self.map[0, 0, rows, first:].double()
            total += float((weights * between[start : start + 256].to(weights)).sum())
            weight += float(weights.sum())
        figures = {name: x for name, x in self.figures.items() if name != "distance_mean"}
        return replace(self, figures=figures | {"patch_distance_mean": total / max(weight, 1e-12)})

    @property
    def name(self) -> str:
        """Layer and number, both from 0: 5.1 is the second head of the sixth layer."""
        return f"{self.layer}.{self.number}"


@dataclass(frozen=True, eq=False)
class Picture:
    """A picture that a model reads or makes, as a grid of tokens.

    `cells` has the token of each cell of the grid, row by row, and -1 where there is none. Tokens
    such as separators are in no cell.
    """

    grid: tuple[int, int]
    cells: tuple[int, ...]
    name: str = ""
    png: bytes | None = None  # None: only its grid is known
    axis: Literal["both", "rows", "columns"] = "both"  # of the map: whose tokens they are

    def distances(self) -> Tensor:
        """The distance of every two cells, in cells: 1 to the next, √2 across a corner.

        >>> Picture((2, 2), (1, 2, 3, 4)).distances()[0]
        tensor([0.0000, 1.0000, 1.0000, 1.4142], dtype=torch.float64)
        """
        places = torch.cartesian_prod(*(torch.arange(side).double() for side in self.grid))
        return torch.cdist(places, places)

    @cached_property
    def runs(self) -> list[tuple[int, int, int]]:
        """The cells as stretches of neighbouring tokens: first cell, first token, their number.

        >>> Picture((2, 2), (5, 6, 8, -1)).runs
        [(0, 5, 2), (2, 8, 1)]
        """
        found: list[tuple[int, int, int]] = []
        for cell, token in enumerate(self.cells):
            first, start, count = found[-1] if found else (-1, -1, 0)
            if token >= 0 and (cell, token) == (first + count, start + count):
                found[-1] = first, start, count + 1
            elif token >= 0:
                found.append((cell, token, 1))
        return found


@dataclass(frozen=True, eq=False)
class Group:
    """The heads whose rows and columns are the same tokens: `rows` look at `columns`.

    Some of the tokens may be those of `pictures`.
    """

    id: str
    name: str
    causal: bool
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    heads: tuple[Head, ...]
    pictures: tuple[Picture, ...] = ()
    looks: Literal["text", "image"] | None = None
    """What looks at what: a text at pictures, or pictures at the text that they are made by."""

    @property
    def square(self) -> bool:
        """True if the tokens look at themselves, False if they look at another sequence."""
        return not self.id.startswith("cross")

    def head(self, name: str) -> Head:
        """The head of this name; ValueError names those there are."""
        for head in self.heads:
            if head.name == name:
                return head
        raise ValueError(
            say(
                "there is no head {name!r}; heads are layer.number, {there}",
                name=name, there=self._there(),
            )
        )  # fmt: skip

    def _there(self) -> str:
        """The heads by their names: all from first to last, or those of each layer."""
        layers = [layer for layer, _, _ in self.layers()]
        if layers == list(range(layers[0], layers[-1] + 1)):
            return say("{first} to {last}", first=self.heads[0].name, last=self.heads[-1].name)
        return ", ".join(f"{layer}.0–{layer}.{count - 1}" for layer, _, count in self.layers())

    def in_patches(self, picture: Picture) -> Group:
        """The same of a picture's tokens, the last ones, its heads' distances measured over it."""
        between = picture.distances()
        heads = tuple(head.in_patches(between) for head in self.heads)
        return replace(self, heads=heads, pictures=(picture,))

    def layers(self) -> list[tuple[int, str, int]]:
        """The number, the module and the count of heads of each layer."""
        found: dict[int, tuple[str, int]] = {}
        for head in self.heads:
            found[head.layer] = head.module, found.get(head.layer, ("", 0))[1] + 1
        return [(layer, module, heads) for layer, (module, heads) in found.items()]

    def leaders(self) -> list[tuple[Head, str]]:
        """The heads worth a look first: those that lead all others in a figure, each once."""
        found: dict[str, tuple[Head, str]] = {}
        spans = [name for name in self.heads[0].figures if name.startswith(SPAN_PREFIX)]
        leads = [
            (name, f"looks most at {name[len(SPAN_PREFIX) : -len('_mean')]}") for name in spans
        ]
        for figure, reason in (*leads, *(LEADS if self.square else LEADS[-3:])):
            able = [head for head in self.heads if figure in head.figures]
            if able:
                head = max(able, key=lambda head: head.figures[figure])
                found.setdefault(head.name, (head, reason))
        return list(found.values())


class Effects(NamedTuple):
    """A watch that has the effects of edges on what somebody differentiated, and a batch entry."""

    seen: Watch
    batch: int


@dataclass(frozen=True, eq=False)
class Input:
    """An input that a model has read, and the heads that read it."""

    name: str
    kind: InputKind
    groups: tuple[Group, ...]
    notes: tuple[str, ...] = ()
    predictor: Predictor | None = None  # None if its model has no outputs here
    effects: Effects | None = None  # of a recording through which a backward pass went

    @cached_property
    def images(self) -> list[bytes]:
        """The images of its groups' pictures, each once, as PNG files."""
        every = [picture.png for group in self.groups for picture in group.pictures]
        return list(dict.fromkeys(png for png in every if png is not None))

    def group(self, id: str) -> Group:
        """The group of this id; ValueError names those there are."""
        for group in self.groups:
            if group.id == id:
                return group
        there = ", ".join(group.id for group in self.groups)
        raise ValueError(say("there is no group {id!r}; there are {there}", id=id, there=there))

    def marked(self, spans: Mapping[str, tuple[int, int]]) -> Input:
        """The same with the mean weight on named spans of keys among the heads' figures."""
        for name, (_, last) in spans.items():
            if last > len(self.main.columns):
                keys = len(self.main.columns)
                raise ValueError(
                    say(
                        "the span {name!r} ends at {last}, and {title} has {keys} keys",
                        name=name, last=last, title=self.name, keys=keys,
                    )
                )  # fmt: skip
        if not spans:
            return self
        heads = tuple(head.marked(spans) for head in self.main.heads)
        return replace(self, groups=(*self.groups[:-1], replace(self.main, heads=heads)))

    def find(self, name: str) -> tuple[Group, Head]:
        """The head of a name such as 5.1; cross:4.3 says its group too."""
        id, _, head = name.rpartition(":")
        if id:
            group = self.group(id)
        else:
            having = (x for x in self.groups if any(head == each.name for each in x.heads))
            group = next(having, self.main)
        return group, group.head(head)

    @property
    def main(self) -> Group:
        """The group to show first: self-attention of a text, cross-attention of a translation."""
        return self.groups[-1]


@dataclass(frozen=True)
class Description:
    """A model in a few numbers; `context` is the longest text that it was trained on."""

    name: str
    parameters: int
    layers: int
    heads: int
    context: int | None
    device: str = "cpu"
