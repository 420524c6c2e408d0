"""The launches of map kernels: a call without values, and a shape of tiles that fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headwise.core.problem import Terms
from headwise.core.row_sums import RowTotals
from headwise.engines.triton.host.cards import card
from headwise.engines.triton.host.launches import launching
from headwise.engines.triton.host.operands import (
    Operands,
    on,
    operands,
    outer_strides,
    pad,
    precision,
    tile_side,
    widened,
)
from headwise.engines.triton.host.tile_shapes import Shape, fit
from headwise.engines.triton.kernels.kept_runs import Marks
from headwise.engines.triton.kernels.maps import map_lse
from headwise.engines.triton.kernels.maps.map_cells import Effects, cells
from headwise.engines.triton.kernels.maps.map_cells import Totals as Known
from headwise.engines.triton.kernels.maps.map_held import Bounds, held

PROGRAMS = 1024  # that keep a large GPU busy, a few for each of its multiprocessors
PARTS = 1 << 25  # numbers of partial cells that are held
CUTS = 8  # of the range of logarithms in one pass over the keys


@dataclass(frozen=True)
class Side:
    """The cells along an axis of a map."""

    cells: int
    width: int  # positions per cell; 0 if they are evenly divided
    widest: int

    def cut(self, block: int, waste: float = 1.03) -> tuple[int, int, int]:
        """The division of a tile's side among cells: part of a cell, groups of cells, steps.

        The largest part that leaves almost nothing of a tile unused.
        """
        found = {}
        part = 1
        while part <= block:
            found[part] = -(-self.cells * part // block), -(-self.widest // part)
            part *= 2
        least = min(groups * steps for groups, steps in found.values())
        part = max(p for p, (groups, steps) in found.items() if groups * steps <= waste * least)
        return part, *found[part]

    def fills(self, length: int, block: int, part: int) -> bool:
        """True if tiles of this side are neighbouring positions, and the axis ends with one."""
        whole = self.cells * self.widest == length and self.widest % part == 0
        return whole and length % block == 0 and part in (block, self.widest)


def map_call(q: Tensor, k: Tensor, terms: Terms, marks: Marks | None = None) -> Operands:
    """The tensors and sizes of a call as map kernels take them."""
    q, k = widened(q, k)
    return operands(q, k, k, terms, None, marks)


def flags(call: Operands) -> dict[str, object]:
    """The constants of a call that every map kernel is compiled for."""
    every = call.flags()
    kept = {name: every[name] for name in ("WIDTH", "PIECES", "CAP")}
    padded = tile_side(call.q.shape[-1])
    return kept | {"PADDED": padded, "PRECISION": precision(call.q.dtype)}


def fit_map(
    call: Operands,
    launch: Callable[[Shape], None],
    effects: Effects | None = None,
    kernel: str = "effects",
) -> None:
    """Launch on the call's GPU with a tile shape that fits it."""
    q, width, itemsize = call.q, call.padded[0], call.q.itemsize
    if effects is None:
        kernel = "map"
    else:  # a second product, of gradients and values
        width, itemsize = max(width, pad(effects.v)), max(itemsize, effects.v.itemsize)
    with on(q.device), launching("of a map"):
        fit(kernel, width, itemsize, card(q.device), launch)


def constants(shape: Shape) -> dict[str, int]:
    """The constants of a tile shape."""
    return {
        "ROWS": shape.rows,
        "KEYS": shape.keys,
        "num_warps": shape.warps,
        "num_stages": shape.stages,
    }


def known_totals(totals: RowTotals) -> Known:
    """The totals of rows as kernels take them."""
    return Known(totals.safe_base().contiguous(), totals.log_total.contiguous())


