"""Runs Gluon kernels on a CPU, and finds the races and deadlocks that a GPU would hide.

    run(kernel, (2, 1, 1), arguments, SIZE=64, seed=3)   # arguments as for `kernel[grid](...)`

The Python body of the kernel runs with stand-ins for Gluon's language: tensors are PyTorch's, and
layouts, warps and registers mean nothing (`tests.engines.compiled` is for those). The partitions of
`warp_specialize` and all programs of the grid take turns in a random order that the seed decides,
and a copy by TMA lands at a random later time. A `Fault` is raised, with the lines of the kernel,
where a real GPU might go wrong:

- nobody can go on (deadlock), or a barrier is completed more often than it was waited for;
- shared memory is read before a barrier ordered the write, or written before a barrier ordered a
  read, whatever the order of this run: each partition and each barrier keeps a vector clock;
- the result of an asynchronous product is used before its wait, or an operand is overwritten;
- TMA or a product reads what was stored without `fence_async_shared`;
- a pointer leaves its tensor. Unwritten outputs show as NaN with `poisoned`.

Assembly is recognised by its text: add what a kernel needs to ASSEMBLY. `emulated` has the whole
engine launch its Gluon kernels here, beside Triton's own interpreter for the others.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.experimental.gluon.language as gluon_language
from greenlet import getcurrent, greenlet
from torch import Tensor
from triton.experimental.gluon.language.nvidia import hopper
from triton.runtime.jit import JITFunction

from headwise.engines.triton.host import launches
from headwise.engines.triton.kernels.hopper_backward import async_add

COMPONENTS = 256  # of a vector clock: partitions and barriers of a program
AT_ONCE = 4  # programs that run beside each other
SWITCH = 0.3  # chance that another partition goes on where this one could
TYPES = {
    torch.float32: gluon_language.float32, torch.bfloat16: gluon_language.bfloat16,
    torch.float16: gluon_language.float16, torch.float64: gluon_language.float64,
    torch.int32: gluon_language.int32, torch.int64: gluon_language.int64,
    torch.int16: gluon_language.int16, torch.int8: gluon_language.int8,
    torch.uint8: gluon_language.uint8, torch.bool: gluon_language.int1,
}  # fmt: skip
TORCH = {str(mine): theirs for theirs, mine in TYPES.items()}
TORCH |= {"uint32": torch.int32, "uint16": torch.int16}  # bits; comparisons are signed


class Fault(Exception):  # noqa: N818 - it is found, not met
    """What a kernel does wrong, with the lines at which each partition stands."""


# Values


class Value:
    """A tensor in registers, or a scalar; or what the asynchronous `product` will have computed."""

    def __init__(self, data: Tensor, product: Product | None = None) -> None:
        self._data, self.product = data, product

    @property
    def data(self) -> Tensor:
        if self.product is not None:
            raise Fault("the result of a product is used before warpgroup_mma_wait returned it")
        return self._data

    dtype = property(lambda self: TYPES[self._data.dtype])
    shape = property(lambda self: list(self._data.shape))
    numel = property(lambda self: self._data.numel())
    type = property(lambda self: types.SimpleNamespace(layout=None, shape=self.shape))
    T = property(lambda self: Value(self.data.T))

    def to(self, dtype: Any, bitcast: bool = False) -> Value:
        kind = TORCH[str(dtype)]
        return Value(self.data.contiguous().view(kind) if bitcast else self.data.to(kind))

    def reshape(self, *shape: Any) -> Value:
        return Value(self.data.reshape(_flat(shape)))

    def permute(self, *order: Any) -> Value:
        return Value(self.data.permute(_flat(order)))

    def __getitem__(self, index: Any) -> Value:
        return Value(self.data[index])

    def __index__(self) -> int:
        return int(self.data)

    def __bool__(self) -> bool:
        return bool(self.data)

    def __neg__(self) -> Value:
        return Value(-self.data)

    def __invert__(self) -> Value:
        return Value(~self.data)

    __hash__ = None  # type: ignore[assignment]


def _flat(shape: tuple[Any, ...]) -> list[int]:
    return [int(x) for x in (shape[0] if isinstance(shape[0], list | tuple) else shape)]


def tensor(x: Any) -> Tensor:
    """A Value's tensor; a plain number as Triton types it."""
    if isinstance(x, Value):
        return x.data
    if isinstance(x, bool | int):
        wide = torch.int64 if not -(2**31) <= x < 2**31 else torch.int32
        return torch.tensor(x, dtype=torch.bool if isinstance(x, bool) else wide)
    return torch.tensor(x, dtype=torch.float32)


