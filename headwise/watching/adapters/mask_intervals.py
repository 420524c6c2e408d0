"""Boolean masks that others made, read back as one interval of keys a row where they are that."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from headwise import mask as masks
from headwise.core.intervals import Mask
from headwise.core.patterns import Between
from headwise.core.place import Place, four

Made = TypeVar("Made")
HIDDEN = -1e4
"""What is added to a logit hides the key from here downwards, and is no position bias."""
ROWS = 1024  # are read at a time, so that reading takes little memory


@dataclass(frozen=True, eq=False, repr=False)
class Stretches(Between):
    """Intervals that also say beside which key the queries stand, and where a sequence begins.

    `begins` numbers the call's keys, (B|1, 1, N|1); below 0 for a cache that forgot the beginning.
    """

    stands: int | None = None
    begins: Tensor | None = None

    def alignment(self, place: Place) -> int | None:
        return self.stands

    def start(self, place: Place) -> Tensor:
        return super().start(place) if self.begins is None else self.begins.to(place.device)


def read(seen: Tensor, stands: bool | int = True, begins: Tensor | None = None) -> Mask:
    """(B|1, Hq|1, N, M) bool, True where a query may look, as intervals; dense where it is no such.

    `stands` says beside which key the first query stands, or True that queries and keys are of one
    sequence: if each query sees one key further than the last, it is its own. `begins` is that of
    `Stretches`.

    >>> read(torch.ones(4, 4, dtype=torch.bool).tril())
    causal(offset=0)
    >>> read(torch.eye(4, dtype=torch.bool).logical_not())
    dense(tensor (1, 1, 4, 4))
    """
    seen = four(seen)
    bounds = intervals(seen)
    if bounds is None:
        return masks.dense(seen)
    return interval_mask(*bounds, stands, begins)


def interval_mask(first: Tensor, last: Tensor, stands: bool | int, begins: Tensor | None) -> Mask:
    """The mask of these bounds (B|1, Hq|1, N), by its shortest name."""
    if isinstance(stands, bool):
        offset = _offset(first, last) if stands else None
    else:
        offset = stands
    if offset is not None and (begins is None or not bool(begins.any())):
        own = torch.arange(first.shape[-1], device=first.device) + offset
        if bool((last == own + 1).all()):
            if not bool(first.any()):
                return masks.causal(offset)
            width = int((own - first).max())
            if bool((first == (own - width).clamp_min(0)).all()):
                return masks.causal(offset) & masks.window(width, offset=offset)
    return Stretches(first, last, offset, begins)


def intervals(seen: Tensor) -> tuple[Tensor, Tensor] | None:
    """The first key of each row and the one past its last, (B|1, Hq|1, N); None: rows have gaps."""
    firsts, lasts = [], []
    for rows in seen.split(ROWS, -2):
        bits = rows.view(torch.uint8)  # booleans have no argmax
        count = bits.sum(-1, dtype=torch.int32)
        first = bits.argmax(-1).int() * (count > 0)
        past = (seen.shape[-1] - bits.flip(-1).argmax(-1).int()) * (count > 0)
        if not torch.equal(past - first, count):
            return None
        firsts.append(first)
        lasts.append(past)
    return torch.cat(firsts, -1), torch.cat(lasts, -1)


def _offset(first: Tensor, last: Tensor) -> int | None:
    """How far every query's last key lies beyond the query's own number; None: not one number."""
    beyond = last - 1 - torch.arange(last.shape[-1], device=last.device, dtype=torch.int32)
    full = last > first
    if not bool(full.any()):
        return None
    lowest = int(beyond.masked_fill(~full, torch.iinfo(torch.int32).max).min())
    highest = int(beyond.masked_fill(~full, torch.iinfo(torch.int32).min).max())
    return lowest if lowest == highest else None


class Memory:
    """What was made of the last few tensors: every layer of a model is handed the same mask."""

    def __init__(self) -> None:
        self._made: list[tuple[weakref.ref[Tensor], int, tuple[object, ...], Any]] = []

    def recall(self, make: Callable[[], Made], tensor: Tensor, *options: object) -> Made:
        """What `make` gave for this very tensor, unchanged since, and these options."""
        if tensor.is_inference():
            return make()  # it does not count its changes
        for known, version, given, found in self._made:
            if known() is tensor and version == tensor._version and given == options:
                kept: Made = found
                return kept
        made = make()
        known = weakref.ref(tensor, self._forget)
        self._made = [*self._made[-3:], (known, tensor._version, options, made)]
        return made

    def _forget(self, gone: weakref.ref[Tensor]) -> None:
        self._made = [entry for entry in self._made if entry[0] is not gone]


def split(added: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """What is added to logits, as (which keys are seen, what else is added); None: all, nothing.

    A key is hidden by -inf, by the dtype's lowest number and by what people write instead, -1e4
    and below: the exponential is 0 there.

    >>> split(torch.tensor([[0.0, -1e9], [0.0, 0.0]]))
    (tensor([[ True, False],
            [ True,  True]]), None)
    """
    return apart(added, ~(added <= HIDDEN))  # what is no number any more hides nothing


def apart(added: Tensor, seen: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The same where it is known which keys are seen."""
    everything = bool(seen.all())
    kept = added if everything else added.masked_fill(~seen, 0)
    return None if everything else seen, kept if bool(kept.any()) else None
