"""Calls of the decoding kernels: few queries, keys split over programs, partial results merged."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from headwise.core.intervals import FURTHEST
from headwise.core.problem import Problem, Terms
from headwise.core.row_sums import FLAGS, RowParts, RowResults
from headwise.engines.decoding import MANY_KEYS, MOST_ROWS, Stored, is_decoding
from headwise.engines.triton.host.cards import Card, card
from headwise.engines.triton.host.launches import Launches
from headwise.engines.triton.host.operands import (
    WORD,
    cap_of,
    on,
    operands,
    precision,
    stride_unit,
    tile_side,
)
from headwise.engines.triton.host.tile_shapes import TENSOR_MEMORY, Shape, fit, loads_pairs
from headwise.engines.triton.kernels.interpreter import INTERPRETING
from headwise.engines.triton.kernels.split_keys import (
    Held,
    merge,
    merge_step,
    split,
    split_step,
)
from headwise.engines.triton.kernels.tile import Given
from headwise.engines.triton.limits import GRID

SPLITS = 128  # splits of the keys, at most
NOTHING_HELD = Held(None, None, None)
NOTHING_GIVEN = Given(*[None] * len(Given._fields))
# NumPy, which the interpreter computes with, has no bfloat16.
STEP_DTYPES = (torch.float32, torch.float16) if INTERPRETING else (torch.bfloat16, torch.float16)


def decodes(q: Tensor, k: Tensor, terms: Terms) -> bool:
    """Return whether the decoding kernels serve this call."""
    return few(q, k) and terms.additive is None and terms.seed is None and _holds(q, k)


def _holds(q: Tensor, k: Tensor) -> bool:
    """Return whether all rows of a key head fit the GPU's memory, whatever the tile of keys."""
    rows = tile_side(q.shape[2] * (q.shape[1] // k.shape[1]))
    found = card(q.device)
    least = 2 * rows * tile_side(q.shape[-1]) * q.itemsize
    # Tensor memory has 256 KB, and holds float32 in two halves.
    return least < (1 << 17 if found.major in TENSOR_MEMORY else found.shared)


def few(q: Tensor, k: Tensor) -> bool:
    """Return whether few queries meet many keys; under the interpreter, 8 keys are many."""
    return is_decoding(q.shape, k.shape, 8 if INTERPRETING else MANY_KEYS)


def attend_step(launches: Launches, problem: Problem) -> Tensor | None:
    """Return out of a plain decoding step, or None if there is a cap, bias, sink or other mask."""
    q, k, v = problem.q, problem.k, problem.v
    extras = (problem.additive, problem.bias, problem.sinks, problem.seed, problem.rows)
    if problem.softcap or any(x is not None for x in extras) or not few(q, k):
        return None
    queries, keys = q.shape[2], k.shape[2]
    band, rest = problem.band()
    if band is None or rest is not None:
        return None
    causal = len(band) == 3
    if causal and not (band[1] <= -FURTHEST and band[2] == keys - queries + 1):
        return None
    if not _takes_step(q, k, v, NOTHING_HELD, problem.scale):
        return None
    with on(q.device):
        return _step(launches, q, k, v, NOTHING_HELD, keys, problem.scale, causal, 0)


def _takes_step(q: Tensor, k: Tensor, v: Tensor, held: Held, scale: float) -> bool:
    """Return whether the kernels of a plain step take these tensors."""
    if q.shape[-1] not in (64, 128, 256) or not 1e-6 < scale < 1e6 or q.dtype not in STEP_DTYPES:
        return False
    if k.shape != v.shape or k.shape[-1] != q.shape[-1] or 0 in (q.numel(), k.numel()):
        return False
    if not q.stride(3) == k.stride(3) == v.stride(3) == 1:
        return False
    batch, heads, queries, width = q.shape
    room = batch * heads * queries * SPLITS * (width + 2)  # with the most splits
    strides = (*q.stride(), *k.stride(), *v.stride(), *_held_strides(held))
    if max(*strides, room) >= WORD or max(batch, heads) > GRID:
        return False
    return not any(x is not None and x.data_ptr() % 16 for x in (q, k, v, *held))


def _step(
    launches: Launches,
    q: Tensor,
    k: Tensor,  # (B, Hkv, any, D), or (pages, Hkv, page, D)
    v: Tensor,
    held: Held,
    length: int,
    scale: float,
    causal: bool,
    page: int,
) -> Tensor:
    """Return out (B, Hq, N, D) of queries against the first `length` keys of each batch entry."""
    batch, heads, queries, width = q.shape
    key_heads, group = k.shape[1], heads // k.shape[1]
    out = q.new_empty(q.shape)
    launches.allocated(out)
    strides = q.stride()[:3] + k.stride()[:3] + v.stride()[:3]
    unit = stride_unit(strides, 16)
    rows = tile_side(group * queries)
    # Programmatic dependent launch: a kernel starts while the one before it ends.
    chained = not INTERPRETING and card(q.device).major >= 9
    kind = (q.dtype, k.dtype, *(x is None for x in held))

    def cut(shape: Shape) -> None:
        splits = shares(batch * key_heads, -(-length // shape.keys), processors(q.device))
        parts = batch * heads * queries * splits
        mixed = q.new_empty(parts * (width + 2), dtype=torch.float32)
        launches.allocated(mixed)
        launches.start(
            split_step, (splits, key_heads, batch), kind,
            (q, k, v, held, mixed, parts, *(stride // unit for stride in strides),
            *_held_strides(held), splits, queries, length, group, scale),
            shape.warps, shape.stages, ROWS=rows, KEYS=shape.keys, WIDTH=width, UNIT=unit,
            PAGE=page, CAUSAL=causal, CHAINED=chained, launch_pdl=chained,
        )  # fmt: skip
        part = min(width, 64)
        launches.start(
            merge_step, (batch * heads * queries, width // part, 1), kind,
            (mixed, out, parts, splits), 2, 1, SPLITS=1 << (splits - 1).bit_length(),
            VALUES=width, BLOCK=part, CHAINED=chained, launch_pdl=chained,
        )  # fmt: skip

    fit(*tile(width, k.itemsize, rows, q.device), cut, launches)
    return out


def _held_strides(held: Held) -> tuple[int, int, int]:
    """Return the batch and head strides of the scales, and the batch stride of the page table."""
    scales = (0, 0) if held.key_scales is None else held.key_scales.stride()[:2]
    return scales[0], scales[1], 0 if held.pages is None else held.pages.stride(0)


def run_decode(
    launches: Launches, q: Tensor, k: Tensor, v: Tensor, terms: Terms, wants: int
) -> RowResults:
    """Return the output and the results that `wants` names, as `run_forward` does."""
    found = launches.empty_results(q, v, wants)
    if found.lse.numel() == 0:
        return found
    call = operands(q, k, v, terms)
    flags = call.flags()
    with on(q.device):
        _split(
            launches, call.q, call.k, call.v, NOTHING_HELD, call.given, tuple(call.sizes), found,
            wants=wants, pieces=flags["PIECES"], cap=flags["CAP"],
        )  # fmt: skip
    return found


def _split(
    launches: Launches,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    held: Held,
    given: Given,
    sizes: tuple[Any, ...],
    found: RowResults,
    *,
    wants: int = 0,
    pieces: int = 0,
    cap: int = 0,
    causal: bool = False,
    page: int = 0,
    longest: int | None = None,
    kind: tuple[object, ...] | None = None,
) -> None:
    """Launch `split`, then `merge`.

    `longest` is the number of keys, if it is not that of k's shape; `kind` as `Launches.start`
    takes it.
    """
    batch, heads, queries, width = q.shape
    key_heads, values = k.shape[1], v.shape[-1]
    rows = tile_side(heads // key_heads * queries)
    keys = k.shape[2] if longest is None else longest
    strides = q.stride()[:3] + k.stride()[:3] + v.stride()[:3]
    unit = stride_unit(strides, 16)
    more = _held_strides(held)
    if max(*strides, *more) >= WORD:
        kind = None

    def cut(shape: Shape) -> None:
        splits = shares(batch * key_heads, -(-keys // shape.keys), processors(q.device))
        parts = parts_for(launches, q, splits, values, wants)
        taken = (q, k, v, *held, parts.maximum, parts.total)
        odd = any(x is not None and x.data_ptr() % 16 for x in taken)
        known = None if odd else kind
        launches.start(
            split, (splits, key_heads, batch), known,
            (q, k, v, held, given, parts, *(stride // unit for stride in strides), *more, splits,
            *sizes), shape.warps, shape.stages, ROWS=rows, KEYS=shape.keys, WIDTH=width,
            VALUES=values, PADDED=tile_side(width), PADDED_VALUES=tile_side(values), UNIT=unit,
            PAGE=page, CAUSAL=causal, PRECISION=precision(q.dtype), PIECES=pieces, CAP=cap,
        )  # fmt: skip
        join(launches, parts, found, given.sinks, splits, known)

    what = tile(max(width, values), k.itemsize, rows, q.device, loads_pairs(given))
    fit(*what, cut, launches)


def run_stored(
    launches: Launches,
    q: Tensor,
    stored: Stored,
    scale: float,
    causal: bool,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return attention of the last tokens' queries over a KV cache."""
    keys, values, length = stored.keys, stored.values, stored.length
    held = Held(stored.key_scales, stored.value_scales, stored.pages)
    page = 0 if stored.pages is None else keys.shape[2]
    if softcap is None and sinks is None and _takes_step(q, keys, values, held, scale):
        with on(q.device):
            return _step(launches, q, keys, values, held, length, scale, causal, page)
    out = q.new_empty(*q.shape[:3], values.shape[-1])
    launches.allocated(out)
    if out.numel() == 0:
        return out
    group = q.shape[1] // keys.shape[1]
    sizes = (q.shape[2], length, group, *[0] * 10, scale, float(softcap or 0.0), 1.0)
    given = NOTHING_GIVEN._replace(sinks=None if sinks is None else sinks.contiguous())
    with on(q.device):
        _split(
            launches, q if q.stride(-1) == 1 else q.contiguous(), keys, values, held, given, sizes,
            RowResults(out, None, None),  # type: ignore[arg-type]  # out alone
            cap=cap_of(scale, softcap or 0.0), causal=causal, page=page, longest=length,
            kind=(q.dtype, keys.dtype, values.dtype, page == 0) if sinks is None else None,
        )  # fmt: skip
    return out


def join(
    launches: Launches,
    parts: RowParts,
    found: RowResults,
    sinks: Tensor | None,
    splits: int,
    kind: tuple[object, ...] | None = None,
) -> None:
    """Merge the parts of every row into its results; lse is None if out is all of them."""
    out, merged = found.out, found.rows()
    batch, heads, queries, values = out.shape
    wide = tile_side(values)
    part = min(wide, 64)
    launches.start(
        merge, (batch * heads * queries, wide // part, 1), kind,
        (parts, out, merged, sinks, splits, queries, heads), 2, 1,
        SPLITS=1 << (splits - 1).bit_length(), VALUES=values, BLOCK=part,
    )  # fmt: skip


def parts_for(launches: Launches, q: Tensor, splits: int, values: int, wants: int) -> RowParts:
    """Allocate the parts as views of one tensor."""
    shape = (*q.shape[:3], splits)
    asked = [True, True, *(bool(wants & FLAGS[name]) for name in RowParts._fields[3:])]
    size = q.shape[0] * q.shape[1] * q.shape[2] * splits
    whole = q.new_empty(size * (values + sum(asked)), dtype=torch.float32)
    launches.allocated(whole)
    found: list[Any] = [whole[: size * values].view(*shape, values)]
    at = size * values
    for wanted in asked:
        found.append(whole[at : at + size].view(shape) if wanted else None)
        at += size * wanted
    return RowParts(*found)


def tile(
    width: int, itemsize: int, rows: int, device: torch.device, biased: bool = False
) -> tuple[str, int, int, Card]:
    """Return the arguments by which `fit` finds a shape; int8 keys count as 16-bit."""
    kernel = "biased decode" if biased else "full decode" if rows == MOST_ROWS else "decode"
    return kernel, tile_side(width), max(2, itemsize), card(device)


@lru_cache(maxsize=4096)
def shares(programs: int, blocks: int, processors: int) -> int:
    """Return the number of splits of the keys that keeps the GPU evenly busy.

    It is the smallest number whose waves of programs are nearly as full as with the best number.
    """
    most = max(1, min(SPLITS, blocks // 4))

    def full(splits: int) -> float:
        total = programs * splits
        return total / (-(-total // processors) * processors)

    best = max(full(splits) for splits in range(1, most + 1))
    return next(splits for splits in range(1, most + 1) if full(splits) >= 0.94 * best)


@cache
def processors(device: torch.device) -> int:
    """Return how many multiprocessors a GPU has; two under the interpreter."""
    if device.type != "cuda":
        return 2
    found: int = torch.cuda.get_device_properties(device).multi_processor_count
    return found
