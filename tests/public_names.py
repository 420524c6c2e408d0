"""The public names of the library, as tests/public_names.txt lists them.

`python -m tests.public_names` writes the list anew, after a name was added. A name that moves or
goes keeps an alias for a release, so that programs of its users go on.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import headwise

PACKAGE = Path(headwise.__file__).parent
LISTED = Path(__file__).with_suffix(".txt")
LIBRARY = "headwise"


def public_names() -> Iterator[tuple[str, str]]:
    """Each (module, name) in the `__all__` of a package, or of a module at the library's root."""
    for file in {*PACKAGE.rglob("__init__.py"), *PACKAGE.glob("*.py")}:
        parts = file.relative_to(PACKAGE).with_suffix("").parts
        if parts[0] in ("apps", "__main__", "transformers") or "kernels" in parts:
            continue
        name = ".".join([LIBRARY, *(part for part in parts if part != "__init__")])
        for each in getattr(importlib.import_module(name), "__all__", []):
            yield name, each


def listing() -> str:
    """The names as the file has them, one per line."""
    return "".join(sorted(f"{module}.{name}\n" for module, name in public_names()))


if __name__ == "__main__":
    LISTED.write_text(listing())
