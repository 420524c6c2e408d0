"""Pictures for papers, by matplotlib: their formats, fonts and metadata."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

KINDS = (".svg", ".pdf", ".png")

FONTS = ("DejaVu Sans", "Noto Sans CJK SC", "PingFang SC", "Microsoft YaHei", "Arial Unicode MS")


def check(path: Path) -> None:
    """ValueError unless a file's name ends in .svg, .pdf or .png."""
    if path.suffix.lower() not in KINDS:
        raise ValueError(f"{path} is not a picture: use a name that ends in {', '.join(KINDS)}")


def drawing() -> tuple[Any, Any]:
    """matplotlib and its Figure; ValueError names the extra if it is not installed."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ModuleNotFoundError as missing:
        raise ValueError("a picture needs matplotlib: pip install 'headwise[look]'") from missing
    return matplotlib, Figure


def fonts() -> list[str]:
    """The installed fonts, of those that together have most of the world's letters."""
    from matplotlib.font_manager import get_font_names

    here = set(get_font_names())
    return [name for name in FONTS if name in here]


def without_font(texts: Sequence[str]) -> str:
    """The letters that no installed font of `fonts` has, each once."""
    from matplotlib.font_manager import findfont, get_font

    known = {code for name in fonts() for code in get_font(findfont(name)).get_charmap()}
    return "".join(dict.fromkeys(x for text in texts for x in text if ord(x) not in known))


def metadata(path: Path) -> dict[str, Any]:
    """Metadata without a date, so that the same head gives the same file."""
    return {"Date": None} if path.suffix.lower() == ".svg" else {}
