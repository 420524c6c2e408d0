"""Parameters of which `make test` takes a part, and `make test-all` every one."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def thinned(*axes: Iterable[Any], keep: int = 2) -> list[Any]:
    """Every combination of these axes; all but one in `keep` are slow.

    Each value of an axis that is longer than `keep` meets some value of the others.
    """
    found = []
    for numbered in product(*map(enumerate, axes)):
        left_out = sum(n for n, _ in numbered) % keep
        values = [value for _, value in numbered]
        found.append(pytest.param(*values, marks=pytest.mark.slow if left_out else ()))
    return found
