"""Attention in compiled code: while it is traced, operators that record figures join its graph.

The compiler reads this file as part of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from headwise.api import observe, statistics
from headwise.core.observation import Observation
from headwise.core.problem import pose
from headwise.core.spans import within
from headwise.maps.sparse_losses import traced_losses
from headwise.nn.call import Call
from headwise.watching.adapters import traced_masks, traced_modules
from headwise.watching.adapters.other_sequence import Elsewhere, elsewhere
from headwise.watching.adapters.traced_graph import (
    UnreadCall,
    constant,
    running_paths,
    unread_call,
)
from headwise.watching.adapters.traced_masks import RUNNING
from headwise.watching.adapters.traced_modules import (
    GROUP,
    UNREAD,
    Attending,
    LastCall,
    Tap,
    attribute,
    key,
)
from headwise.watching.recorder.board import record
from headwise.watching.recorder.call_recorder import norms
from headwise.watching.recorder.seen_call import padding_rows
from headwise.watching.recorder.watch_options import plain_statistics

Read = TypeVar("Read")


ATTENDED: list[nn.Module] = []
"""The modules of the region that is being traced that attended so far, once for each time."""

ACROSS: list[nn.Module] = []
"""The same for attention to another sequence."""


KEYS_OF: list[tuple[nn.Module, Elsewhere]] = []
"""The modules whose forwards are being traced, with what their arguments tell of their keys."""


def traced_module() -> nn.Module | None:
    """The module whose forward is being traced; None inside a call that is read already."""
    return RUNNING[-1] if RUNNING else None


@contextmanager
def uncounted() -> Iterator[None]:
    """Mark a call that an adapter reads, so that what it calls is not counted again."""
    _enter(None)
    try:
        yield
    finally:
        _leave()


def run(
    original: Callable[..., Any],
    names: tuple[str, ...],
    module: nn.Module,
    given: tuple[Any, ...],
    options: dict[str, Any],
) -> Any:
    """Run a module's forward, whose arguments have these names, and remember that it is running."""
    if RUNNING and RUNNING[-1] is None:
        return original(module, *given, **options)
    _enter(module)
    KEYS_OF.append((module, elsewhere(names, given, options)))
    try:
        return original(module, *given, **options)
    finally:
        KEYS_OF.pop()
        _leave()
        if not RUNNING:
            ATTENDED.clear()
            ACROSS.clear()
            traced_masks.forget()


def looks_elsewhere(module: nn.Module | None, keys: int, masked: bool) -> bool:
    """True if a running module's arguments say that its keys are of another sequence."""
    found = [told for one, told in KEYS_OF if one is module]
    return bool(found) and found[-1].holds(keys, masked)


def _enter(module: nn.Module | None) -> None:
    _look_back()
    RUNNING.append(module)


def _leave() -> None:
    _look_back()
    RUNNING.pop()


def _look_back() -> None:
    """Count attention of the current module that was traced and that nobody read."""
    module = traced_module()
    if _find_unread(_group(module)):
        _count_unread(module)


def read_or_count(module: nn.Module | None, read: Callable[[], Read], x: Tensor) -> Read | None:
    """The call that `read` returns; None if it raises ValueError, and then it is counted."""
    try:
        return read()
    except ValueError as error:
        _refuse(_group(module), str(error), x.device.type, x.device.index)
    _count_unread(module)
    return None


def beside(
    module: nn.Module | None,
    call: Call,
    across: bool = False,
    padding: Tensor | None = None,
    out: Tensor | None = None,
) -> None:
    """Record the figures of a call whose output (B, Hq, N, Dv) the model computes itself."""
    way, tap = _prepared(module, call.q, across)
    if module is not None and tap is not None:
        _beside(module, way, tap, call, padding, out)


def inside(
    module: nn.Module | None, call: Call, across: bool = False, padding: Tensor | None = None
) -> Tensor:
    """Compute the output (B, Hq, N, Dv) of a call, and record its figures from the same pass.

    They are computed beside it where a recorder does so, and on a CPU.
    """
    way, tap = _prepared(module, call.q, across)
    apart = call.given.engine != "auto" or bool(call.given.dropout) or call.q.device.type == "cpu"
    if module is None or tap is None or apart or tap.rows is not None:
        with uncounted():
            out = call.attend()
        if module is not None and tap is not None:
            _beside(module, way, tap, call, padding, out)
        return out
    with uncounted():
        out, seen = observe(call.q, call.k, call.v, **call.options(), **_asked(tap, call.k))
        seen.values = {name: value.detach() for name, value in seen.values.items()}
        _record(module, way, tap, call, padding, seen)
    return out


