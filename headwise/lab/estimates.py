"""The few statistics that rules are made of: fitted exponents and intervals of means."""

from __future__ import annotations

import math
from collections.abc import Sequence


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


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean of independent values and its 95 % interval by Student's t; infinite for one value.

    >>> tuple(round(x, 3) for x in interval([1.0, 2.0, 3.0]))
    (2.0, -0.484, 4.484)
    """
    count = len(values)
    mean = sum(values) / count
    if count < 2:
        return mean, -math.inf, math.inf
    variance = sum((value - mean) ** 2 for value in values) / (count - 1)
    quantile = _T95[count - 2] if count - 2 < len(_T95) else 1.96
    half = quantile * math.sqrt(variance / count)
    return mean, mean - half, mean + half
