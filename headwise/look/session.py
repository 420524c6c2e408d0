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
    _stopped: bool = False
    _thread: Thread | None = None

    def start(self, opened: Callable[[], Reader], what: str | bytes | None) -> None:
        """Load a model and let it read, in the background; `progress` says how far that is."""

        def work() -> None:
            try:
                self.reader = opened()
                self._read(self._next(), given(self.reader, what))
            except StoppedError:
                pass
            except Exception as error:  # whatever is wrong with a model, the page says it
                said, hint = told(error)
                if self.run is None:
                    self.tell(Progress("error", None, None, said, hint))
                else:  # of a run that has only begun there is no model yet, but something to see
                    self.tell(Progress("ready", None, notice={"error": said, "hint": hint}))

        self._begin(work)

    def add(self, what: str | bytes) -> str:
        """Let the model read something more, in the background; the id that it will have."""
        with self._lock:
            if self.progress.state != "ready" or self.progress.stage:
                raise BusyError("the model is still busy with another input")
            if self.reader is None:
                raise BusyError("there is no model here that could read it, only a run")
            self.progress = Progress("ready", "running the model")
        id = self._next()

        def work() -> None:
            try:
                self._read(id, what)
            except StoppedError:
                pass
            except Exception as error:
                said, hint = told(error)
                self.tell(Progress("ready", None, notice={"error": said, "hint": hint}))

        self._begin(work)
        return id

    def _begin(self, work: Callable[[], None]) -> None:
        self._thread = Thread(target=work, name="reading", daemon=True)
        self._thread.start()

    def stop(self, seconds: float) -> bool:
        """End the work in the background at the model's next block; whether it did in this time."""
        self._stopped = True
        return self.join(seconds)

    def join(self, seconds: float) -> bool:
        """Wait for the work in the background; whether it ended in this time."""
        if self._thread is not None:
            self._thread.join(seconds)
        return self._thread is None or not self._thread.is_alive()

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
        self.tell(Progress("ready", None))

    def _report(self, stage: str, done: float | None) -> None:
        if self._stopped:
            raise StoppedError
        self.tell(replace(self.progress, stage=stage, done=done))

    def tell(self, progress: Progress) -> None:
        """Say how far the work is."""
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
            "device": "cpu" if described is None else described.device,
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


class StoppedError(Exception):
    """Nobody waits for this work any more."""


def given(reader: Reader, what: str | bytes | None) -> str | bytes:
    """What to read: the model's sample where nothing is given."""
    if what is not None:
        return what
    if reader.sample is None:
        raise ValueError("this model looks at images: --image FILE gives it one")
    return reader.sample


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
