"""The statistics that rules are made of: exponents, differences with intervals, tests of a table.

Intervals and tests are Student's as Welch corrects them: each of two groups of runs has its own
scatter, and nothing else enters, so that one comparison has the same interval wherever it stands.
They need scipy, `pip install 'headwise[lab]'`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from headwise.apps.lab.claim import Verdict, both
from headwise.messages import Sentence

LEVEL = 0.05
"""How often chance alone may look like a difference."""
BLEU = both(" % BLEU", "% BLEU")
"""The unit of a difference in percent of BLEU."""
BLEU_POINTS = both(" BLEU", " BLEU")
POINTS = both(" percentage points", " 个百分点")


class NoStatisticsError(ValueError):
    """A comparison can't be judged here, because scipy is not installed."""


def _student() -> Any:
    """scipy's distributions."""
    try:
        from scipy import stats
    except ImportError as missing:
        raise NoStatisticsError(
            "comparing runs needs scipy: pip install 'headwise[lab]'"
        ) from missing
    return stats


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """The exponent p of y ≈ c·x^p, by least squares on logarithms.

    >>> slope([1, 2, 4], [3, 12, 48])
    2.0
    """
    log_x, log_y = [math.log(value) for value in x], [math.log(value) for value in y]
    mean_x, mean_y = sum(log_x) / len(log_x), sum(log_y) / len(log_y)
    across = sum((a - mean_x) * (b - mean_y) for a, b in zip(log_x, log_y, strict=True))
    return across / sum((a - mean_x) ** 2 for a in log_x)


class Line(NamedTuple):
    """The exponent p of y ≈ c·x^p, its 95 % interval, standard error and degrees of freedom."""

    power: float
    low: float
    high: float
    error: float = 0.0
    freedom: float = math.inf

    @property
    def said(self) -> Sentence:
        """The exponent in a sentence."""
        return both(
            "{power:.2f} (95 % interval {low:.2f} to {high:.2f})",
            "{power:.2f}（95% 区间 {low:.2f} 至 {high:.2f}）",
            **self._asdict(),
        )

    def shows(self, true: float) -> float:
        """How often so many points, with this scatter, show a true exponent of this size."""
        return Difference(true, self.low, self.high, self.error, self.freedom).power(true)


def fitted(x: Sequence[float], y: Sequence[float]) -> Line:
    """The exponent of a power law by least squares on logarithms, with Student's interval.

    >>> print(fitted([1, 2, 4, 8], [3, 13, 47, 190]).said)
    1.98 (95 % interval 1.84 to 2.13)
    """
    found = _student().linregress([math.log(each) for each in x], [math.log(each) for each in y])
    power, error = float(found.slope), float(found.stderr)
    half = float(_student().t.ppf(1 - LEVEL / 2, len(x) - 2)) * error
    return Line(power, power - half, power + half, error, len(x) - 2.0)


