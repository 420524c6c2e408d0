"""A prepared call of the Triton engine: the memory it allocates and the kernels it launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.engines.failures import failure

Known = Sequence[Tensor]  # the call's own tensors, those it allocated, and views of them
Fill = Callable[[Known], Any]


class Allocated:
    """A tensor that a call allocates.

    `torch.empty_like` takes half as long as `torch.empty`; the template holds a single element.
    """

    def __init__(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
        self.like = torch.empty((), dtype=dtype, device=device).expand(shape)

    def tensor(self, known: Known) -> Tensor:
        """Allocate it."""
        return torch.empty_like(self.like, memory_format=torch.contiguous_format)


allocated = lru_cache(maxsize=1024)(Allocated)  # many calls allocate tensors of one shape


class View(NamedTuple):
    """A part of a tensor that a call allocates."""

    place: int  # of that tensor among the known tensors
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int

    def tensor(self, known: Known) -> Tensor:
        """Return the view."""
        return known[self.place].as_strided(self.shape, self.strides, self.offset)


class Launch(NamedTuple):
    """A kernel and its arguments, except for those that hold tensors (`fills`)."""

    run: Callable[..., Any]
    arguments: list[Any]
    fills: list[tuple[int, Fill]]


@dataclass(frozen=True)
class PreparedCall:
    """A call that can be repeated with other tensors of the same description."""

    made: list[Allocated | View]
    launches: list[Launch]
    results: list[int | None]  # places among the known tensors; None for results that are None

    def __call__(self, *tensors: Tensor) -> tuple[Any, ...]:
        """Return what the call returns for these tensors."""
        device = tensors[0].device
        if device.type == "cuda" and device.index != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                return self._run(tensors)
        return self._run(tensors)

    def _run(self, tensors: tuple[Tensor, ...]) -> tuple[Any, ...]:
        known = [*tensors]
        for each in self.made:
            known.append(each.tensor(known))
        for run, arguments, fills in self.launches:
            arguments = arguments.copy()
            for at, fill in fills:
                arguments[at] = fill(known)
            try:
                run(*arguments)
            except Exception as error:
                failed = failure("a kernel that ran before", error)
                if failed is None:
                    raise
                raise failed from error
        return tuple([None if place is None else known[place] for place in self.results])


def filled_tuple(
    make: Callable[..., Any], arguments: list[Any], fills: list[tuple[int, Fill]]
) -> Fill:
    """Return how to make the same tuple with other tensors."""

    def fill(known: Known) -> Any:
        filled = arguments.copy()
        for at, each in fills:
            filled[at] = each(known)
        return make(filled)

    return fill


def filled_descriptor(x: Any, place: int) -> Fill:
    """Return how to make the same descriptor for another tensor."""
    kind, shared = type(x), {name: value for name, value in vars(x).items() if name != "base"}

    def fill(known: Known) -> Any:
        made = object.__new__(kind)
        made.__dict__.update(shared)
        made.base = known[place]
        return made

    return fill


def same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are views of the same numbers."""
    if a.data_ptr() != b.data_ptr() or a.dtype != b.dtype:
        return False
    return a.shape == b.shape and a.stride() == b.stride() and a.numel() > 0


def storage(x: Tensor) -> int:
    """Return the address of a tensor's memory."""
    return x.untyped_storage().data_ptr()
