"""Every notebook runs from its first cell to its last, and its assertions hold."""

import re

import pytest

from bench.notebooks import names, read, run

LONG = {
    "induction-circuit", "memory", "sparse", "training-health", "two-checkpoints", "what-heads-do",
}  # fmt: skip
"""Notebooks that take more than a few seconds."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in LONG else []) for name in names()],
)
def test_a_notebook_runs(name: str) -> None:
    notebook = read(name)
    kept = [len(cell.get("outputs", [])) for cell in notebook["cells"]]
    run(notebook, name)
    # What is kept for readers is what the cells give: as many outputs, if not the same digits.
    assert [len(cell.get("outputs", [])) for cell in notebook["cells"]] == kept


@pytest.mark.parametrize("name", names())
def test_a_notebook_asks_a_question_or_names_its_subject_and_checks_what_it_claims(
    name: str,
) -> None:
    cells = read(name)["cells"]
    assert cells[0]["cell_type"] == "markdown"
    assert cells[0]["source"][0].startswith("# ")
    text = [cell for cell in cells if cell["cell_type"] == "markdown"]
    for cell in text:  # in both languages, with the same headings and code
        english, chinese = "".join(cell["source"]), "".join(cell["metadata"]["zh"])
        assert english.count("#") == chinese.count("#")
        assert re.findall(r"`[^`]+`", english) == re.findall(r"`[^`]+`", chinese)
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert any("assert " in source for source in code)
