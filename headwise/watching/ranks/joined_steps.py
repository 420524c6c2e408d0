"""Steps of a watch on a mesh: figures of all ranks, under the numbers of the whole model."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from headwise.core.reduction import Columns
from headwise.distributed.figures import LAYERS, JoinedFigures, LayerPart
from headwise.watching.adapters.module_forwards import find_module
from headwise.watching.ranks.head_places import head_place
from headwise.watching.recorder.board import Board, HostCopy, Slot
from headwise.watching.recorder.call_recorder import CallRecorder
from headwise.watching.recorder.layer import WatchedLayer


class JoinedSteps:
    """The layers of all ranks, and their figures when a step has ended.

    A layer that a rank sees for the first time keeps its figures until the ranks have agreed on its
    number, when the next step ends.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.figures = JoinedFigures(mesh)
        self.layers: tuple[WatchedLayer, ...] = ()  # of all ranks
        self.board: Board | None = None  # that their slots are on
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

    def take(self, recorder: CallRecorder, model: nn.Module) -> dict[Board, HostCopy]:
        """End a step: join the figures of all ranks, and start anew."""
        table, waiting = self._join(recorder, model)
        assert self.board is not None
        self.board.ended = table[:-1]
        for board in recorder.registry.boards.values():
            board.restart([slot.number for slot in waiting if slot.board is board])
        copies = {self.board: HostCopy.of(table)}
        for slot, _ in recorder.unread.compiled.values():
            copies.setdefault(slot.board, HostCopy.of(slot.board.ended[: slot.board.used]))
        return copies

    def read(self, copies: dict[Board, Tensor]) -> None:
        """Note what a step's figures tell besides: the ranks must agree on their layers again."""
        if self.board is not None and self.board in copies:
            flag = copies[self.board][-1, self.board.columns.sums, 0]
            self.figures.outdated = self.figures.outdated or bool(flag > 0)

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

    def _join(self, recorder: CallRecorder, model: nn.Module) -> tuple[Tensor, list[Slot]]:
        """The table of all ranks, and the slots of layers that have no place in it yet."""
        registry = recorder.registry
        layers = {name: x for name, x in registry.layers.items() if x.slot is not None}
        parts = {  # those that were not asked for count too, or the others' numbers would change
            name: self._part(layers[name], model) if name in layers else LayerPart(name, "", 0)
            for name in registry.shown
        }
        columns = Columns(recorder.options.stats)
        boards = list(registry.boards.values())
        device = boards[0].device if boards else torch.device(self.figures.mesh.device_type)
        if self.figures.layers is None or self.figures.outdated:
            self._number(parts, layers, columns, device, recorder)
        known = [name for name in layers if self.figures.knows(parts[name])]
        groups: dict[tuple[Board, int, int], list[str]] = {}
        for name in known:
            slot = layers[name].slot
            assert slot is not None
            groups.setdefault((slot.board, slot.heads, layers[name].first_head), []).append(name)
        mine = []
        for (board, heads, _), names in groups.items():
            slots = tuple(layers[name].slot.number for name in names)  # type: ignore[union-attr]
            if (board, slots) not in self._at:
                self._at[board, slots] = torch.tensor(slots, device=board.device)
            figures = board.now.index_select(0, self._at[board, slots])[:, :, :heads]
            mine.append((names, figures.to(device)))
        waiting = [layer.slot for name, layer in layers.items() if name not in known]
        table = self.figures.join(
            mine, columns.sums, columns.count + 1, device, outdated=bool(waiting)
        )
        return table, [slot for slot in waiting if slot is not None]

    def _part(self, layer: WatchedLayer, model: nn.Module) -> LayerPart:
        if layer.share is None:
            try:
                module = find_module(model, layer.module)
            except ValueError:  # the other ranks wait, so nothing may fail here
                module = nn.Identity()
            layer.share = head_place(module, layer.heads, layer.width) or (0, 0)
        first, total = layer.share
        return LayerPart(layer.name, layer.kind, layer.heads, first, total, layer.stats)

    def _number(
        self, parts: dict[str, LayerPart], layers: dict[str, WatchedLayer], columns: Columns,
        device: torch.device, recorder: CallRecorder,
    ) -> None:  # fmt: skip
        """Agree with the other ranks on the layers of the whole model, and number this rank's."""
        found = self.figures.agree(list(parts.values()))
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
                local.number, local.first_head = each.number, each.own.start
