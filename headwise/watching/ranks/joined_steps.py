"""Steps of a watch on a mesh: figures of all ranks, under the numbers of the whole model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from headwise.core.host_copy import HostCopy
from headwise.core.reduction import Columns
from headwise.watching.ranks.joined_figures import JoinedFigures
from headwise.watching.ranks.layer_numbers import LAYERS, LayerPart
from headwise.watching.recorder.board import Board, Slot
from headwise.watching.recorder.call_recorder import CallRecorder
from headwise.watching.recorder.layer import WatchedLayer
from headwise.watching.recorder.layer_registry import LayerRegistry

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
