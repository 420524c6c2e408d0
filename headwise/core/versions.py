"""Tensors that are kept for later, and whether they still hold what they held."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class Unchanged:
    """Tensors by their names, as they are now.

    PyTorch counts how often a tensor, or a view of the same one, is written to; but not what
    inference mode or a compiler made: of those nothing is known, and `written` never names them.

    >>> k = torch.zeros(3)
    >>> kept = Unchanged({"k": k})
    >>> kept.written(), k.add_(1).sum().item(), kept.written()
    (None, 3.0, 'k')
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)
        self._writes = _writes(self._tensors)

    def written(self) -> str | None:
        """The name of a tensor that was written to since; None: there is none."""
        now = _writes(self._tensors)
        known = [name for name in self._writes if name in now]
        return next((name for name in known if now[name] != self._writes[name]), None)

    def __getstate__(self) -> dict[str, Tensor]:
        return self._tensors  # a copy counts from its own beginning

    def __setstate__(self, tensors: dict[str, Tensor]) -> None:
        self.__init__(tensors)  # type: ignore[misc]


def overwritten(x: Tensor) -> bool:
    """Whether a tensor may be written over, as a cache's memory is: it was before, or who knows."""
    return x.is_inference() or x._version > 0


def _writes(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    if torch.compiler.is_compiling():
        return {}
    return {name: x._version for name, x in tensors.items() if not x.is_inference()}
