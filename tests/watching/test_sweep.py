"""Every family of transformers that builds from a tiny config is read, or says what is not."""

import pytest

from tests.watching import sweep

QUICK = ("bloom", "led", "llama", "wavlm")


@pytest.mark.parametrize(
    "family",
    [
        family if family in QUICK else pytest.param(family, marks=pytest.mark.slow)
        for family in sweep.families()
    ],
)
def test_a_family_is_read_exactly_or_says_what_is_not(family: str) -> None:
    found = sweep.check(family)
    assert not found.wrong, found
    if family in QUICK:
        assert found.built == "yes"
        assert found.heads > 0
        assert found.unread == []


def test_the_table_counts_families_and_names_those_that_are_not_complete() -> None:
    results = [
        sweep.Result("llama", heads=8, bits="same", figures="3e-07", headwise="4e-07"),
        sweep.Result("led", heads=8, unread=["a.b"], bits="same", figures="wrong: off by 2"),
        sweep.Result("clip", built="ValueError: no"),
    ]
    text = sweep.table(results)
    assert "3 families, of which 2 build" in text
    assert "| led | 8 | `a.b` | figures: off by 2 |" in text
    assert "Read completely: llama." in text
    assert "not tried: clip." in text
