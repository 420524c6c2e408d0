"""The attention layers that a model has shown: their names, their numbers, their places on boards.

A layer that was not asked for is registered too, because it counts in the numbers of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from headwise.core.reduction import Columns
from headwise.core.spans import SPAN_PREFIX
from headwise.nn.call import Call
from headwise.watching.recorder.board import Board
from headwise.watching.recorder.layer import WatchedLayer
from headwise.watching.recorder.seen_call import Kind
from headwise.watching.recorder.watch_options import WatchOptions


@dataclass
class LayerRegistry:
    """The layers of one model. `layers` has those that are watched, `shown` all of them."""

    options: WatchOptions
    layers: dict[str, WatchedLayer] = field(default_factory=dict)
    shown: dict[str, bool] = field(default_factory=dict)  # True: watched; in the order of numbers
    boards: dict[object, Board] = field(default_factory=dict)  # by device, and group if compiled
    numbered: bool = False  # a step has ended: layers keep their numbers
    towers: tuple[str, ...] = ()  # the parts of a model of tokens that take something else
    some_layers: bool = False  # other ranks have other layers of the model, which shift its numbers
    placed: Callable[[str, int, int], tuple[int, int] | None] = lambda *_: None
    """The first head of a module, and the number of all, by its weights, if it computes so many
    heads of a width; None if its weights do not tell."""
    _modules: dict[str, bool] = field(default_factory=dict)  # those shown, True: some is watched

    def board(self, device: torch.device) -> Board:
        """The board of a device, a new one if need be."""
        if device not in self.boards:
            self.boards[device] = Board(Columns(self.options.stats), device)
        return self.boards[device]

    def group_board(self, group: tuple[int, str], device: torch.device) -> Board:
        """The board of layers that are built alike and run compiled: it must not move."""
        key = (device, *group)
        if key not in self.boards:
            self.boards[key] = Board(Columns(self.options.stats), device)
        return self.boards[key]

    def watches(self, module: str) -> bool:
        """True unless all layers that a module has shown were not asked for, or dropped."""
        if not self._modules:
            for name, watched in self.shown.items():
                key = name.partition("#")[0]
                self._modules[key] = watched or self._modules.get(key, False)
        return self._modules.get(module, True)

    def asked_for(self, name: str) -> bool:
        """True if the next layer that the model shows is watched under this name."""
        return self.options.ask_for(len(self.shown), name)

    def in_tower(self, name: str) -> bool:
        """True if a module is in a part that takes no tokens: spans are ranges of tokens."""
        return name.startswith(tuple(f"{tower}." for tower in self.towers))

    def distinct_name(self, name: str, kind: Kind) -> str:
        """A name that no layer of another kind has."""
        known = self.layers.get(name)
        return name if known is None or known.kind == kind else f"{name}#{kind}"

    def layer(self, name: str, call: Call, kind: Kind) -> WatchedLayer | None:
        """The layer of this name, a new one if need be; None if it was not asked for."""
        if name not in self.shown:
            self._register(name, kind, call.q.shape[1], call.q.shape[3])
        layer = self.layers.get(name)
        if layer is not None and (layer.slot is None or layer.slot.board.device != call.q.device):
            board, slot = self.board(call.q.device), layer.slot
            layer.slot = board.slot(layer.heads) if slot is None else slot.moved(board)
        return layer

    def traced_layer(
        self, module: str, again: int, kind: Kind, heads: int, width: int, board: Board
    ) -> WatchedLayer | None:
        """The layer of a module that runs compiled; None if it was not asked for.

        `again` counts its calls before in the same pass.
        """
        name = self.distinct_name(f"{module}#{again}" if again else module, kind)
        if name not in self.shown:
            self._register(name, kind, heads, width, known=False)
        layer = self.layers.get(name)
        moves = layer is not None and (layer.slot is None or layer.slot.board is not board)
        if layer is not None and moves:
            layer.slot = board.slot(heads) if layer.slot is None else layer.slot.moved(board)
            layer.compiled = layer.recorded = True
        return layer

    def _register(self, name: str, kind: Kind, heads: int, width: int, known: bool = True) -> None:
        """Number a layer that is seen for the first time, and watch it if it was asked for.

        While its number is not known for certain, every layer is watched.
        """
        number = len(self.shown)
        self._modules.clear()
        self.shown[name] = self.options.ask_for(number, name) or not known or self.some_layers
        if self.shown[name]:
            sampled, stats = self.options.rows is not None, self.options.stats_of(kind)
            if self.in_tower(name):
                stats = tuple(stat for stat in stats if not stat.startswith(SPAN_PREFIX))
            layer = WatchedLayer(number, name, kind, heads, sampled, stats, width=width)
            layer.take_place(self.placed(layer.module, heads, width))
            self.layers[name] = layer

    def renumber(self, order: Iterable[str]) -> None:
        """Number the layers in this order of their names, until a step has ended.

        Compiled code shows its layers group by group, not in the order in which they run.
        """
        if self.numbered:
            return
        names = [name for name in order if name in self.shown]
        names += [name for name in self.shown if name not in names]
        self.shown = {name: self.shown[name] for name in names}
        self.layers = {name: self.layers[name] for name in names if name in self.layers}
        for number, name in enumerate(names):
            if name in self.layers:
                self.layers[name].number = number

    def drop(self, layer: WatchedLayer) -> None:
        """Watch a layer no longer: it was misread."""
        self.shown[layer.name] = False
        self._modules.clear()
        self.layers.pop(layer.name, None)
