"""Writing a run's folder while the model trains, so that a kill at any moment loses little."""

from __future__ import annotations

import errno
import json
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

from headwise.files import FolderLock, parsed_json, write_whole
from headwise.watching.alarms import Alarm
from headwise.watching.recording import Entry, Recording
from headwise.watching.runs import manifest, parts
from headwise.watching.runs.kept_maps import FOLDER, MapFile, maps_in, write_map
from headwise.watching.runs.parts import LOGGED, SeriesPart

log = logging.getLogger("headwise")

JOINED = 64
"""This many small parts are joined into a larger one."""

MOST_WAITING = 200_000
"""Rows kept in memory while they can't be written; the oldest are dropped beyond that."""

OnError = Literal["go on", "stop"]


class RunWriter:
    """A run's folder, open for writing; `watch.record(folder)` makes one.

    Steps are written after `steps` of them or `seconds`, whichever comes first, at the end of a
    step, in part files that are whole or not there. Each process of a distributed run writes its
    own files and waits for no other. `keep` lists the (layer, head) whose maps of the first
    sequence are kept, at every `keep_every`-th step. If writing fails, on a full disk for instance,
    the log says so once and the run goes on; with `on_error="stop"` it stops with an OSError.
    `pending` adds steps that have ended and were not added yet.
    """

    def __init__(
        self,
        folder: Path | str,
        about: dict[str, Any],
        *,
        keep: Iterable[tuple[int, int]] = (),
        keep_every: int = 1000,
        steps: int = 100,
        seconds: float = 10.0,
        on_error: OnError = "go on",
        resume: bool = False,
        pending: Callable[[], object] = lambda: None,
    ) -> None:
        parts.arrow()
        if on_error not in ("go on", "stop"):
            raise ValueError(f"on_error={on_error!r} is not known; use 'go on' or 'stop'")
        if keep_every < 1:
            raise ValueError(f"keep_every={keep_every}: it must be at least 1")
        self.folder, self.rank = Path(folder), manifest.rank()
        self.keep, self.keep_every = tuple(keep), keep_every
        if self.keep and not about["looking"].get("maps", True):
            raise ValueError(
                f"keep={list(self.keep)}: the watch has maps=False and so no map to keep; use "
                "hw.watch(model, maps=True)"
            )
        self.steps, self.seconds, self.on_error = steps, seconds, on_error
        self.closed, self.pending = False, pending
        self._waiting: list[dict[str, Any]] = []
        self._entries = 0  # steps that wait
        self._alarms: list[Alarm] = []  # alarms that wait
        self._metered = False  # the last utilisation waits, which the manifest has
        self._flushed_at = time.monotonic()
        self._failing: set[str] = set()  # what could not be done, until it can
        self._lock = FolderLock(self.folder, f".lock-rank{self.rank}")
        try:
            self._resuming = self._begin(about, resume)
        except BaseException:
            self._lock.release()
            raise

    def _begin(self, about: dict[str, Any], resume: bool) -> bool:
        """Set up the folder; True if it held a run before, which is continued."""
        there = (self.folder / manifest.NAME).exists()
        if there:
            manifest.read_manifest(self.folder)
            if not resume and self.rank == 0:
                raise ValueError(
                    f"{self.folder} holds a watched run already; resume=True continues it"
                )
        for place in (self.folder, self.folder / FOLDER):
            parts.remove_leftovers(place, self.rank)
        self._about = manifest.read_manifest(self.folder) if there else about
        self._about.pop("ended", None)
        self._write_manifest(self._about)
        self._next = 1 + max((part.last for part in self._parts()), default=0)
        return there and resume

    def _write_manifest(self, about: dict[str, Any]) -> None:
        """Write the manifest; the first process does so for all."""
        if self.rank == 0:
            said = json.dumps(about, indent=2, ensure_ascii=False) + "\n"
            write_whole(self.folder / manifest.NAME, said)

    def add(
        self, entry: Entry, alarms: Sequence[Alarm] = (), seen: Recording | None = None
    ) -> None:
        """Add a closed step; `seen` holds the maps of its last pass."""
        if self._resuming:
            self._resuming = False
            self._try("", lambda: self._forget(entry.step))
        self._waiting += [{"step": entry.step, "rank": self.rank, **row} for row in entry.table]
        self._entries += 1
        if entry.mfu is not None:
            self._about["mfu"], self._metered = {"step": entry.step, "mfu": entry.mfu}, True
        self._alarms += alarms
        if alarms:
            self._try("", self._write_alarms)
        if seen is not None and seen.unread != self._about.get("unread", []):
            self._about["unread"] = seen.unread
            self._try("", lambda: self._write_manifest(self._about))
        if seen is not None and self.keeps(entry.step):
            for layer, head in self.keep:
                keep = partial(self.keep_map, entry.step, layer, head, seen)
                self._try(f"the map of head {head} in layer {layer}", keep)
        waited = time.monotonic() - self._flushed_at
        if self._entries >= self.steps or waited >= self.seconds:
            self.flush()

    def log(self, found: Iterable[tuple[int, str, float]]) -> None:
        """Add numbers that are not about heads: a step, a name and a number each."""
        place = {"rank": self.rank, "layer": 0, "kind": LOGGED, "head": 0}
        self._waiting += [{"step": x, **place, "name": name, LOGGED: v} for x, name, v in found]

    def keeps(self, step: int) -> bool:
        """True if maps of this step are kept."""
        return bool(self.keep) and step % self.keep_every == 0

    def keep_map(self, step: int, layer: int, head: int, seen: Recording) -> None:
        """Keep the map of one head in the last pass."""
        (self.folder / FOLDER).mkdir(exist_ok=True)
        found = seen.layer(layer)
        if found.split:
            raise ValueError("its sequence is split between ranks, and one of them writes the run")
        kept = MapFile(step, found.number, head % found.heads, self.rank)
        write_map(self.folder / FOLDER / kept.name, seen.map(layer, head))

    def flush(self) -> None:
        """Write what waits."""
        self.pending()
        self._flushed_at, self._entries = time.monotonic(), 0
        if self._waiting:
            self._try("", self._write)
        if self._alarms:
            self._try("", self._write_alarms)
        if self._metered:
            self._metered = False
            self._try("", lambda: self._write_manifest(self._about))

    def _write(self) -> None:
        part = SeriesPart(self.rank, self._next, self._next)
        parts.write_part(self.folder, part, parts.columns(self._waiting))
        self._next += 1
        self._waiting = []
        small = [part for part in self._parts() if part.first == part.last]
        if len(small) >= JOINED:
            parts.join(self.folder, small)

    def _write_alarms(self, before: int | None = None) -> None:
        """Write the alarms that wait after the written ones; `before` drops this step and later."""
        path = self._alarm_file
        if not self._alarms and not path.exists():
            return
        known = read_alarms(path).alarms
        known = [alarm for alarm in known if before is None or alarm.step < before]
        said = [json.dumps(x.to_dict(), ensure_ascii=False) for x in (*known, *self._alarms)]
        write_whole(path, "".join(f"{line}\n" for line in said))
        self._alarms = []

    def _forget(self, step: int) -> None:
        """Drop the steps that a resumed run will repeat: this one and later ones."""
        if before := self._parts():
            parts.join(self.folder, before, before=step)
        self._write_alarms(before=step)
        for kept in maps_in(self.folder):
            if kept.rank == self.rank and kept.step >= step:
                (self.folder / FOLDER / kept.name).unlink(missing_ok=True)

    def alarms_before(self, step: int) -> list[Alarm]:
        """The alarms of this process that the folder holds from before a step."""
        return [alarm for alarm in read_alarms(self._alarm_file).alarms if alarm.step < step]

    def close(self) -> None:
        """Write what waits, and join the parts into one file."""
        self.flush()
        self.closed = True
        if len(mine := self._parts()) > 1:
            self._try("", lambda: parts.join(self.folder, mine))
        self._try("", lambda: self._write_manifest({**self._about, "ended": manifest.now()}))
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _alarm_file(self) -> Path:
        return self.folder / f"alarms-rank{self.rank}.jsonl"

    def _parts(self) -> list[SeriesPart]:
        return [part for part in parts.parts_in(self.folder) if part.rank == self.rank]

    def _try(self, what: str, write: Callable[[], None]) -> None:
        """Write a part of the folder; if that fails, log it once and go on, or stop if chosen."""
        try:
            write()
        except Exception as error:
            full = isinstance(error, OSError) and error.errno == errno.ENOSPC
            reason = "the disk is full" if full else str(error) or type(error).__name__
            part = f"{what} into {self.folder}" if what else str(self.folder)
            said = f"could not write {part}: {reason}; what was written before is untouched"
            if self.on_error == "stop":
                if isinstance(error, OSError):
                    raise OSError(error.errno, said) from error
                raise
            if what not in self._failing:
                log.error("%s. The run goes on, and writing is tried again", said)
            self._failing.add(what)
            self._waiting = self._waiting[-MOST_WAITING:]
        else:
            self._failing.discard(what)


