"""What goes into the Hopper backward for each row, and the gradients of queries that come out.

Its sums of the gradients of queries lie in memory as its threads hold them (`in_threads` of
`hopper_backward`), so that they are written and added as whole blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headwise.engines.triton.kernels.tile import LOG2E, NOTHING, load_tile

STEP = tl.constexpr(8192)  # numbers of a block of rows: 128 rows of 64 or 64 rows of 128
PART = tl.constexpr(4096)  # and of the part of one warpgroup, 64 by 64
SIDE = tl.constexpr(64)

_STRIDES = ["grad_batch", "grad_head", "grad_row", "out_batch", "out_head", "out_row"]


@triton.jit(do_not_specialize=[*_STRIDES, "queries"])
def prepare_rows(
    grad, out, grad_batch, grad_head, grad_row, out_batch, out_head, out_row,
    base, log_total, numbers, sums, counts, queries,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Write lse in base 2 and Σ grad · out of a block of rows; set its sums and their count to 0.

    grad and out are (B, H, N, D), base and log_total (B, H, N), `numbers` (kinds, B, H, blocks ·
    ROWS). A row without weights has an lse of inf. Strides are in multiples of UNIT.
    """
    block, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    strides = (grad_batch * UNIT, grad_head * UNIT, grad_row * UNIT)
    one = load_tile(grad, strides, b, h, block * ROWS, queries, ROWS, WIDTH, PADDED, False)
    strides = (out_batch * UNIT, out_head * UNIT, out_row * UNIT)
    two = load_tile(out, strides, b, h, block * ROWS, queries, ROWS, WIDTH, PADDED, False)
    shared = tl.sum(one.to(tl.float32) * two.to(tl.float32), 1)
    i = block * ROWS + tl.arange(0, ROWS)
    here = i < queries
    head = (b * tl.num_programs(1) + h).to(tl.int64)
    largest = tl.load(base + head * queries + i, mask=here, other=NOTHING)
    rest = tl.load(log_total + head * queries + i, mask=here, other=0.0)
    lse = tl.where(largest == NOTHING, float("inf"), (largest + rest) * LOG2E)
    line = head * (tl.num_programs(0) * ROWS) + i
    kind = tl.num_programs(2).to(tl.int64) * tl.num_programs(1) * tl.num_programs(0) * ROWS
    tl.store(numbers + line, lse)
    tl.store(numbers + kind + line, shared)
    place = (head * tl.num_programs(0) + block) * STEP
    tl.store(sums + place + tl.arange(0, STEP), tl.zeros([STEP], tl.float32))
    tl.store(counts + head * tl.num_programs(0) + block, 0)


@triton.jit(do_not_specialize=["queries", "scale"])
def finish_queries(sums, grad_q, queries, scale, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Write the gradients of 64 rows and 64 columns of queries from their sums.

    grad_q is (B, H, N, WIDTH), contiguous. A block of rows is ROWS · 64 or ROWS · 128.
    """
    part, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    head = (b * tl.num_programs(1) + h).to(tl.int64)
    place = (head * tl.num_programs(0) + part) * PART
    x = tl.load(sums + place + tl.arange(0, PART)) * scale
    # Eight columns at a time: by warp, row in eight, pair of columns, which eight, and column.
    x = tl.permute(tl.reshape(x, [8, 4, 8, 4, 2, 2]), [1, 4, 2, 0, 3, 5])
    x = tl.reshape(x, [SIDE, SIDE])
    first, column = part // 2 * ROWS, tl.arange(0, SIDE)
    if ROWS == SIDE:
        column += part % 2 * SIDE
    else:
        first += part % 2 * SIDE
    i = first + tl.arange(0, SIDE)
    tl.store(
        grad_q + (head * queries + i)[:, None] * WIDTH + column[None, :],
        x.to(grad_q.dtype.element_ty),
        mask=(i < queries)[:, None] & (column < WIDTH)[None, :],
    )
