"""Finds and opens the model that `headwise look MODEL` names: built in, a folder, or on the hub."""

from __future__ import annotations

from pathlib import Path

from headwise import devices
from headwise.apps.look.readers import transformers_opening
from headwise.apps.look.readers.builtin import ImageReader, TextReader, TranslationReader
from headwise.apps.look.readers.reader import Reader
from headwise.apps.look.sparse_report import SparseReport
from headwise.apps.look.watched_folder import WatchedFolder
from headwise.models.trained import (
    Classifier,
    LanguageModel,
    built_in,
    find_model,
    holds_trained_model,
    is_on_disk,
    load,
)
from headwise.watching import holds_run


def opened(what: str, device: str | None = None) -> Reader:
    """Open the model of this name or folder; ValueError says what is wrong.

    >>> opened("gpt").description
    Description(name='gpt', parameters=5573888, layers=6, heads=48, context=4096, device='cpu')
    """
    place = devices.chosen(device)
    if what not in built_in() and not holds_trained_model(Path(what)):
        if holds_run(Path(what)):
            raise ValueError(
                f"{what} is a watched run without its model: headwise look {what} shows it in the "
                f"browser, and headwise watch {what} in the terminal"
            )
        if report(what) is not None:
            raise ValueError(
                f"{what} is a report of headwise sparse: headwise look {what} shows it in the "
                f"browser, and --out page.html writes it as a file"
            )
        return transformers_opening.opened(what, place, is_on_disk(what))
    loaded, name = load(what, place), Path(what).name
    if isinstance(loaded, LanguageModel):
        return TextReader(name, loaded)
    if isinstance(loaded, Classifier):
        return ImageReader(name, loaded)
    return TranslationReader(name, loaded)


def find(what: str) -> None:
    """ValueError if there is no such model, run or report, before anything is loaded."""
    if not holds_run(Path(what)) and report(what) is None:
        find_model(what)


def report(what: str) -> SparseReport | None:
    """The report of `headwise sparse` in this file; None if it is not a file of JSON."""
    path = Path(what)
    return SparseReport.read(path) if path.suffix == ".json" and path.is_file() else None


def watched(what: str) -> WatchedFolder | None:
    """The watched run in this folder; None if there is none."""
    folder = Path(what)
    return None if what in built_in() or not holds_run(folder) else WatchedFolder(folder)
