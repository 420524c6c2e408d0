"""Figures of heads, joined over the ranks of a mesh: sums are added, maxima compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from headwise.core.reduction import Columns
from headwise.distributed.header import SIZE, Header, compare
from headwise.distributed.transport import RankError, RankGroup
from headwise.watching.ranks.layer_numbers import JoinedLayer, LayerPart, numbered


@dataclass(frozen=True)
class Parcel:
    """The layout of what every rank sends when a step ends: a header, and figures of its heads.

    Figures are float64 (layers, columns, heads), with room for those of the rank that has most.
    """

    layers: int
    columns: Columns  # and one more maximum, as on a board
    heads: int
    slots: Mapping[str, int]  # of this rank's layers, by their names on it
    sources: Tensor  # (parts, layers, heads) of the whole model: their places in all parcels

    @classmethod
    def of(
        cls, layers: Sequence[JoinedLayer], ranks: int, columns: Columns, device: torch.device
    ) -> Parcel:
        """The layout that all ranks work out from the layers on which they agreed."""
        places: list[dict[int, int]] = [{} for _ in range(ranks)]
        for layer in layers:
            for rank in layer.held:
                places[rank][layer.number] = len(places[rank])
        slots = max(map(len, places), default=0)
        heads = max((len(x) for layer in layers for x in layer.held.values()), default=0)
        most = max((layer.heads for layer in layers), default=0)
        parts = torch.zeros(len(layers), most, dtype=torch.int64)  # so far
        found: list[Tensor] = []
        nobody = ranks * slots * heads
        for layer in layers:
            for rank, held in layer.held.items():
                mine = slice(held.start, held.stop)
                part = int(parts[layer.number, mine].max())
                if part == len(found):
                    found.append(torch.full_like(parts, nobody))
                begin = (rank * slots + places[rank][layer.number]) * heads
                found[part][layer.number, mine] = begin + torch.arange(len(held))
                parts[layer.number, mine] = part + 1
        own = [layer for layer in layers if layer.own]
        return cls(
            slots, columns, heads, {layer.local_name: at for at, layer in enumerate(own)},
            torch.stack(found or [torch.full_like(parts, nobody)]).to(device),
        )  # fmt: skip

    def empty(self) -> Tensor:
        """Figures of heads that nobody has seen."""
        shape = self.layers, self.columns.count + 1, self.heads
        found = torch.zeros(shape, dtype=torch.float64, device=self.sources.device)
        found[:, self.columns.sums :] = -torch.inf
        return found

    def reduced(self, parcels: Tensor) -> Tensor:
        """The figures of the whole model, float64 (layers, columns, heads), of all ranks' parcels.

        Every rank adds in the same order, so all have the same bits.
        """
        count, sums = self.columns.count + 1, self.columns.sums
        flat = parcels.view(len(parcels), self.layers, count, self.heads).movedim(2, 0).flatten(1)
        nobody = flat.new_zeros(count, 1)
        nobody[sums:] = -torch.inf
        flat = torch.cat((flat, nobody), 1)
        found = flat.index_select(1, self.sources.flatten()).view(count, *self.sources.shape)
        return torch.cat((found[:sums].sum(1), found[sums:].amax(1))).transpose(0, 1)


class JoinedFigures:
    """Joins tables of figures, (columns, heads) per layer, the first columns of which are sums.

    Ranks exchange the names of their layers when a step ends for the first time, and again after a
    step in which one of them has seen a new layer. A join is one collective of a fixed layout, and
    nothing is read back.
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
        self._joins = 0
        self._parts: dict[str, LayerPart] = {}  # of this rank, as agreed
        self._at: dict[tuple[str, ...], Tensor] = {}

    @property
    def first(self) -> bool:
        """True on the rank that reports for all."""
        return not any(self._coordinate())

    def knows(self, part: LayerPart) -> bool:
        """True if the ranks have agreed on the place of this part."""
        known = self._parts.get(part.name)
        return known is not None and replace(known, stats=()) == replace(part, stats=())

    def agree(
        self, parts: Sequence[LayerPart], columns: Columns, device: torch.device,
        failure: Exception | None = None,
    ) -> list[JoinedLayer]:  # fmt: skip
        """Exchange the layers of all ranks, and number them; ValueError if they don't fit.

        `failure` is this rank's own: it is raised when the others know, and they raise RankError.
        """
        said = None if failure is None else f"{type(failure).__name__}: {failure}"
        everyone: list[Any] = [(self._coordinate(), tuple(parts), columns.stats, said)]
        for group in self.groups:
            found: list[Any] = [None] * group.count
            with group.telling(None):
                dist.all_gather_object(found, everyone, group=group.group)
            everyone = [each for part in found for each in part]
        if failure is not None:
            raise failure
        order = sorted(range(len(everyone)), key=lambda at: everyone[at][0])
        everyone = [everyone[at] for at in order]
        for rank, (*_, error) in enumerate(everyone):
            if error is not None:
                raise RankError(f"rank {rank} of {len(everyone)} failed in hw.watch: {error}")
        _check_statistics([stats for _, _, stats, _ in everyone])
        names = self.mesh.mesh_dim_names or ()
        by_coordinate = {coordinate: parts for coordinate, parts, *_ in everyone}
        self.layers = numbered(names, by_coordinate, self._coordinate())
        self.parcel = Parcel.of(self.layers, len(everyone), columns, device)
        self._header = Header(
            "figures",
            {"the watched layers": f"{[(x.name, x.heads) for x in self.layers]}"},
            own=(0,),
        )
        self._order = torch.tensor(order, device=device)
        self._parts = {part.name: part for part in parts}
        self.outdated, self._at = False, {}
        return self.layers

    def join(
        self, mine: Iterable[tuple[Sequence[str], Tensor]], outdated: bool,
        failure: Exception | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The figures of all layers and ranks, float64 (layers, columns, heads), and the headers.

        `mine` are names of layers with equally many heads, and their figures (layers, columns,
        heads). The headers, int64 (ranks, SIZE), are for `check`: they tell which ranks failed, or
        were `outdated`.
        """
        figures = self.parcel.empty()
        for names, some in mine:
            if tuple(names) not in self._at:
                at = [self.parcel.slots[name] for name in names]
                self._at[tuple(names)] = torch.tensor(at, device=figures.device)
            figures[:, :, : some.shape[2]].index_copy_(0, self._at[tuple(names)], some)
        numbers = replace(self._header, own=(int(outdated),)).numbers(self._joins, failure)
        self._joins += 1
        header = torch.tensor(numbers, dtype=torch.int64, device=figures.device)
        every = self._gathered(torch.cat((header.view(torch.float64), figures.flatten())))
        headers = every[:, :SIZE].contiguous().view(torch.int64)
        return self.parcel.reduced(every[:, SIZE:]), headers

    def check(self, headers: Tensor) -> None:
        """Note a rank that was outdated; raise an error that names one that failed or differs."""
        self.outdated = True  # unless all is well
        own = int(self.mesh.mesh.flatten().tolist().index(dist.get_rank()))
        self.outdated = any(old for (old,) in compare(self._header, headers.tolist(), own))

    def _gathered(self, mine: Tensor) -> Tensor:
        """The parcels of all ranks of the mesh, (ranks, n), in the order of their coordinates."""
        found = mine[None]
        for group in self.groups:  # as in `agree`, so that all arrives in the same order
            sent = found.to(group.carrier(mine.device))
            every = sent.new_empty(group.count, *sent.shape)
            with group.telling(None):
                dist.all_gather(list(every), sent, group=group.group)
            found = every.to(mine.device).flatten(0, 1)
        return found.index_select(0, self._order)

    def _coordinate(self) -> tuple[int, ...]:
        return tuple(self.mesh.get_coordinate() or ())


def _check_statistics(every: Sequence[tuple[str, ...]]) -> None:
    """Raise ValueError, which names the rank, unless all ranks have the same statistics."""
    usual = Counter(every).most_common(1)[0][0]
    for rank, stats in enumerate(every):
        if stats != usual:
            raise ValueError(
                f"rank {rank} differs in stats: {' '.join(stats)} there, {' '.join(usual)} "
                f"elsewhere\n  in hw.watch on {len(every)} ranks"
            )
