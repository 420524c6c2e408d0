"""Detection of in-place writes to tensors that are kept for later."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class Versions:
    """The versions of named tensors now, to tell later which of them have been written to.

    PyTorch counts the in-place writes to a tensor and its views, except for tensors made in
    inference mode or by a compiler: `modified` never names those.

    >>> k = torch.zeros(3)
    >>> kept = Versions({"k": k})
    >>> kept.modified(), k.add_(1).sum().item(), kept.modified()
    (None, 3.0, 'k')
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)
        self._versions = _versions(self._tensors)

    def modified(self) -> str | None:
        """The name of a tensor that has been written to since; None if there is none."""
        now = _versions(self._tensors)
        known = [name for name in self._versions if name in now]
        return next((name for name in known if now[name] != self._versions[name]), None)

    def __getstate__(self) -> dict[str, Tensor]:
        return self._tensors  # a copy starts from its own versions

    def __setstate__(self, tensors: dict[str, Tensor]) -> None:
        self.__init__(tensors)  # type: ignore[misc]


def may_be_overwritten(x: Tensor) -> bool:
    """True if a tensor may be written to later, as a cache is: it was before, or is not counted."""
    return x.is_inference() or x._version > 0


def _versions(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    if torch.compiler.is_compiling():
        return {}
    return {name: x._version for name, x in tensors.items() if not x.is_inference()}
