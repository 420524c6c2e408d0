"""What is being looked at now: the model, its inputs, and how far the work on them is."""

from __future__ import annotations

import importlib.metadata
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from threading import Lock, Thread
from typing import Any, Literal

from headwise.look.atlas import Atlas
from headwise.look.reading import Reader
from headwise.look.scene import Group
from headwise.look.watch_api import WatchedFolder
from headwise.observation import STATISTICS, Observation

MOST_INPUTS = 8
"""An input keeps the queries and keys of every layer; the oldest go first."""


@dataclass(frozen=True)
class Progress:
    """How far the work is; `done` is a share where one is known."""

    state: Literal["loading", "ready", "error"] = "loading"
    stage: str | None = "loading the model"
    done: float | None = None
    error: str | None = None
    hint: str | None = None
    notice: dict[str, str] | None = None


@dataclass
class Session:
    """A model that reads inputs, one after the other, while others look at those it has read."""

    sample: bool = False
    reader: Reader | None = None
    progress: Progress = field(default_factory=Progress)
    atlases: OrderedDict[str, Atlas] = field(default_factory=OrderedDict)
    run: WatchedFolder | None = None
    heard: Callable[[Progress], None] = lambda progress: None
    _lock: Lock = field(default_factory=Lock)
    _count: int = 0

    def start(self, opened: Callable[[], Reader], what: str | bytes | None) -> Thread:
        """Load a model and let it read, in the background; `progress` says how far that is."""

        def work() -> None:
            try:
                self.reader = opened()
                given = self.reader.sample if what is None else what
                if given is None:
                    raise ValueError("this model looks at images: --image FILE gives it one")
                self._read(self._next(), given)
            except Exception as error:  # whatever is wrong with a model, the page says it
                said, hint = told(error)
                self._tell(Progress("error", None, None, said, hint))

        thread = Thread(target=work, name="reading", daemon=True)
        thread.start()
        return thread

    def add(self, what: str | bytes) -> str:
        """Let the model read something more, in the background; the id that it will have."""
        with self._lock:
            if self.reader is None or self.progress.state != "ready" or self.progress.stage:
                raise BusyError("the model is still busy with another input")
            self.progress = Progress("ready", "running the model")
        id = self._next()

        def work() -> None:
            try:
                self._read(id, what)
            except Exception as error:
                said, hint = told(error)
                self._tell(Progress("ready", None, notice={"error": said, "hint": hint}))

        Thread(target=work, name="reading", daemon=True).start()
        return id

    def _next(self) -> str:
        self._count += 1
        return str(self._count - 1)

    def _read(self, id: str, what: str | bytes) -> None:
        assert self.reader is not None
        read = self.reader.read(what, self._report)
        atlas = Atlas(read).prepare(self._report)
        self.atlases[id] = atlas
        while len(self.atlases) > MOST_INPUTS:
            self.atlases.popitem(last=False)
        self._tell(Progress("ready", None))

    def _report(self, stage: str, done: float | None) -> None:
        self._tell(replace(self.progress, stage=stage, done=done))

    def _tell(self, progress: Progress) -> None:
        self.progress = progress
        self.heard(progress)

    def state(self) -> dict[str, Any]:
        """All of it in one dictionary, as `/api/state` gives it."""
        progress, reader = self.progress, self.reader
        described = reader.description if reader is not None else None
        return {
            "state": progress.state,
            "stage": progress.stage,
            "done": progress.done,
            "error": progress.error,
            "hint": progress.hint,
            "notice": progress.notice,
            "version": importlib.metadata.version("headwise"),
            "pages": {"heads": bool(self.atlases), "why": True, "watch": self.run is not None},
            "sample": self.sample,
            "model": None
            if described is None
            else {
                "name": described.name,
                "parameters": described.parameters,
                "layers": described.layers,
                "heads": described.heads,
                "context": described.context,
            },
            "inputs": [_input(id, atlas) for id, atlas in list(self.atlases.items())],
            "statistics": [
                {"name": name, "meaning": getattr(Observation, name).__doc__} for name in STATISTICS
            ],
        }


class BusyError(Exception):
    """One input is read at a time."""


def told(error: Exception) -> tuple[str, str]:
    """What went wrong, and what to do about it."""
    if isinstance(error, ValueError | OSError | ModuleNotFoundError):
        return str(error), "change what the message names, and start headwise look again"
    said = f"{type(error).__name__}: {error}"
    return said, "this is an error inside the model or headwise; the terminal may say more"


def _input(id: str, atlas: Atlas) -> dict[str, Any]:
    read = atlas.input
    main = read.main
    return {
        "id": id,
        "name": read.name,
        "kind": read.kind,
        "rows": len(main.rows),
        "columns": len(main.columns),
        "notes": list(read.notes),
        "image": None
        if read.image is None
        else {"grid": list(read.image.grid), "first": read.image.first},
        "groups": [_group(group) for group in read.groups],
    }


def _group(group: Group) -> dict[str, Any]:
    return {
        "id": group.id,
        "name": group.name,
        "causal": group.causal,
        "square": group.square,
        "rows": len(group.rows),
        "columns": len(group.columns),
        "layers": [
            {"layer": layer, "name": module, "heads": heads}
            for layer, module, heads in group.layers()
        ],
    }
