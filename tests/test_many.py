"""A hundred thousand small problems, each against the reference."""

from __future__ import annotations

import pytest

from tests.many import check

PART = 5000


@pytest.mark.parametrize("first", range(0, 300, 100))
def test_a_few_hundred_problems_agree_with_the_reference(first: int) -> None:
    for seed in range(first, first + 100):
        check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 100_000, PART))
def test_a_hundred_thousand_problems_agree_with_the_reference(first: int) -> None:
    for seed in range(first, first + PART):
        check(seed)
