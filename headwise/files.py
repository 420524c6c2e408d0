"""Files that are written completely or not at all, JSON, locks, and the cache folder."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

__all__ = [
    "FolderLock",
    "cache_folder",
    "json_object",
    "parsed_json",
    "read_json",
    "write_whole",
]

DEEPEST = 60
"""Levels of lists and dictionaries in a JSON file; more would exhaust the stack of its readers."""


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


def read_json(path: Path) -> Any:
    """The content of a JSON file; ValueError, without the file's name, if it is damaged."""
    return parsed_json(path.read_text(encoding="utf-8"))


def parsed_json(text: bytes | str) -> Any:
    """The content of a JSON text; ValueError if it is damaged.

    >>> parsed_json("[" * 70 + "]" * 70)
    Traceback (most recent call last):
    ValueError: it is nested more than 60 levels deep
    """
    try:
        content = json.loads(text)
        deep = _deeper(content, DEEPEST)
    except RecursionError:
        deep = True
    if deep:
        raise ValueError(f"it is nested more than {DEEPEST} levels deep")
    return content


def json_object(content: bytes | str, origin: object) -> dict[str, Any]:
    """Parse JSON that must hold an object; ValueError names the origin, whatever is wrong.

    >>> json_object('{"layers": 2}', "config.json")
    {'layers': 2}
    >>> json_object("null", "config.json")
    Traceback (most recent call last):
    ValueError: config.json is damaged: it holds a NoneType, not an object of JSON
    """
    try:
        found = parsed_json(content)
    except ValueError as error:
        raise ValueError(f"{origin} is damaged: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(
            f"{origin} is damaged: it holds a {type(found).__name__}, not an object of JSON"
        )
    return found


def _deeper(content: Any, levels: int) -> bool:
    """True if lists and dictionaries are nested more than so many levels deep."""
    level = [content]
    for _ in range(levels + 1):
        inside = [list(x.values()) if isinstance(x, dict) else x for x in level]
        level = [x for each in inside if isinstance(each, list) for x in each]
        if not level:
            return False
    return True


class FolderLock:
    """Keeps other writers out of a folder until it is released or this process ends.

    ValueError names the folder and the process that writes into it. A killed process leaves the
    file of its lock behind, which keeps nobody out. Where the system has no such locks (Windows,
    some network drives) nobody is kept out.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> lock = FolderLock(folder)
    >>> FolderLock(folder)
    Traceback (most recent call last):
    ValueError: process ... is writing into ...; wait until it ends, or choose another folder
    >>> lock.release()
    """

    def __init__(self, folder: Path, name: str = ".lock") -> None:
        self._handle: int | None = None
        try:
            import fcntl
        except ImportError:  # Windows
            return
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(handle, 20).decode(errors="replace").strip()
            os.close(handle)
            who = f"process {holder}" if holder.isdecimal() else "another process"
            raise ValueError(
                f"{who} is writing into {folder}; wait until it ends, or choose another folder"
            ) from None
        except OSError:  # a drive without locks
            os.close(handle)
            return
        self._handle = handle
        try:
            os.ftruncate(handle, 0)
            os.write(handle, f"{os.getpid()}\n".encode())
        except OSError:  # on a full disk the lock does without the number
            pass

    def release(self) -> None:
        """Let others write; nothing happens if it was released before."""
        handle, self._handle = self._handle, None
        if handle is not None:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_UN)  # also for children that have inherited it
            os.close(handle)

    def __del__(self) -> None:
        self.release()
