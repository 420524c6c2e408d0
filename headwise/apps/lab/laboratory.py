"""The place an experiment runs in: how large it may be, on what device, and what it keeps."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

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

    One that `only_reads` computes no pieces: those that it lacks raise NotKeptError.

    >>> lab = Lab("tiny")
    >>> lab.pick(tiny=4, quick=64, full=1024)
    4
    """

    form: str = "quick"
    device: torch.device = CPU
    folder: Path | None = None
    report: Callable[[str, int, int], None] = _silent
    only_reads: bool = False

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise ValueError(f"form={self.form!r}; use {', '.join(FORMS)}")

    def pick(self, *, tiny: T, quick: T, full: T | None = None) -> T:
        """The size for this form; `full` is like `quick` where a larger one would say no more."""
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
        if (found := self.kept(name, compute, **settings)) is not None:
            return found
        if self.only_reads:
            raise NotKeptError(f"{name} is not there yet")
        return self.store(
            name,
            compute,
            compute(self, self.place(name, compute, **settings), **settings),
            **settings,
        )

    def keep_all(self, pieces: Collection[Piece]) -> list[dict[str, Any]]:
        """The figures of several pieces, each of them computed once and kept."""
        found = []
        for number, (name, compute, settings) in enumerate(pieces):
            self.report(name, number, len(pieces))
            found.append(self.keep(name, compute, **settings))
        return found

    def place(
        self, name: str, compute: Callable[..., Mapping[str, Any]], **settings: Any
    ) -> Path | None:
        """The folder in which `keep` lets a piece be computed, None if this lab keeps nothing."""
        if self.folder is None:
            return None
        about = self._about(compute, settings)
        work = self.folder / "kept" / f"{name}-{fingerprint(compute, about)[:8]}"
        work.mkdir(parents=True, exist_ok=True)
        return work

    def store(
        self,
        name: str,
        compute: Callable[..., Mapping[str, Any]],
        figures: Mapping[str, Any],
        **settings: Any,
    ) -> dict[str, Any]:
        """Keep the figures of a piece, as `keep` does, and return them."""
        stored = plain(figures)
        if self.folder is not None:
            about = self._about(compute, settings)
            kept = json.dumps({"about": about, "figures": stored}, ensure_ascii=False)
            write_whole(self.folder / "kept" / f"{name}.json", kept)
        return stored

    def kept(
        self, name: str, compute: Callable[..., Mapping[str, Any]], **settings: Any
    ) -> dict[str, Any] | None:
        """The figures that `keep` has kept by this name, None if it has none of these settings."""
        file = None if self.folder is None else self.folder / "kept" / f"{name}.json"
        if file is None or not file.exists():
            return None
        try:
            found = read_json(file)
            same = found["about"] == self._about(compute, settings)
            return dict(found["figures"]) if same else None
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{file} is damaged ({error!r:.200}); delete it, and it is computed again"
            ) from error

    def _about(self, compute: Callable[..., Any], settings: Mapping[str, Any]) -> dict[str, Any]:
        return plain({"form": self.form, "settings": settings, "code": fingerprint(compute)})


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
