"""The package stays one that a stranger can read: few modules per folder, one name for one idea."""

import ast
from pathlib import Path

import pytest

import headwise
from bench.house import size

PACKAGE = Path(headwise.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
FOLDERS = sorted({path.parent for path in MODULES})

SAME = {"look", "watch", "cost", "train", "doctor", "engine"}
"""Modules that may share a name: a command with what it shows, and the engine of each folder."""

LEARNT = {"ALiBi", "RelativeBuckets", "Additive", "General", "Cosine"}
"""A module of hw.nn with learnt weights has the name of the value that it passes to a call."""


def inside(names: list[str]) -> bool:
    return any(PACKAGE / name in MODULES for name in names)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_a_folder_has_at_most_twenty_modules(folder: Path) -> None:
    assert len(list(folder.glob("*.py"))) <= 20


def test_no_two_modules_share_a_name() -> None:
    shared = size(PACKAGE)["duplicate_modules"]
    assert {
        name: files for name, files in shared.items() if name not in SAME and inside(files)
    } == {}


def test_no_two_public_classes_share_a_name() -> None:
    shared = size(PACKAGE)["duplicate_classes"]
    assert {
        name: files for name, files in shared.items() if name not in LEARNT and inside(files)
    } == {}


def test_no_docstring_begins_with_a_question_word() -> None:
    found = []
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                first = (ast.get_docstring(node) or "").split("\n")[0]
                if first.startswith(("What ", "Whether ", "Who ", "Which ")):
                    found.append(f"{path.relative_to(PACKAGE)}: {first}")
    assert not found, "\n".join(found)
