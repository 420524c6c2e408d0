"""Files that are written completely or not at all, and the folder for those kept between runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

__all__ = ["cache_folder", "write_whole"]


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


def _sync_folder(folder: Path) -> None:
    """Make a rename survive a power cut, on systems where a folder can be opened."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
