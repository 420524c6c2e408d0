"""The folder of a training run: its settings, its measurements and the state to resume from."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwise.files import FolderLock, json_object, parsed_json, write_whole
from headwise.models.trained import checkpoints


@dataclass(frozen=True)
class Run:
    """The files of a run. Two runs may train at once in two folders, never in one.

    config.json       the settings: task, data, model, recipe
    tokenizer.json    the subwords, if the task has any
    last.safetensors  the whole state, to resume from
    last/             instead of it, if many processes train: a folder that they write together
    model.safetensors the weights alone, once the run has finished
    metrics.jsonl     the measurements, one per line

    Of many processes that train together one `writes`; the others only read.
    """

    folder: Path
    writes: bool = True

    @property
    def config(self) -> Path:
        """The settings."""
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
    def shared_state(self) -> Path:
        """The folder of the state that many processes wrote."""
        return self.folder / "last"

    @property
    def model(self) -> Path:
        """The weights alone."""
        return self.folder / "model.safetensors"

    @property
    def metrics(self) -> Path:
        """The measurements."""
        return self.folder / "metrics.jsonl"

    def begin(self, settings: dict[str, Any]) -> None:
        """Write the settings into a new folder; ValueError if it already holds a run."""
        if not self.writes:
            return
        if self.config.exists() or self.state.exists():
            raise ValueError(
                f"{self.folder} already holds a run; use --resume to continue it, or another --out"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self.config, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")

    def settings(self) -> dict[str, Any]:
        """The settings that this run was started with."""
        try:
            return json_object(self.config.read_bytes(), self.config)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ValueError(f"{self.folder} does not hold a run: it has no config.json") from error

    def record(self, measured: dict[str, Any]) -> None:
        """Append a measurement."""
        if not self.writes:
            return
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(measured, ensure_ascii=False) + "\n")

    def measured(self) -> Iterator[dict[str, Any]]:
        """The measurements; a line that was cut short by a kill is skipped."""
        if self.metrics.exists():
            for line in self.metrics.read_text(encoding="utf-8", errors="replace").splitlines():
                try:
                    found = parsed_json(line)
                except ValueError:
                    continue
                if isinstance(found, dict) and isinstance(found.get("step"), int):
                    yield found

    def forget_after(self, step: int) -> None:
        """Drop the measurements that a run resuming at this step will make again."""
        if not self.writes:
            return
        kept = [line for line in self.measured() if line["step"] <= step]
        lines = [json.dumps(line, ensure_ascii=False) + "\n" for line in kept]
        if self.metrics.exists():
            write_whole(self.metrics, "".join(lines))
        checkpoints.remove_leftovers(self.state)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep a second process out of the folder; the lock ends with the process."""
        if not self.writes:
            yield
            return
        lock = FolderLock(self.folder)
        try:
            yield
        finally:
            lock.release()
