"""Turns the layers of a recording into groups of heads."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headwise import AttentionMap
from headwise.apps.look.scene import Group, Head
from headwise.messages import Sentence, say
from headwise.watching import Recording, WatchedLayer, head_types

NAMES = {
    "self": "self-attention",
    "encoder": "encoder",
    "decoder": "decoder",
    "cross": "cross-attention",
}
Axes = tuple[Sequence[str], Sequence[str]]
"""The tokens of the rows and of the columns."""


def groups(
    seen: Recording, axes: Mapping[str, Axes], ids: Sequence[int] | None = None, batch: int = 0
) -> tuple[Group, ...]:
    """The heads of a recording in groups; `axes` has the tokens of each possible group.

    The groups are "encoder", "decoder" and "cross" for a model with an encoder and a decoder, else
    "self". `ids` are the numbers of a text's tokens, which induction heads are found by. Layers
    have the numbers of the recording, in every group.
    """
    figures = {(row["layer"], row["head"]): row for row in seen.heads()}
    tokens = seen.tokens if ids is None else torch.tensor([ids])
    found: dict[str, list[Head]] = {id: [] for id in axes}
    for layer in mapped(seen):
        id = side(layer, axes)
        if layer.map().shape[2:] == tuple(map(len, axes[id])):
            found[id].extend(heads_of(layer, figures, tokens, batch))
    made = []
    for id, heads in found.items():
        queries, keys = map(tuple, axes[id])
        if heads:
            made.append(Group(id, NAMES[id], causal(heads[0].map), queries, keys, tuple(heads)))
    return tuple(made)


def mapped(seen: Recording) -> list[WatchedLayer]:
    """The layers whose maps are of tokens against tokens; ValueError if there are none.

    The columns of a window's map are places in it, and not the same tokens for all rows.
    """
    found = [layer for layer in seen.layers if layer.kind != "window"]
    if not found:
        raise ValueError(
            say(
                "all heads of this model look through windows, and the page shows maps of tokens "
                "against tokens; hw.watch has their figures"
            )
        )
    return found


def left_out(seen: Recording) -> tuple[Sentence, ...]:
    """A note that names the layers whose maps are not shown, if there are any."""
    windows = [layer.name for layer in seen.layers if layer.kind == "window"]
    found = []
    if windows:
        found.append(say("not shown, for they look through windows: {names}", names=few(windows)))
    if seen.unread:
        names = few([name or "the model" for name in seen.unread])
        found.append(say("not shown, for they could not be read: {names}", names=names))
    return tuple(found)


def of_other_sizes(seen: Recording, shown: Sequence[Group]) -> tuple[Sentence, ...]:
    """A note that names the layers of other tokens than those shown, such as a vision tower's."""
    there = {layer for group in shown for layer, _, _ in group.layers()}
    names = [layer.name for layer in mapped(seen) if layer.number not in there]
    if not names:
        return ()
    return (say("not shown, for they have another number of tokens: {names}", names=few(names)),)


def few(names: Sequence[str], most: int = 4) -> str:
    """Some names, and how many more there are.

    >>> few(["a", "b", "c"], 2)
    'a, b +1'
    """
    more = f" +{len(names) - most}" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def heads_of(
    layer: WatchedLayer,
    figures: Mapping[Any, Mapping[str, Any]],
    tokens: Tensor | None,
    batch: int,
) -> Iterator[Head]:
    """The heads of a layer."""
    maps, rows, scores = layer.map(), layer.observation, head_types.scores(layer, tokens)
    for head, (kind, judged) in enumerate(zip(scores.types(), scores.by_type(), strict=True)):
        row = figures[layer.number, head]
        mine = {name: value for name, value in row.items() if isinstance(value, float)}
        mine |= {"induction_mean": float(scores.induction[head])}
        mine |= {"local_mean": float(scores.local[head])}
        yield Head(
            layer.number,
            head,
            layer.name,
            {name: value for name, value in mine.items() if not math.isnan(value)},
            maps.head(batch, head),
            rows.entropy[batch, head],
            rows.top_prob[batch, head],
            kind,
            judged,
        )


def side(layer: WatchedLayer, ids: Container[str]) -> str:
    """The group that a layer belongs to, of those that may be there."""
    if "self" in ids:
        return "self"
    if layer.kind == "cross":
        return "cross"
    return "decoder" if "decoder" in layer.name.split(".") else "encoder"


def causal(amap: AttentionMap) -> bool:
    """True if no row of a map (1, 1, N, M) looks ahead, judged by a sample of its rows.

    >>> import headwise as hw
    >>> q = torch.zeros(1, 1, 5, 4)
    >>> causal(hw.attention_map(q, q)), causal(hw.attention_map(q, q, mask=hw.mask.causal()))
    (False, True)
    """
    _, _, rows, keys = amap.shape
    if rows != keys:
        return False
    sample = {row * (rows - 1) // 8 for row in range(8)}
    return not any(bool(amap[0, 0, row, row + 1 :].any()) for row in sample)
