"""How an application adds views to the page: answers by address, and work in the background.

A module with answers has `ROUTES`, and `POSTS` if it takes requests that change something: pairs of
a pattern and a function of the host, the query and the groups of the pattern.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from headwise.apps.interface.reply import Answer

Route = tuple[str, Callable[..., Answer]]


class Job(Protocol):
    """Work in the background of a page."""

    def stop(self) -> None:
        """Tell the work to end."""

    def join(self, seconds: float) -> bool:
        """Wait for its end; True if it came in this time."""
        ...


class Host(Protocol):
    """The session that a view belongs to, with the work of each view by name."""

    jobs: dict[str, Job]
