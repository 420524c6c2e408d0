"""The few statistics that rules are made of: fitted exponents, differences with intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from headwise.apps.lab.claim import both
from headwise.messages import Sentence


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """The exponent p of y ≈ c·x^p, by least squares on logarithms.

    >>> slope([1, 2, 4], [3, 12, 48])
    2.0
    """
    log_x, log_y = [math.log(value) for value in x], [math.log(value) for value in y]
    mean_x, mean_y = sum(log_x) / len(log_x), sum(log_y) / len(log_y)
    across = sum((a - mean_x) * (b - mean_y) for a, b in zip(log_x, log_y, strict=True))
    return across / sum((a - mean_x) ** 2 for a in log_x)


# Two-sided 95 % quantiles of Student's t for 1, 2, … degrees of freedom; then the normal's.
_T95 = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


BLEU = both(" % BLEU", "% BLEU")
"""The unit of a difference in percent of BLEU."""
POINTS = both(" percentage points", " 个百分点")


class Difference(NamedTuple):
    """A difference of means and its 95 % interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return self.brief

    @property
    def brief(self) -> Sentence:
        """The difference as a cell of a table whose heading names its unit."""
        if not math.isfinite(self.high - self.low):
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
        if not math.isfinite(self.high - self.low):
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
        return Difference(self.mean * factor, self.low * factor, self.high * factor)


def difference(groups: Mapping[str, Sequence[float]], one: str, other: str) -> Difference:
    """The mean of group `one` minus that of `other`, with Student's interval.

    The scatter is pooled over all groups: runs that differ in their seed alone scatter alike, and a
    group with a single run takes the scatter of the others. That needs several of them: two runs
    may agree by chance, and would then decide about every other. With fewer than three degrees of
    freedom the interval of a single run is infinite.

    >>> print(difference({"a": [2.0, 3.0, 4.0], "b": [1.0, 2.0, 3.0]}, "a", "b"))
    +1.00 (-1.27 to +3.27)
    >>> print(difference({"a": [2.0], "b": [1.0]}, "a", "b"))
    +1.00 (too few runs)
    """
    freedom = sum(len(values) - 1 for values in groups.values())
    mean = {name: sum(values) / len(values) for name, values in groups.items()}
    gap = mean[one] - mean[other]
    alone = min(len(groups[one]), len(groups[other])) < 2
    if freedom < 1 or (alone and freedom < 3):
        return Difference(gap, -math.inf, math.inf)
    squares = sum((x - mean[name]) ** 2 for name, values in groups.items() for x in values)
    quantile = _T95[freedom - 1] if freedom <= len(_T95) else 1.96
    counts = 1 / len(groups[one]) + 1 / len(groups[other])
    half = quantile * math.sqrt(squares / freedom * counts)
    return Difference(gap, gap - half, gap + half)