def together(*given: Any) -> list[Tensor]:
    """Operands in their common type; a plain number takes that of the others."""
    kind: torch.dtype | None = None
    for x in given:
        if isinstance(x, Value):
            kind = x.data.dtype if kind is None else torch.promote_types(kind, x.data.dtype)
    floats = any(isinstance(x, float) for x in given)
    if kind is None or (floats and not kind.is_floating_point):
        kind = torch.float32 if floats else torch.int32
    if kind == torch.bool and any(type(x) is int for x in given):
        kind = torch.int32
    return [tensor(x).to(kind) for x in given]


def _divide(a: Tensor, b: Tensor) -> Tensor:
    return torch.div(a, b, rounding_mode="trunc")  # as C does, not Python


def _binary(name: str, operate: Callable[[Tensor, Tensor], Tensor]) -> None:
    def left(self: Value, other: Any) -> Any:
        return (
            NotImplemented if isinstance(other, Pointer) else Value(operate(*together(self, other)))
        )

    def right(self: Value, other: Any) -> Value:
        return Value(operate(*together(other, self)))

    setattr(Value, f"__{name}__", left)
    setattr(Value, f"__r{name}__", right)


for _name, _operate in {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "floordiv": _divide, "mod": torch.fmod,
    "and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor,
    "lshift": torch.bitwise_left_shift, "rshift": torch.bitwise_right_shift,
    "truediv": lambda a, b: a.to(torch.promote_types(a.dtype, torch.float32)) / b,
    "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge, "eq": torch.eq, "ne": torch.ne,
}.items():  # fmt: skip
    _binary(_name, _operate)


class Pointer:
    """Addresses inside one tensor of the caller, which must not leave it."""

    def __init__(self, base: Tensor, offset: Tensor | None = None) -> None:
        self.base = base
        self.offset = torch.zeros((), dtype=torch.int64) if offset is None else offset

    dtype = property(lambda self: types.SimpleNamespace(element_ty=TYPES[self.base.dtype]))

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.base, self.offset + tensor(more).long())

    __radd__ = __add__

    def __getitem__(self, index: Any) -> Pointer:
        return Pointer(self.base, self.offset[index])

    def cells(self, mask: Any) -> tuple[Tensor, Tensor, Tensor]:
        """The caller's memory, the addresses, and which of them are used."""
        axes = zip(self.base.shape, self.base.stride(), strict=True)
        size = sum((n - 1) * step for n, step in axes) + 1 if self.base.numel() else 0
        flat = self.base.as_strided((size,), (1,))
        used = torch.ones_like(self.offset, dtype=torch.bool) if mask is None else tensor(mask)
        offset, used = torch.broadcast_tensors(self.offset, used.bool())
        if bool((used & ((offset < 0) | (offset >= size))).any()):
            raise Fault(f"a pointer leaves its tensor of {size} elements")
        return flat, offset, used


# One program: clocks, barriers, shared memory


@dataclass(eq=False)
class Task:
    """A partition: its place in the vector clocks, and what it waits for."""

    program: Program
    number: int
    clock: Tensor
    work: greenlet | None = None
    ready: Callable[[], bool] | None = None
    where: str = "starting"
    products: list[Product] = field(default_factory=list)  # those not waited for
    stores: list[Store] = field(default_factory=list)

    def tick(self) -> None:
        """Begin a new stretch: what follows is not ordered before what others learnt so far."""
        self.clock[self.number] += 1


@dataclass(eq=False)
class Program:
    """One program of the grid."""

    machine: Machine
    place: tuple[int, int, int]
    components: int = 0
    memory: list[Memory] = field(default_factory=list)

    def component(self) -> int:
        self.components += 1
        assert self.components <= COMPONENTS, "more partitions and barriers than clocks have room"
        return self.components - 1

    def begin(self, work: Callable[[], object], clock: Tensor | None = None) -> Task:
        """Begin a partition that has seen what `clock` has."""
        seen = torch.zeros(COMPONENTS, dtype=torch.int32) if clock is None else clock.clone()
        task = Task(self, self.component(), seen)
        task.tick()

        def whole() -> None:
            work()
            if task.products:
                raise Fault("a partition ends without waiting for a product")
            self.machine.tasks.remove(task)

        task.work = greenlet(whole, parent=self.machine.loop)
        self.machine.tasks.append(task)
        self.machine.by_work[task.work] = task
        return task


