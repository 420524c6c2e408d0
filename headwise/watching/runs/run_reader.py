"""Reading a run's folder, while it is written or afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from headwise.files import parsed_json
from headwise.maps.attention_map import AttentionMap
from headwise.messages import say
from headwise.watching.alarms import Alarm
from headwise.watching.logged import Course
from headwise.watching.recorder.layer import WatchedLayer
from headwise.watching.recorder.seen_call import Kind
from headwise.watching.recording import NAN, Entry, Recording
from headwise.watching.runs import manifest, parts
from headwise.watching.runs.kept_maps import FOLDER, MapFile, maps_in, read_map
from headwise.watching.runs.parts import LOGGED, Rows, SeriesPart
from headwise.watching.runs.run_writer import WrittenAlarms, read_alarms
from headwise.watching.table import PLACES, Table


def open_run(folder: Path | str) -> WatchedRun:
    """Open the folder of a watched run; ValueError if it holds none, or a newer headwise's.

    The folder of `headwise train --watch`, which has the watched run inside, is accepted too.

    >>> import tempfile, torch, headwise as hw
    >>> model = hw.nn.MultiHeadAttention(64, 8)
    >>> with hw.watch(model) as seen: _ = model(torch.randn(1, 10, 64))
    >>> run = tempfile.mkdtemp() + "/run"
    >>> seen.save(run, maps=[(0, 3)])
    >>> hw.watching.open_run(run)
    <WatchedRun of 1 layers, 8 heads, 1 steps>
    >>> hw.watching.open_run(run).map(layer=0, head=3)
    <AttentionMap 1 × 1 × 10 × 10>
    """
    folder = Path(folder)
    inside = folder / INSIDE
    return WatchedRun(
        inside if not (folder / manifest.NAME).exists() and inside.exists() else folder
    )


INSIDE = "watch"
"""The folder inside a training run that holds the watched run."""

MEASURED = "metrics.jsonl"
"""The measurements of a training run, one per line, beside the folder of its watched run."""


def holds_run(folder: Path | str) -> bool:
    """True if a folder holds a watched run, or a training run that was watched.

    >>> holds_run("no such folder")
    False
    """
    return any((x / manifest.NAME).is_file() for x in (Path(folder), Path(folder) / INSIDE))


class WatchedRun(Recording):
    """A run's folder as it stands; `refresh()` reads what was written since.

    Figures of several processes are merged: the mean of means, max of maxima, min of minima.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read: dict[SeriesPart, Rows | None] = {}
        self._rows: Rows | None = None
        self._logged: dict[str, dict[int, float]] = {}
        self._series: list[Entry] | None = None
        self.refresh()

    def training(self) -> dict[str, float]:
        """Loss, speed and utilisation of the training that is watched, as far as they are known."""
        metered = self.manifest.get("mfu")
        found: dict[str, Any] = dict(metered) if isinstance(metered, dict) else {}
        found |= next((x for x in self._measured() if "loss" in x), {})
        wanted = {name: found.get(name) for name in ("loss", "per_second", "mfu")}
        return {name: x for name, x in wanted.items() if isinstance(x, int | float)}

    def refresh(self) -> bool:
        """Read what is new; False if nothing is."""
        self.manifest: dict[str, Any] = manifest.read_manifest(self.folder)
        there = parts.parts_in(self.folder)
        if list(self._read) == there and self._rows is not None:
            return False
        known, self._logged = self._read, {}
        self._read = {x: known[x] if x in known else parts.read_part(self.folder, x) for x in there}
        found = [rows for rows in self._read.values() if rows is not None and len(rows)]
        heads = [_of_heads(rows, self._logged) for rows in found]
        heads = [rows for rows in heads if len(rows)]
        self._rows = _merged(parts.concatenated(heads)) if heads else None
        self._series = None
        return True

    @property
    def logged(self) -> dict[str, Course]:
        """Numbers of the training: those of its own log where the watch has none."""
        found: dict[str, dict[int, float]] = {}
        for known in self._measured():
            for name in ("loss", "evaluation"):
                if isinstance(known.get("step"), int) and isinstance(known.get(name), int | float):
                    found.setdefault(name, {}).setdefault(known["step"], float(known[name]))
        found |= self._logged
        courses = {name: sorted(course.items()) for name, course in found.items()}
        return {
            name: ([step for step, _ in course], [value for _, value in course])
            for name, course in courses.items()
        }

    def _measured(self) -> Iterator[dict[str, Any]]:
        """The log of a training by headwise, the last line first; one that was cut short is left
        out."""
        beside = self.folder.parent / MEASURED
        if self.folder.name != INSIDE or not beside.is_file():
            return
        for line in reversed(beside.read_text(encoding="utf-8", errors="replace").splitlines()):
            try:
                known = parsed_json(line)
            except ValueError:
                continue
            if isinstance(known, dict):
                yield known

    @property
    def damaged(self) -> list[str]:
        """The names of files that are left out, whole or in part, because they are damaged."""
        parts = [part.name for part, rows in self._read.items() if rows is None]
        return parts + [file.name for file, found in self._written_alarms() if found.damaged]

    @property
    def ended(self) -> bool:
        """True if the run was closed; a run that was killed was not."""
        return "ended" in self.manifest

    def _rules(self) -> list[str]:
        return [str(rule["rule"]) for rule in self.manifest.get("rules", []) if "rule" in rule]

    @property
    def unread(self) -> list[str]:
        return list(self.manifest.get("unread", ()))

    @property
    def steps(self) -> list[int]:
        """The numbers of the steps that were looked at."""
        found = set() if self._rows is None else set(self._rows["step"].to_pylist())
        return sorted(found)

    @property
    def series(self) -> list[Entry]:  # type: ignore[override]
        """The tables of all steps."""
        if self._series is None:
            by_step: dict[int, list[dict[str, Any]]] = {}
            for row in [] if self._rows is None else self._rows.to_pylist():
                by_step.setdefault(row.pop("step"), []).append(_numbers(row))
            self._series = [Entry(step, Table(rows)) for step, rows in by_step.items()]
        return self._series

    def history(self, figure: str) -> tuple[list[int], dict[tuple[int, int], list[float]]]:
        """The steps, and a figure of each (layer, head) at these steps; NaN if it is missing."""
        if self._rows is None:
            return [], {}
        if figure not in self._rows.column_names:
            raise ValueError(
                say(
                    "there is no figure {name!r}; there are {there}",
                    name=figure,
                    there=", ".join(self.figures),
                )
            )
        steps = self.steps
        place = {step: number for number, step in enumerate(steps)}
        found: dict[tuple[int, int], list[float]] = {}
        columns = (self._rows[name].to_pylist() for name in ("step", "layer", "head", figure))
        for step, layer, head, value in zip(*columns, strict=True):
            line = found.setdefault((layer, head), [NAN] * len(steps))
            line[place[step]] = NAN if value is None else value
        return steps, dict(sorted(found.items()))

    @property
    def figures(self) -> list[str]:
        """The names of the figures that were written."""
        names = [] if self._rows is None else self._rows.column_names
        return [name for name in names if name not in (*PLACES, "step")]

    def heads(self, step: int | None = None) -> Table:
        """The table of a step, the last one unless another is named."""
        if self._rows is None:
            return Table([])
        steps = self.steps
        step = steps[-1] if step is None else step
        if step not in steps:
            raise ValueError(
                f"step {step} was not recorded; {len(steps)} of {steps[0]} to {steps[-1]} were"
            )
        chosen = self._rows.filter([x == step for x in self._rows["step"].to_pylist()])
        rows = [_numbers(row) for row in chosen.drop(["step"]).to_pylist()]
        return Table(rows, note=self._note())

    @property
    def layers(self) -> list[WatchedLayer]:
        """The layers: their names and heads, without rows or maps."""
        found: dict[int, WatchedLayer] = {}
        for row in self.heads():
            number = int(row["layer"])
            kind = cast(Kind, row["kind"])
            layer = found.setdefault(number, WatchedLayer(number, str(row["name"]), kind, 0))
            layer.heads = max(layer.heads, int(row["head"]) + 1)
        return list(found.values())

    @property
    def alarms(self) -> list[Alarm]:  # type: ignore[override]
        """The alarms in order, each head and rule once."""
        first: dict[tuple[str, int | None, int | None], Alarm] = {}
        found = [alarm for _, written in self._written_alarms() for alarm in written.alarms]
        for alarm in sorted(found, key=lambda x: x.step):
            first.setdefault((alarm.rule, alarm.layer, alarm.head), alarm)
        return list(first.values())

    def _written_alarms(self) -> list[tuple[Path, WrittenAlarms]]:
        files = sorted(self.folder.glob("alarms-rank*.jsonl"))
        return [(file, read_alarms(file)) for file in files]

    @property
    def kept(self) -> list[MapFile]:
        """The maps in the folder."""
        return maps_in(self.folder)

    def map(
        self, layer: int | str, head: int, batch: int = 0, step: int | None = None
    ) -> AttentionMap:
        """A map that was kept, the last of this head unless a step is named."""
        if batch != 0:
            raise ValueError(f"batch={batch}: a run keeps the maps of the first sequence, 0")
        number = self.layer(layer).number
        mine = [x for x in self.kept if (x.layer, x.head) == (number, head)]
        found = [x for x in mine if step is None or x.step == step]
        if not found:
            there = ", ".join(f"{x.layer}.{x.head} at step {x.step}" for x in self.kept[:8])
            raise ValueError(f"no such map was kept; there are {there or 'none'}")
        return read_map(self.folder / FOLDER / found[-1].name)


