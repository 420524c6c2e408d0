"""Attention in compiled code: while it is traced, operators that record figures join its graph.

The compiler reads this file as part of the model. Everything that a traced call needs hangs on its
module: a group number, the same for modules that are built alike, so that equal layers share one
graph; and a `Tap`, the board and its place on the board, which are prepared by plain Python as soon
as the number of heads is known.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwise.api import observe, statistics
from headwise.core.observation import Observation
from headwise.core.spans import Span, within
from headwise.nn.call import Call
from headwise.watching.board import record
from headwise.watching.call_recorder import WITHIN, CallRecorder, plain_statistics
from headwise.watching.seen_call import Kind, padding_rows

GROUP, TAP, BOARD, PLACE = (f"_headwise_{name}" for name in ("group", "tap", "board", "place"))


@dataclass(frozen=True)
class Tap:
    """The looking options of a layer: constants of its graph."""

    kind: Kind
    heads: int
    stats: tuple[str, ...]
    rows: int | None
    sink_keys: int
    columns: tuple[str, ...]  # the statistics that the board has columns for
    maxima: tuple[int, ...]
    minima: tuple[int, ...]
    spans: tuple[tuple[str, Span], ...] = ()

    def look(self, call: Call, across: bool) -> dict[str, Any]:
        """The statistics of a call that are asked for."""
        stats = plain_statistics(self.stats)
        if across or self.kind == "cross":
            stats = tuple(name for name in stats if name not in WITHIN)
        spans = within(dict(self.spans), call.k.shape[2])
        return {"stats": stats, "sink_keys": self.sink_keys, "spans": spans}


class Tracing:
    """The module whose forward is being traced; None outside of compiled code."""

    def __init__(self) -> None:
        self.module: nn.Module | None = None
        self.recorded = 0  # calls of the traced code so far


NOW = Tracing()


@contextmanager
def taken() -> Iterator[None]:
    """Mark a call that is recorded already, so that what it calls is not counted again."""
    before = NOW.module
    NOW.module = None
    try:
        yield
    finally:
        NOW.module = before


def run(
    original: Callable[..., Any],
    module: nn.Module,
    given: tuple[Any, ...],
    options: dict[str, Any],
) -> Any:
    """Run a module's forward, and remember that it is running."""
    before = NOW.module
    NOW.module = module
    try:
        return original(module, *given, **options)
    finally:
        NOW.module = before
        if before is None:
            NOW.recorded = 0


def beside(
    module: nn.Module | None, call: Call, across: bool = False, padding: Tensor | None = None
) -> None:
    """Record the figures of a call whose output the model computes itself."""
    tap = _tap(module, call.q)
    if module is None or tap is None:
        return
    q, k, v = (x.detach() for x in call[:3])
    options = call.options()
    del options["dropout"], options["engine"]
    seen = statistics(q, k, v, **options, **tap.look(call, across), rows=tap.rows)
    _record(module, tap, call, across, padding, seen)


def inside(
    module: nn.Module | None, call: Call, across: bool = False, padding: Tensor | None = None
) -> Tensor:
    """Compute the output (B, Hq, N, Dv) of a call, and record its figures from the same pass."""
    tap = _tap(module, call.q)
    if module is None or tap is None:
        return call.attend()
    if tap.rows is not None or call.engine != "auto" or call.q.device.type == "cpu":
        with taken():
            out = call.attend()
        beside(module, call, across, padding)
        return out
    out, seen = observe(call.q, call.k, call.v, **call.options(), **tap.look(call, across))
    seen.values = {name: value.detach() for name, value in seen.values.items()}
    _record(module, tap, call, across, padding, seen)
    return out


def _record(
    module: nn.Module,
    tap: Tap,
    call: Call,
    across: bool,
    padding: Tensor | None,
    seen: Observation,
) -> None:
    if padding is None and not across and tap.kind == "self":
        padding = padding_rows(call.mask, call.q, call.k)
    NOW.recorded += 1
    values = [seen.values.get(name) for name in tap.columns]
    record(
        getattr(module, BOARD),
        getattr(module, PLACE),
        values,
        seen.highest,
        seen.padding_of(padding),
        None,
        list(tap.maxima),
        list(tap.minima),
    )


def _tap(module: nn.Module | None, q: Tensor) -> Tap | None:
    """The tap of a module that attends with queries (B, Hq, N, D); None if it is not watched."""
    group = None if module is None else getattr(module, GROUP, None)
    if module is None or group is None:
        return None
    _prepare(group, q.shape[1], q.device.type, q.device.index)
    tap: Tap | None = getattr(module, TAP, None)
    return tap


def _prepare(group: int, heads: int, device: str, index: int | None) -> bool:
    """Prepare the modules of a group in every watched model."""
    if torch.compiler.is_exporting():
        raise ValueError(
            "a watched model can't be exported: detach() the watch first. A model whose forward "
            "returns the figures of hw.observe exports with them"
        )
    for model in list(_attached):
        model.prepare(group, heads, torch.device(device if index is None else f"{device}:{index}"))
    return True


# The mark of torch.compiler.assume_constant_result, which itself imports the compiler: the function
# runs while a graph is traced, and its result is a constant there.
_prepare._dynamo_marked_constant = True  # type: ignore[attr-defined]


class TracedModel:
    """The modules of a watched model that compiled code may run, and their places on boards."""

    def __init__(self, names: dict[nn.Module, str], recorder: CallRecorder) -> None:
        self.names, self.recorder = names, recorder
        for module in names:
            setattr(module, GROUP, _group(module))
        for module in names:
            if module in _known:  # its graph is there already
                self.prepare(getattr(module, GROUP), *_known[module])
        _attached.append(self)

    def detach(self) -> None:
        """Take everything off the modules again."""
        _attached.remove(self)
        for module in self.names:
            for name in (GROUP, TAP, BOARD, PLACE):
                vars(module).pop(name, None)

    def prepare(self, group: int, heads: int, device: torch.device) -> None:
        """Give every module of a group its place on the group's board."""
        mine = [module for module in self.names if getattr(module, GROUP) == group]
        if not mine or TAP in vars(mine[0]):
            return
        options, board = self.recorder.options, self.recorder.group_board(group, device)
        board.reserve(len(mine), heads)
        columns = board.columns
        for module in mine:
            _known[module] = (heads, device)
            layer = self.recorder.traced_layer(self.names[module], heads, board)
            if layer is None:
                setattr(module, TAP, None)
                continue
            assert layer.slot is not None
            tap = Tap(
                layer.kind,
                heads,
                layer.stats,
                options.rows,
                options.sink_keys,
                columns.stats,
                columns.maxima,
                columns.minima,
                tuple(options.spans.items()),
            )
            setattr(module, TAP, tap)
            setattr(module, BOARD, board.now)
            setattr(module, PLACE, torch.tensor([layer.slot.number], device=device))
        self.recorder.renumber(self.names.values())


_attached: list[TracedModel] = []
_known: weakref.WeakKeyDictionary[nn.Module, tuple[int, torch.device]] = weakref.WeakKeyDictionary()
_groups: dict[object, int] = {}


def _group(module: nn.Module) -> int:
    """A number that modules of the same class, widths and heads share."""
    shapes = tuple(tuple(x.shape) for x in module.parameters())
    heads = tuple((key, x) for key, x in vars(module).items() if "head" in key and type(x) is int)
    kind = (type(module).__module__, type(module).__qualname__)
    return _groups.setdefault((kind, shapes, heads), len(_groups))
