"""A training run's folder: what was asked, what was measured, and the state to go on from."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwise.files import write_whole
from headwise.training import checkpoints


@dataclass(frozen=True)
class Run:
    """The files of a run. Two runs may go side by side in two folders, never in one.

    config.json       what was asked: the task, the data, the model, the recipe
    tokenizer.json    the subwords, where the task has any
    last.safetensors  the whole state, to resume from
    model.safetensors the weights alone, once the run is done
    metrics.jsonl     what was measured, a line each time
    """

    folder: Path

    @property
    def config(self) -> Path:
        """What was asked."""
        return self.folder / "config.json"

    @property
    def tokeniser(self) -> Path:
        """The subwords."""
        return self.folder / "tokenizer.json"

    @property
    def state(self) -> Path:
        """The state to resume from."""
        return self.folder / "last.safetensors"

    @property
    def model(self) -> Path:
        """The weights alone."""
        return self.folder / "model.safetensors"

    @property
    def metrics(self) -> Path:
        """What was measured."""
        return self.folder / "metrics.jsonl"

    def begin(self, asked: dict[str, Any]) -> None:
        """Start in an empty folder, or refuse one that holds a run."""
        if self.config.exists() or self.state.exists():
            raise ValueError(
                f"{self.folder} holds a run already: --resume goes on with it, --out names another"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self.config, json.dumps(asked, indent=2, ensure_ascii=False) + "\n")

    def asked(self) -> dict[str, Any]:
        """What this run was asked to do."""
        try:
            said: dict[str, Any] = json.loads(self.config.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise ValueError(f"{self.folder} holds no run: it has no config.json") from error
        except ValueError as error:
            raise ValueError(f"{self.config} is damaged: {error}") from error
        return said

    def record(self, measured: dict[str, Any]) -> None:
        """Add a line to the metrics."""
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(measured, ensure_ascii=False) + "\n")

    def measured(self) -> Iterator[dict[str, Any]]:
        """The lines of the metrics; one that a kill cut short is passed over."""
        if self.metrics.exists():
            for line in self.metrics.read_text(encoding="utf-8").splitlines():
                try:
                    yield json.loads(line)
                except ValueError:
                    continue

    def forget_after(self, step: int) -> None:
        """Drop what was measured after the checkpoint a run resumes from."""
        kept = [line for line in self.measured() if line["step"] <= step]
        lines = [json.dumps(line, ensure_ascii=False) + "\n" for line in kept]
        write_whole(self.metrics, "".join(lines))
        checkpoints.remove_leftovers(self.state)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep a second process out of the folder; the lock goes when the process does."""
        try:
            import fcntl
        except ImportError:  # Windows
            yield
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ValueError(f"another process is training in {self.folder}") from error
            yield
