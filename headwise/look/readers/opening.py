"""What `headwise look MODEL` means: a model by its name or its folder, ready to read."""

from __future__ import annotations

import json
from pathlib import Path

from headwise import devices
from headwise.look.readers import sample
from headwise.look.readers import transformers_reader as foreign
from headwise.look.readers.builtin import ImageReader, TextReader, TranslationReader
from headwise.look.readers.reader import Reader
from headwise.look.serving.watch_answers import WatchedFolder
from headwise.training.loading import Classifier, LanguageModel, built_in, load
from headwise.watching.runs.manifest import NAME
from headwise.watching.runs.run_reader import INSIDE


def opened(what: str, device: str | None = None) -> Reader:
    """The model of this name or folder, ready to read; ValueError says what would work.

    >>> opened("gpt").description
    Description(name='gpt', parameters=5573888, layers=6, heads=48, context=4096, device='cpu')
    """
    place = devices.chosen(device)
    if what not in built_in() and not trained_here(Path(what)):
        if recorded(Path(what)):
            raise ValueError(
                f"{what} is a watched run, without its model: headwise look {what} shows it in the "
                f"browser, and headwise watch {what} in the terminal"
            )
        return foreign.opened(what, place)
    loaded, name = load(what, place), Path(what).name
    if isinstance(loaded, LanguageModel):
        return TextReader(name, loaded, sample.TEXT)
    if isinstance(loaded, Classifier):
        return ImageReader(name, loaded)
    return TranslationReader(name, loaded, sample.ENGLISH)


def find(what: str) -> None:
    """ValueError where there is no such model, before anything is loaded."""
    folder = Path(what)
    if what in built_in() or recorded(folder):
        return
    if not folder.is_dir():
        foreign.find(what)
    elif not (folder / "config.json").is_file():
        raise ValueError(
            f"{what} holds no model: it has no config.json, as a run of headwise train and a model "
            "of transformers have, and nothing that hw.watch wrote"
        )


def watched(what: str) -> WatchedFolder | None:
    """The run that was watched in this folder; None where it holds none."""
    folder = Path(what)
    if what in built_in() or not recorded(folder):
        return None
    return WatchedFolder(folder)


def recorded(folder: Path) -> bool:
    """Whether a folder holds what a watch recorded."""
    return any((x / NAME).is_file() for x in (folder, folder / INSIDE))


def trained_here(folder: Path) -> bool:
    """Whether a folder is a run of `headwise train`."""
    try:
        return "task" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False
