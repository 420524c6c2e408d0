"""The interpreter for tests of engines, with the maxima of a GPU."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest

from headwise.engines import failures


@pytest.fixture(autouse=True, scope="session")
def maxima_of_a_gpu() -> None:
    """Let the maximum of a number and NaN be the number, as on a GPU; NumPy would return NaN."""
    if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
        return
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder

    InterpreterBuilder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    InterpreterBuilder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)


@pytest.fixture(autouse=True)
def every_engine_is_tried() -> Iterator[None]:
    """Forget the kernels that a test made fail."""
    yield
    failures.forget()
