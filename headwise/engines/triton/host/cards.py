"""The properties of this machine's GPUs that kernels depend on, read once when the engine loads."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headwise.engines.triton.kernels.interpreter import INTERPRETING


@dataclass(frozen=True, eq=False)  # hashed by identity, because every call looks it up
class Card:
    """A GPU: its name, compute capability, and the bytes of shared memory per program."""

    name: str
    major: int
    minor: int
    shared: int

    @property
    def copies(self) -> bool:
        """True if the GPU has TMA, which copies whole tiles."""
        return self.major >= 9


def _look(index: int) -> Card:
    found = torch.cuda.get_device_properties(index)
    shared: int = found.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return Card(found.name, found.major, found.minor, shared)


_COUNT = 0 if INTERPRETING or torch.version.hip is not None else torch.cuda.device_count()
CARDS = {i: _look(i) for i in range(_COUNT)}
_INTERPRETED = Card("Triton's interpreter", 9, 0, 232448)


def card(device: torch.device) -> Card:
    """Return the GPU of a device; for the interpreter, one that stands in for it."""
    return CARDS.get(device.index or 0, _INTERPRETED) if device.type == "cuda" else _INTERPRETED
