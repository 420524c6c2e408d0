"""The models whose cost is counted: described by layers and formulas, or traced."""

from __future__ import annotations

from typing import Protocol


class Architecture(Protocol):
    """A model that was read, and the lengths that it takes."""

    def __hash__(self) -> int: ...

    @property
    def name(self) -> str:
        """Its class, or its kind."""
        ...

    @property
    def longest(self) -> int | None:
        """The most tokens that it has positions for; None if any number has."""
        ...

    @property
    def stated(self) -> int | None:
        """The positions that its configuration states."""
        ...

    @property
    def own_length(self) -> bool:
        """True if every call has the same length, such as an image's."""
        ...

    @property
    def pair(self) -> bool:
        """True for an encoder with a decoder, each with a sequence of its own."""
        ...
