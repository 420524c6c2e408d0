"""Files that are written completely or not at all, and the folder for those kept between runs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def cache_folder() -> Path:
    """The folder of downloads and measurements: $HEADWISE_CACHE, or this system's cache folder."""
    if chosen := os.environ.get("HEADWISE_CACHE"):
        return Path(chosen).absolute()  # downloads run commands in folders of their own
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData/Local")) / "headwise"
    if sys.platform == "darwin":
        return Path.home() / "Library/Caches/headwise"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headwise"


def write_whole(path: Path, content: bytes | str) -> None:
    """Replace a file atomically: the old one stays until the new one is complete.

    The temporary file is `.<name>-<process id>`; a killed process leaves it behind.
    """
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def json_object(content: bytes | str, origin: object) -> dict[str, Any]:
    """Parse JSON that must hold an object; ValueError names the origin, whatever is wrong.

    >>> json_object('{"layers": 2}', "config.json")
    {'layers': 2}
    >>> json_object("null", "config.json")
    Traceback (most recent call last):
    ValueError: config.json is damaged: it holds a NoneType, not an object of JSON
    """
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:  # recursion: nested a thousand deep
        raise ValueError(f"{origin} is damaged: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(
            f"{origin} is damaged: it holds a {type(found).__name__}, not an object of JSON"
        )
    return found


def _sync_folder(folder: Path) -> None:
    """Make a rename survive a power cut, on systems where a folder can be opened."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
