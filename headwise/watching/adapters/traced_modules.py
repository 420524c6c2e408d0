"""Watched modules that compiled code may run, and what the compiler finds on them.

Everything that a traced call needs hangs on its module: a group number, the same for modules that
are built alike, so that equal layers share one graph; and a `Tap`, a board and a place on it, which
plain Python prepares for the whole group while the first of its modules is traced.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from headwise.core.observation import Observation
from headwise.core.spans import SPAN_PREFIX, Span
from headwise.nn.call import Call
from headwise.watching.adapters.traced_graph import UnreadCall
from headwise.watching.recorder.board import Board, Slot
from headwise.watching.recorder.call_recorder import CallRecorder
from headwise.watching.recorder.seen_call import Kind, SeenCall, kind_of, owned, why_not_linear


class LastCall:
    """The last call of a module: traced code sets the attributes, and its graph returns them.

    Later runs of a CUDA graph write over what it returned, so a GPU's tensors are copied when they
    are taken: at the end of a step, and by whoever asks.
    """

    def __init__(self) -> None:
        self.sizes: tuple[int, int, int] | None = None  # batch, queries, keys; None if none ran
        self.not_linear: str | None = None
        self.call: Call | None = None
        self.padding: Tensor | None = None
        self.rows: Tensor | None = None
        self.highest: Tensor | None = None
        self.values: dict[str, Tensor] = {}

    def set(self, call: Call) -> None:
        """Note how a call is made; the compiler traces this."""
        self.sizes = (call.q.shape[0], call.q.shape[2], call.k.shape[2])
        self.not_linear = why_not_linear(call)

    def keep(self, call: Call, seen: Observation, padding: Tensor | None) -> None:
        """Keep the rows of a call and what its map needs; the compiler traces this."""
        q, k = call.q.detach(), call.k.detach()
        if k.shape[2] != q.shape[2]:
            k = k.clone()  # it may be a cache, which will be written into
        none = call.v.new_empty(*call.v.shape[:3], 0)  # a view would hold all the values
        self.call = Call(q, k, none, call.given)  # torch 2.11 can't rebuild what _replace() makes
        self.padding, self.rows = padding, seen.rows
        self.highest, self.values = seen.highest, dict(seen.values)

    def take(self, stats: tuple[str, ...]) -> SeenCall | None:
        """The call with these statistics; None if none ran since the last time this was asked."""
        sizes, self.sizes = self.sizes, None
        if sizes is None:
            return None
        batch, queries, keys = sizes
        found = SeenCall(batch, queries, 0, None, None, None, None, self.not_linear, keys)
        call, self.call = self.call, None
        return found if call is None else self._kept(found, call, stats)

    def _kept(self, found: SeenCall, call: Call, stats: tuple[str, ...]) -> SeenCall:
        """The same with its rows, and what its map needs; they are forgotten here."""
        assert self.highest is not None
        values = {name: _own(value) for name, value in self.values.items()}
        lse = values.get("lse") if self.rows is None else None
        shown = {name: value for name, value in values.items() if name in stats}
        seen = Observation(shown, _own(self.highest), self.rows)
        padding = None if self.padding is None else _own(self.padding)
        kept = owned(call._replace(q=_own(call.q), k=_own(call.k)))
        self.padding, self.rows, self.highest, self.values = None, None, None, {}
        return replace(found, observation=seen, padding=padding, lse=lse).keeping(kept)


def _own(x: Tensor) -> Tensor:
    return x.clone() if x.device.type == "cuda" else x


GROUP = "_headwise_group"
UNREAD = "unread"


@dataclass(frozen=True)
class Tap:
    """The looking options of a layer: constants of its graph."""

    kind: Kind
    stats: tuple[str, ...]
    rows: int | None
    maps: bool
    sink_keys: int
    columns: tuple[str, ...]  # the statistics that the board has columns for
    maxima: tuple[int, ...]
    minima: tuple[int, ...]
    spans: tuple[tuple[str, Span], ...]
    sparse: int  # the number of the policies
    losses: tuple[str, ...]  # the figures that they have in this layer


@dataclass(frozen=True)
class Attending:
    """A way in which the modules of a group attend: how often before in this pass, and to what."""

    group: int
    again: int
    across: bool
    heads: int
    width: int
    device: torch.device

    @property
    def key(self) -> str:
        """A part of the names of the attributes that belong to it."""
        return key(self.again, self.across)


def key(again: int, across: bool) -> str:
    """The `key` of `Attending`."""
    return f"{again}_across" if across else f"{again}"


def attribute(key: str, what: str) -> str:
    """The attribute of a module that is its tap, its board, its place there or its last call."""
    return f"_headwise_{key}_{what}"


class TracedModel:
    """The modules of a watched model that compiled code may run, and their places on boards."""

    def __init__(self, names: dict[nn.Module, str], recorder: CallRecorder) -> None:
        self.names, self.recorder = names, recorder
        for module, name in names.items():
            setattr(module, GROUP, _group(module, name))
        for module in names:  # whose graphs are there already
            for way in _known.get(module, {}).values():
                self.prepare(way)
            if module in _refused:
                self.refuse(getattr(module, GROUP), _refused[module])
        _attached.append(self)

    def detach(self) -> None:
        """Take everything off the modules again."""
        _attached.remove(self)
        if any(layer.compiled for layer in self.recorder.registry.layers.values()):
            self._renumber()  # others have run that are not compiled
        for layer in self.recorder.registry.layers.values():
            layer.adopt()
        for module in self.names:
            for name in [x for x in vars(module) if x.startswith("_headwise_")]:
                del vars(module)[name]

    def prepare(self, way: Attending) -> None:
        """Give every module of a group its place on the group's board."""
        mine = self._group(way.group)
        if not mine or _is_prepared(mine[0], way.key, way.device):
            return
        recorder = self.recorder
        board = recorder.registry.group_board((way.group, way.key), way.device)
        board.reserve(len(mine), way.heads)
        for module in mine:
            _known.setdefault(module, {})[way.key] = way
            name = self.names[module]
            kind: Kind = "cross" if way.across else kind_of(name)
            layer = recorder.registry.traced_layer(
                name, way.again, kind, way.heads, way.width, board
            )
            if layer is None:
                setattr(module, attribute(way.key, "tap"), None)
                continue
            assert layer.slot is not None
            self._put(module, way.key, layer.slot, layer.kind, layer.stats)
            last = LastCall()
            setattr(module, attribute(way.key, "last"), last)
            layer.late = last.take
        self._renumber()

    def note_order(self, group: int, paths: list[str]) -> None:
        """Note when a module of a group runs: the one whose name ends the first of these paths.

        An encoder layer's fast path is traced in the layer, around its attention.
        """
        mine = {self.names[module]: module for module in self._group(group)}
        for path in paths:
            named = [name for name in mine if f".{path}".endswith(f".{name}")]
            within = [name for name in mine if path and name.startswith(f"{path}.")]
            if named or len(within) == 1:
                _order.setdefault(mine[max(named, key=len) if named else within[0]], next(_count))
                self._renumber()
                return

    def _renumber(self) -> None:
        """Number the layers in the order in which they were traced, or else are registered.

        A block that is compiled by itself is traced once for all of its kind. Layers that have not
        run come last.
        """
        found = {
            layer.module
            for layer in self.recorder.registry.layers.values()
            if layer.last is not None
        }
        ran = [x for x in self.names if x in _order or self.names[x] in found]
        traced = iter(sorted((x for x in ran if x in _order), key=lambda x: _order[x]))
        first = [next(traced) if x in _order else x for x in ran]
        rest = [x for x in self.names if x not in ran]
        self.recorder.registry.renumber(self.names[module] for module in (*first, *rest))

    def refuse(self, group: int, call: UnreadCall) -> None:
        """Let compiled code count the calls of a group's modules that can't be read."""
        mine = self._group(group)
        for module in mine:
            _refused[module] = call
        if not mine or _is_prepared(mine[0], UNREAD, call.device):
            return
        board = self.recorder.registry.group_board((group, UNREAD), call.device)
        board.reserve(len(mine), 1)
        for module in mine:
            name, unread = self.names[module], self.recorder.unread
            known = unread.compiled.get(name)
            slot = known[0] if known is not None and known[0].board is board else board.slot(1)
            unread.compiled[name] = (slot, call.reason)
            self._put(module, UNREAD, slot, "self", ())

    def _group(self, group: int) -> list[nn.Module]:
        return [module for module in self.names if getattr(module, GROUP) == group]

    def _put(
        self, module: nn.Module, key: str, slot: Slot, kind: Kind, stats: tuple[str, ...]
    ) -> None:
        """Put a tap on a module, the slot's board and its place there."""
        options, board = self.recorder.options, slot.board
        columns = board.columns
        spans = tuple(x for x in options.spans.items() if SPAN_PREFIX + x[0] in stats)
        tap = Tap(
            *(kind, stats, options.rows, options.maps, options.sink_keys),
            *(columns.stats, columns.maxima, columns.minima, spans),
            *(options.sparse.number, options.sparse.figures(options.sparse.for_kind(kind))),
        )
        setattr(module, attribute(key, "tap"), tap)
        setattr(module, attribute(key, "board"), board.now)
        setattr(module, attribute(key, "place"), _place(slot))


