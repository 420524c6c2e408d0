"""The views of the page besides the heads: the modules that answer for them, by name."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

from headwise.apps.interface.page import Route


class Page(NamedTuple):
    """A view: the module that answers at /api/NAME, and whether it takes POST requests."""

    answers: str
    posts: bool = False

    def routes(self) -> Sequence[Route]:
        """Its answers; the module is loaded when they are first asked for."""
        found: Sequence[Route] = import_module(self.answers).ROUTES
        return found

    def post_routes(self) -> Sequence[Route]:
        """Its answers to requests that change something."""
        found: Sequence[Route] = import_module(self.answers).POSTS if self.posts else ()
        return found


PAGES = {
    "cost": Page("headwise.apps.look.serving.cost_answers"),
    "lab": Page("headwise.apps.lab.page", posts=True),
    "sparse": Page("headwise.apps.look.sparsity.page"),
    "watch": Page("headwise.apps.look.serving.watch_answers"),
    "why": Page("headwise.apps.lab.why_page"),
}
