"""Shows a recording from Python: in a notebook as a widget, elsewhere as a page."""

from __future__ import annotations

import os
import sys
import webbrowser
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from headwise.apps.look.atlas import Atlas
from headwise.apps.look.readers.reader import Given, Report
from headwise.apps.look.recorded_inputs import Shown, Tokens, inputs
from headwise.apps.look.scene import Description, Effects, Input
from headwise.apps.look.session import Progress, Session
from headwise.messages import say
from headwise.watching import Recording, Watch


def show(
    seen: Recording,
    tokens: Tokens | None = None,
    source: Sequence[str] | None = None,
    **more: Any,
) -> Any:
    """Show a recording: a widget in a notebook; elsewhere a page, served until Ctrl-C.

    `more` is image, grid and batch, as `Recording.show` has them.
    """
    session = session_of(seen, tokens, source, **more)
    if in_notebook():
        from headwise.apps.look.serving.widget import LookWidget

        return LookWidget(session)
    from headwise.apps.look.serving import server

    bound = server.listening()
    address = server.address(bound)
    print(f"{address}   (Ctrl-C stops it)", flush=True)
    if displayed():
        webbrowser.open(address)
    with suppress(KeyboardInterrupt):
        server.serve(server.application(session), bound)
    return None


def in_notebook() -> bool:
    """True in the kernel of a notebook, which can show a widget."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and hasattr(shell, "kernel")


def displayed() -> bool:
    """True if there is a display for a browser."""
    if sys.platform != "linux":
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


@dataclass(frozen=True)
class RecordedReader:
    """The model of a recording, which can't read anything more."""

    description: Description
    model: None = None
    sample: None = None

    def count(self, text: str) -> int:
        return 0

    def read(self, what: Given, report: Report) -> Input:
        said = say("this is a recording: run the model again to look at something else")
        raise ValueError(said)


def session_of(
    seen: Recording,
    tokens: Tokens | None = None,
    source: Sequence[str] | None = None,
    *,
    image: Any = None,
    grid: Any = None,
    batch: int = 0,
) -> Session:
    """The session of a recording; positions are numbered if no tokens are given.

    The arguments are those of `Recording.show`.

    >>> import headwise as hw
    >>> gpt = hw.load("gpt")
    >>> with hw.watch(gpt.model) as seen:
    ...     _ = gpt.model(gpt.encode("to be or not to be"))
    >>> session_of(seen, gpt.pieces("to be or not to be")).state()["model"]["heads"]
    48
    """
    read = inputs(seen, Shown.of(tokens, source, image, grid, batch))
    groups = read[-1].groups
    layers = {layer for group in groups for layer, _, _ in group.layers()}
    heads = sum(len(group.heads) for group in groups)
    session = Session(reader=RecordedReader(Description("watched", 0, len(layers), heads, None)))
    if isinstance(seen, Watch) and seen.explained and len(read) == 1:
        read = [replace(read[0], effects=Effects(seen, batch))]
    for number, each in enumerate(read):
        session.atlases[str(number)] = Atlas(each)
    session.progress = Progress("ready", None)
    return session
