"""Calls of the kernels for additive scores: the powers they need, and the launches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headwise.core.problem import Terms
from headwise.core.row_sums import RowResults
from headwise.engines.gradients import BackwardInputs, Gradients, sink_share
from headwise.engines.triton.host.decoding_call import join, parts_for, processors, shares
from headwise.engines.triton.host.launches import Kind, Launches, kind_of
from headwise.engines.triton.host.operands import (
    WORD,
    Operands,
    exposed,
    on,
    operands,
    outer_strides,
    tile_side,
)
from headwise.engines.triton.kernels.additive.additive_forward import additive_forward
from headwise.engines.triton.kernels.additive.additive_grads import (
    additive_grad_keys,
    additive_grad_queries,
)
from headwise.engines.triton.kernels.additive.powers import Powers, prepare
from headwise.engines.triton.kernels.gradients import Rows
from headwise.engines.triton.kernels.interpreter import INTERPRETING
from headwise.engines.triton.kernels.tile import LOG2E

TILE = (64, 64, 4)  # rows, keys, warps: the fastest of a few on an NVIDIA H200
TOGETHER = 2  # programs of this tile that fit on a multiprocessor
GRADIENT_TILE = (64, 64, 8)
Strides = tuple[tuple[int, int, int], ...]


def run_additive(
    launches: Launches, q: Tensor, k: Tensor, v: Tensor, terms: Terms, wants: int
) -> RowResults:
    """Return the output and the results that `wants` names."""
    found = launches.empty_results(q, v, wants)
    if found.lse.numel() == 0:
        return found
    call = operands(q, k, v, terms)
    rows, keys, warps = (16, 32, 4) if INTERPRETING else TILE
    weight = _weight(terms)
    tensors = (call.q, call.k, call.v)
    strides = tuple(map(outer_strides, tensors))
    kind = _kind(call, (weight,), strides, wants)
    batch, heads, queries, _ = q.shape
    blocks = -(-queries // rows)
    splits = shares(batch * heads * blocks, -(-k.shape[2] // keys), TOGETHER * processors(q.device))
    parts = parts_for(launches, q, splits, v.shape[-1], wants)
    with on(q.device):
        powers = prepared(launches, call, weight, strides, kind, rows, keys)
        launches.start(
            additive_forward, (blocks * splits, heads, batch), kind, (*tensors, *strides, weight,
            powers, call.given, parts, splits, *call.sizes), warps, 2, ROWS=rows, KEYS=keys,
            WARPS=warps, CLEAN=exposed(q, k, terms), **_flags(call),
        )  # fmt: skip
        join(launches, parts, found, call.given.sinks, splits, kind)
    return found


def prepared(
    launches: Launches,
    call: Operands,
    weight: Tensor,
    strides: Strides,
    kind: Kind,
    rows: int,
    keys: int,
    plain: bool = False,
) -> Powers:
    """Compute the powers of q and k in blocks of rows and keys; `plain` adds those of gradients.

    They take O(n) memory.
    """
    batch, heads, queries, width = call.q.shape
    key_heads, blocks = call.k.shape[1], -(-queries // rows)
    key_blocks, fours = -(-call.k.shape[2] // keys), _fours(width)
    sizes = [
        batch * heads * blocks * rows * fours,
        batch * key_heads * key_blocks * keys * fours,
        heads * fours,
        heads * 2,
        batch * heads * blocks * 2,
        batch * key_heads * key_blocks * 2,
    ]
    room = [-(-size // 4) * 4 for size in sizes]  # so addresses stay multiples of 16 bytes
    each = call.q.new_empty(sum(room), dtype=torch.float32).split(room)
    both = (x.new_empty(x.shape, dtype=torch.float32) if plain else None for x in (call.q, call.k))
    powers = Powers(*each, *both)
    launches.start(
        prepare, (heads * blocks + key_heads * key_blocks, batch, 1), kind, (call.q, call.k,
        *strides[:2], weight, powers, queries, call.k.shape[2], heads, key_heads), 4, 1, ROWS=rows,
        KEYS=keys, WIDTH=width, FOURS=fours, PADDED=tile_side(width),
    )  # fmt: skip
    return powers


def _kind(
    call: Operands, tensors: tuple[Tensor | None, ...], strides: Strides, *more: object
) -> Kind:
    """Return `kind_of` with strides, which Triton specialises on 1 and on multiples of 16."""
    flat = [step for each in strides for step in each]
    if max(flat) >= WORD:
        return None
    special = tuple(1 if step == 1 else step % 16 == 0 for step in flat)
    dtypes = tuple(None if x is None else x.dtype for x in tensors)
    return kind_of(call, tensors, dtypes, special, *more)


def _weight(terms: Terms) -> Tensor:
    assert terms.additive is not None
    return terms.additive.contiguous()


def differentiate_additive(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms, given: BackwardInputs
) -> Gradients:
    """Gradients of every input from those of out, lse and entropy; there is no bias."""
    totals, grad_entropy = given.totals, given.grad_entropy
    products = (given.out.float() * given.grad_out.float()).sum(-1)
    shared, sinks = given.row_constants(products, sink_share(terms.sinks, totals))
    if grad_entropy is not None:
        grad_entropy = grad_entropy.contiguous()
    rest = totals.log_total * LOG2E.value
    rows = Rows(totals.safe_base(), rest, shared.contiguous(), grad_entropy)
    grads = _launch(operands(q, k, v, terms), rows, given.grad_out, given.out.dtype)
    return Gradients(*grads, None, None, None, sinks)


def _launch(
    call: Operands, rows: Rows, grad_out: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the backward kernels; return the gradients of q, k, v and the weight."""
    batch, heads, queries, width = call.q.shape
    key_heads, keys = call.k.shape[1:3]
    grad_q, grad_k, grad_v = (x.new_empty(x.shape, dtype=dtype) for x in (call.q, call.k, call.v))
    block, other, warps = (16, 32, 4) if INTERPRETING else GRADIENT_TILE
    blocks, key_blocks = -(-queries // block), -(-keys // other)
    grad_weight = rows.shared.new_empty(batch, heads, blocks, width)
    if rows.shared.numel() == 0:
        return grad_q, grad_k.zero_(), grad_v.zero_(), grad_weight.sum((0, 2))
    grad_out = grad_out if grad_out.stride(-1) == 1 else grad_out.contiguous()
    tensors = (call.q, call.k, call.v, grad_out)
    strides = tuple(map(outer_strides, tensors))
    weight = _weight(call.terms)
    programs = batch * max(heads * blocks, key_heads * key_blocks)
    room = rows.shared.new_empty(programs * block * other)  # a tile for each program
    kind = _kind(call, (weight, grad_out, *rows), strides, dtype)
    flags = _flags(call) | {"ROWS": block, "KEYS": other, "WARPS": warps}
    # With 128 registers per thread two programs fit on a multiprocessor, which is worth the spills,
    # except in float32, where each product takes three passes.
    few = 128 if call.q.itemsize == 2 else None
    launches = Launches()
    with on(call.q.device):
        powers = prepared(launches, call, weight, strides, kind, block, other, True)
        given = (*tensors, *strides, weight, powers, call.given, *call.sizes, rows, room)
        launches.start(
            additive_grad_queries, (blocks, heads, batch), kind, (*given, grad_q, grad_weight),
            warps, 1, **flags, maxnreg=128,
        )  # fmt: skip
        launches.start(
            additive_grad_keys, (key_blocks, key_heads, batch), kind, (*given, grad_k, grad_v),
            warps, 1, **flags, maxnreg=few,
        )  # fmt: skip
    return grad_q, grad_k, grad_v, grad_weight.sum((0, 2))


def _flags(call: Operands) -> dict[str, Any]:
    flags = call.flags()
    kept = {name: flags[name] for name in ("WIDTH", "VALUES", "PIECES", "CAP", "PRECISION")}
    width, values = call.q.shape[-1], call.v.shape[-1]
    return kept | {
        "FOURS": _fours(width),
        "PADDED": tile_side(width),
        "PADDED_VALUES": tile_side(values),
    }


def _fours(width: int) -> int:
    """Round a width up to a multiple of four: four dimensions share a reciprocal."""
    return -(-width // 4) * 4
