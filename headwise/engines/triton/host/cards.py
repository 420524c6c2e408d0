"""What the GPUs of this machine have that a kernel must know: asked once, when the engine loads."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headwise.engines.triton.kernels.interpreter import INTERPRETING


@dataclass(frozen=True, eq=False)  # looked up by identity: every call does
class Card:
    """A GPU: its name, its generation, and the bytes of shared memory that a program may take."""

    name: str
    major: int
    minor: int
    shared: int

    @property
    def copies(self) -> bool:
        """Whether it has the copy engine that loads whole tiles."""
        return self.major >= 9


def _look(index: int) -> Card:
    found = torch.cuda.get_device_properties(index)
    shared: int = found.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return Card(found.name, found.major, found.minor, shared)


_COUNT = 0 if INTERPRETING or torch.version.hip is not None else torch.cuda.device_count()
CARDS = {i: _look(i) for i in range(_COUNT)}
_INTERPRETED = Card("Triton's interpreter", 9, 0, 232448)


def card(device: torch.device) -> Card:
    """The GPU that a tensor lies on; the interpreter stands for one of them."""
    return CARDS.get(device.index or 0, _INTERPRETED) if device.type == "cuda" else _INTERPRETED
