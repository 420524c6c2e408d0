"""Copies of tensors that arrive on the processor without making it wait."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class HostCopy:
    """A copy of a tensor on its way to the processor."""

    _values: Tensor
    _arrival: torch.cuda.Event | None

    @classmethod
    def of(cls, values: Tensor) -> HostCopy:
        """Begin to copy; on a CPU the copy is there at once."""
        if values.device.type != "cuda":
            return cls(values.to("cpu", copy=True), None)
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        arrival = torch.cuda.Event()
        arrival.record(torch.cuda.current_stream(values.device))
        return cls(host, arrival)

    @property
    def arrived(self) -> bool:
        """True if reading it waits for nothing."""
        return self._arrival is None or self._arrival.query()

    def read(self) -> Tensor:
        """The values, once they have arrived."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._values
