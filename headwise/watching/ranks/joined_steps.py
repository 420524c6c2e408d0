"""Steps of a watch on a mesh: figures of all ranks, under the numbers of the whole model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from headwise.core.host_copy import HostCopy
from headwise.core.reduction import Columns
from headwise.distributed.header import SIZE, Header, compare
from headwise.distributed.transport import RankError, RankGroup
from headwise.watching.ranks.layer_numbers import LAYERS, JoinedLayer, LayerPart, numbered
from headwise.watching.recorder.board import Board, Slot
from headwise.watching.recorder.call_recorder import CallRecorder
from headwise.watching.recorder.layer import WatchedLayer
from headwise.watching.recorder.layer_registry import LayerRegistry


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
            with group.rank_errors(None):
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
            with group.rank_errors(None):
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


Made = TypeVar("Made")


class JoinedSteps:
    """The layers of all ranks, and their figures when a step has ended.

    A layer that a rank sees for the first time keeps its figures until the ranks have agreed on its
    number, when the next step ends.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.figures = JoinedFigures(mesh)
        self.layers: tuple[WatchedLayer, ...] = ()  # of all ranks
        self.board: Board | None = None  # that their slots are on
        self._headers: HostCopy | None = None  # of the last step, until they are read
        self._told: dict[str, tuple[int, int]] = {}  # places of heads by weights; 0 if unknown
        self._at: dict[tuple[Board, tuple[int, ...]], Tensor] = {}  # numbers of slots

    @property
    def first(self) -> bool:
        """True on the rank that reports for all."""
        return self.figures.first

    @property
    def names(self) -> list[str]:
        """The names of all layers of the model, once the ranks have agreed on them."""
        return [layer.name for layer in self.figures.layers or ()]

    @property
    def stages(self) -> bool:
        """True if ranks have different layers, so that a rank can't number its own."""
        return LAYERS in (self.figures.mesh.mesh_dim_names or ())

    def take(
        self, recorder: CallRecorder, failure: Exception | None = None
    ) -> dict[Board, HostCopy]:
        """End a step: join the figures of all ranks, and start anew.

        `failure` is an error of this rank, raised when the others know.
        """
        try:
            self._check()  # before, if the last step could not be read
        except Exception as error:
            failure = failure or error
        columns = Columns(recorder.options.stats)
        boards = list(recorder.registry.boards.values())
        device = boards[0].device if boards else torch.device(self.figures.mesh.device_type)
        if self.figures.layers is None or self.figures.outdated:
            self._number(recorder, columns, device, failure)
        own, failure = _tried(lambda: self._own_figures(recorder, device), failure)
        mine, waiting = own or ([], [])
        table, headers = self.figures.join(mine, bool(waiting), failure)
        if failure is not None:
            self.figures.outdated = True  # as on the others, once they have read the headers
            raise failure
        self._headers = HostCopy.of(headers)
        assert self.board is not None
        self.board.ended = table
        for board in boards:
            board.restart([slot.number for slot in waiting if slot.board is board])
        copies = {self.board: HostCopy.of(table)}
        for slot, _ in recorder.unread.compiled.values():
            copies.setdefault(slot.board, HostCopy.of(slot.board.ended[: slot.board.used]))
        return copies

    def read(self, copies: dict[Board, Tensor]) -> None:
        """Note that ranks must agree again; raise an error that names one that failed."""
        if self.board is not None and self.board in copies:
            self._check()

    def _check(self) -> None:
        headers, self._headers = self._headers, None
        if headers is not None:
            self.figures.check(headers.read())

    def columns(self) -> dict[str, Tensor]:
        """The columns (columns, heads) of all heads of this rank's layers in the last step."""
        if self.board is None:
            return {}
        found = self.figures.layers or []
        return {x.local_name: self.board.ended[x.number, :, : x.heads] for x in found if x.own}

    def infinite(self, stat: str) -> Tensor:
        """True if the largest value of a statistic was infinite or NaN on any rank, () bool."""
        assert self.board is not None
        found = self.board.ended[:, self.board.columns.largest(stat)]
        return ((found == torch.inf) | found.isnan()).any()

    def _parts(self, recorder: CallRecorder) -> dict[str, LayerPart]:
        """This rank's part of every layer, by its name here."""
        layers, registry = _recorded(recorder), recorder.registry
        return {  # those that were not asked for count too, or the others' numbers would change
            name: self._part(layers[name], registry) if name in layers else LayerPart(name, "", 0)
            for name in registry.shown
        }

    def _own_figures(
        self, recorder: CallRecorder, device: torch.device
    ) -> tuple[list[tuple[list[str], Tensor]], list[Slot]]:
        """This rank's figures, and the slots of layers on which the ranks have not agreed yet."""
        layers, parts = _recorded(recorder), self._parts(recorder)
        known = [name for name in layers if self.figures.knows(parts[name])]
        groups: dict[tuple[Board, int], list[str]] = {}
        for name in known:
            slot = layers[name].slot
            assert slot is not None
            groups.setdefault((slot.board, slot.heads), []).append(name)
        mine = []
        for (board, heads), names in groups.items():
            slots = tuple(layers[name].slot.number for name in names)  # type: ignore[union-attr]
            if (board, slots) not in self._at:
                self._at[board, slots] = torch.tensor(slots, device=board.device)
            figures = board.now.index_select(0, self._at[board, slots])[:, :, :heads]
            mine.append((names, figures.to(device)))
        waiting = [layer.slot for name, layer in layers.items() if name not in known]
        return mine, [slot for slot in waiting if slot is not None]

    def _part(self, layer: WatchedLayer, registry: LayerRegistry) -> LayerPart:
        if layer.name not in self._told:
            # FSDP's weights are whole while a layer runs, and tell only now.
            told = layer.share or registry.placed(layer.module, layer.heads, layer.width)
            self._told[layer.name] = told or (0, 0)
        first, total = self._told[layer.name]
        return LayerPart(layer.name, layer.kind, layer.heads, first, total, layer.stats)

    def _number(
        self, recorder: CallRecorder, columns: Columns, device: torch.device,
        failure: Exception | None,
    ) -> None:  # fmt: skip
        """Agree with the other ranks on the layers of the whole model, and number this rank's."""
        parts, failure = _tried(lambda: self._parts(recorder), failure)
        found = self.figures.agree(list((parts or {}).values()), columns, device, failure)
        layers = _recorded(recorder)
        self.board = Board(columns, device)
        sampled = recorder.options.rows is not None
        self.layers = tuple(
            WatchedLayer(
                each.number, each.name, each.kind, each.heads, sampled, each.stats,  # type: ignore[arg-type]
                Slot(self.board, each.number, each.heads),
            )
            for each in found
            if each.heads
        )  # fmt: skip
        for each in found:
            if each.own:
                local = layers[each.local_name]
                local.number = each.number
                local.take_place((each.own.start, each.heads))


def _recorded(recorder: CallRecorder) -> dict[str, WatchedLayer]:
    """The layers that have figures on this rank, by their names."""
    layers = recorder.registry.layers.values()
    return {layer.name: layer for layer in layers if layer.slot is not None}


def _tried(
    make: Callable[[], Made], failure: Exception | None
) -> tuple[Made | None, Exception | None]:
    """The result of a function or its error, unless there is one already: the other ranks wait."""
    try:
        return (None if failure is not None else make()), failure
    except Exception as error:
        return None, error
