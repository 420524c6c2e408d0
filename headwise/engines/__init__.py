"""The engines, each one way to compute attention; the plan; the cache of prepared calls."""

from headwise.engines.calls import forget as forget_prepared_calls
from headwise.engines.failures import KernelError, cause_of
from headwise.engines.failures import failed as failed_kernels
from headwise.engines.plan import Plan, engines

__all__ = [
    "KernelError",
    "Plan",
    "cause_of",
    "engines",
    "failed_kernels",
    "forget_prepared_calls",
]
