"""A session of the page: the model, the inputs it has read, and the progress of the next one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any, Literal, NamedTuple

from headwise import STATISTICS, Edge, Observation, __version__
from headwise.apps.interface.background import Background, BusyError
from headwise.apps.interface.page import Job
from headwise.apps.look.atlas import Atlas
from headwise.apps.look.fit import remarks
from headwise.apps.look.pages import PAGES
from headwise.apps.look.predictions import Outcome, Predictor
from headwise.apps.look.readers.reader import Given, Reader, check_length, most_tokens
from headwise.apps.look.reasons import Reasons
from headwise.apps.look.scene import Group, Input
from headwise.apps.look.sparse_report import SparseReport
from headwise.apps.look.watched_folder import WatchedFolder
from headwise.messages import Sentence, said_by, say

State = Literal["loading", "ready", "error"]

MOST_INPUTS = 8
"""The most inputs to keep, each with the queries and keys of every layer; the oldest go first."""


class ReadingProblem(NamedTuple):
    """The reason why an input could not be read, and what to do about it."""

    id: str
    error: Sentence
    hint: Sentence


@dataclass(frozen=True)
class Progress:
    """The progress of the work; `done` is a share, None if it is unknown.

    In the state "error" a problem is final; in others, what was read before can be seen.
    """

    state: State = "loading"
    stage: str | None = "loading the model"
    done: float | None = None
    problem: ReadingProblem | None = None


@dataclass
class Session:
    """A model that reads inputs one after the other, and the inputs it has read."""

    sample: bool = False
    reader: Reader | None = None
    progress: Progress = field(default_factory=Progress)
    atlases: OrderedDict[str, Atlas] = field(default_factory=OrderedDict)
    run: WatchedFolder | None = None
    beside: WatchedFolder | None = None  # another run to compare it with
    sparse: SparseReport | None = None
    spans: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # of keys, by name
    jobs: dict[str, Job] = field(default_factory=dict)  # of other views, by name
    heard: Callable[[Progress], None] = lambda progress: None
    _told: tuple[tuple[str, int], Reasons] | None = None  # the last prediction that was explained
    _lock: Lock = field(default_factory=Lock)
    _count: int = 0
    _work: Background = field(default_factory=lambda: Background("reading"))

    def start(self, opened: Callable[[], Reader], what: Given | None) -> None:
        """Load a model and let it read in the background; `progress` says how far it is."""

        def work() -> None:
            id = self._next()
            try:
                self.reader = opened()
                self._read(id, given(self.reader, what))
            except Exception as error:  # any error of a model is shown on the page
                if self.reader is not None:  # the input is wrong, not the model
                    self._refuse(id, error)
                    return
                hint = say("fix what the message names, then start headwise look again")
                # A run that has just begun has no model yet, but it can be watched.
                state: State = "error" if self.run is None else "ready"
                self.tell(Progress(state, None, problem=problem_of(id, error, hint)))

        self._work.begin(work)

    def add(self, what: Given) -> str:
        """Let the model read one more input in the background; returns its id.

        ValueError if it is a text of too many tokens.
        """
        if isinstance(what, str):
            reader = self._idle()
            check_length(reader.count(what), reader.description.device)
        with self._lock:
            self._idle()
            self.progress = Progress("ready", "running the model")
        id = self._next()

        def work() -> None:
            try:
                self._read(id, what)
            except Exception as error:
                self._refuse(id, error)

        self._work.begin(work)
        return id

    def count(self, text: str) -> dict[str, int | None]:
        """The number of tokens of a text, and the most that can be read; None while one is read."""
        try:
            reader = self._idle()
        except BusyError:
            return {"tokens": None, "most": None}
        return {"tokens": reader.count(text), "most": most_tokens(reader.description.device)}

    def compare(
        self, predictor: Predictor, row: int, edges: list[Edge]
    ) -> tuple[list[Outcome], float]:
        """Compare a model's predictions with and without edges; BusyError while it reads."""
        with self._lock:
            self._idle()
            return predictor.compare(row, edges)

    def reasons(self, id: str, row: int) -> Reasons:
        """The edges behind a prediction; the last are kept. BusyError while the model reads."""
        with self._lock:
            if self._told is None or self._told[0] != (id, row):
                read = self.atlases[id].input
                if read.effects is not None:
                    told = Reasons(read, row, *read.effects)
                else:
                    self._idle()
                    assert read.predictor is not None
                    told = Reasons.of(read, read.predictor, row)
                self._told = (id, row), told
            return self._told[1]

    def _idle(self) -> Reader:
        """The model, which must not be reading: a tokeniser serves one text at a time."""
        if self.progress.state != "ready" or self.progress.stage:
            hint = say("wait until it is done")
            raise BusyError(say("the model is still busy with another input"), hint)
        if self.reader is None:
            hint = say("open a model with headwise look MODEL")
            raise BusyError(say("this is a run without its model: nothing can be read"), hint)
        return self.reader

    def _refuse(self, id: str, error: Exception) -> None:
        hint = say("the model is ready for another one")
        self.tell(Progress("ready", None, problem=problem_of(id, error, hint)))

    def stop(self, seconds: float) -> bool:
        """End all background work at its next report; True if it ended in this time."""
        self._work.stop()
        for job in self.jobs.values():
            job.stop()
        return self.join(seconds) and all(job.join(seconds) for job in self.jobs.values())

    def join(self, seconds: float) -> bool:
        """Wait until the model has read; True if it has in this time."""
        return self._work.join(seconds)

    def _next(self) -> str:
        self._count += 1
        return str(self._count - 1)

    def _read(self, id: str, what: Given) -> None:
        assert self.reader is not None
        read = self.reader.read(what, self._report).marked(self.spans)
        atlas = Atlas(read).prepare(self._report)
        self.atlases[id] = atlas
        while len(self.atlases) > MOST_INPUTS:
            self.atlases.popitem(last=False)
        self.tell(Progress("ready", None))

    def _report(self, stage: str, done: float | None) -> None:
        self._work.check()
        self.tell(replace(self.progress, stage=stage, done=done))

    def tell(self, progress: Progress) -> None:
        """Record the progress and pass it on."""
        self.progress = progress
        self.heard(progress)

    def state(self) -> dict[str, Any]:
        """The whole session as one dictionary, as `/api/state` gives it."""
        progress, reader = self.progress, self.reader
        described = reader.description if reader is not None else None
        return {
            "state": progress.state,
            "stage": progress.stage,
            "done": progress.done,
            "problem": None if progress.problem is None else progress.problem._asdict(),
            "version": __version__,
            "pages": {
                "heads": bool(self.atlases),
                **dict.fromkeys(PAGES, True),
                "sparse": self.sparse is not None,
                "watch": self.run is not None,
            },
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
                "reads": _reads(reader),
            },
            "inputs": [_input(id, atlas) for id, atlas in list(self.atlases.items())],
            "statistics": [
                {"name": name, "meaning": getattr(Observation, name).__doc__} for name in STATISTICS
            ],
        }


