"""From a call with few queries to the decoding kernels: what they serve, and how keys are split."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from headwise.core.problem import Terms
from headwise.core.sums import DISTANCE, ENTROPY, MOMENTS, Sums, room
from headwise.engines.triton.host.cards import INTERPRETING, Card, card
from headwise.engines.triton.host.launches import start
from headwise.engines.triton.host.operands import WORD, cap_of, on, operands, precision, stride_unit
from headwise.engines.triton.host.tile_shapes import TENSOR_MEMORY, Shape, fit, loads_pairs
from headwise.engines.triton.kernels.split_keys import (
    Held,
    Merged,
    Parts,
    merge,
    split,
)
from headwise.engines.triton.kernels.tile import Given

ROWS = 64  # of one key head at most: beyond it the forward kernel has work for the whole chip
SPLITS = 128  # shares of the keys at most
NOTHING_HELD = Held(None, None, None)
NOT_MERGED = Merged(None, None, None, None, None, None, None)
NOTHING_GIVEN = Given(*[None] * len(Given._fields))


def decodes(q: Tensor, k: Tensor, terms: Terms) -> bool:
    """Whether the decoding kernels serve this call."""
    return few(q, k) and terms.additive is None and terms.seed is None and _holds(q, k)


def _holds(q: Tensor, k: Tensor) -> bool:
    """Whether the GPU has room for all rows of a key head and their sums, whatever the tile."""
    rows = tile_rows(q.shape[2] * (q.shape[1] // k.shape[1]))
    found = card(q.device)
    least = 2 * rows * _padded(q.shape[-1]) * q.itemsize
    # Tensor memory has 256 KB, and float32 is split in two there.
    return least < (1 << 17 if found.major in TENSOR_MEMORY else found.shared)


def few(q: Tensor, k: Tensor) -> bool:
    """Whether there are few rows a key head, and many keys."""
    rows: int = q.shape[2] * (q.shape[1] // k.shape[1])
    return rows <= ROWS and q.shape[2] <= 16 and k.shape[2] >= least_keys()


def least_keys() -> int:
    """With fewer keys than this there is nothing to split."""
    return 8 if INTERPRETING else 512


def run_decode(q: Tensor, k: Tensor, v: Tensor, terms: Terms, wants: int) -> Sums:
    """Output and the sums that `wants` names, as `run_forward` gives them."""
    if INTERPRETING and q.dtype == torch.bfloat16:  # as in the forward
        sums = run_decode(q.float(), k.float(), v.float(), terms, wants)
        return sums._replace(out=sums.out.to(q.dtype))
    sums = room(q, v, wants)
    if sums.lse.numel() == 0:
        return sums
    call = operands(q, k, v, terms)
    merged = Merged(sums.lse, sums.max_logit, *(x if x.numel() else None for x in sums[3:8]))
    flags = call.flags()
    with on(q.device):
        launch(
            call.q, call.k, call.v, NOTHING_HELD, call.given, tuple(call.sizes), sums.out, merged,
            wants=wants, pieces=flags["PIECES"], plain=flags["PLAIN"], cap=flags["CAP"],
        )  # fmt: skip
    return sums


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    held: Held,
    given: Given,
    sizes: tuple[Any, ...],
    out: Tensor,
    merged: Merged = NOT_MERGED,
    *,
    wants: int = 0,
    pieces: int = 0,
    plain: bool = True,
    cap: int = 0,
    causal: bool = False,
    page: int = 0,
    longest: int | None = None,
    kind: tuple[object, ...] | None = None,
) -> None:
    """Both kernels. `longest`: how many keys a sequence has, where pages do not say; `kind` as
    `start.start` takes it."""
    batch, heads, queries, width = q.shape
    key_heads, values = k.shape[1], v.shape[-1]
    group = heads // key_heads
    rows = tile_rows(group * queries)
    keys = k.shape[2] if longest is None else longest
    strides = q.stride()[:3] + k.stride()[:3] + v.stride()[:3]
    unit = stride_unit(strides, 16)
    scaled = held.key_scales
    more = (0, 0) if scaled is None else scaled.stride()[:2]
    more += (0 if held.pages is None else held.pages.stride(0),)
    if max(*strides, *more) >= WORD:
        kind = None

    def cut(shape: Shape) -> None:
        splits = shares(batch * key_heads, -(-keys // shape.keys), processors(q.device))
        parts = parts_for(q, splits, values, wants)
        taken = (q, k, v, *held, parts.maximum, parts.total)
        odd = any(x is not None and x.data_ptr() % 16 for x in taken)
        known = None if odd else kind
        start(
            split, (splits, key_heads, batch), known,
            (q, k, v, held, given, parts, *(stride // unit for stride in strides), *more, splits,
            *sizes), shape.warps, shape.stages, ROWS=rows, KEYS=shape.keys, WIDTH=width,
            VALUES=values, PADDED=_padded(width), PADDED_VALUES=_padded(values), UNIT=unit,
            PAGE=page, CAUSAL=causal, PRECISION=precision(q.dtype), PIECES=pieces, PLAIN=plain,
            CAP=cap,
        )  # fmt: skip
        join(parts, out, merged, given.sinks, splits, known)

    what = tile(max(width, values), k.itemsize, rows, q.device, loads_pairs(given))
    fit(*what, cut)


def attend_stored(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    length: int,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    pages: Tensor | None,
    *,
    scale: float,
    causal: bool,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of the last tokens' queries to int8 keys, or to the keys in pages of a pool."""
    out = q.new_empty(*q.shape[:3], values.shape[-1])
    if out.numel() == 0:
        return out
    group = q.shape[1] // keys.shape[1]
    sizes = (q.shape[2], length, group, *[0] * 10, scale, float(softcap or 0.0), 1.0)
    given = NOTHING_GIVEN._replace(sinks=None if sinks is None else sinks.contiguous())
    with on(q.device):
        launch(
            q if q.stride(-1) == 1 else q.contiguous(), keys, values,
            Held(key_scales, value_scales, pages), given, sizes, out,
            plain=softcap is None and 1e-6 < scale < 1e6, cap=cap_of(scale, softcap or 0.0),
            causal=causal,
            page=0 if pages is None else keys.shape[2], longest=length,
            kind=(q.dtype, keys.dtype, values.dtype, pages is None) if sinks is None else None,
        )  # fmt: skip
    return out


