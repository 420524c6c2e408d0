"""The arguments of a launch: tensors as kernels load them, and the numbers they take."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from headwise import dropout
from headwise.core.intervals import FURTHEST
from headwise.core.problem import Terms
from headwise.engines.triton.host.cards import card
from headwise.engines.triton.kernels.interpreter import INTERPRETING
from headwise.engines.triton.kernels.kept_runs import Marks
from headwise.engines.triton.kernels.maps.map_held import Bounds
from headwise.engines.triton.kernels.tile import Given, Sizes

Steps = list[int] | None
WORD = 1 << 31  # from here on a kernel takes a number as int64
MOST_ROWS = 256  # per tile, at most: offsets inside a tile fit 32 bits


@dataclass(frozen=True)
class Operands:
    """The arguments that every kernel of a call takes: tensors, masks, biases and numbers."""

    q: Tensor
    k: Tensor
    v: Tensor
    terms: Terms
    steps: tuple[Steps, Steps, Steps]  # TMA strides of q, k and v
    given: Given
    sizes: Sizes

    @property
    def padded(self) -> tuple[int, int]:
        """The padded widths of a tile of keys and a tile of values."""
        return pad(self.q), pad(self.v)

    @property
    def chooses(self) -> bool:
        """True if each row keeps some of the keys that it sees."""
        return self.given.least is not None or self.given.words is not None

    def flags(self) -> dict[str, Any]:
        """The compile-time switches that forward and backward share."""
        terms = self.terms
        width, values = self.padded
        added = (terms.additive, terms.bias, terms.slopes, terms.relative)
        # The maximum may be taken before a positive factor only, and its product must be finite.
        plain = 1e-6 < (terms.softcap or terms.scale) < 1e6 and all(x is None for x in added)
        plain = plain and not self.chooses
        return {
            "WIDTH": self.q.shape[-1],
            "VALUES": self.v.shape[-1],
            "PADDED": width,
            "PADDED_VALUES": values,
            "PRECISION": precision(self.q.dtype),
            "PIECES": pieces(terms),
            "PLAIN": plain,
            "CAP": cap_of(terms.scale, terms.softcap),
        }


def cap_of(scale: float, softcap: float) -> int:
    """Return how kernels cap scores: 0 not at all, 1 raw, 2 after a factor scale / softcap.

    A polynomial of the raw score is cheaper. Its coefficients hold powers of that ratio, which must
    stay inside the range of float32.
    """
    if not softcap:
        return 0
    return 1 if 1e-4 < abs(scale / softcap) < 1e4 else 2


def pieces(terms: Terms) -> int:
    """Return the number of intervals per row; 0 if rows see all keys or the mask is dense."""
    if terms.intervals is not None:
        return terms.intervals.shape[0]
    return 1 if terms.band is not None and len(terms.band) == 3 else 0


def exposed(q: Tensor, k: Tensor, terms: Terms) -> bool:
    """Return whether there may be a key that no row sees, and that may hold anything."""
    if terms.intervals is not None or terms.dense is not None:
        return True
    return terms.band is not None and leaves_keys(q, k, terms.band)


def leaves_keys(q: Tensor, k: Tensor, band: list[int]) -> bool:
    """Return whether there are keys outside a band (`Terms.band`), which no row sees."""
    if len(band) == 1:
        return False
    _, low, high = band
    return low > 0 or q.shape[2] - 1 + high < k.shape[2] or low >= high


def narrow(terms: Terms) -> bool:
    """Return whether rows may see so few keys that masked tiles take much of the time."""
    if terms.intervals is not None:
        return True
    return terms.band is not None and len(terms.band) == 3 and terms.band[2] - terms.band[1] <= 4096


def operands(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: Terms,
    largest: Bounds | None = None,
    marks: Marks | None = None,
) -> Operands:
    """Gather the arguments of a call's kernels.

    `largest`, `marks`: each row keeps only its largest keys, or those that are marked.
    """
    (q, q_steps), (k, k_steps), (v, v_steps) = loadable(q), loadable(k), loadable(v)
    intervals = None if terms.intervals is None else terms.intervals.contiguous()
    step = batch = head = 0
    if intervals is not None:
        step = intervals.stride(1)
        batch = intervals.stride(2) if intervals.shape[2] > 1 else 0
        head = intervals.stride(3) if intervals.shape[3] > 1 else 0
    position = terms.position.contiguous() if terms.band is None else None
    shift, low, high = (*(terms.band or [0]), -FURTHEST, FURTHEST)[:3]
    dense = None if terms.dense is None else terms.dense.view(torch.int8)
    seed, origin = terms.seed, None
    if seed is not None and seed.ndim:  # the call is part of a larger one
        seed, origin = seed[0], seed[1:]
    words = None if marks is None else broadcast_strides(marks.words)
    given = Given(
        intervals,
        dense,
        None if dense is None else broadcast_strides(dense),
        terms.bias,
        None if terms.bias is None else broadcast_strides(terms.bias),
        position,
        None if terms.slopes is None else terms.slopes.contiguous(),
        None if terms.relative is None else terms.relative.contiguous(),
        None if terms.sinks is None else terms.sinks.contiguous(),
        seed,
        origin,
        None if largest is None else largest.least,
        None if largest is None else largest.above,
        None if largest is None else largest.last,
        None if largest is None else largest.least.stride(0),
        None if largest is None else largest.least.stride(1),
        None if marks is None else marks.words,
        None if words is None else words[0],
        None if words is None else words[1],
        None if words is None else words[2],
        None if marks is None else marks.run,
    )
    sizes = Sizes(
        q.shape[2],
        k.shape[2],
        q.shape[1] // k.shape[1],
        terms.first_key,
        0 if terms.relative is None else terms.relative.shape[1] // 2,
        shift,
        low,
        high,
        step,
        batch,
        head,
        position.stride(0) if position is not None and position.shape[0] > 1 else 0,
        dropout.threshold(terms.dropout),
        terms.scale,
        terms.softcap,
        1 / (1 - terms.dropout),
    )
    return Operands(q, k, v, terms, (q_steps, k_steps, v_steps), given, sizes)


def broadcast_strides(x: Tensor) -> tuple[int, ...]:
    """Return the strides, 0 for axes of size 1."""
    return tuple(
        0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)
    )


def outer_strides(x: Tensor) -> tuple[int, int, int]:
    """Return the strides of batch, head and row."""
    return x.stride(0), x.stride(1), x.stride(2)


def described(
    tensors: tuple[Tensor, ...], steps: tuple[Steps, ...], rows: tuple[int, ...]
) -> tuple[bool, list[Any]]:
    """Return True and TMA descriptors of (rows, padded width) tiles, if TMA can load all tensors.

    Otherwise return False and the tensors; the kernels then compute addresses.
    """
    if any(step is None for step in steps):
        return False, list(tensors)
    return True, [
        _descriptor(x, step, [1, 1, count, pad(x)])
        for x, step, count in zip(tensors, steps, rows, strict=True)
    ]


def pair_tiles(call: Operands, rows: int, keys: int) -> list[TensorDescriptor | None]:
    """Return TMA descriptors of (rows, keys) tiles of the bias tensor and the dense mask.

    None if there is none, or if TMA can't load it and the kernels compute addresses.
    """
    return [_pair_tiles(x, call, [1, 1, rows, keys]) for x in (call.given.bias, call.given.dense)]


def _pair_tiles(x: Tensor | None, call: Operands, block: list[int]) -> TensorDescriptor | None:
    z = call.sizes
    if x is None or x.shape[2:] != (z.queries, z.keys) or x.stride(3) != 1 or x.itemsize > 4:
        return None
    for axis in (0, 1):  # a broadcast axis becomes size 1
        x = x if x.stride(axis) else x.narrow(axis, 0, 1)
    steps = _steps_of(x) if card(x.device).copies else None
    if steps is None or not begins_at(call, 16 // x.itemsize):
        return None
    return _descriptor(x, steps, block)


def begins_at(call: Operands, unit: int) -> bool:
    """Return whether every tile of the scores begins at a multiple of `unit` keys.

    Along a row, TMA loads begin at multiples of 16 bytes; `extents` decides where tiles begin.
    """
    z = call.sizes
    if call.given.intervals is not None or z.keys % unit:
        return False
    if pieces(call.terms) == 0:
        return True
    first = z.queries - 1 + z.low <= 0 or z.low % unit == 0
    ends = z.queries % unit == 0 or z.queries - 1 + z.high >= z.keys
    return first and (z.high - 1) % unit == 0 and ends


def _descriptor(x: Tensor, steps: Steps, block: list[int]) -> TensorDescriptor:
    """Return a TMA descriptor without its own checks, which take as long as a launch; `_steps` and
    `pad` ensure that they would pass."""
    made = TensorDescriptor.__new__(TensorDescriptor)
    made.base, made.shape, made.strides, made.block_shape = x, list(x.shape), steps, block
    return made


def loadable(x: Tensor) -> tuple[Tensor, Steps]:
    """Return x as kernels can load it, and its TMA strides, None if TMA can't load it.

    Rows become contiguous. Heads of an odd width are copied into wider rows, once.
    """
    x = x if x.stride(-1) == 1 and x.stride(2) * MOST_ROWS < WORD else x.contiguous()
    if not card(x.device).copies:
        return x, None
    steps = _steps_of(x)
    if steps is not None or INTERPRETING:  # the interpreter tests both ways to load
        return x, steps
    width = x.shape[-1]
    wide = x.new_empty(*x.shape[:-1], -(-width // 16) * 16)
    wide[..., :width] = x
    return wide[..., :width], _steps_of(wide)


def _steps_of(x: Tensor) -> Steps:
    return None if x.data_ptr() % 16 else _steps(x.shape, x.stride(), x.itemsize)


@lru_cache(4096)
def _steps(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> Steps:
    """Return TMA strides, multiples of 16 bytes; None if TMA can't load such a tensor.

    The stride of an axis of size 1 is arbitrary, so a valid one is passed instead.
    """
    if 0 in shape:
        return None
    unit = 16 // itemsize
    least = -(-shape[3] // unit) * unit
    steps = [1]
    for size, stride in zip(shape[2::-1], strides[2::-1], strict=True):
        step = stride if size > 1 else least
        if step <= 0 or step % unit:
            return None
        steps.append(step)
        least = max(least, step * size)
    return steps[::-1]


def pad(x: Tensor) -> int:
    """Return the tile width of x: a power of two, on a GPU at least the 128 bytes that copies and
    matrix products handle as one. Narrow heads lose little: exponentials dominate their time."""
    least = 16 if INTERPRETING else 128 // x.itemsize
    return max(least, 1 << (x.shape[-1] - 1).bit_length())


def tile_side(size: int) -> int:
    """Return the side of a tile for so many rows or numbers: a power of two, at least 16, which is
    the least that matrix products take."""
    return max(16, 1 << (size - 1).bit_length())


def stride_unit(strides: Iterable[int], unit: int) -> int:
    """Return the unit of strides: `unit` if all are multiples of it and fit 32 bits, else 1."""
    return unit if all(stride % unit == 0 and stride < WORD for stride in strides) else 1


def precision(dtype: torch.dtype) -> str:
    """Return how to multiply float32: in one tf32 product if PyTorch's switch allows it, else in
    three, which keep float32's precision (the error is below that of PyTorch's own kernels)."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"


def widened(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors as kernels take them: bfloat16 becomes float32 under the interpreter, which
    would multiply its bits as integers."""
    if INTERPRETING and tensors[0].dtype == torch.bfloat16:
        return tuple(x.float() for x in tensors)
    return tensors


def on(device: torch.device) -> AbstractContextManager[object]:
    """Make the tensors' GPU the current one for a launch."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)
