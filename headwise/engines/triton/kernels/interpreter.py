"""The switch of Triton's interpreter, which runs kernels on the CPU; read once, as in Triton."""

from __future__ import annotations

import os

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
