"""What a call did beside thinking, kept for the next call like it.

Checking, planning and describing a call takes a processor longer than a short kernel takes a GPU,
and comes to the same for every call of the same description. A `Tape` is what is left without it:
the tensors that the call made and the kernels that it launched, with places for its own tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Known = Sequence[Tensor]  # what the call was given, what it made, and views of that
Fill = Callable[[Known], Any]


class Made:
    """A tensor that a call allocates.

    To say again what it is like takes a processor twice as long as to show one like it, of which
    one number exists.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self.like = torch.empty((), dtype=dtype, device=device).expand(shape)

    def of(self, _: Known = ()) -> Tensor:
        return torch.empty_like(self.like, memory_format=torch.contiguous_format)


class View(NamedTuple):
    """A part of a tensor that a call allocates."""

    place: int  # of that one among the known
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int

    def of(self, known: Known) -> Tensor:
        return known[self.place].as_strided(self.shape, self.strides, self.offset)


class Launch(NamedTuple):
    """A kernel with its arguments, but for the tensors at `fills`."""

    run: Callable[..., Any]
    arguments: list[Any]
    fills: list[tuple[int, Fill]]


class Tape:
    """A call that can be played again with other tensors of the same description."""

    def __init__(
        self, grown: list[Made | View], launches: list[Launch], results: list[int]
    ) -> None:
        self.grown, self.launches, self.results = grown, launches, results

    def play(self, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """What the call returns for these tensors."""
        device = given[0].device
        if device.type == "cuda" and device.index != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                return self._play(given)
        return self._play(given)

    def _play(self, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        known = [*given]
        for each in self.grown:
            known.append(each.of(known))
        for run, arguments, fills in self.launches:
            arguments = arguments.copy()
            for at, fill in fills:
                arguments[at] = fill(known)
            run(*arguments)
        return tuple([known[place] for place in self.results])


def filled_tuple(
    make: Callable[..., Any], arguments: list[Any], fills: list[tuple[int, Fill]]
) -> Fill:
    """A tuple that holds tensors, under the names of its fields."""

    def fill(known: Known) -> Any:
        filled = arguments.copy()
        for at, each in fills:
            filled[at] = each(known)
        return make(filled)

    return fill


def filled_descriptor(x: Any, place: int) -> Fill:
    """A descriptor of another tensor of the same layout."""
    kind, shared = type(x), {name: value for name, value in vars(x).items() if name != "base"}

    def fill(known: Known) -> Any:
        made = object.__new__(kind)
        made.__dict__.update(shared)
        made.base = known[place]
        return made

    return fill
