"""One backward call: the constants of each row, then one kernel per kind of gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headwise.core.problem import Terms
from headwise.core.row_sums import RowTotals
from headwise.engines.gradients import BackwardInputs, Gradients, sink_share
from headwise.engines.triton.host.cards import card
from headwise.engines.triton.host.launches import Kind, Launches, kind_of
from headwise.engines.triton.host.operands import (
    WORD,
    Operands,
    described,
    exposed,
    loadable,
    on,
    operands,
    outer_strides,
    pair_tiles,
    stride_unit,
)
from headwise.engines.triton.host.tile_shapes import Shape, fit, loads_pairs
from headwise.engines.triton.kernels.grad_keys import grad_keys, row_blocks
from headwise.engines.triton.kernels.grad_queries import RowSums, grad_queries
from headwise.engines.triton.kernels.grad_small import grad_bias, grad_distance
from headwise.engines.triton.kernels.gradients import WHOLE, Rows, fill_rows
from headwise.engines.triton.kernels.kept_runs import Marks
from headwise.engines.triton.kernels.maps.map_held import Bounds


def differentiate_dot(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: Terms,
    given: BackwardInputs,
    largest: Bounds | None = None,
    marks: Marks | None = None,
) -> Gradients:
    """Return the gradients of every input from those of out, lse and entropy."""
    with on(q.device):
        call = BackwardCall(q, k, v, terms, given.out, given.grad_out, largest, marks)
        share = sink_share(terms.sinks, given.totals)
        rows = call.numbers(given.out, given.totals)
        _, grad_sinks = given.row_constants(rows.shared[..., : call.rows], share)
        if given.grad_entropy is not None:
            past = rows.shared.shape[-1] - call.rows
            padded = torch.nn.functional.pad(given.grad_entropy.contiguous(), (0, past))
            rows = rows._replace(entropy=padded)
        grad_q, sums = call.queries(rows)
        grad_k, grad_v = call.keys(rows)
        return Gradients(
            grad_q,
            grad_k,
            grad_v,
            None,
            call.bias(rows) if given.bias_learns else None,
            None if sums.slopes is None else -sums.slopes.sum((0, 2)),
            None if terms.relative is None else call.relative(rows, sums),
            grad_sinks,
        )


class BackwardCall:
    """The launches of one backward call."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        terms: Terms,
        out: Tensor,
        grad_out: Tensor,
        largest: Bounds | None,
        marks: Marks | None,
    ) -> None:
        self.start = Launches().start
        self.operands: Operands = operands(q, k, v, terms, largest, marks)
        self.grad_out, step = loadable(grad_out)
        q_steps, k_steps, v_steps = self.operands.steps
        self.steps = q_steps, step, k_steps, v_steps
        self.flags = {name: x for name, x in self.operands.flags().items() if name != "PLAIN"}
        self.batch, self.heads, self.rows = q.shape[:3]
        self.wide = max(self.operands.padded)
        self.dtype = out.dtype  # of the gradients: wider than q's if more are to be added

    def numbers(self, out: Tensor, totals: RowTotals) -> Rows:
        """Compute the constants of every row but the entropy's, padded to WHOLE blocks of rows."""
        a, c = (x if x.stride(-1) == 1 else x.contiguous() for x in (self.grad_out, out))
        blocks = -(-self.rows // WHOLE.value)
        found = totals.lse.new_empty(3, self.batch, self.heads, blocks * WHOLE.value)
        rows = Rows(found[0], found[1], found[2], None)
        if found.numel():
            strides = (*outer_strides(a), *outer_strides(c))
            unit = stride_unit(strides, 8)
            loaded = (a, c, totals.base, totals.log_total)
            aligned = all(x.data_ptr() % 16 == 0 for x in loaded) and max(strides) < WORD
            self.start(
                fill_rows, (blocks * 2, self.heads, self.batch),
                (a.dtype, c.dtype) if aligned else None,
                (a, c, *(stride // unit for stride in strides), totals.base, totals.log_total,
                rows, self.rows), 4, 1,
                ROWS=WHOLE.value // 2, WIDTH=a.shape[-1], PADDED=self.flags["PADDED_VALUES"],
                UNIT=unit,
            )  # fmt: skip
        return rows

    def grid(self, rows: int) -> tuple[int, int, int]:
        """Return a grid with one program per block of rows, head and batch entry."""
        return -(-self.rows // rows), self.heads, self.batch

    def fit(self, kernel: str, launch: Callable[[Shape], None]) -> None:
        """Launch "queries" or "keys" with a shape that fits."""
        x = self.operands.q
        kind = "capped " if self.flags["CAP"] else ""
        if loads_pairs(self.operands.given):
            kind = "biased "
        fit(kind + kernel, self.wide, x.itemsize, card(x.device), launch)

    def tensors(self, rows: int, keys: int) -> tuple[bool, list[Any]]:
        """Return whether TMA is used, and the arguments that the two large kernels share."""
        x = self.operands
        each = (x.q, self.grad_out, x.k, x.v)
        tma, loaded = described(each, self.steps, (rows, rows, keys, keys))
        strides = [None] * 4 if tma else map(outer_strides, each)
        return tma, [*loaded, *strides, *pair_tiles(x, rows, keys), x.given, *x.sizes]

    def kind(self, rows: Rows) -> Kind:
        """Return the `kind_of` the two large kernels, or None if only Triton can tell."""
        if self.steps[1] is None:
            return None
        return kind_of(self.operands, rows, self.dtype)

    def queries(self, rows: Rows) -> tuple[Tensor, RowSums]:
        """Return q's gradient, and the row sums for those of ALiBi slopes and relative table."""
        terms, q = self.operands.terms, self.operands.q
        grad = q.new_empty(q.shape, dtype=self.dtype)
        empty, size = rows.shared.new_empty, q.shape[:3]
        slopes = None if terms.slopes is None else empty(size)
        ends = [None if terms.relative is None else empty(size) for _ in range(2)]
        sums = RowSums(slopes, *ends)

        def launch(shape: Shape) -> None:
            tma, tensors = self.tensors(shape.rows, shape.keys)
            self.start(
                grad_queries, self.grid(shape.rows), self.kind(rows), (*tensors, rows, grad, sums),
                shape.warps, shape.stages, ROWS=shape.rows, KEYS=shape.keys, TMA=tma,
                CLEAN=exposed(q, self.operands.k, terms), **self.flags,
            )  # fmt: skip

        if grad.numel():
            self.fit("queries", launch)
        return grad, sums

    def keys(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Return the gradients of k and v."""
        k, v = self.operands.k, self.operands.v
        grad_k, grad_v = (x.new_empty(x.shape, dtype=self.dtype) for x in (k, v))
        if self.rows == 0:
            return grad_k.zero_(), grad_v.zero_()

        def launch(shape: Shape) -> None:
            tma, tensors = self.tensors(shape.rows, shape.keys)
            grid = (-(-k.shape[2] // shape.keys), k.shape[1], self.batch)
            self.start(
                grad_keys, grid, self.kind(rows),
                (*tensors, rows, grad_k, grad_v, *self.table(shape.rows)), shape.warps,
                shape.stages, ROWS=shape.rows, KEYS=shape.keys, TMA=tma, **self.flags,
            )  # fmt: skip

        if grad_k.numel():
            self.fit("keys", launch)
        return grad_k, grad_v

    def table(self, rows: int) -> tuple[Tensor | None, int, int, int]:
        """Return a table of the keys each block of rows sees, its blocks, and its strides."""
        intervals = self.operands.given.intervals
        if intervals is None:
            return None, 0, 0, 0
        blocks = -(-self.rows // rows)
        pieces, _, batch, heads, _ = intervals.shape
        table = intervals.new_empty(batch, heads, pieces, 4, blocks)
        given, sizes = self.operands.given, self.operands.sizes
        row_blocks[(blocks, heads, batch)](given, *sizes, table, blocks, ROWS=rows, PIECES=pieces)
        step = table.stride()
        return table, blocks, step[0] if batch > 1 else 0, step[1] if heads > 1 else 0

    def small(self) -> list[Any]:
        """Return the arguments of the small kernels, which never use TMA."""
        x = self.operands
        each = (x.q, self.grad_out, x.k, x.v)
        return [*each, *map(outer_strides, each), x.given, *x.sizes]

    def bias(self, rows: Rows) -> Tensor:
        """Return the gradient of the bias tensor, float32, in the shape of the bias."""
        bias = self.operands.terms.bias
        assert bias is not None
        grad = bias.new_zeros(bias.shape, dtype=torch.float32)
        keys = self.operands.k.shape[2]
        if grad.numel() == 0 or self.rows == 0 or keys == 0:
            return grad
        tile = 32 if self.wide > 64 or self.operands.q.itemsize == 4 else 64
        tiles = -(-self.rows // tile), -(-keys // tile)
        whole = self.batch, self.heads, *tiles
        spans = tuple(n if bias.shape[axis] == 1 else 1 for axis, n in enumerate(whole))
        flags = self.flags | {"ROW_SUM": bias.shape[2] == 1, "KEY_SUM": bias.shape[3] == 1}
        grid = (tiles[0] // spans[2] * (tiles[1] // spans[3]), bias.shape[1], bias.shape[0])
        grad_bias[grid](
            *self.small(), rows, grad, self.heads, tiles[1], *spans, ROWS=tile, KEYS=tile,
            num_warps=4, num_stages=1, **flags,
        )  # fmt: skip
        return grad

    def relative(self, rows: Rows, sums: RowSums) -> Tensor:
        """Return the gradient of the relative table, (Hq, 2R + 1)."""
        table = self.operands.terms.relative
        assert table is not None and sums.before is not None and sums.after is not None
        reach = self.operands.sizes.reach
        grad = rows.shared.new_zeros(self.batch, self.heads, table.shape[1])
        if self.rows and self.operands.k.shape[2]:
            flags = {name: x for name, x in self.flags.items() if name != "PRECISION"}
            grad_distance[(2 * reach - 1, self.heads, self.batch)](
                *self.small(), rows, grad, ROWS=32, num_warps=4, num_stages=1, **flags
            )
        grad[..., 0], grad[..., -1] = sums.after.sum(-1), sums.before.sum(-1)
        return grad.sum(0)
