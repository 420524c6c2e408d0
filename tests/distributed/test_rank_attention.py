"""Attention over split sequences is that of one process, whatever the mask, layout and options."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.distributed.cases import Case, alone, distances, joined, split
from tests.distributed.processes import Processes
from tests.problems import KINDS, Recipe, every_pair

pytestmark = pytest.mark.xdist_group("ranks")  # one worker, one set of processes

LAYOUTS = ("contiguous", "head_tail", "balanced")
MOVES = ("auto", "ranges", "ring", "gather")


def check(processes: Processes, case: Case) -> None:
    found = joined(processes.run(split, case.ranks, case))
    far = distances(found, alone(case.recipe))
    assert max(far.values()) <= 1e-9, (str(case), far)


@pytest.mark.parametrize("mask", KINDS["mask"])
def test_every_mask_in_every_layout(processes: Processes, mask: str) -> None:
    for i, layout in enumerate(LAYOUTS):
        recipe = Recipe(mask=mask, heads="grouped", seed=i, longest=24)
        check(processes, Case(recipe, 2 + i % 3, layout, MOVES[(i + len(mask)) % 4]))


PAIRS = every_pair(
    dtype=("float64",), parameters=("same dtype",), layout=("packed", "expanded"),
    logits=("usual", "huge"),
)  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_pair_of_options(processes: Processes, ranks: int) -> None:
    for i, recipe in enumerate(PAIRS):
        if i % 3 == ranks - 2:
            layout = LAYOUTS[i // 3 % (3 if recipe.lengths == "square" else 2)]
            check(processes, Case(replace(recipe, longest=12), ranks, layout, MOVES[i % 4]))