class Memory:
    """An allocation of shared memory, and for each element who wrote and read it last."""

    def __init__(self, shape: list[int], kind: torch.dtype) -> None:
        self.data = torch.full((math.prod(shape),), _poison(kind), dtype=kind)
        count = self.data.numel()
        self.writer, self.written, self.loading, self.reading, self.unfenced = (
            torch.zeros(count, dtype=torch.int32) for _ in range(5)
        )
        self.reads: dict[int, Tensor] = {}  # by partition, its clock when it read an element last


def _poison(kind: torch.dtype) -> float:
    return math.nan if kind.is_floating_point else torch.iinfo(kind).min


class View:
    """A part of shared memory, in the shape and order in which a kernel sees it."""

    def __init__(self, memory: Memory, place: Tensor, dtype: Any, layout: Any) -> None:
        self.memory, self.place, self.dtype, self.layout = memory, place, dtype, layout

    shape = property(lambda self: list(self.place.shape))
    type = property(lambda self: types.SimpleNamespace(layout=self.layout, shape=self.shape))
    numel = property(lambda self: self.place.numel())

    def _of(self, place: Tensor) -> View:
        return View(self.memory, place, self.dtype, self.layout)

    def index(self, n: Any) -> View:
        n = int(n)
        if not 0 <= n < self.place.shape[0]:
            raise Fault(f"buffer {n} of {self.place.shape[0]}")
        return self._of(self.place[n])

    def slice(self, start: int, length: int, dim: int = 0) -> View:
        return self._of(self.place.narrow(dim, start, length))

    def reshape(self, *shape: Any) -> View:
        return self._of(self.place.reshape(_flat(shape)))

    def permute(self, *order: Any) -> View:
        return self._of(self.place.permute(_flat(order)))

    def load(self, layout: Any = None) -> Value:
        task = here()
        self.check_read(task, fenced=False)
        self.note_read(task)
        return Value(self.memory.data[self.place])

    def store(self, value: Value) -> None:
        task = here()
        self.check_write(task)
        assert value.shape == self.shape, (value.shape, self.shape)
        self.memory.data[self.place] = value.data.to(self.memory.data.dtype)
        self.note_write(task.number, int(task.clock[task.number]))
        self.memory.unfenced[self.place] = task.number + 1

    def _keep_alive(self) -> None:
        pass

    # What the clocks allow

    def check_read(self, task: Task, fenced: bool = True) -> None:
        """Raise a Fault unless everything here was written before, by what the task has seen."""
        memory, place = self.memory, self.place
        if bool(memory.loading[place].any()):
            raise Fault("shared memory is read while TMA writes it")
        if bool((memory.written[place] > task.clock[memory.writer[place].long()]).any()):
            raise Fault("shared memory is read, and no barrier orders that after its write")
        if bool((memory.written[place] == 0).any()):
            raise Fault("shared memory is read that was never written")
        if fenced and bool(memory.unfenced[place].any()):
            raise Fault("TMA or a product reads what was stored without fence_async_shared")

    def check_write(self, task: Task) -> None:
        """Raise a Fault unless all use of this memory has ended, by what the task has seen."""
        memory, place = self.memory, self.place
        if bool(memory.loading[place].any()):
            raise Fault("shared memory is written while TMA writes it")
        if bool(memory.reading[place].any()):
            raise Fault("shared memory is written while a product or TMA reads it")
        late = memory.written[place] > task.clock[memory.writer[place].long()]
        for reader, clock in memory.reads.items():
            late |= clock[place] > task.clock[reader]
        if bool(late.any()):
            raise Fault("shared memory is written, and no barrier orders that after its last use")

    def note_read(self, task: Task) -> None:
        reads = self.memory.reads.setdefault(task.number, torch.zeros_like(self.memory.writer))
        reads[self.place] = task.clock[task.number]

    def note_write(self, component: int, clock: int) -> None:
        self.memory.writer[self.place], self.memory.written[self.place] = component, clock
        self.memory.unfenced[self.place] = 0