class WrittenAlarms(NamedTuple):
    """The alarms of a file, and whether some of it could not be read."""

    alarms: list[Alarm]
    damaged: bool = False


def read_alarms(path: Path) -> WrittenAlarms:
    """The alarms of a file; a damaged line is left out."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except FileNotFoundError:
        return WrittenAlarms([])
    except OSError:
        return WrittenAlarms([], damaged=True)
    found, damaged = [], False
    for line in lines:
        try:
            found += [Alarm.from_dict(parsed_json(line))] if line else []
        except ValueError:
            damaged = True
    return WrittenAlarms(found, damaged)


def save_recording(
    seen: Recording,
    step: int,
    about: dict[str, Any],
    folder: Path | str,
    maps: Iterable[tuple[int, int]],
) -> None:
    """Write the series, what was seen in this `step` that has not ended, the alarms, some maps."""
    entries = list(seen.series)
    if any(layer.recorded for layer in seen.layers):
        entries.append(Entry(step, seen.heads()))
    if not entries:
        raise ValueError(f"nothing was seen yet that could be saved in {folder}")
    wanted = list(maps)
    for layer, head in wanted:
        seen.map(layer, head)  # raises before anything is written
    if manifest.rank() == 0 and (Path(folder) / manifest.NAME).exists():
        raise ValueError(f"{folder} holds a watched run already; choose another folder")
    with RunWriter(folder, about, keep=wanted, keep_every=1, on_error="stop") as writer:
        for entry in entries[:-1]:
            writer.add(entry)
        for name, course in seen.logged.items():
            writer.log((at, name, value) for at, value in zip(*course, strict=True))
        writer.add(entries[-1], seen.alarms, seen)
