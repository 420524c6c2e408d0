"""Shows a recording from Python: in a notebook as a widget, elsewhere as a page."""

from __future__ import annotations

import os
import sys
import webbrowser
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from headwise.apps.look.atlas import Atlas
from headwise.apps.look.head_groups import Axes, groups, mapped, of_other_sizes, side
from headwise.apps.look.readers.reader import Given, Report
from headwise.apps.look.scene import Description, Input, InputKind
from headwise.apps.look.session import Progress, Session
from headwise.messages import say
from headwise.watching import Recording


def show(
    seen: Recording, tokens: Sequence[str] | None = None, source: Sequence[str] | None = None
) -> Any:
    """Show a recording: a widget in a notebook; elsewhere a page, served until Ctrl-C."""
    session = session_of(seen, tokens, source)
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
    seen: Recording, tokens: Sequence[str] | None = None, source: Sequence[str] | None = None
) -> Session:
    """The session of a recording; positions are numbered if no tokens are given.

    `tokens` are those of the text, or of the decoder's side; `source` those of the encoder's.

    >>> import headwise as hw
    >>> gpt = hw.load("gpt")
    >>> with hw.watch(gpt.model) as seen:
    ...     _ = gpt.model(gpt.encode("to be or not to be"))
    >>> session_of(seen, gpt.pieces("to be or not to be")).state()["model"]["heads"]
    48
    """
    if not seen.layers:
        raise ValueError("nothing was recorded yet; run the model while it is watched")
    axes = _axes(seen, tokens, source)
    kind: InputKind = "text" if "self" in axes else "translation"
    made = groups(seen, axes)
    read = Input("watched", kind, made, of_other_sizes(seen, made))
    heads = sum(layer.heads for layer in seen.layers)
    session = Session(
        reader=RecordedReader(Description("watched", 0, len(seen.layers), heads, None))
    )
    session.atlases["0"] = Atlas(read).prepare()
    session.progress = Progress("ready", None)
    return session


def _axes(
    seen: Recording, tokens: Sequence[str] | None, source: Sequence[str] | None
) -> dict[str, Axes]:
    """The tokens of each group's rows and columns."""
    both = any(layer.kind == "cross" for layer in seen.layers)
    axes: dict[str, Axes] = {} if both else {"self": ((), ())}
    for layer in mapped(seen):
        _, _, rows, columns = layer.map().shape
        id = side(layer, axes)
        given = (
            source if id == "encoder" else tokens,
            source if id in ("encoder", "cross") else tokens,
        )
        for words, count in zip(given, (rows, columns), strict=True):
            if words is not None and len(words) != count:
                raise ValueError(
                    f"{len(words)} tokens were given for {layer.name}, which read {count}; give as "
                    "many tokens as the model read"
                )
        numbered = (range(rows), range(columns))
        named = [
            tuple(map(str, numbers)) if words is None else tuple(words)
            for words, numbers in zip(given, numbered, strict=True)
        ]
        axes[id] = (named[0], named[1])
    order = ("self", "encoder", "decoder", "cross")
    return {id: axes[id] for id in order if id in axes}
