"""The contracts for those who add to headwise: an engine, a mask, a statistic, an alarm.

docs/architecture.md has a recipe for each. Everything else that headwise's own applications use is
in the `__all__` of the library's packages.
"""

from headwise.core.arguments import is_integer, is_number
from headwise.core.intervals import Mask
from headwise.core.options import Options
from headwise.core.patterns import Between, Causal, Dense, Documents, Lengths, Window
from headwise.core.problem import Problem
from headwise.core.row_sums import ROW_SUMS, RowResults, RowSum
from headwise.core.spans import SPAN_PREFIX
from headwise.engines.contract import Engine
from headwise.engines.plan import ENGINES
from headwise.watching.rules import Rule

__all__ = [
    "ENGINES",
    "ROW_SUMS",
    "SPAN_PREFIX",
    "Between",
    "Causal",
    "Dense",
    "Documents",
    "Engine",
    "Lengths",
    "Mask",
    "Options",
    "Problem",
    "RowResults",
    "RowSum",
    "Rule",
    "Window",
    "is_integer",
    "is_number",
]
