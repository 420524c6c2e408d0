"""What `headwise look MODEL` means: a model by its name or its folder, ready to read."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from headwise.loading import Classifier, LanguageModel, built_in, load
from headwise.look import foreign, sample
from headwise.look.own import ImageReader, TextReader, TranslationReader
from headwise.look.reading import Reader
from headwise.look.watch_api import WatchedFolder
from headwise.watching.folder.manifest import NAME
from headwise.watching.folder.reading import INSIDE


def opened(what: str, device: str | None = None) -> Reader:
    """The model of this name or folder, ready to read; ValueError says what would work.

    >>> opened("gpt").description
    Description(name='gpt', parameters=5573888, layers=6, heads=48, context=4096, device='cpu')
    """
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if what not in built_in() and not trained_here(Path(what)):
        if watched(what) is not None:
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
    if what not in built_in() and not Path(what).is_dir():
        foreign.find(what)


def check_device(device: str | None) -> None:
    """ValueError for a device that is none, or not of this machine."""
    if device is None:
        return
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        said = str(error).splitlines()[0][:120]
        raise ValueError(f"--device {device} can't be used here: {said}; cpu would work") from None


def watched(what: str) -> WatchedFolder | None:
    """The run that was watched in this folder; None where it holds none."""
    folder = Path(what)
    if what in built_in() or not any((x / NAME).is_file() for x in (folder, folder / INSIDE)):
        return None
    return WatchedFolder(folder)


def trained_here(folder: Path) -> bool:
    """Whether a folder is a run of `headwise train`."""
    try:
        return "task" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False
