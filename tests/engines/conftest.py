"""What tests of engines run under: an interpreter whose maxima are a GPU's."""

from __future__ import annotations

import importlib.util
import os

import pytest


@pytest.fixture(autouse=True, scope="session")
def maxima_of_a_gpu() -> None:
    """On a GPU the larger of a number and NaN is the number; NumPy would pass NaN on."""
    if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
        return
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder

    InterpreterBuilder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    InterpreterBuilder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)
