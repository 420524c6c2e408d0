"""Figures of heads, joined over the ranks of a mesh: sums are added, maxima compared.

Ranks along a dimension named "tp" have other heads of the same layers, along one named "pp" other
layers; along every other dimension they have the same heads of the same layers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from headwise.distributed.transport import RankGroup

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
    """A layer of the whole model; `own` are this rank's heads, empty if it has none of them."""

    number: int
    name: str
    kind: str
    heads: int
    stats: tuple[str, ...]
    own: range
    local_name: str  # on the ranks that have it


class JoinedFigures:
    """Joins tables of figures, (columns, heads) per layer, the first columns of which are sums.

    Ranks exchange the names of their layers when a step ends for the first time, and again after a
    step in which one of them has seen a new layer. A join is one sum and one maximum of a table of
    a fixed size over the mesh, and nothing is read back.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        if not isinstance(mesh, DeviceMesh):
            raise ValueError(f"mesh= takes a DeviceMesh, not {type(mesh).__name__}")
        self.mesh = mesh
        whole = mesh.size() == dist.get_world_size()
        groups = [dist.group.WORLD] if whole else mesh.get_all_groups()
        self.groups = [RankGroup(group) for group in groups if group is not None]
        self.layers: list[JoinedLayer] | None = None  # of all ranks, once they have agreed
        self.outdated = False  # a rank has seen a layer since, so they must agree again
        self._parts: dict[str, LayerPart] = {}  # of this rank, as agreed
        self._at: dict[tuple[str, ...], Tensor] = {}

    @property
    def first(self) -> bool:
        """True on the rank that reports for all."""
        return not any(self._coordinate())

    def knows(self, part: LayerPart) -> bool:
        """True if the ranks have agreed on the place of this part."""
        return _same(self._parts.get(part.name), part)

    def agree(self, parts: Sequence[LayerPart]) -> list[JoinedLayer]:
        """Exchange the layers of all ranks, and number them; ValueError if they don't fit."""
        everyone = [(self._coordinate(), tuple(parts))]
        for group in self.groups:
            found: list[Any] = [None] * group.count
            with group.telling(None):
                dist.all_gather_object(found, everyone, group=group.group)
            everyone = [each for part in found for each in part]
        names = self.mesh.mesh_dim_names or ()
        self.layers = numbered(names, dict(everyone), self._coordinate())
        self._parts = {part.name: part for part in parts}
        self.outdated, self._at = False, {}
        return self.layers

    def join(
        self, mine: Iterable[tuple[Sequence[str], Tensor]], sums: int, columns: int,
        device: torch.device, outdated: bool,
    ) -> Tensor:  # fmt: skip
        """The figures of all layers and ranks, float64 (layers + 1, columns, heads).

        `mine` are names of layers whose heads begin at the same number, and their figures
        (layers, columns, heads). The last entry has a positive number in its first maximum if a
        rank was `outdated`.
        """
        assert self.layers is not None
        most = max([layer.heads for layer in self.layers], default=1)
        shape = (len(self.layers) + 1, columns, most)
        table = torch.zeros(shape, dtype=torch.float64, device=device)
        table[:, sums:] = -torch.inf
        if outdated:
            table[-1, sums, 0] = 1
        numbers = {layer.local_name: layer for layer in self.layers if layer.own}
        for names, figures in mine:
            heads = numbers[names[0]].own
            if tuple(names) not in self._at:
                at = [numbers[name].number for name in names]
                self._at[tuple(names)] = torch.tensor(at, device=device)
            place = table[:, :, heads.start : heads.stop]
            place.index_copy_(0, self._at[tuple(names)], figures)
        for group in self.groups:
            carrier = group.carrier(device)
            for part, how in (
                (table[:, :sums], dist.ReduceOp.SUM),
                (table[:, sums:], dist.ReduceOp.MAX),
            ):
                together = part.to(carrier).contiguous()
                with group.telling(None):
                    dist.all_reduce(together, op=how, group=group.group)
                part.copy_(together)
        return table

    def _coordinate(self) -> tuple[int, ...]:
        return tuple(self.mesh.get_coordinate() or ())


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
    mine = dict(zip(dimensions, own, strict=False))
    found: list[JoinedLayer] = []
    for stage, some in sorted(stages.items()):
        names = max(([part.name for part in parts] for *_, parts in some), key=len)
        ranks = [(number, share, _filled(parts, names)) for number, share, parts in some]
        _check_layers(ranks, len(everyone))
        here, known = mine.get(LAYERS, 0) == stage, _filled(everyone[own], names)
        for layer, part in enumerate(ranks[0][2]):
            shares = [(share, rank[layer]) for _, share, rank in ranks if rank[layer].heads]
            total, firsts = _heads(part.name, shares)
            heads = range(0)
            if here:
                held = known[layer]
                first = held.first if held.total else firsts.get(mine.get(HEADS, 0), 0)
                heads = range(first, first + held.heads)
            stats = dict.fromkeys(name for _, each in shares for name in each.stats)
            kind = shares[0][1].kind if shares else ""
            found.append(JoinedLayer(stage, part.name, kind, total, tuple(stats), heads, part.name))
    return _in_order(found)


def _filled(parts: Sequence[LayerPart], names: Sequence[str]) -> tuple[LayerPart, ...]:
    """The parts, with empty ones for the layers that a rank has not run; as they are if others."""
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


def _same(known: LayerPart | None, part: LayerPart) -> bool:
    return known is not None and replace(known, stats=()) == replace(part, stats=())