def join(
    parts: Parts,
    out: Tensor,
    merged: Merged,
    sinks: Tensor | None,
    splits: int,
    kind: tuple[object, ...] | None = None,
) -> None:
    """Merge the parts of every row into out (B, Hq, N, Dv) and the statistics."""
    batch, heads, queries, values = out.shape
    wide = _padded(values)
    part = min(wide, 64)
    start(
        merge, (batch * heads * queries, wide // part, 1), kind,
        (parts, out, merged, sinks, splits, queries, heads), 2, 1,
        SPLITS=1 << (splits - 1).bit_length(), VALUES=values, BLOCK=part,
    )  # fmt: skip


def _padded(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


def parts_for(q: Tensor, splits: int, values: int, wants: int) -> Parts:
    """Unwritten room for the parts, in one piece of memory."""
    shape = (*q.shape[:3], splits)
    asked = [True, True, *(bool(wants & what) for what in (ENTROPY, DISTANCE))]
    asked += 3 * [bool(wants & MOMENTS)]
    size = q.shape[0] * q.shape[1] * q.shape[2] * splits
    whole = q.new_empty(size * (values + sum(asked)), dtype=torch.float32)
    found: list[Any] = [whole[: size * values].view(*shape, values)]
    at = size * values
    for wanted in asked:
        found.append(whole[at : at + size].view(shape) if wanted else None)
        at += size * wanted
    return Parts(*found)


def tile(
    width: int, itemsize: int, rows: int, device: torch.device, biased: bool = False
) -> tuple[str, int, int, Card]:
    """What `fit` finds a shape by; `itemsize` is of keys, and int8 ones are multiplied wider."""
    kernel = "biased decode" if biased else "full decode" if rows == ROWS else "decode"
    return kernel, _padded(width), max(2, itemsize), card(device)


def tile_rows(rows: int) -> int:
    """The height of a tile for so many rows of a key head."""
    return max(16, 1 << (rows - 1).bit_length())


@lru_cache(maxsize=4096)
def shares(programs: int, blocks: int, processors: int) -> int:
    """Into how many shares the keys are split so that the chip is full, and evenly.

    The smallest number whose last round of programs is nearly as full as any other's could be.
    """
    most = max(1, min(SPLITS, blocks // 4))

    def full(splits: int) -> float:
        total = programs * splits
        return total / (-(-total // processors) * processors)

    best = max(full(splits) for splits in range(1, most + 1))
    return next(splits for splits in range(1, most + 1) if full(splits) >= 0.94 * best)


@cache
def processors(device: torch.device) -> int:
    """How many multiprocessors a GPU has; the interpreter acts as two."""
    if device.type != "cuda":
        return 2
    found: int = torch.cuda.get_device_properties(device).multi_processor_count
    return found
