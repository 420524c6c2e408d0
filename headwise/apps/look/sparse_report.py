"""How much a language model loses with few keys per row: the report and its JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headwise.messages import say

SINKS = 4  # first keys that the window keeps

NAMES = {
    "top-k": say("top-k"),
    "blocks, exact": say("blocks, exact"),
    "blocks, max": say("blocks, max"),
    "blocks, mean": say("blocks, mean"),
    "window + sinks": say("window + sinks"),
    "eviction": say("eviction"),
}
"""The methods by their names in the report."""

METHODS = {
    "top-k": say("the k largest logits of each row: an oracle that scores every key"),
    "blocks, exact": say("the blocks with the largest weight: an oracle too"),
    "blocks, max": say("blocks by the upper bound of their logits, as in Quest"),
    "blocks, mean": say("blocks by their mean key, as in MoBA and NSA"),
    "window + sinks": say("the last keys and the first {sinks}, as in StreamingLLM", sinks=SINKS),
    "eviction": say("prompt keys by the attention of its last rows, as in SnapKV; newer keys stay"),
}
"""The keys that each method keeps, in words."""

MOST = 20_000_000
"""Bytes of the largest file that is read as a report."""


@dataclass(frozen=True)
class Point:
    """The loss at one budget."""

    budget: int
    loss: float
    increase: float


@dataclass(frozen=True)
class HeadNeeds:
    """How many keys a head's rows need for a share of their weight, and what few of them hold."""

    layer: int
    name: str
    head: int
    needed_mean: float
    needed_max: int
    kept: dict[int, float]  # mean weight on the largest keys, by budget


@dataclass(frozen=True)
class LayerNeeds:
    """The loss that a layer adds if it alone is sparse."""

    layer: int
    name: str
    points: list[Point]
    suggested: int | None  # keys; None: all of them


@dataclass(frozen=True)
class SparseReport:
    """The whole report, in the form of its JSON."""

    model: str
    tokens: int
    scored: int
    block: int
    share: float
    loss: float
    methods: dict[str, list[Point]]
    heads: list[HeadNeeds]
    layers: list[LayerNeeds]
    allowed: float
    suggestion: Point  # of all layers together; its budget is the mean, of tokens where all stay

    def as_dictionary(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self) | {"about": METHODS}

    @classmethod
    def read(cls, path: Path) -> SparseReport:
        """The report that `headwise sparse --json` wrote to a file; ValueError if it holds none."""
        with path.open("rb") as file:
            text = file.read(MOST + 1)
        try:
            if len(text) > MOST:
                raise ValueError("too long")
            return _understood(json.loads(text))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(
                say(
                    "{file} is not a report of headwise sparse; headwise sparse --json writes one",
                    file=str(path),
                )
            ) from error

    @property
    def policies(self) -> str:
        """The suggestion as the argument of `hw.sparsify`; empty if every layer keeps all keys."""
        chosen = {x.layer: x.suggested for x in self.layers if x.suggested is not None}
        listed = ", ".join(f"{layer}: hw.sparse.TopK({keys})" for layer, keys in chosen.items())
        return f"{{{listed}}}" if listed else ""


def _understood(found: dict[str, Any]) -> SparseReport:
    """A report from its JSON; each value must be what it should be."""
    points = {name: [_point(x) for x in found["methods"][name]] for name in found["methods"]}
    heads = [
        HeadNeeds(
            _whole(x["layer"]), _text(x["name"]), _whole(x["head"]), _number(x["needed_mean"]),
            _whole(x["needed_max"]), {int(k): _number(v) for k, v in x["kept"].items()},
        )
        for x in found["heads"]
    ]  # fmt: skip
    layers = [
        LayerNeeds(
            _whole(x["layer"]), _text(x["name"]), [_point(y) for y in x["points"]],
            None if x["suggested"] is None else _whole(x["suggested"]),
        )
        for x in found["layers"]
    ]  # fmt: skip
    if not (heads and layers and points.keys() <= METHODS.keys() and any(points.values())):
        raise ValueError("it has nothing to show")
    if not all(each.points for each in layers):
        raise ValueError("it has a layer without points")
    alone = len({x.layer for x in layers}) == len(layers)
    if not alone or len({(x.layer, x.head) for x in heads}) < len(heads):
        raise ValueError("it names a layer or a head twice")
    return SparseReport(
        _text(found["model"]), _whole(found["tokens"]), _whole(found["scored"]),
        _whole(found["block"]), _number(found["share"]), _number(found["loss"]), points, heads,
        layers, _number(found["allowed"]), _point(found["suggestion"]),
    )  # fmt: skip


def _point(found: dict[str, Any]) -> Point:
    return Point(_whole(found["budget"]), _number(found["loss"]), _number(found["increase"]))


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 53:
        raise ValueError(f"{value} is not a count")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) < 1e300:
        raise ValueError(f"{value} is not a number")
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value} is not a text")
    return value
