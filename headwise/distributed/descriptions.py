"""Options as ranks compare them: texts that are the same if the options mean the same.

The values of tensors are compared by a sum that is computed where they are. `described` waits for
it; `Values` does not, so that a GPU need not stop for parameters that every rank should have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from headwise.core.arguments import is_integer, is_number
from headwise.core.host_copy import HostCopy
from headwise.core.intervals import Mask
from headwise.distributed.transport import bytes_of

SHOWN = 16  # values of a tensor in a text
CHUNK = 1 << 20  # words that are summed at once
_GOLDEN, _MIXER = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9  # odd, of 62 bits: they wrap around

_known: WeakKeyDictionary[Mask, tuple[tuple[object, ...], str]] = WeakKeyDictionary()


class Values:
    """The values of a tensor, compared by a number that is on its way to the processor."""

    def __init__(self, x: Tensor) -> None:
        self._tensor = x.detach()
        self._sum = HostCopy.of(checksum(x))

    @property
    def number(self) -> int:
        """A number of 64 bits that stands for the values."""
        return int(self._sum.read())

    def __str__(self) -> str:
        flat = self._tensor.flatten()
        some = ", ".join(repr(x) for x in flat[:SHOWN].tolist())
        return f"[{some}]" if flat.numel() <= SHOWN else f"[{some}, …] #{self.number:x}"


def described(x: object, read: bool = True) -> str:
    """An option as a text; tensors that it holds with their values, or without if not `read`.

    >>> described({"image": (4, 580.0)}), described(None)
    ('{image: (4, 580)}', 'None')
    """
    if isinstance(x, Tensor):
        return f"{_named(x)}{_learns(x)}" + (f" {Values(x)}" if read else "")
    if isinstance(x, Mask):
        return _mask(x)
    if is_number(x):
        return str(int(x)) if is_integer(x) or float(x).is_integer() else repr(float(x))
    if isinstance(x, Mapping):
        return f"{{{', '.join(f'{name}: {described(each, read)}' for name, each in x.items())}}}"
    if isinstance(x, list | tuple):
        return f"({', '.join(described(each, read) for each in x)})"
    if isinstance(x, str) or not hasattr(x, "__dict__"):
        return str(x)
    return f"{type(x).__name__}({_fields(x, read)})"


def described_part(x: Tensor, axis: int, dtype: torch.dtype | None = None) -> str:
    """A tensor of which each rank has a part along an axis, without its values.

    >>> described_part(torch.ones(2, 4, 5, 8), 2)
    'float32 (2, 4, ·, 8)'
    """
    sizes = ["·" if at == axis else str(size) for at, size in enumerate(x.shape)]
    name = str(x.dtype if dtype is None else dtype).removeprefix("torch.")
    return f"{name} ({', '.join(sizes)}){_learns(x)}"


def _learns(x: Tensor) -> str:
    return " with requires_grad" if x.requires_grad and torch.is_grad_enabled() else ""


def _named(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"


def _fields(x: object, read: bool) -> str:
    return ", ".join(f"{name}={described(each, read)}" for name, each in vars(x).items())


def _mask(mask: Mask) -> str:
    """A mask with the values of its tensors, which are read again when one has changed."""
    known, now = _known.get(mask), versions(mask)
    if known is not None and known[0] == now:
        return known[1]
    if type(mask).__repr__ is object.__repr__:  # it has the address, which is never the same
        text = f"{type(mask).__name__}({_fields(mask, True)})"
    else:
        prepared = mask.description() is not None
        used = mask.tensors() if prepared else tensors(mask)
        text = " ".join([repr(mask), *(f"{_named(x)} #{Values(x).number:x}" for x in used)])
    _known[mask] = now, text
    return text


def versions(mask: Mask | None) -> tuple[object, ...]:
    """Values that change when a tensor of the mask is changed in place."""
    return () if mask is None else tuple(_version(x) for x in tensors(mask))


def _version(x: Tensor) -> object:
    return object() if x.is_inference() else x._version  # those do not tell: never the same


def tensors(mask: Mask) -> Iterator[Tensor]:
    """The tensors that a mask is made of."""
    for value in vars(mask).values():
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mask):
            yield from tensors(value)


def checksum(x: Tensor) -> Tensor:
    """A number that stands for a tensor's bytes, int64 (), computed where they are.

    The same bytes give the same number on every device, and other bytes another one: always if one
    word of eight bytes differs, and else with all but certainty.
    """
    flat = bytes_of(x)
    short = -flat.numel() % 8
    if short or flat.storage_offset() % 8:
        flat = torch.cat((flat, flat.new_zeros(short)))
    factors = _factors(x.device)
    first, *rest = flat.view(torch.int64).split(CHUNK)
    total: Tensor = (first * factors[: len(first)]).sum()
    for words in rest:
        total = total * _GOLDEN + (words * factors[: len(words)]).sum()
    return total


@lru_cache(maxsize=16)
def _factors(device: torch.device) -> Tensor:
    """Odd factors of the words of a chunk, int64 (CHUNK,): products wrap around."""
    mixed = (torch.arange(CHUNK, dtype=torch.int64) + 1) * _GOLDEN
    mixed = (mixed ^ mixed >> 31) * _MIXER
    return torch.bitwise_or(mixed ^ mixed >> 29, 1).to(device)