def _beside(
    module: nn.Module, way: str, tap: Tap, call: Call, padding: Tensor | None, out: Tensor | None
) -> None:
    q, k, v = (x.detach() for x in call[:3])
    asked = _asked(tap, k)
    known = out is not None and not call.given.dropout and out.shape[:3] == q.shape[:3]
    if known:  # its norm needs no values and no second weighting of them
        asked["stats"] = tuple(name for name in asked["stats"] if name != "output_norm")
        v = v[..., :0]
    with uncounted():
        rows = None
        if tap.rows is not None:
            rows = traced_masks.sampled(tap.rows, q.shape[2], q.device)
        seen = statistics(q, k, v, call.given, **asked, rows=rows)
        if out is not None and known and "output_norm" in tap.stats:
            seen.values["output_norm"] = norms(out.detach(), seen)
        _record(module, way, tap, call, padding, seen)


def _record(
    module: nn.Module, way: str, tap: Tap, call: Call, padding: Tensor | None, seen: Observation
) -> None:
    if padding is None and tap.kind == "self":
        padding = padding_rows(call.given.mask, call.q, call.k)
    if tap.losses:
        problem = pose("observe", call.q, call.k, call.v, call.given._replace(dropout=0.0))
        problem = problem if seen.rows is None else problem.at(seen.rows)
        seen.values |= traced_losses(problem, tap.sparse, tap.kind, tap.losses)
    last: LastCall = getattr(module, attribute(way, "last"))
    last.set(call)
    if tap.maps:
        last.keep(call, seen, padding)
    values = [seen.values.get(name) for name in tap.columns]
    _add_to_board(module, way, tap, values, seen.highest, seen.padding_of(padding))


def _add_to_board(
    module: nn.Module | None,
    way: str,
    tap: Tap,
    values: list[Tensor | None],
    highest: Tensor,
    padding: Tensor | None = None,
) -> None:
    board: Tensor = getattr(module, attribute(way, "board"))
    place = getattr(module, attribute(way, "place"))
    extremes = list(tap.maxima), list(tap.minima)
    record(board, place, values, highest, padding, None, *extremes)


def _asked(tap: Tap, k: Tensor) -> dict[str, Any]:
    """The statistics of a layer with keys (B, Hkv, M, D), and what its map needs."""
    stats = plain_statistics(tap.stats)
    if tap.maps and tap.rows is None and "lse" not in stats:
        stats = (*stats, "lse")
    spans = within(dict(tap.spans), k.shape[2])
    return {"stats": stats, "sink_keys": tap.sink_keys, "spans": spans}


def _group(module: nn.Module | None) -> int:
    return -1 if module is None else getattr(module, GROUP, -1)


def _prepared(module: nn.Module | None, q: Tensor, across: bool) -> tuple[str, Tap | None]:
    """The way a module attends with queries (B, Hq, N, D), and its tap; None if not watched."""
    group = _group(module)
    if group < 0:
        return "", None
    before = ACROSS if across else ATTENDED
    again = sum([one is module for one in before])
    if across and q.shape[2] == 1:
        again = 0  # the next row of a sequence that is looked at step by step
    elif module is not None:
        before.append(module)
    _prepare(group, again, across, q.shape[1], q.shape[3], q.device.type, q.device.index)
    way = key(again, across)
    return way, getattr(module, attribute(way, "tap"), None)


def _count_unread(module: nn.Module | None) -> None:
    """Count a call that can't be read, in the place of its module for those."""
    tap: Tap | None = getattr(module, attribute(UNREAD, "tap"), None)
    if tap is None:
        return
    one = torch.zeros(1, 1, 1, device=getattr(module, attribute(UNREAD, "board")).device)
    _add_to_board(module, UNREAD, tap, [None for _ in tap.columns], one)


@constant
def _prepare(
    group: int, again: int, across: bool, heads: int, width: int, device: str, index: int | None
) -> bool:
    """Prepare the modules of a group in every watched model."""
    way = Attending(group, again, across, heads, width, _device(device, index))
    traced_modules.prepare(way, running_paths())
    return True


@constant
def _refuse(group: int, reason: str, device: str, index: int | None) -> bool:
    """Note that a call of a group's module can't be read."""
    call = UnreadCall(f"{reason} (in compiled code)", _device(device, index))
    traced_modules.refuse(group, call)
    return True


@constant
def _find_unread(group: int) -> bool:
    """True if something was traced since the last time that is attention, and that nobody read."""
    if torch.compiler.is_exporting():
        raise ValueError(
            "a watched model can't be exported: detach() the watch first. A model whose forward "
            "returns the figures of hw.observe exports with them"
        )
    found = unread_call()
    if found is None or group < 0:
        return False
    traced_modules.refuse(group, found)
    return True


def _device(kind: str, index: int | None) -> torch.device:
    return torch.device(kind if index is None else f"{kind}:{index}")
