"""Kernel launches that skip Triton's inspection of the arguments and can be replayed.

Triton compiles a version of a kernel for each combination of types, missing tensors and aligned
pointers. To find it, Triton inspects every argument, which takes three times as long as a launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.runtime.errors import OutOfResources

from headwise.core.row_sums import RowResults, empty_results
from headwise.engines.failures import failure
from headwise.engines.triton.host.operands import WORD, Operands
from headwise.engines.triton.host.prepared_call import (
    Allocated,
    Fill,
    Launch,
    PreparedCall,
    View,
    allocated,
    filled_descriptor,
    filled_tuple,
    same,
    storage,
)
from headwise.engines.triton.kernels.interpreter import INTERPRETING

Kind = tuple[object, ...] | None
_COMPILED: dict[tuple[object, ...], tuple[Any, tuple[Any, ...]]] = {}


class Launches:
    """The launches of one call.

    Given the call's tensors, it also records what is allocated and launched through it, and where
    those tensors are among the arguments: `prepared` returns that as a call that can be repeated.
    """

    def __init__(self, *tensors: Tensor) -> None:
        self._known = list(tensors)  # and what the call allocates
        self._given = len(tensors)  # nothing is recorded if there are none
        self._made: list[Allocated | View] = []
        self._fixed: list[Tensor] = []  # the same in every call of this description
        self._launched: list[Launch] = []
        addresses = {x.data_ptr() for x in tensors}
        self._complete = 0 < len(addresses) == len(tensors)  # otherwise an address is ambiguous

    def allocated(self, *tensors: Tensor) -> None:
        """Record tensors that the call has just allocated."""
        if self._given:
            self._made += [allocated(x.shape, x.dtype, x.device) for x in tensors]
            self._known += tensors

    def fixed(self, *tensors: Tensor) -> None:
        """Record tensors that are the same in every call of this description."""
        self._fixed += [x for x in tensors if x.numel()]

    def empty_results(self, q: Tensor, v: Tensor, wants: int) -> RowResults:
        """Allocate the results of a call that `wants` names."""
        rows = empty_results(q, v, wants)
        self.allocated(*(x for x in rows if x is not None))
        return rows

    def start(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        kind: Kind,
        arguments: tuple[Any, ...],
        warps: int,
        stages: int,
        **constants: Any,
    ) -> None:
        """Launch a kernel on the current GPU; `kind` as `kind_of` returns it."""
        with launching(kernel):
            run, filled = _launched(kernel, grid, kind, arguments, warps, stages, constants)
        if self._given:
            self._launched.append(Launch(run, *self._filled(filled)))

    def mark(self) -> tuple[int, int]:
        """Return a mark of what is recorded so far, for `back_to`."""
        return len(self._launched), len(self._made)

    def back_to(self, mark: tuple[int, int]) -> None:
        """Forget what was recorded since a mark: that attempt failed, and another follows."""
        del self._launched[mark[0] :]
        del self._made[mark[1] :]
        del self._known[self._given + mark[1] :]

    def prepared(self, results: tuple[Any, ...]) -> PreparedCall | None:
        """Return the call that gave these results, or None if it did more than launch kernels."""
        if not self._launched:
            return None
        places = [None if x is None else self._place(x) for x in results]
        if not self._complete or any(x is not None and x < self._given for x in places):
            return None
        return PreparedCall(self._made, self._launched, places)

    def _place(self, x: Tensor) -> int:
        """Return a tensor's place among the known ones."""
        for place, known in enumerate(self._known):
            if known is x or (place >= self._given and same(known, x)):
                return place
        for place, known in enumerate(self._known):
            if storage(known) != storage(x) or known.dtype != x.dtype:
                continue
            if place >= self._given:
                self._made.append(View(place, x.shape, x.stride(), int(x.storage_offset())))
                self._known.append(x)
                return len(self._known) - 1
            if known.data_ptr() == x.data_ptr():  # a kernel sees the address only
                return place
        self._complete = False  # computed by something other than the launches
        return 0

    def _filled(self, given: tuple[Any, ...]) -> tuple[list[Any], list[tuple[int, Fill]]]:
        """Return arguments without those that hold tensors, and how to make these."""
        fills = [(at, fill) for at, x in enumerate(given) if (fill := self._fill(x)) is not None]
        filled = {at for at, _ in fills}
        return [None if at in filled else x for at, x in enumerate(given)], fills

    def _fill(self, x: Any) -> Fill | None:
        """Return how to make an argument from the known tensors, or None if it never changes."""
        if isinstance(x, Tensor):
            fixed = any(x.data_ptr() == one.data_ptr() for one in self._fixed)
            return None if fixed else itemgetter(self._place(x))
        if isinstance(x, tuple):
            arguments, fills = self._filled(x)
            make = getattr(type(x), "_make", tuple)  # a kernel may use the names of fields
            return filled_tuple(make, arguments, fills) if fills else None
        if isinstance(getattr(x, "base", None), Tensor):
            return filled_descriptor(x, self._place(x.base))
        return None


