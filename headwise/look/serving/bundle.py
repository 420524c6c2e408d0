"""The built page: one script, one style sheet and the HTML that names them."""

from __future__ import annotations

from pathlib import Path

STATIC = Path(__file__).parent.parent / "static"
"""Where the build puts it; nothing there is in the repository."""

MISSING = """The page is not built: {folder} lacks {name}.

It is built when headwise is installed from its source: pip install -e . in the repository.
"""


def built(folder: Path = STATIC) -> tuple[str, str, str]:
    """The HTML, the script and the style sheet; ValueError says how to build them."""
    found = []
    for name in ("index.html", "headwise.js", "headwise.css"):
        path = folder / name
        if not path.is_file():
            raise ValueError(MISSING.format(folder=folder, name=name))
        found.append(path.read_text(encoding="utf-8"))
    return found[0], found[1], found[2]
