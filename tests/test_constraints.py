"""The packages that `make` installs are those that were tested, all of them."""

import re
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FILE = Path(__file__).parents[1] / "constraints.txt"


def pinned() -> dict[str, str]:
    lines = re.findall(r"^([^#\s=]+)==(\S+)$", FILE.read_text(), re.MULTILINE)
    return {canonicalize_name(name): version for name, version in lines}


def needed(name: str, extras: frozenset[str], found: dict[str, str]) -> None:
    """Add a package, and everything that it needs here, with the installed versions."""
    try:
        package = distribution(name)
    except PackageNotFoundError:
        return  # of an extra that is not installed here
    found[canonicalize_name(name)] = package.version.partition("+")[0]  # +cpu is torch's build
    for line in package.requires or ():
        each = Requirement(line)
        asked = [{"extra": extra} for extra in ("", *extras)]
        if each.marker is not None and not any(map(each.marker.evaluate, asked)):
            continue
        if canonicalize_name(each.name) not in found or each.extras:
            needed(each.name, frozenset(each.extras), found)


def test_every_installed_package_is_pinned() -> None:
    found: dict[str, str] = {}
    needed("headwise", frozenset({"all", "dev"}), found)
    found.pop("headwise")
    if any(version != pinned().get(name, version) for name, version in found.items()):
        pytest.skip("this environment was not made from constraints.txt")
    assert len(found) > 50
    assert not sorted(set(found) - set(pinned()))