def recorded(
    work_out: Callable[[Launches], tuple[Any, ...]], tensors: tuple[Tensor, ...]
) -> tuple[tuple[Any, ...], PreparedCall | None]:
    """Return the results of a call with these tensors, and the call prepared for other ones."""
    launches = Launches(*tensors)
    results = work_out(launches)
    return results, launches.prepared(results)


@contextmanager
def launching(kernel: Any) -> Iterator[None]:
    """Raise KernelError if a kernel does not compile or launch, for a reason other than memory.

    Too little shared memory is for `fit` to deal with, too little memory for the caller.
    """
    try:
        yield
    except OutOfResources:
        raise
    except Exception as error:
        name = getattr(getattr(kernel, "fn", None), "__name__", kernel)
        failed = failure(f"the kernel {name}", error)
        if failed is None:
            raise
        raise failed from error


def kind_of(call: Operands, tensors: tuple[Tensor | None, ...], *more: object) -> Kind:
    """Return a key that, with its constants, identifies the compiled version of a kernel.

    `tensors` are those the kernel takes besides the call's own and the newly allocated ones. None
    if only Triton can tell: a bias, a dense mask, odd layouts, numbers beyond 32 bits.
    """
    given, sizes = call.given, call.sizes
    extras = (given.bias, given.dense, given.slopes, given.relative, given.sinks, given.seed)
    if any(x is not None for x in (*extras, given.least, given.words)) or None in call.steps:
        return None
    numbers = (sizes.first_key, sizes.shift, sizes.low, sizes.high, sizes.interval_step)
    if any(abs(x) >= WORD for x in (*numbers, sizes.interval_batch, sizes.interval_head)):
        return None
    tensors = (given.intervals, given.position, *tensors)
    if any(x is not None and x.data_ptr() % 16 for x in tensors):
        return None
    return (call.q.dtype, *(x is None for x in tensors), *more)


def _launched(
    kernel: Any,
    grid: tuple[int, int, int],
    kind: Kind,
    arguments: tuple[Any, ...],
    warps: int,
    stages: int,
    constants: dict[str, Any],
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Launch a kernel; return a function and arguments that launch it again."""
    options = {"num_warps": warps, "num_stages": stages, **constants}
    if INTERPRETING:
        run = partial(kernel[grid], **options)
        run(*arguments)
        return run, arguments
    key = (kernel, torch.cuda.current_device(), kind, warps, stages, *constants.values())
    known = None if kind is None else _COMPILED.get(key)
    if known is not None:
        again, filled = launcher(known[0], grid), (*arguments, *known[1])
        again(*filled)
        return again, filled
    compiled = kernel[grid](*arguments, **options)
    rest = tuple(constants[name] for name in kernel.arg_names[len(arguments) :])
    if kind is not None:
        _COMPILED[key] = compiled, rest
    return launcher(compiled, grid), (*arguments, *rest)


def launcher(compiled: Any, grid: tuple[int, int, int]) -> Callable[..., None]:
    """Return a compiled kernel on a grid, launched on the current stream of the current GPU.

    It does what Triton does, but goes through launch hooks only if one is set.
    """
    run, function, packed = compiled.run, compiled.function, compiled.packed_metadata

    def go(*arguments: Any) -> None:
        one, two = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        if getattr(one, "calls", one) or getattr(two, "calls", two):
            compiled[grid](*arguments)
            return
        stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
        run(*grid, stream, function, packed, None, None, None, *arguments)

    return go