class Difference(NamedTuple):
    """A difference of means, its 95 % interval, its standard error and degrees of freedom."""

    mean: float
    low: float
    high: float
    error: float = math.inf
    freedom: float = 0.0

    def __str__(self) -> str:
        return self.brief

    @property
    def known(self) -> bool:
        """True if there are runs enough for an interval."""
        return math.isfinite(self.high - self.low)

    @property
    def brief(self) -> Sentence:
        """The difference as a cell of a table whose heading names its unit."""
        if not self.known:
            return both("{x:+.2f} (too few runs)", "{x:+.2f}（次数太少）", x=self.mean)
        return both(
            "{mean:+.2f} ({low:+.2f} to {high:+.2f})",
            "{mean:+.2f}（{low:+.2f} 至 {high:+.2f}）",
            **self._asdict(),
        )

    def said(self, unit: Sentence | None = None) -> Sentence:
        """The difference in a sentence, with its unit.

        >>> Difference(1.0, -1.27, 3.27).said(both(" % BLEU", "% BLEU"))
        '+1.00 % BLEU (95 % interval -1.27 to +3.27)'
        """
        unit = unit or both("", "")
        if not self.known:
            few = "{mean:+.2f}{unit} (too few runs for an interval)"
            return both(few, "{mean:+.2f}{unit}（次数太少，没有区间）", mean=self.mean, unit=unit)
        return both(
            "{mean:+.2f}{unit} (95 % interval {low:+.2f} to {high:+.2f})",
            "{mean:+.2f}{unit}（95% 区间 {low:+.2f} 至 {high:+.2f}）",
            mean=self.mean,
            low=self.low,
            high=self.high,
            unit=unit,
        )

    def scaled(self, factor: float) -> Difference:
        """The difference in other units."""
        low, high = sorted((self.low * factor, self.high * factor))
        return Difference(self.mean * factor, low, high, self.error * abs(factor), self.freedom)

    def probability(self) -> float:
        """The p-value: how often runs that don't differ would differ by as much."""
        if not self.known:
            return 1.0
        if self.error == 0:
            return 1.0 if self.mean == 0 else 0.0
        return float(2 * _student().t.sf(abs(self.mean) / self.error, self.freedom))

    def power(self, effect: float) -> float:
        """How often so many runs, with this scatter, would show a true difference of this size."""
        if not self.known:
            return 0.0
        if self.error == 0:
            return 1.0
        stats = _student()
        edge, shift = stats.t.ppf(1 - LEVEL / 2, self.freedom), abs(effect) / self.error
        above = stats.nct.sf(edge, self.freedom, shift)
        return float(above + stats.nct.cdf(-edge, self.freedom, shift))

    def within(self, low: float, high: float) -> bool:
        """True if two one-sided tests (TOST) find the difference above `low` and below `high`.

        That is what has to be shown before two things are called the same: an interval that
        contains zero shows nothing.
        """
        if not self.known:
            return False
        half = self.error and float(_student().t.ppf(1 - LEVEL, self.freedom)) * self.error
        return low < self.mean - half and self.mean + half < high


def difference(groups: Mapping[str, Sequence[float]], one: str, other: str) -> Difference:
    """The mean of group `one` minus that of `other`, with Welch's interval.

    A group with a single run has no scatter, and the interval is infinite.

    >>> print(difference({"a": [2.0, 3.0, 4.0], "b": [1.0, 2.0, 3.0]}, "a", "b"))
    +1.00 (-1.27 to +3.27)
    >>> print(difference({"a": [2.0], "b": [1.0]}, "a", "b"))
    +1.00 (too few runs)
    """
    a, b = groups[one], groups[other]
    gap = sum(a) / len(a) - sum(b) / len(b)
    if min(len(a), len(b)) < 2:
        return Difference(gap, -math.inf, math.inf)
    shares = [_variance(values) / len(values) for values in (a, b)]
    error = math.sqrt(sum(shares))
    if error == 0:  # equal runs tell nothing of how others would scatter
        return Difference(gap, gap, gap, 0.0, len(a) + len(b) - 2.0)
    freedom = error**4 / sum(
        share**2 / (len(values) - 1) for share, values in zip(shares, (a, b), strict=True)
    )
    half = float(_student().t.ppf(1 - LEVEL / 2, freedom)) * error
    return Difference(gap, gap - half, gap + half, error, freedom)


DRAWS = 400
"""Samples of sentences, which give the standard error to 4 %."""


def over_sentences(
    one: Sequence[Sequence[Sequence[int]]],
    other: Sequence[Sequence[Sequence[int]]],
    score: Callable[[Sequence[float]], float],
) -> float:
    """The standard error, over test sentences, of the mean score of runs minus that of others.

    Each run is a list of sentences, each a list of counts; `score` takes their sums. A paired
    bootstrap: sentences are drawn with replacement, the same ones for all runs, so that the runs
    stay and the error says what other sentences would have shown.

    >>> runs = [[[1], [3]]], [[[1], [2]]]
    >>> round(over_sentences(*runs, lambda sums: sums[0]), 1)  # gaps of 0, 1, 1, 2
    0.7
    """
    import numpy as np

    size = len(other[0])
    draws = np.random.default_rng(0).multinomial(size, np.full(size, 1 / size), size=DRAWS)

    def means(runs: Sequence[Sequence[Sequence[int]]]) -> Any:
        return np.mean(
            [[score(sums) for sums in (draws @ np.asarray(x)).tolist()] for x in runs], 0
        )

    return float(np.std(means(one) - means(other), ddof=1))


