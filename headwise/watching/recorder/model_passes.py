"""The passes of a watched model: a forward, or a prompt and the steps that generate from it.

A call shows where its rows stand; whether they continue the pass before is worked out here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headwise.core.versions import Versions, may_be_overwritten
from headwise.nn.call import Call
from headwise.watching.recorder.checkpointing import recomputing
from headwise.watching.recorder.layer import WatchedLayer
from headwise.watching.recorder.seen_call import Kind, address, lie_together, newest_key


@dataclass
class ModelPasses:
    """The forward of the model that is running now, and the tokens of its last pass."""

    ended: Callable[[], None]  # is called when the outermost module has run
    count: int = 0  # whether or not any attention was seen
    tokens: Tensor | None = None  # (B, N) of the last pass, if the model was called with tokens
    past: bool = False  # this forward continues from a cache
    first: int = 0  # the position of its first token
    _depth: int = 0  # modules of the model that are running
    _calls: dict[tuple[str, Kind], int] = field(default_factory=dict)
    """The calls of each module in this forward so far, by their kind."""
    _memories: dict[str, list[tuple[Tensor, Versions]]] = field(default_factory=dict)
    """The other sequences that each module has looked at in this forward, one per layer."""
    ids: Tensor | None = None  # the tokens that this forward was called with

    def begin(self, given: tuple[Any, ...] = (), options: Mapping[str, Any] | None = None) -> None:
        """A module of the model starts to run; a pass begins with the outermost one."""
        if recomputing():
            return
        if self._depth == 0:
            self.count += 1
            self._calls, self.past, self.first, self.ids = {}, False, 0, None
            self._memories = {}
        self._depth += 1
        if given or options:
            self.ids = token_ids(given, options or {})

    def end(self) -> None:
        """A module has run, with or without an error."""
        if recomputing() or self._depth == 0:
            return
        self._depth -= 1
        if self._depth:
            return
        self._memories = {}
        before, ids = self.tokens, self.ids
        before = None if before is None else before[:, : self.first]  # the rest was taken back
        if self.past and before is not None and ids is not None and len(before) == len(ids):
            self.tokens = torch.cat((before, ids), 1)
        elif ids is not None or not self.past:
            self.tokens = None if self.past else ids
        self.ended()

    def first_call(self, name: str, kind: Kind) -> bool:
        """True if a module made no call of this kind in this forward yet."""
        return not self._calls.get((name, kind))

    def note_call(self, name: str, kind: Kind) -> None:
        """Count a call of a module in this forward."""
        self._calls[name, kind] = self._calls.get((name, kind), 0) + 1

    def depth_name(self, name: str, call: Call, kind: Kind) -> tuple[str, bool]:
        """Count a call of a module, and name its layer: one for each depth that it runs at.

        True if the call adds rows to one before in the same forward.
        """
        again = self._calls.get((name, kind), 0)
        self._calls[name, kind] = again + 1
        if kind == "cross" and self._depth:
            again, continuing = self._depth_across(name, call)
            return (f"{name}#{again}" if again else name), continuing
        if again and not self.past and self._depth:
            return f"{name}#{again}", False
        return name, False

    def _depth_across(self, name: str, call: Call) -> tuple[int, bool]:
        """The depth of a call that looks at another sequence; True if it had rows there before.

        A single row, or rows after a cache, of a sequence that the module has looked at before is
        a next step. Whatever else a module looks at again is another depth, as in a model whose
        attention goes both ways or reads two sequences.
        """
        known, memory = self._memories.setdefault(name, []), memory_of(call)
        memory = memory.clone() if may_be_overwritten(memory) else memory
        if self.past or call.q.shape[2] == 1:
            for depth, (other, kept) in enumerate(known):
                if kept.modified() is None and is_same(other, memory):
                    return depth, True
        known.append((memory, Versions({"memory": memory})))
        return len(known) - 1, False

    def continues(self, layer: WatchedLayer, call: Call, start: int, again: bool) -> bool:
        """True if a call adds rows to the one before: the next step of a model that generates.

        `again` if that is known, because both are of one forward.
        """
        last = layer.last
        if last is None or layer.ended or last.batch != call.q.shape[0]:
            return False  # beams begin with a larger batch
        if layer.kind == "self":  # before the end: tokens were taken back
            return 0 < start <= last.start + last.queries
        if layer.kind == "window":
            return self.past
        same = call.q.shape[2] == 1 and last.address == address(call.k)
        return last.keys == call.k.shape[2] and (self.past or again or same)


def memory_of(call: Call) -> Tensor:
    """The tensor to know another sequence by: its keys, or values where logits are written out."""
    written = isinstance(call.bias, Tensor) and call.k.shape[-1] == 1
    return (call.v if written else call.k).detach()


def is_same(x: Tensor, y: Tensor) -> bool:
    """True if two tensors hold the same numbers."""
    if x.shape != y.shape or x.device != y.device or x.dtype != y.dtype:
        return False
    return lie_together(x, y) or torch.equal(x, y)


def forgets(layer: WatchedLayer, call: Call, start: int) -> bool:
    """True if a call's cache has forgotten tokens, rather than taken the last ones back.

    Then the newest key of the call before is still there, right before the call's own. Written-out
    logits have no keys: there a full cache shows as many as the time before.
    """
    last = layer.last
    if last is None or not layer.prompted or not 0 < start < last.start + last.queries:
        return False
    before = newest_key(call, start - 1)
    if last.newest is None or before is None:
        return last.keys == call.k.shape[2]
    return last.newest.shape == before.shape and torch.equal(last.newest, before)


def token_ids(given: tuple[Any, ...], options: Mapping[str, Any]) -> Tensor | None:
    """The tokens (B, N) a model is called with; None if there are none, or two kinds of them."""
    names = ("input_ids", "decoder_input_ids")
    values = [*given, *(options[name] for name in names if name in options)]
    found = [x.detach() for x in values if isinstance(x, Tensor) and x.ndim == 2]
    found = [x for x in found if not x.is_floating_point() and x.dtype != torch.bool]
    return found[0] if len(found) == 1 else None
