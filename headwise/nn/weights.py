"""Others' names for the same matrices: state dicts of other libraries, said in ours."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def translate(module: nn.Module, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Rename what another library calls its projections, in place; a hook of `load_state_dict`."""