def joined(gap: Difference, error: float) -> Difference:
    """A difference of runs with another, independent source of error.

    The variances add up. The degrees of freedom stay those of the runs, which are the fewest, so
    that the interval is never narrower than it was.

    >>> print(joined(Difference(1.0, -1.27, 3.27, 0.816, 4.0), 0.5))
    +1.00 (-1.66 to +3.66)
    """
    if not gap.known or error == 0:
        return gap
    whole = math.hypot(gap.error, error)
    half = float(_student().t.ppf(1 - LEVEL / 2, gap.freedom)) * whole
    return Difference(gap.mean, gap.mean - half, gap.mean + half, whole, gap.freedom)


def _variance(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return sum((x - mean) ** 2 for x in values) / (len(values) - 1)


class Share(NamedTuple):
    """How many of several hold, with Wilson's 95 % interval of their share."""

    holds: int
    of: int
    low: float
    high: float

    @property
    def said(self) -> Sentence:
        """The share in a sentence about settings."""
        return both(
            "{holds} of {of} settings ({mean:.0f} %, 95 % interval {low:.0f} to {high:.0f})",
            " {of} 个设置中的 {holds} 个（{mean:.0f}%，95% 区间 {low:.0f} 至 {high:.0f}）",
            **(self._asdict() | self.interval),
        )

    @property
    def interval(self) -> dict[str, Any]:
        """The share in percent, as a verdict carries it."""
        shares = {"mean": self.holds / self.of, "low": self.low, "high": self.high}
        return {name: 100 * x for name, x in shares.items()} | {"unit": "% of settings"}

    def power(self, true: float) -> float:
        """How often so many show that a true share of this size is more than half."""
        enough = next(
            x for x in range(self.of + 2) if x > self.of or proportion(x, self.of).low > 0.5
        )
        return float(_student().binom.sf(enough - 1, self.of, true))


def proportion(holds: int, of: int) -> Share:
    """So many of several, with Wilson's interval of the share.

    >>> proportion(71, 80).said
    '71 of 80 settings (89 %, 95 % interval 80 to 94)'
    """
    found = _student().binomtest(holds, of).proportion_ci(method="wilson")
    return Share(holds, of, float(found.low), float(found.high))


def unlike(holds: int, of: int, others: int, of_others: int) -> float:
    """Fisher's exact p-value: how often two equal shares would differ by as much.

    >>> round(unlike(1, 9, 11, 12), 4)
    0.0004
    """
    table = [[holds, of - holds], [others, of_others - others]]
    return float(_student().fisher_exact(table).pvalue)


def holm(probabilities: Sequence[float]) -> list[float]:
    """The p-values of several comparisons, corrected by Holm for there being several.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    order = sorted(range(len(probabilities)), key=probabilities.__getitem__)
    found, least = [0.0] * len(order), 0.0
    for rank, place in enumerate(order):
        least = max(least, min(1.0, (len(order) - rank) * probabilities[place]))
        found[place] = least
    return found


def measured(verdict: Verdict, gap: Difference, unit: Sentence, effect: float) -> Verdict:
    """The verdict with the interval that it rests on; if it is undecided, with the power.

    `effect` is the smallest difference that would have mattered.
    """
    power = gap.power(effect)
    interval = {
        "mean": gap.mean,
        "low": gap.low if gap.known else None,
        "high": gap.high if gap.known else None,
        "unit": unit.strip(),
        "effect": effect,
    }
    because = verdict.because
    if verdict.verdict == "undecided":
        because = both(
            "{because}; so many runs show a true difference of {effect:g}{unit} with a "
            "probability of {power:.0%}",
            "{because}；这样多的训练能看出 {effect:g}{unit} 真实差别的概率是 {power:.0%}",
            because=because,
            effect=effect,
            unit=unit,
            power=power,
        )
    return replace(verdict, because=because, interval=interval, power=power)
