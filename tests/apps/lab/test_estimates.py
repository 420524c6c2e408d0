"""Intervals, corrections, equivalence and power, beside scipy and by hand."""

from __future__ import annotations

import math
import sys

import pytest
import torch

from headwise.apps.lab.claim import both, undecided
from headwise.apps.lab.estimates import (
    BLEU_POINTS,
    Difference,
    NoStatisticsError,
    difference,
    holm,
    joined,
    measured,
    over_sentences,
)

stats = pytest.importorskip("scipy.stats")
A, B = [2.1, 2.9, 4.2, 3.3], [1.0, 1.1, 0.9]


def test_the_interval_is_welch_s_of_the_two_groups_alone() -> None:
    mine = difference({"a": A, "b": B}, "a", "b")
    theirs = stats.ttest_ind(A, B, equal_var=False)
    low, high = theirs.confidence_interval()
    assert (mine.low, mine.high) == pytest.approx((low, high))
    assert mine.probability() == pytest.approx(theirs.pvalue)
    others = {"a": A, "b": B, "wild": [0.0, 900.0]}
    assert difference(others, "a", "b") == mine  # what a third group does is no matter


def test_two_runs_against_eight_get_a_wide_interval() -> None:
    """The quantile is that of one to two degrees of freedom, not the normal's 1.96."""
    eight = [1.31, 1.32, 1.31, 1.31, 1.31, 1.33, 1.31, 1.32]
    gap = difference({"a": [2.47, 2.66], "b": eight}, "a", "b")
    assert gap.freedom == pytest.approx(1, abs=0.01)
    assert gap.high - gap.mean > 1.1


@pytest.mark.parametrize("freedom", [11, 30])
def test_quantiles_are_student_s(freedom: int) -> None:
    half = freedom // 2 + 1
    values = [0.0, 1.0] * half
    gap = difference({"a": values, "b": values}, "a", "b")
    assert (gap.high - gap.mean) / gap.error == pytest.approx(stats.t.ppf(0.975, gap.freedom))


def test_holm_corrects_as_by_hand() -> None:
    assert holm([0.001, 0.02, 0.03, 0.5]) == pytest.approx([0.004, 0.06, 0.06, 0.5])


def test_an_interval_with_zero_is_not_agreement() -> None:
    wide = difference({"a": [0.0, 10.0, 5.0], "b": [1.0, 9.0, 5.5]}, "a", "b")
    assert wide.low < 0 < wide.high
    assert not wide.within(-1, 1)
    narrow = difference({"a": [5.0, 5.1, 4.9], "b": [5.0, 5.1, 4.95]}, "a", "b")
    assert narrow.within(-1, 1)


def test_power_is_the_share_of_repetitions_that_show_the_effect() -> None:
    gap = Difference(0.0, -1.0, 1.0, math.sqrt(2 / 6), 10.0)  # two groups of six, deviation one
    torch.manual_seed(0)
    a, b = torch.randn(4000, 6) + 1.5, torch.randn(4000, 6)
    found = stats.ttest_ind(a.numpy(), b.numpy(), axis=1).pvalue < 0.05
    assert gap.power(1.5) == pytest.approx(found.mean(), abs=0.03)


def test_an_interval_over_sentences_too_covers_what_other_sentences_show() -> None:
    """Two systems that don't differ, on 100 sentences of which some happen to suit one of them."""
    torch.manual_seed(0)
    by_seeds, by_both = 0, 0
    for _ in range(60):
        suits = torch.randn(2, 1, 100) + 0.1 * torch.randn(2, 4, 100)  # systems, runs, sentences
        systems = [[[[x] for x in run] for run in runs] for runs in suits.tolist()]
        seeds = dict(zip("ab", suits.sum(-1).tolist(), strict=True))
        gap = difference(seeds, "a", "b")
        whole = joined(gap, over_sentences(*systems, lambda sums: sums[0]))
        assert whole.mean == gap.mean
        by_seeds += gap.low < 0 < gap.high
        by_both += whole.low < 0 < whole.high
    assert by_seeds < 20  # seeds alone tell nothing of other sentences
    assert by_both >= 54


def test_an_undecided_verdict_says_its_power() -> None:
    gap = difference({"a": A, "b": [1.0, 3.0, 5.0]}, "a", "b")
    judged = measured(undecided(both("so it is", "如此")), gap, BLEU_POINTS, 0.5)
    assert judged.power == gap.power(0.5)
    assert "show a true difference of 0.5 BLEU with a probability of" in judged.because
    assert judged.interval is not None
    assert judged.interval["low"] == gap.low


def test_without_scipy_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(NoStatisticsError, match=r"pip install 'headwise\[lab\]'"):
        difference({"a": A, "b": B}, "a", "b")
