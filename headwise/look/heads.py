"""From what was watched to what is shown: the layers of a recording as groups of heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from headwise.look.scene import Group, Head
from headwise.map import AttentionMap
from headwise.watching import Layer, Recording

REPEATS = 32
"""How many repeated tokens are followed up in search of induction."""

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
    """The heads of a recording; `axes` has the tokens of each group that the model may have.

    Where a model has an encoder and a decoder, each is a group, and what looks from one to the
    other is "cross"; else all is "self". `ids` are the numbers of a text's tokens: with them heads
    that look at what followed the same token last time are found.
    """
    figures = {(row["layer"], row["head"]): row for row in seen.heads()}
    found: dict[str, list[Head]] = {id: [] for id in axes}
    layers: dict[str, int] = dict.fromkeys(axes, 0)
    for layer in seen.layers:
        id = side(layer, axes)
        maps, rows = layer.map(), layer.observation
        follow = induction(maps, ids or (), batch)
        for number in range(layer.heads):
            row = figures[layer.number, number]
            mine = {k: v for k, v in row.items() if isinstance(v, float) and k != "head"}
            found[id].append(
                Head(
                    layers[id],
                    number,
                    layer.name,
                    mine | ({} if follow is None else {"induction_mean": follow[number]}),
                    maps.head(batch, number),
                    rows.entropy[batch, number],
                    rows.top_prob[batch, number],
                )
            )
        layers[id] += 1
    made = []
    for id, heads in found.items():
        queries, keys = map(tuple, axes[id])
        if heads:
            made.append(Group(id, NAMES[id], causal(heads[0].map), queries, keys, tuple(heads)))
    return tuple(made)


def side(layer: Layer, axes: Mapping[str, Axes]) -> str:
    """The group that a layer belongs to."""
    if "self" in axes:
        return "self"
    if layer.kind == "cross":
        return "cross"
    return "decoder" if "decoder" in layer.name.split(".") else "encoder"


def causal(amap: AttentionMap) -> bool:
    """Whether no row of a map (1, 1, N, M) looks ahead, by a sample of its rows.

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


def induction(amap: AttentionMap, ids: Sequence[int], batch: int) -> list[float] | None:
    """What each head looks, on average, at what followed the same token last time."""
    pairs = repeats(ids)
    if not pairs:
        return None
    found = torch.stack([amap[batch, :, row, column] for row, column in pairs])
    means: list[float] = found.double().mean(0).tolist()
    return means


def repeats(ids: Sequence[int]) -> list[tuple[int, int]]:
    """(row, column): a token said before, and what followed it the last time.

    >>> repeats([5, 6, 7, 5, 6])
    [(3, 1), (4, 2)]
    """
    last: dict[int, int] = {}
    found = []
    for row, token in enumerate(ids):
        if token in last and last[token] + 1 < row:
            found.append((row, last[token] + 1))
        last[token] = row
    return found[-REPEATS:]
