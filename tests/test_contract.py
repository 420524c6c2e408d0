"""Applications use nothing of the library but its public names, so that they prove its API."""

import ast
import importlib
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.public_names import LIBRARY, LISTED, PACKAGE, listing, public_names

APPS = "headwise.apps"


def library_names(file: Path) -> Iterator[tuple[str, str]]:
    """Each (module, name) that an application's file imports from the library."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found = [(each.name, "") for each in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found = [(node.module, each.name) for each in node.names]
        else:
            continue
        for module, name in found:
            inside = module == LIBRARY or module.startswith(f"{LIBRARY}.")
            if inside and not f"{module}.{name}".startswith(APPS):
                yield module, name


def is_public(module: str, name: str) -> bool:
    """True if a name is in the `__all__` of a module or package that is itself public."""
    names: list[str] = getattr(importlib.import_module(module), "__all__", [])
    if not name:  # `import headwise.x`
        return bool(names)
    return name in names or (module == LIBRARY and is_public_module(f"{module}.{name}"))


def is_public_module(name: str) -> bool:
    try:
        return hasattr(importlib.import_module(name), "__all__")
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize("app", ["cli", "lab", "look", "train"])
def test_an_application_imports_public_names_only(app: str) -> None:
    used = {
        (f"{file.relative_to(PACKAGE)}", *found)
        for file in (PACKAGE / "apps" / app).rglob("*.py")
        for found in library_names(file)
    }
    assert used, "no import was found, so nothing was checked"
    assert not sorted(use for use in used if not is_public(*use[1:]))


def test_every_public_name_exists() -> None:
    for module, name in public_names():
        owner = importlib.import_module(module)
        assert hasattr(owner, name) or importlib.import_module(f"{module}.{name}"), (module, name)


def test_no_public_name_comes_or_goes_unnoticed() -> None:
    before, now = set(LISTED.read_text().split()), set(listing().split())
    assert not before - now, "a name that moves or goes keeps an alias for a release"
    assert not now - before, "python -m tests.public_names lists new names"


def test_the_linter_keeps_every_part_of_the_library_from_applications() -> None:
    settings = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    (kept,) = [each for each in contracts if each.get("forbidden_modules") == [APPS]]
    there = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__"}
    there |= {path.parent.name for path in PACKAGE.glob("*/__init__.py")} - {"apps"}
    assert set(kept["source_modules"]) == {f"{LIBRARY}.{name}" for name in there}