def _reads(reader: Reader | None) -> str | None:
    """What more a reader reads: images or texts; None of a recording."""
    if reader is None or reader.model is None:
        return None
    return "image" if reader.sample is None else "text"


def given(reader: Reader, what: Given | None) -> Given:
    """The input to read; the model's sample if nothing is given."""
    if what is not None:
        return what
    if reader.sample is None:
        raise ValueError(say("this model reads images; use --image FILE"))
    return reader.sample


def problem_of(id: str, error: Exception, hint: Sentence) -> ReadingProblem:
    """The problem behind an error; the hint is for errors that the user can fix."""
    if isinstance(error, ValueError | OSError | ModuleNotFoundError):
        return ReadingProblem(id, said_by(error), hint)
    inside = say("this is an error in the model or in headwise; the terminal may say more")
    return ReadingProblem(id, Sentence(f"{type(error).__name__}: {error}"), inside)


def _input(id: str, atlas: Atlas) -> dict[str, Any]:
    read = atlas.input
    main = read.main
    return {
        "id": id,
        "name": read.name,
        "kind": read.kind,
        "rows": len(main.rows),
        "columns": len(main.columns),
        "notes": [*read.notes, *remarks(read)],
        "groups": [_group(group, read) for group in read.groups],
    }


def _group(group: Group, read: Input) -> dict[str, Any]:
    predictor, images = read.predictor, read.images
    predicts = predictor is not None and group.id in predictor.groups
    given = None if read.effects is None else "given"
    return {
        "id": group.id,
        "name": group.name,
        "causal": group.causal,
        "square": group.square,
        "predicts": predictor.predicts if predictor is not None and predicts else given,
        "rows": len(group.rows),
        "columns": len(group.columns),
        "layers": [
            {"layer": layer, "name": module, "heads": heads}
            for layer, module, heads in group.layers()
        ],
        "looks": group.looks,
        "pictures": [
            {
                "name": picture.name,
                "image": None if picture.png is None else images.index(picture.png),
                "grid": list(picture.grid),
                "runs": picture.runs,
                "axis": picture.axis,
            }
            for picture in group.pictures
        ],
    }
