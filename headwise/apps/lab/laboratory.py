"""The place an experiment runs in: how large it may be, on what device, and what it keeps."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from headwise import devices
from headwise.apps.lab.fingerprint import fingerprint
from headwise.files import read_json, write_whole

T = TypeVar("T")
CPU = torch.device("cpu")
Piece = tuple[str, Callable[..., Mapping[str, Any]], Mapping[str, Any]]
"""The arguments of `Lab.keep`: a name, the function that computes, and its settings."""

FORMS = ("tiny", "quick", "full")
"""Sizes of an experiment: for tests, for two cores, for a GPU."""


def _silent(what: str, done: int, of: int) -> None:
    return None


class NotKeptError(ValueError):
    """A piece that an experiment needs has not been computed yet."""


@dataclass(frozen=True)
class Lab:
    """Everything an experiment is given: its form, a device, a folder for what claims share.

    One that `only_reads` computes no pieces: those that it lacks raise NotKeptError. `settings`
    replace what an experiment picks by these names. `pieces` says of each piece that
    was found or made where it was computed, and how long that took.

    >>> lab = Lab("tiny", settings={"steps": 7})
    >>> lab.pick(tiny=4, quick=64, full=1024), lab.pick("steps", tiny=1, quick=100)
    (4, 7)
    """

    form: str = "quick"
    device: torch.device = CPU
    folder: Path | None = None
    report: Callable[[str, int, int], None] = _silent
    only_reads: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    pieces: list[Mapping[str, Any]] = field(default_factory=list, compare=False)

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise ValueError(f"form={self.form!r}; use {', '.join(FORMS)}")

    def pick(self, name: str = "", /, *, tiny: T, quick: T, full: T | None = None) -> T:
        """The size for this form; `full` is like `quick` where a larger one would say no more.

        A size with a name is a setting, which a user may replace.
        """
        if name in self.settings:
            chosen: T = self.settings[name]
            return chosen
        if self.form == "tiny":
            return tiny
        return quick if self.form == "quick" or full is None else full

    def each(self, items: Collection[T], what: str = "") -> Iterator[T]:
        """The items one by one, with a report of how many are done."""
        for number, item in enumerate(items):
            self.report(f"{what} {item}".strip(), number, len(items))
            yield item

    def normal(self, *shape: int, stream: int = 0) -> Tensor:
        """Independent N(0, 1), float64, the same for every run; each `stream` is another draw."""
        generator = torch.Generator().manual_seed(stream)
        # drawn in float32, which is several times as fast, and computed with in float64
        return torch.randn(*shape, generator=generator).double().to(self.device)

    def keep(
        self, name: str, compute: Callable[..., Mapping[str, Any]], **settings: Any
    ) -> dict[str, Any]:
        """The figures of compute(lab, folder, **settings), computed once and kept by this name.

        For what takes minutes and serves several claims, such as a training run: an interrupted
        experiment goes on with the pieces it had. `folder` is the piece's own, to resume in; it is
        None if this lab keeps nothing. A piece with other settings or other code is made anew.
        """
        if (found := self._read(name, compute, settings)) is not None:
            self.pieces.append(found.get("made", {}))
            return dict(found["figures"])
        if self.only_reads:
            raise NotKeptError(f"{name} is not there yet")
        about, begun = self._about(compute, settings), time.monotonic()
        if self.folder is None:
            return plain(compute(self, None, **settings))
        work = self.folder / "kept" / f"{name}-{fingerprint(compute, about)[:8]}"
        work.mkdir(parents=True, exist_ok=True)
        figures = plain(compute(self, work, **settings))
        seconds = round(time.monotonic() - begun, 1)
        made = {"machine": devices.machine(self.device), "seconds": seconds}
        whole = {"about": about, "made": made, "figures": figures}
        file = self.folder / "kept" / f"{name}.json"
        write_whole(file, json.dumps(whole, ensure_ascii=False))
        return figures

    def keep_all(self, pieces: Collection[Piece]) -> list[dict[str, Any]]:
        """The figures of several pieces, each of them computed once and kept."""
        found = []
        for number, (name, compute, settings) in enumerate(pieces):
            self.report(name, number, len(pieces))
            found.append(self.keep(name, compute, **settings))
        return found

    def kept(
        self, name: str, compute: Callable[..., Any], **settings: Any
    ) -> dict[str, Any] | None:
        """The figures that `keep` has kept by this name, None if it has none of these settings."""
        found = self._read(name, compute, settings)
        return None if found is None else dict(found["figures"])

    def _read(
        self, name: str, compute: Callable[..., Any], settings: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """The file of a piece: its figures, and where and how long they were made."""
        file = None if self.folder is None else self.folder / "kept" / f"{name}.json"
        if file is None or not file.exists():
            return None
        try:
            found: dict[str, Any] = read_json(file)
            same = found["about"] == self._about(compute, settings)
            dict(found["figures"])
            return found if same else None
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{file} is damaged ({error!r:.200}); delete it, and it is computed again"
            ) from error

    def _about(self, compute: Callable[..., Any], settings: Mapping[str, Any]) -> dict[str, Any]:
        about = {"form": self.form, "settings": settings, "code": fingerprint(compute)}
        return plain(about | ({"changed": self.settings} if self.settings else {}))


def plain(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Figures as JSON gives them back; ValueError for a number that JSON does not have.

    >>> plain({"widths": (4, 8), 2: "two"})
    {'widths': [4, 8], '2': 'two'}
    """
    try:
        found: dict[str, Any] = json.loads(json.dumps(figures, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"figures are finite numbers, texts, and lists and mappings of them: {error}"
        ) from error
    return found