def _of_heads(rows: Rows, logged: dict[str, dict[int, float]]) -> Rows:
    """The rows about heads; numbers that a user logged are added to `logged`."""
    if LOGGED not in rows.column_names:
        return rows
    kinds = rows["kind"].to_pylist()
    for row in rows.filter([kind == LOGGED for kind in kinds]).to_pylist():
        value = row[LOGGED]
        logged.setdefault(row["name"], {})[row["step"]] = NAN if value is None else value
    return rows.filter([kind != LOGGED for kind in kinds]).drop([LOGGED])


def _merged(rows: Rows) -> Rows:
    """One row per step and head, in order, the processes merged."""
    if len(set(rows["rank"].to_pylist())) > 1:
        keys = ["step", *PLACES]
        figures = [name for name in rows.column_names if name not in (*keys, "rank")]
        wanted = [
            (name, next((way for way in ("max", "min") if f"_{way}" in name), "mean"))
            for name in figures
        ]
        rows = rows.group_by(keys).aggregate(wanted)
        rows = rows.rename_columns([*keys, *figures])
    else:
        rows = rows.drop(["rank"])
    return rows.sort_by([("step", "ascending"), ("layer", "ascending"), ("head", "ascending")])


def _numbers(row: dict[str, Any]) -> dict[str, Any]:
    return {name: NAN if value is None else value for name, value in row.items()}
