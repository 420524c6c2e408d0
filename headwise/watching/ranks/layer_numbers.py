"""The layers and heads of a whole model, numbered from the parts that its ranks have.

Ranks along a dimension named "tp" have other heads of the same layers, along one named "pp" other
layers; along every other dimension they have the same heads of the same layers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

HEADS, LAYERS = "tp", "pp"  # the names of dimensions that split heads and layers


@dataclass(frozen=True)
class LayerPart:
    """The heads of a layer that a rank has; `total` is 0 if the rank can't tell its share.

    A rank that does not watch the layer has no heads of it, and no kind.
    """

    name: str
    kind: str
    heads: int
    first: int = 0
    total: int = 0
    stats: tuple[str, ...] = ()


@dataclass(frozen=True)
class JoinedLayer:
    """A layer of the whole model; `own` are this rank's heads, empty if it has none of them.

    `held` are the heads of every rank that has some, by its number in the mesh.
    """

    number: int
    name: str
    kind: str
    heads: int
    stats: tuple[str, ...]
    own: range
    local_name: str  # on the ranks that have it
    held: Mapping[int, range]


Rank = tuple[int, int, tuple[LayerPart, ...]]  # number in the mesh, share of heads, layers


def numbered(
    dimensions: Sequence[str],
    everyone: Mapping[tuple[int, ...], Sequence[LayerPart]],
    own: tuple[int, ...],
) -> list[JoinedLayer]:
    """The layers of the whole model in its order, from the parts of the ranks at each coordinate.

    ValueError if ranks that should have the same layers or heads differ.
    """
    stages: dict[int, list[Rank]] = {}
    for number, (coordinate, parts) in enumerate(sorted(everyone.items())):
        place = dict(zip(dimensions, coordinate, strict=False))
        rank = (number, place.get(HEADS, 0), tuple(parts))
        stages.setdefault(place.get(LAYERS, 0), []).append(rank)
    mine = sorted(everyone).index(own)
    found: list[JoinedLayer] = []
    for stage, some in sorted(stages.items()):
        names = max(([part.name for part in parts] for *_, parts in some), key=len)
        ranks = [(number, share, _filled(parts, names)) for number, share, parts in some]
        _check_layers(ranks, len(everyone))
        for layer, part in enumerate(ranks[0][2]):
            shares = [(share, rank[layer]) for _, share, rank in ranks if rank[layer].heads]
            total, firsts = _heads(part.name, shares)
            held = {}
            for number, share, own_parts in ranks:
                each = own_parts[layer]
                first = each.first if each.total else firsts.get(share, 0)
                if each.heads:
                    held[number] = range(first, first + each.heads)
            stats = dict.fromkeys(name for _, each in shares for name in each.stats)
            kind = shares[0][1].kind if shares else ""
            heads = held.get(mine, range(0))
            found.append(
                JoinedLayer(stage, part.name, kind, total, tuple(stats), heads, part.name, held)
            )
    return _in_order(found)


def _filled(parts: Sequence[LayerPart], names: Sequence[str]) -> tuple[LayerPart, ...]:
    """The parts, with empty ones for the layers that a rank has not run; as they are if others.

    >>> [part.heads for part in _filled([LayerPart("b", "self", 2)], ["a", "b"])]
    [0, 2]
    >>> [x.name for x in _filled([LayerPart(x, "self", 2) for x in "ba"], ["a", "b"])]
    ['a', 'b']
    >>> [x.name for x in _filled([LayerPart(x, "self", 2) for x in "bc"], ["a", "b"])]
    ['b', 'c']
    """
    known = {part.name: part for part in parts}
    if len(set(names)) < len(names) or not set(known) <= set(names):
        return tuple(parts)
    return tuple(known.get(name, LayerPart(name, "", 0)) for name in names)


def _check_layers(ranks: Sequence[Rank], count: int) -> None:
    """Raise ValueError, which names the rank, unless all have the same layers."""
    for what, look in (
        ("watched layers", lambda parts: len(parts)),
        ("the names of watched layers", lambda parts: [part.name for part in parts]),
    ):
        values = {number: look(parts) for number, _, parts in ranks}
        usual = Counter(map(str, values.values())).most_common(1)[0][0]
        for number, value in values.items():
            if str(value) != usual:
                raise ValueError(
                    f"rank {number} differs in {what}: {value} there, {usual} elsewhere\n"
                    f"  in hw.watch on {count} ranks; name the dimension of the mesh that splits "
                    f"heads {HEADS!r}, and the one that splits layers {LAYERS!r}"
                )


def _heads(name: str, parts: Sequence[tuple[int, LayerPart]]) -> tuple[int, dict[int, int]]:
    """The number of a layer's heads, and where each share begins."""
    if all(part.total for _, part in parts):
        return max((part.total for _, part in parts), default=0), {}
    counts: dict[int, set[int]] = {}
    for share, part in parts:
        counts.setdefault(share, set()).add(part.heads)
    if any(len(heads) > 1 for heads in counts.values()):
        seen = sorted(set().union(*counts.values()))
        raise ValueError(f"ranks differ in the heads of {name or 'the model'}: they have {seen}")
    sizes = {share: heads.pop() for share, heads in sorted(counts.items())}
    ends = list(accumulate(sizes.values()))
    return ends[-1], {share: end - sizes[share] for share, end in zip(sizes, ends, strict=True)}


def _in_order(layers: Sequence[JoinedLayer]) -> list[JoinedLayer]:
    """The layers of all stages, numbered from 0 (their numbers are those of their stages).

    Stages that kept the model's names are put in the order of the first number in them; names that
    two stages share get the stage in front.
    """
    used = Counter(layer.name for layer in layers)
    if max(used.values(), default=1) > 1:
        layers = [replace(layer, name=f"pp{layer.number}.{layer.name}") for layer in layers]
    else:
        prefixes = list(dict.fromkeys(_prefix(layer.name)[0] for layer in layers))
        layers = sorted(
            layers, key=lambda x: (prefixes.index(_prefix(x.name)[0]), _prefix(x.name)[1])
        )
    return [replace(layer, number=number) for number, layer in enumerate(layers)]


def _prefix(name: str) -> tuple[str, int]:
    """The name up to its first number, and that number."""
    head, number = re.fullmatch(r"(\D*)(\d*).*", name, re.S).groups()  # type: ignore[union-attr]
    return head, int(number or 0)