class Barrier:
    """An mbarrier: arrivals, bytes of TMA, phases, and what those who wait for it learn."""

    def __init__(self, count: int, component: int) -> None:
        self.count = self.pending = count
        self.component, self.landed = component, 0
        self.bytes = self.phase = self.awaited = 0
        self.gathering = torch.zeros(COMPONENTS, dtype=torch.int32)
        self.known = torch.zeros(COMPONENTS, dtype=torch.int32)

    def arrive(self, task: Task, count: int = 1) -> None:
        if count > self.pending:
            raise Fault(f"{count} arrivals at a barrier that expects {self.pending} more")
        self.gathering = self.gathering.maximum(task.clock)
        task.tick()
        self.pending -= count
        self.complete()

    def land(self, size: int) -> int:
        """Count bytes that TMA wrote; return the clock of that write."""
        self.landed += 1
        self.gathering[self.component] = self.landed
        self.bytes -= size
        return self.landed

    def complete(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.known = self.known.maximum(self.gathering)
            self.phase, self.pending = self.phase + 1, self.count


@dataclass(eq=False)
class Product:
    """A matrix product that reads its operands until it is waited for."""

    operands: list[View]

    def finish(self, task: Task) -> None:
        for x in self.operands:
            x.memory.reading[x.place] -= 1
            x.note_read(task)


@dataclass(eq=False)
class Load:
    """A copy into shared memory that has not landed."""

    tile: Tensor
    barrier: Barrier
    into: View

    def finish(self) -> None:
        memory, place = self.into.memory, self.into.place
        memory.data[place] = self.tile.reshape(place.shape)
        memory.loading[place] = 0
        clock = self.barrier.land(self.tile.numel() * self.tile.element_size())
        self.into.note_write(self.barrier.component, clock)
        self.barrier.complete()


@dataclass(eq=False)
class Store:
    """A copy out of shared memory, or a sum into what is there, that has not been made."""

    task: Task
    source: View
    into: Descriptor
    corner: list[int]
    add: bool

    def finish(self) -> None:
        self.source.memory.reading[self.source.place] -= 1
        self.source.note_read(self.task)
        self.into.write(self.corner, self.source.memory.data[self.source.place], self.add)
        self.task.stores.remove(self)


class Descriptor:
    """A TMA descriptor: tiles of a tensor, zero outside of it."""

    def __init__(self, given: Any) -> None:
        base, shape, strides = given.base, list(given.shape), list(given.strides)
        self.whole = base.as_strided(shape, strides)
        self.block_shape, self.layout, self.dtype = (
            given.block_shape,
            given.layout,
            TYPES[base.dtype],
        )
        size = math.prod(given.block_shape) * base.element_size()
        self.block_type = types.SimpleNamespace(
            shape=given.block_shape, nbytes=size, element_ty=self.dtype
        )
        self.nbytes_per_cta = size

    def _common(self, corner: list[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        sizes = zip(corner, self.block_shape, self.whole.shape, strict=True)
        spans = [(at, max(at, 0), max(0, at, min(at + block, size))) for at, block, size in sizes]
        outside = tuple(slice(low, high) for _, low, high in spans)
        return outside, tuple(slice(low - at, high - at) for at, low, high in spans)

    def read(self, corner: list[int]) -> Tensor:
        tile = self.whole.new_zeros(self.block_shape)
        outside, inside = self._common(corner)
        tile[inside] = self.whole[outside]
        return tile

    def write(self, corner: list[int], tile: Tensor, add: bool) -> None:
        outside, inside = self._common(corner)
        tile = tile.reshape(self.block_shape)[inside]
        self.whole[outside] = self.whole[outside] + tile if add else tile


class Machine:
    """Lets the partitions of a grid's programs take turns."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.tasks: list[Task] = []
        self.by_work: dict[Any, Task] = {}
        self.loads: list[Load] = []
        self.loop = getcurrent()

    def run(self, grid: tuple[int, int, int], body: Callable[[], object]) -> None:
        waiting = [place[::-1] for place in itertools.product(*map(range, grid[::-1]))][::-1]
        try:
            while waiting or self.tasks or self.loads:
                while waiting and len({id(task.program) for task in self.tasks}) < AT_ONCE:
                    Program(self, waiting.pop()).begin(body)
                self.step()
        finally:
            for task in self.tasks:  # greenlets that never end would stay alive
                task.work.throw()  # type: ignore[union-attr]

    def step(self) -> None:
        """Let one partition go on to where it pauses, or one copy be made."""
        able: list[Any] = [task for task in self.tasks if task.ready is None or task.ready()]
        stores = [store for task in self.tasks for store in task.stores]
        able += self.loads + stores
        if not able:
            stuck = "\n".join(f"  partition {task.number} at {task.where}" for task in self.tasks)
            raise Fault(f"deadlock: nobody can go on\n{stuck}")
        chosen = self.dice.choice(able)
        if isinstance(chosen, Task):
            chosen.ready = None
            chosen.work.switch()  # type: ignore[union-attr]
            return
        if isinstance(chosen, Load):
            self.loads.remove(chosen)
        chosen.finish()


_machines: list[Machine] = []


def here() -> Task:
    """The partition that runs."""
    return _machines[-1].by_work[getcurrent()]


def pause(ready: Callable[[], bool] | None = None) -> None:
    """Let others go on, until `ready` is true."""
    machine, task = _machines[-1], here()
    if ready is None and machine.dice.random() > SWITCH:
        return
    task.ready, task.where = ready, _line()
    machine.loop.switch()


def _line() -> str:
    """The lines of the kernel that called this module."""
    frame, found = sys._getframe(1), []
    while frame is not None and len(found) < 3:
        if frame.f_code.co_filename != __file__:
            name = frame.f_code.co_filename.rpartition("/")[2]
            found.append(f"{name}:{frame.f_lineno} ({frame.f_code.co_name})")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(found)


# The language


def mma(
    a: Any, b: View, acc: Value, *, use_acc: Any = True, is_async: bool = False, **_: Any
) -> Value:
    task, product = here(), Product([x for x in (a, b) if isinstance(x, View)])
    for x in product.operands:
        x.check_read(task)
        x.memory.reading[x.place] += 1
    left, right = (x.memory.data[x.place] if isinstance(x, View) else x.data for x in (a, b))
    found = left.float() @ right.float()
    if bool(use_acc):
        found += acc._data  # the sum of a product that still runs may be added to
    task.products.append(product)
    pause()
    made = Value(found, product)
    return made if is_async else mma_wait(0, (made,))


def mma_wait(num_outstanding: int = 0, deps: Sequence[Value] = ()) -> Any:
    task = here()
    while len(task.products) > num_outstanding:
        task.products.pop(0).finish(task)
    pause()
    done = [Value(x._data, x.product if x.product in task.products else None) for x in deps]
    return done[0] if len(done) == 1 else tuple(done)


def fence(cluster: bool = False) -> None:
    task = here()
    for memory in task.program.memory:
        memory.unfenced[memory.unfenced == task.number + 1] = 0


class Barriers:
    """Barriers in shared memory, and which of them an index chose."""

    def __init__(self, made: list[Barrier | None], n: int = 0) -> None:
        self.made, self.n = made, n
        self.shape = [len(made), 1]

    def index(self, n: Any) -> Barriers:
        if not 0 <= int(n) < len(self.made):
            raise Fault(f"barrier {int(n)} of {len(self.made)}")
        return Barriers(self.made, int(n))

    @property
    def one(self) -> Barrier:
        found = self.made[self.n]
        if found is None:
            raise Fault("a barrier is used before mbarrier.init")
        return found


def barrier_init(bar: Barriers, count: int) -> None:
    bar.made[bar.n] = Barrier(int(count), here().program.component())


def barrier_wait(bar: Barriers, phase: Any, pred: Any = True, deps: Sequence[Any] = ()) -> None:
    if not bool(pred):
        return
    barrier, parity = bar.one, int(phase) & 1
    task = here()
    pause(lambda: barrier.phase & 1 != parity)
    task.clock = task.clock.maximum(barrier.known)


def barrier_arrive(bar: Barriers, *, count: int = 1, pred: Any = True) -> None:
    if bool(pred):
        bar.one.arrive(here(), int(count))
        pause()


def barrier_expect(bar: Barriers, bytes: Any = None, pred: Any = True, **named: Any) -> None:
    if bool(pred):
        bar.one.bytes += int(named.get("bytes_per_cta", bytes))
        bar.one.arrive(here(), 1)
        pause()


def tma_load(
    desc: Descriptor, coord: Sequence[Any], barrier: Barriers, result: View, pred: Any = True
) -> None:
    if not bool(pred):
        return
    result.check_write(here())
    memory, place = result.memory, result.place
    memory.data[place], memory.loading[place] = _poison(memory.data.dtype), 1
    load = Load(desc.read([int(x) for x in coord]), barrier.one, result)
    assert load.tile.numel() == place.numel(), (load.tile.shape, place.shape)
    _machines[-1].loads.append(load)
    pause()


def tma_store(desc: Descriptor, coord: Sequence[Any], src: View, add: bool = False) -> None:
    task = here()
    src.check_read(task)
    src.memory.reading[src.place] += 1
    task.stores.append(Store(task, src, desc, [int(x) for x in coord], add))
    pause()


def tma_store_wait(pendings: int = 0) -> None:
    task = here()
    while len(task.stores) > pendings:
        task.stores[0].finish()
    pause()


def specialize(parts: Sequence[Any], *_: Any, **__: Any) -> Any:
    task = here()
    others = [task.program.begin(lambda f=f, a=a: f(*a), task.clock) for f, a in parts[1:]]
    task.tick()
    first, given = parts[0]
    found = first(*given)
    alive = _machines[-1].tasks
    pause(lambda: not any(other in alive for other in others))
    for other in others:
        task.clock = task.clock.maximum(other.clock)
    return found


def allocate(dtype: Any, shape: list[Any], layout: Any = None, value: Value | None = None) -> View:
    shape = [int(x) for x in shape]
    if isinstance(layout, _BarrierLayout):
        return Barriers([None] * shape[0])
    memory = Memory(shape, TORCH[str(dtype)])
    here().program.memory.append(memory)
    view = View(memory, torch.arange(math.prod(shape)).reshape(shape), dtype, layout)
    if value is not None:
        view.store(value)
    return view


class _BarrierLayout:
    def __init__(self, *_: Any) -> None:
        pass


def load(pointer: Pointer, mask: Any = None, other: Any = 0, **_: Any) -> Value:
    pause()
    flat, offset, used = pointer.cells(mask)
    found = flat[torch.where(used, offset, 0)] if flat.numel() else flat.new_zeros(used.shape)
    return Value(torch.where(used, found, tensor(other).to(found.dtype)))


def store(pointer: Pointer, value: Any, mask: Any = None, **_: Any) -> None:
    flat, offset, used = pointer.cells(mask)
    flat[offset[used]] = tensor(value).to(flat.dtype).expand(used.shape)[used]
    pause()


def _atomic(operate: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Value]:
    def atomic(pointer: Pointer, value: Any, mask: Any = None, **_: Any) -> Value:
        pause()
        flat, offset, used = pointer.cells(mask)
        values = tensor(value).to(flat.dtype).expand(used.shape)
        old = torch.zeros(used.shape, dtype=flat.dtype)
        for at in used.nonzero(as_tuple=False).tolist():
            cell = offset[tuple(at)]
            old[tuple(at)] = flat[cell]
            flat[cell] = operate(flat[cell], values[tuple(at)])
        return Value(old)

    return atomic


def _reduction(operate: Callable[..., Tensor], nothing: float) -> Callable[..., Value]:
    """A maximum or minimum; as on a GPU, that of a number and NaN is the number."""

    def reduce(x: Value, axis: int | None = None, **_: Any) -> Value:
        data, axes = x.data, tuple(range(len(x.shape))) if axis is None else (axis,)
        if not data.is_floating_point():
            return Value(operate(data, axes))
        nan = data.isnan()
        found = operate(data.masked_fill(nan, nothing), axes)
        return Value(found.masked_fill(nan.all(axes), math.nan))

    return reduce


def _sum(x: Value, axis: int | None = None, **_: Any) -> Value:
    data = x.data.int() if x.data.dtype == torch.bool else x.data
    return Value(data.sum() if axis is None else data.sum(axis, dtype=data.dtype))


def _any_bit(x: Value, axis: int = 0) -> Value:
    found = x.data.movedim(axis, 0)
    return Value(functools.reduce(torch.bitwise_or, found.unbind(0)))


def _elementwise(operate: Callable[..., Tensor]) -> Callable[..., Value]:
    return lambda *given, **_: Value(operate(*together(*given)))


def _choose(condition: Any, a: Any, b: Any) -> Value:
    a, b = together(a, b)
    return Value(torch.where(tensor(condition).bool(), a, b))


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return torch.addcmul(c.double(), a.double(), b.double()).to(c.dtype)  # rounded once


def _cdiv(a: Any, b: Any) -> Any:
    return (a + (b - 1)) // b


def _full(shape: Any, value: Any, dtype: Any, layout: Any = None) -> Value:
    return Value(torch.full([int(x) for x in shape], float(tensor(value)), dtype=TORCH[str(dtype)]))


def _pack(low: Tensor, high: Tensor, kind: torch.dtype) -> Tensor:
    return torch.stack((low.to(kind), high.to(kind)), -1).view(torch.int32)[..., 0]


def _unpack(words: Tensor) -> tuple[Tensor, Tensor]:
    halves = words.contiguous()[..., None].view(torch.int16)
    return halves[..., 0], halves[..., 1]


ASSEMBLY: dict[str, Callable[..., Any]] = {  # by how the text begins, or what it contains
    "mul.rn.f32 $0, $1, $2": torch.mul,
    "cvt.rn.bf16x2.f32 $0, $2, $1": lambda a, b: _pack(a, b, torch.bfloat16),
    "cvt.rn.f16x2.f32 $0, $2, $1": lambda a, b: _pack(a, b, torch.float16),
    "mov.b32 {$0, $1}, $2": _unpack,
    "cp.async.bulk.wait_group 0": lambda x: (tma_store_wait(), x)[1],
    "mov.b32 $0, $1": lambda x: x,
    # the tanh of a cap: e^2x is 2^(factor · s)
    "LARGE:": lambda s, limit, factor, *series: torch.tanh(s * (factor * math.log(2) / 2)),
}


def assembly(text: str, constraints: str, args: Sequence[Any], *_: Any, **__: Any) -> Any:
    if not text:  # registers that nothing sets
        return Value(torch.full_like(tensor(args[0]), math.nan, dtype=torch.float32))
    for known, operate in ASSEMBLY.items():
        if known in text:
            found = operate(*(tensor(x) for x in args))
            return tuple(map(Value, found)) if isinstance(found, tuple) else Value(found)
    raise NotImplementedError(f"add this assembly to ASSEMBLY: {text}")


def _grid(axis: int) -> Value:
    return Value(torch.tensor(here().program.place[int(axis)], dtype=torch.int32))


def _language(grid: tuple[int, int, int]) -> types.SimpleNamespace:
    """The stand-in for `triton.experimental.gluon.language`."""
    layouts = (
        "AutoLayout", "BlockedLayout", "SliceLayout", "DistributedLinearLayout", "DotOperandLayout",
        "NVMMADistributedLayout", "SwizzledSharedLayout", "PaddedSharedLayout",
    )  # fmt: skip
    names = ("float32", "bfloat16", "float16", "float64", "int1", "int8", "int16", "int32", "int64",
             "uint8", "uint16", "uint32", "NVMMASharedLayout")  # fmt: skip
    return types.SimpleNamespace(
        **dict.fromkeys(layouts, lambda *_, **__: None),
        **{name: getattr(gluon_language, name) for name in names},
        constexpr=lambda x: x, static_range=range, static_assert=lambda *_: None,
        program_id=_grid, num_programs=lambda axis: grid[int(axis)], num_warps=lambda: 4,
        allocate_shared_memory=allocate, warp_specialize=specialize,
        convert_layout=lambda x, *_, **__: x,
        inline_asm_elementwise=assembly, load=load, store=store,
        atomic_add=_atomic(torch.add), atomic_max=_atomic(torch.maximum),
        atomic_min=_atomic(torch.minimum), atomic_xchg=_atomic(lambda old, new: new),
        barrier=lambda **_: None, thread_barrier=lambda: None,
        arange=lambda first, last, *_, **__: Value(torch.arange(first, last, dtype=torch.int32)),
        full=_full, zeros=lambda shape, dtype, *_: _full(shape, 0, dtype),
        zeros_like=lambda x: Value(torch.zeros_like(x.data)),
        where=_choose, cdiv=_cdiv,
        maximum=_elementwise(torch.fmax), minimum=_elementwise(torch.fmin),
        reduce_or=_any_bit, multiple_of=lambda x, *_: x,
        max=_reduction(torch.amax, -math.inf), min=_reduction(torch.amin, math.inf), sum=_sum,
        exp2=_elementwise(torch.exp2), exp=_elementwise(torch.exp), log2=_elementwise(torch.log2),
        log=_elementwise(torch.log), sqrt=_elementwise(torch.sqrt), abs=_elementwise(torch.abs),
        floor=_elementwise(torch.floor), ceil=_elementwise(torch.ceil),
        fma=_elementwise(_fma),
        split=lambda x: (x[..., 0], x[..., 1]),
        expand_dims=lambda x, axis: Value(x.data.unsqueeze(axis)),
        join=lambda a, b: Value(torch.stack((a.data, b.data), -1)),
        reshape=lambda x, *shape: x.reshape(*shape), permute=lambda x, *order: x.permute(*order),
        to_tensor=lambda x: Value(tensor(x)), assume=lambda *_: None, device_assert=lambda *_: None,
    )  # fmt: skip


def _stand_ins(grid: tuple[int, int, int]) -> dict[int, Any]:
    """Stand-ins by the identity of what a kernel's module imported."""
    tma, bar = hopper.tma, hopper.mbarrier
    tmas = {
        "async_copy_global_to_shared": tma_load, "async_load": tma_load,
        "async_copy_shared_to_global": tma_store, "async_store": tma_store,
        "async_atomic_add": lambda *given: tma_store(*given, add=True),
        "store_wait": tma_store_wait,
    }  # fmt: skip
    bars = {
        "init": barrier_init, "wait": barrier_wait, "arrive": barrier_arrive,
        "expect": barrier_expect, "invalidate": lambda bar: None, "MBarrierLayout": _BarrierLayout,
    }  # fmt: skip
    own = {"warpgroup_mma": mma, "warpgroup_mma_wait": mma_wait, "fence_async_shared": fence}
    found: dict[int, Any] = {id(gluon_language): _language(grid)}
    found[id(getattr(gluon_language, "barrier", None) or gluon_language.thread_barrier)] = (
        lambda **_: None
    )
    found |= {id(tma): types.SimpleNamespace(**tmas), id(bar): types.SimpleNamespace(**bars)}
    found[id(async_add)] = tmas["async_atomic_add"]
    for module, names in ((tma, tmas), (bar, bars), (hopper, own)):
        found |= {id(getattr(module, x)): y for x, y in names.items() if hasattr(module, x)}
    return found


def _translated(function: Any, known: dict[int, Any]) -> Callable[..., Any]:
    """A kernel's function whose names are stand-ins."""
    if id(function) in known:
        return known[id(function)]
    body = function.fn
    names: dict[str, Any] = {"__builtins__": __builtins__, "__name__": body.__module__}
    made = types.FunctionType(
        body.__code__, names, body.__name__, body.__defaults__, body.__closure__
    )
    made.__kwdefaults__ = body.__kwdefaults__
    known[id(function)] = made
    for name in body.__code__.co_names:
        if name in body.__globals__:
            names[name] = _stand_in(body.__globals__[name], known)
    return made


def _stand_in(x: Any, known: dict[int, Any]) -> Any:
    if id(x) in known:
        return known[id(x)]
    if isinstance(x, JITFunction):
        return _translated(x, known)
    return getattr(x, "value", x) if isinstance(x, triton.language.constexpr) else x


def _argument(x: Any) -> Any:
    """A kernel's argument as its body takes it."""
    if isinstance(x, Tensor):
        return Pointer(x)
    if isinstance(x, tuple):
        made = [_argument(each) for each in x]
        return type(x)(*made) if hasattr(x, "_fields") else tuple(made)
    if hasattr(x, "block_shape"):
        return Descriptor(x)
    return Value(tensor(x)) if isinstance(x, int | float) else x


def run(
    kernel: Any,
    grid: tuple[int, int, int],
    arguments: Sequence[Any],
    seed: int = 0,
    **constants: Any,
) -> None:
    """Run a Gluon kernel; options such as num_warps are ignored."""
    made = []
    for parameter, x in zip(kernel.params, arguments, strict=False):
        made.append(x if parameter.is_constexpr else _argument(x))
    named = {x: y for x, y in constants.items() if x in kernel.arg_names}
    body, threads = _translated(kernel, _stand_ins(grid)), torch.get_num_threads()
    torch.set_num_threads(1)  # tiles are small
    _machines.append(Machine(seed))
    try:
        _machines[-1].run(grid, lambda: body(*made, **named))
    finally:
        _machines.pop()
        torch.set_num_threads(threads)


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill what `Tensor.new_empty` allocates, so that unwritten outputs show."""
    usual = Tensor.new_empty

    def new_empty(self: Tensor, *given: Any, **named: Any) -> Tensor:
        made = usual(self, *given, **named)
        return made.fill_(_poison(made.dtype)) if made.dtype != torch.bool else made

    Tensor.new_empty = new_empty  # type: ignore[method-assign]
    try:
        yield
    finally:
        Tensor.new_empty = usual  # type: ignore[method-assign]


@contextmanager
def emulated(seed: int = 0) -> Iterator[None]:
    """Let the engine launch Gluon kernels here; Triton's go to its interpreter."""
    usual = launches._launched

    def launched(kernel: Any, grid: Any, kind: Any, arguments: Any, *rest: Any) -> Any:
        if not getattr(kernel, "is_gluon", lambda: False)():
            return usual(kernel, grid, kind, arguments, *rest)
        constants = rest[-1]

        def again(*given: Any) -> None:
            run(kernel, grid, given, seed, **constants)

        again(*arguments)
        return again, arguments

    launches._launched = launched
    try:
        with poisoned():
            yield
    finally:
        launches._launched = usual
