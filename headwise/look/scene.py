"""What there is to look at: a model, the inputs it has read, and the heads that read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from headwise.maps.attention_map import AttentionMap
from headwise.messages import say

Kind = Literal["text", "translation", "image"]


@dataclass(frozen=True, eq=False)
class Head:
    """A head: where it stands, its figures, what each row did, and its map (1, 1, N, M)."""

    layer: int
    number: int
    module: str
    figures: dict[str, float]
    map: AttentionMap
    entropy: Tensor  # (N,)
    top_prob: Tensor  # (N,)
    type: str | None = None

    @property
    def name(self) -> str:
        """Layer and number, both from 0: 5.1 is the second head of the sixth layer."""
        return f"{self.layer}.{self.number}"


@dataclass(frozen=True, eq=False)
class Group:
    """The heads whose rows and columns are the same tokens: `rows` look at `columns`."""

    id: str
    name: str
    causal: bool
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    heads: tuple[Head, ...]

    @property
    def square(self) -> bool:
        """Whether the tokens look at themselves, and not at another sequence."""
        return self.id != "cross"

    def head(self, name: str) -> Head:
        """The head of this name; ValueError names those there are."""
        for head in self.heads:
            if head.name == name:
                return head
        raise ValueError(
            say(
                "there is no head {name!r}; heads are layer.number, {first} to {last}",
                name=name,
                first=self.heads[0].name,
                last=self.heads[-1].name,
            )
        )

    def layers(self) -> list[tuple[int, str, int]]:
        """The number, the module and the count of heads of each layer."""
        found: dict[int, tuple[str, int]] = {}
        for head in self.heads:
            found[head.layer] = head.module, found.get(head.layer, ("", 0))[1] + 1
        return [(layer, module, heads) for layer, (module, heads) in found.items()]


@dataclass(frozen=True, eq=False)
class Image:
    """An image as the model saw it: a PNG, its grid of patches, and the tokens before them."""

    png: bytes
    grid: tuple[int, int]
    first: int


@dataclass(frozen=True, eq=False)
class Input:
    """What a model read, and what its heads did with it."""

    name: str
    kind: Kind
    groups: tuple[Group, ...]
    notes: tuple[str, ...] = ()
    image: Image | None = None

    def group(self, id: str) -> Group:
        """The group of this name; ValueError names those there are."""
        for group in self.groups:
            if group.id == id:
                return group
        there = ", ".join(group.id for group in self.groups)
        raise ValueError(say("there is no group {id!r}; there are {there}", id=id, there=there))

    def find(self, name: str) -> tuple[Group, Head]:
        """The head of a name such as 5.1, in the main group, or cross:0.3, in another."""
        id, _, head = name.rpartition(":")
        group = self.group(id) if id else self.main
        return group, group.head(head)

    @property
    def main(self) -> Group:
        """The group that says most: what a text does with itself, a translation with its source."""
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