def prepare(way: Attending, paths: list[str]) -> None:
    """Prepare the modules of a group in every watched model, when one of these paths attends."""
    for model in list(_attached):
        model.prepare(way)
        model.note_order(way.group, paths)


def refuse(group: int, call: UnreadCall) -> None:
    """Note in every watched model that a call of this group can't be read."""
    for model in list(_attached):
        model.refuse(group, call)


def _is_prepared(module: nn.Module, key: str, device: torch.device) -> bool:
    """True if a module has its tap, with a board on this device unless it was not asked for."""
    board = vars(module).get(attribute(key, "board"))
    return attribute(key, "tap") in vars(module) and (board is None or board.device == device)


def _place(slot: Slot) -> Tensor:
    """The number of a slot, (1,), always the same tensor: CUDA graphs remember its address."""
    places = _places.setdefault(slot.board, {})
    if slot.number not in places:
        with torch.inference_mode(False):  # its graphs are for any mode
            places[slot.number] = torch.tensor([slot.number], device=slot.board.device)
    return places[slot.number]


_attached: list[TracedModel] = []
_places: weakref.WeakKeyDictionary[Board, dict[int, Tensor]] = weakref.WeakKeyDictionary()
_known: weakref.WeakKeyDictionary[nn.Module, dict[str, Attending]] = weakref.WeakKeyDictionary()
_order: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
_count = itertools.count()
_refused: weakref.WeakKeyDictionary[nn.Module, UnreadCall] = weakref.WeakKeyDictionary()
_groups: dict[object, int] = {}


def _group(module: nn.Module, name: str) -> int:
    """A number that modules of the same class, widths, heads and kind share.

    And of the same attribute: `attn1` and `attn2` of a block may differ in whose keys they see.
    """
    shapes = tuple(tuple(x.shape) for x in module.parameters())
    heads = tuple((key, x) for key, x in vars(module).items() if "head" in key and type(x) is int)
    kind = (type(module).__module__, type(module).__qualname__)
    own = name.rpartition(".")[2]
    role = (kind_of(name), None if own.isdigit() else own)
    return _groups.setdefault((kind, shapes, heads, role), len(_groups))
