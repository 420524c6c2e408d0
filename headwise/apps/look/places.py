"""Checks the names of files before anything is computed for them."""

from __future__ import annotations

from pathlib import Path


def check_place(path: Path, page: bool) -> None:
    """ValueError unless a file of this name can be written; that of a page ends in .html."""
    if path.is_dir() or not _resolved(path).parent.is_dir():
        raise ValueError(f"{path} can't be written: name a file in an existing folder")
    if page and path.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"{path} is not a page: use a name that ends in .html")


def _resolved(path: Path) -> Path:
    """The path behind all links."""
    try:
        return path.resolve()
    except (OSError, RuntimeError) as error:  # Python 3.11 and 3.12 raise RuntimeError
        raise ValueError(f"{path} can't be written: its links lead in a circle") from error
