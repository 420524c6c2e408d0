"""The mask of a cache that has forgotten its first keys."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from headwise.core.intervals import Both, Mask
from headwise.core.place import Place


@dataclass(frozen=True, eq=False, repr=False)
class LaterKeys(Both):
    """A mask for keys `first` and later that knows where the sequence began, before them.

    Only `sink_mass` depends on that, so `plain` is the same mask for a call without statistics: it
    has a description, by which the next call is recognised.
    """

    whole: Mask | None = None  # the mask of the whole sequence
    first: int = 0

    @property
    def plain(self) -> Mask:
        """The same keys, without the beginning."""
        return Both(self.a, self.b)

    def shows_all(self, place: Place) -> bool:
        return False  # a mask that hides nothing is left out, and the beginning with it

    def start(self, place: Place) -> int | Tensor:
        if self.whole is None:
            return -self.first
        first_key, offset = place.first_key + self.first, place.offset + self.first
        return self.whole.start(replace(place, first_key=first_key, offset=offset)) - self.first
