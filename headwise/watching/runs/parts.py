"""A series in Parquet part files, each written whole, and joined into larger ones at any time.

    series-rank0-000007.parquet           the seventh part that process 0 wrote
    series-rank0-000001-000064.parquet    its first 64 parts, joined

A joined file takes effect with its rename; from then on the parts it holds are skipped, whether or
not they are deleted yet. So a run may be killed at any moment and can still be read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwise.files import write_whole

Rows = Any
"""A pyarrow.Table, one row per step and head; the package has no type information."""

NAME = re.compile(r"series-rank(?P<rank>\d+)-(?P<first>\d{6,})(?:-(?P<last>\d{6,}))?\.parquet")

LOGGED = "logged"
"""The kind of rows that are not about a head, and the column of their numbers."""

NUMBERS = {"step": 2**53, "rank": 1_000_000, "layer": 100_000, "head": 100_000}
"""The whole numbers of a row, each below so many: readers count to a damaged one."""

LEFTOVER = re.compile(r"\.(manifest\.json|.*rank(?P<rank>\d+).*)-\d+")
"""The name of a file that is being written; the manifest is written by process 0."""


@dataclass(frozen=True, order=True)
class SeriesPart:
    """One file: the parts first to last of a process."""

    rank: int
    first: int
    last: int

    @classmethod
    def of(cls, name: str) -> SeriesPart | None:
        """The part of a file's name; None for another file, such as one being written.

        >>> SeriesPart.of("series-rank0-000007.parquet")
        SeriesPart(rank=0, first=7, last=7)
        >>> SeriesPart.of(".series-rank0-000007.parquet-1234") is None
        True
        """
        found = numbers_in(name, NAME)
        return None if found is None else cls(**{"last": found["first"], **found})

    @property
    def name(self) -> str:
        """The name of its file."""
        last = f"-{self.last:06d}" if self.last > self.first else ""
        return f"series-rank{self.rank}-{self.first:06d}{last}.parquet"

    def holds(self, other: SeriesPart) -> bool:
        """True if another part is joined into this one."""
        within = self.first <= other.first and other.last <= self.last
        return self != other and self.rank == other.rank and within


def numbers_in(name: str, pattern: re.Pattern[str]) -> dict[str, int] | None:
    """The numbers in a file's name, by the names of the pattern's groups; None for another file.

    >>> numbers_in("step-12-head-3", re.compile(r"step-(?P<step>\\d+)-head-(?P<head>\\d+)"))
    {'step': 12, 'head': 3}
    """
    found = pattern.fullmatch(name)
    if found is None:
        return None
    return {key: int(value) for key, value in found.groupdict().items() if value is not None}


def arrow() -> Any:
    """Import pyarrow, which only run folders need."""
    try:
        import pyarrow.compute  # type: ignore[import-untyped]
        import pyarrow.parquet  # type: ignore[import-untyped]
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            "run folders need the package pyarrow: pip install 'headwise[watch]'", name=missing.name
        ) from missing
    return pyarrow


def parts_in(folder: Path) -> list[SeriesPart]:
    """The parts of a run that count, in order."""
    found = [part for path in folder.iterdir() if (part := SeriesPart.of(path.name)) is not None]
    return sorted(part for part in found if not any(other.holds(part) for other in found))


def remove_leftovers(folder: Path, rank: int) -> None:
    """Delete the unfinished files of a process that was killed while writing."""
    for path in folder.glob(".*"):
        found = numbers_in(path.name, LEFTOVER)
        if found is not None and found.get("rank", 0) == rank:
            path.unlink(missing_ok=True)


def columns(rows: Sequence[dict[str, Any]]) -> Rows:
    """Rows as a Parquet table: figures in double precision, NaN as null.

    >>> columns([{"step": 3, "name": "h.0", "entropy_mean": float("nan")}]).to_pylist()
    [{'step': 3, 'name': 'h.0', 'entropy_mean': None}]
    """
    pyarrow = arrow()
    names = list(dict.fromkeys(name for row in rows for name in row))
    arrays = [
        pyarrow.array([row.get(name) for row in rows], type=_type(name), from_pandas=True)
        for name in names
    ]
    return pyarrow.table(arrays, names=names)


def write_part(folder: Path, part: SeriesPart, table: Rows) -> None:
    """Write a part."""
    pyarrow = arrow()
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(table, sink, compression="zstd")
    write_whole(folder / part.name, sink.getvalue().to_pybytes())


def read_part(folder: Path, part: SeriesPart) -> Rows | None:
    """A part's rows; None if the file is damaged, or was joined into another meanwhile."""
    pyarrow = arrow()
    try:
        with pyarrow.parquet.ParquetFile(folder / part.name) as file:
            table = file.read()
        table.validate(full=True)  # texts are UTF-8
        table = table.cast(pyarrow.schema([(x, _type(x)) for x in table.column_names]))
        return table if _is_whole(table) else None
    except (OSError, ValueError, KeyError, MemoryError, pyarrow.ArrowException):
        return None


def _is_whole(table: Rows) -> bool:
    """True if every row says where its figures belong, and each column is there once."""
    compute = arrow().compute
    if len(set(table.column_names)) < len(table.column_names):
        return False
    if any(table[name].null_count for name in ("name", "kind")):
        return False
    for name, most in NUMBERS.items():
        column = table[name]
        inside = compute.and_(compute.greater_equal(column, 0), compute.less(column, most))
        if column.null_count or not compute.all(inside, min_count=0).as_py():
            return False
    return True


def join(folder: Path, parts: Sequence[SeriesPart], before: int | None = None) -> None:
    """Make one file of consecutive parts; `before` leaves out this step and later ones."""
    tables = [table for part in parts if (table := read_part(folder, part)) is not None]
    if tables:
        whole = concatenated(tables)
        if before is not None:
            whole = whole.filter([step < before for step in whole["step"].to_pylist()])
        joined = SeriesPart(parts[0].rank, parts[0].first, parts[-1].last) if len(whole) else None
        if joined is not None:
            write_part(folder, joined, whole)
        for part in parts:
            if part != joined:
                (folder / part.name).unlink(missing_ok=True)


def concatenated(tables: Iterable[Rows]) -> Rows:
    """All rows; a column that one table lacks is null there."""
    pyarrow = arrow()
    return pyarrow.concat_tables(tables, promote_options="default")


def _type(name: str) -> Any:
    pyarrow = arrow()
    if name in NUMBERS:
        return pyarrow.int64()
    return pyarrow.string() if name in ("name", "kind") else pyarrow.float64()
