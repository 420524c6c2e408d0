"""An experiment of the lab that the page runs in the background: one at a time."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field, replace
from threading import Lock
from typing import Any, Literal

import torch

from headwise.apps.interface.background import Background, BusyError, StoppedError
from headwise.apps.lab import record
from headwise.apps.lab.claim import Claim
from headwise.apps.lab.laboratory import Lab
from headwise.apps.lab.runner import Told, run
from headwise.messages import Sentence, said_by, say


@dataclass(frozen=True)
class JobProgress:
    """The state of the last experiment: how many of its steps are done, and the current one."""

    id: str
    state: Literal["running", "stopping", "stopped", "failed", "done"] = "running"
    what: str = ""
    done: int = 0
    steps: int = 0
    seconds: float = 0.0
    error: Sentence | None = None

    @property
    def going(self) -> bool:
        """True until the experiment has ended, in whichever way."""
        return self.state in ("running", "stopping")


@dataclass
class LabJob:
    """Runs the quick form of a claim and saves it where `headwise lab run` does."""

    progress: JobProgress | None = None
    threads: int = field(default_factory=torch.get_num_threads)
    _work: Background = field(default_factory=lambda: Background("lab"))
    _lock: Lock = field(default_factory=Lock)

    def start(self, claim: Claim) -> None:
        """Run an experiment in the background; BusyError while one is running."""
        with self._lock:
            now = self.progress
            if now is not None and now.going:
                hint = say("wait for it, or stop it")
                raise BusyError(say("the lab is still running {id}", id=now.id), hint)
            self.progress = JobProgress(claim.id)
            self._work.begin(lambda: self._measure(claim))

    def _measure(self, claim: Claim) -> None:
        begun = time.monotonic()
        missing = ""

        def tell(told: Told) -> None:
            nonlocal missing
            self._work.check()
            missing = told.missing
            seconds = time.monotonic() - begun
            self._change(what=told.what, done=told.done, steps=told.steps, seconds=seconds)

        # All cores, as on the command line, although an experiment of "Why" may have set one.
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        state, error = "done", None
        try:
            if not list(run([claim], Lab("quick"), record.own_folder(), again=True, tell=tell)):
                state, error = "failed", Sentence(missing)
        except StoppedError:
            state = "stopped"
        except Exception as raised:  # whatever an experiment raises is shown on the page
            known = isinstance(raised, ValueError | OSError)
            said = said_by(raised) if known else Sentence(f"{type(raised).__name__}: {raised}")
            state, error = "failed", said
        finally:
            torch.set_num_threads(before)
        self._change(state=state, error=error, seconds=time.monotonic() - begun)

    def stop(self) -> None:
        """End the experiment at its next report; nothing happens if there is none."""
        with self._lock:
            if self.progress is not None and self.progress.state == "running":
                self.progress = replace(self.progress, state="stopping")
                self._work.stop()

    def join(self, seconds: float) -> bool:
        """Wait for the experiment; True if it ended in this time."""
        return self._work.join(seconds)

    def state(self) -> dict[str, Any] | None:
        """The progress as one dictionary, as `/api/lab/job` gives it; None before the first job."""
        return None if self.progress is None else asdict(self.progress)

    def _change(self, **changes: Any) -> None:
        with self._lock:
            assert self.progress is not None
            self.progress = replace(self.progress, **changes)