def log_totals(call: Operands) -> RowTotals:
    """The totals of every row over all keys, (B, Hq, N) each; there must be rows and keys."""
    rows = call.q.shape[2]
    sums = call.q.new_empty(3, *call.q.shape[:3], dtype=torch.float32)

    def launch(shape: Shape) -> None:
        map_lse.log_sums[_grid(call, -(-rows // shape.rows))](
            call.q, call.k, *sums, outer_strides(call.q), outer_strides(call.k), call.given,
            *call.sizes, **constants(shape), **flags(call),
        )  # fmt: skip

    fit_map(call, launch)
    return RowTotals(*sums)


def reduce_cells(
    call: Operands,
    totals: Known,
    out: Tensor,
    rows: Side,
    keys: Side,
    largest: bool = False,
    effects: Effects | None = None,
    norms: Tensor | None = None,
) -> None:
    """Write the sum or the largest of each cell's weights or effects, (B, Hq, cells, cells).

    `out` is zero: cells that no row sees may stay as they are.
    """
    batch, heads = out.shape[:2]

    def launch(shape: Shape) -> None:
        row_part, row_groups, row_steps = rows.cut(shape.rows)
        key_part, key_groups, key_steps = keys.cut(shape.keys)
        target, striped, stripes = out, row_steps == 1, key_groups
        if not striped:
            part, groups, steps = rows.cut(shape.rows, 1.25)
            if out.numel() * steps <= PARTS:
                striped, row_part, row_groups, row_steps = True, part, groups, steps
                target = out.new_zeros(batch, heads, rows.cells * steps, keys.cells)
        if striped:
            programs = row_groups * row_steps * heads * batch
            stripes = min(key_groups, max(1, PROGRAMS // programs))
        across = row_steps if striped else 1
        even = striped and keys.fills(call.k.shape[2], shape.keys, key_part)
        cells[(row_groups * across * stripes, heads, batch)](
            call.q, call.k, norms, totals, effects, target, outer_strides(call.q),
            outer_strides(call.k), call.given, *call.sizes, rows.cells, keys.cells, rows.width,
            keys.width, row_steps, key_steps, stripes, *norm_strides(norms), ROW_PART=row_part,
            KEY_PART=key_part, LARGEST=largest, **constants(shape), **flags(call),
            **value_flags(effects), STRIPED=striped, EVEN=even,
        )  # fmt: skip
        if target is not out:
            parts = target.unflatten(2, (rows.cells, row_steps))
            if largest:
                furthest = parts.abs().argmax(3, keepdim=True)
                out.copy_(parts.gather(3, furthest).squeeze(3))
            else:
                torch.sum(parts, 3, out=out)

    fit_map(call, launch, effects)


def value_flags(effects: Effects | None) -> dict[str, object]:
    """The constants of the second product, of gradients and values."""
    if effects is None:
        return {"VALUES": 0, "PADDED_VALUES": 0, "VALUE_PRECISION": ""}
    values = effects.v.shape[-1]
    return {
        "VALUES": values,
        "PADDED_VALUES": tile_side(values),
        "VALUE_PRECISION": precision(effects.v.dtype),
    }


def norm_strides(norms: Tensor | None) -> tuple[int, int]:
    """The strides of batch and head in the factors of keys, contiguous (B, Hkv, M)."""
    return (0, 0) if norms is None else (norms.stride(0), norms.stride(1))


def run_held(
    call: Operands,
    totals: RowTotals,
    out: Tensor | None,
    bounds: Bounds | None,
    count: float = 0.0,
    share: float = 0.0,
) -> None:
    """Write the weight of each row's `count` largest keys, or with integers how many hold a share.

    With bounds, write those instead of `out`.
    """
    rows, known = call.q.shape[2], known_totals(totals)
    by_mass = out is not None and not out.is_floating_point()

    def launch(shape: Shape) -> None:
        held[_grid(call, -(-rows // shape.rows))](
            call.q, call.k, known, out, out, bounds, outer_strides(call.q), outer_strides(call.k),
            call.given, *call.sizes, count, share, CUTS=CUTS, BY_MASS=by_mass,
            **constants(shape), **flags(call),
        )  # fmt: skip

    fit_map(call, launch)


def largest_bounds(q: Tensor, k: Tensor, terms: Terms, amount: Tensor) -> Bounds:
    """What tells the largest keys of each row from the others; amount (B, Hq, N) int32."""
    call = map_call(q, k, terms._replace(sinks=None))
    least, above = q.new_empty(2, *q.shape[:3], dtype=torch.float32)
    bounds = Bounds(amount.contiguous(), least, above, torch.empty_like(amount.contiguous()))
    run_held(call, log_totals(call), None, bounds)
    return bounds


def _grid(call: Operands, blocks: int) -> tuple[Any, ...]:
    """One program per block of rows, head and batch entry."""
    return blocks, call.q.shape[1], call.q.shape[0]
