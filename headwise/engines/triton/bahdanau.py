"""Calls with an additive score: what their kernels serve, the factors they take, the launches."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.engines.operators import Gradients
from headwise.engines.triton.additive import Factors, additive_forward
from headwise.engines.triton.additive_grads import additive_grad_keys, additive_grad_queries
from headwise.engines.triton.cards import INTERPRETING
from headwise.engines.triton.decoding import join, parts_for
from headwise.engines.triton.gradients import Rows
from headwise.engines.triton.launch import Operands, on, operands, outer_strides
from headwise.engines.triton.split import Merged
from headwise.problem import Problem, Terms
from headwise.sums import Sums, room

WIDEST = 128  # of a head: beyond it a gradient no longer fits beside its tile


def refuses(problem: Problem) -> str | None:
    """Why the additive kernels can't serve a problem that is otherwise the engine's."""
    if problem.bias is not None:
        return "its additive kernels take no bias"
    if max(problem.q.shape[-1], problem.v.shape[-1]) > WIDEST:
        return f"its additive kernels take heads of 1 to {WIDEST}"
    return None


def run_additive(q: Tensor, k: Tensor, v: Tensor, terms: Terms, wants: int) -> Sums:
    """Output and the sums that `wants` names."""
    if INTERPRETING and q.dtype == torch.bfloat16:  # as in the forward
        sums = run_additive(q.float(), k.float(), v.float(), terms, wants)
        return sums._replace(out=sums.out.to(q.dtype))
    sums = room(q, v, wants)
    if sums.lse.numel() == 0:
        return sums
    call = operands(q, k, v, terms)
    rows, keys, warps = (16, 32, 4) if INTERPRETING else (32, 64, 4)
    parts = parts_for(q, 1, v.shape[-1], wants)
    merged = Merged(sums.lse, sums.max_logit, *(x if x.numel() else None for x in sums[3:]))
    tensors = (call.q, call.k, call.v)
    with on(q.device):
        additive_forward[(-(-q.shape[2] // rows), q.shape[1], q.shape[0])](
            *tensors, *map(outer_strides, tensors), factors(call.q, call.k, terms), call.given,
            parts, *call.sizes, ROWS=rows, KEYS=keys, num_warps=warps, num_stages=2,
            **_flags(call),
        )  # fmt: skip
        join(parts, sums.out, merged, call.given.sinks, 1)
    return sums


def differentiate_additive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: Terms,
    out: Tensor,
    lse: Tensor,
    entropy: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    grad_entropy: Tensor | None,
) -> Gradients:
    """Gradients of every input from those of out, lse and entropy."""
    if INTERPRETING and q.dtype == torch.bfloat16:
        q, k, v, out, grad_out = (x.float() for x in (q, k, v, out, grad_out))
    shared = (out.float() * grad_out.float()).sum(-1)
    shared = shared if grad_lse is None else shared - grad_lse
    share = None if terms.sinks is None else torch.exp(terms.sinks.float()[:, None] - lse)
    if grad_entropy is not None:
        shared = shared + grad_entropy * (entropy + (0.0 if share is None else share))
        grad_entropy = grad_entropy.contiguous()
    rows = Rows(lse, shared.contiguous(), grad_entropy)
    call = operands(q, k, v, terms)
    grad_q, grad_k, grad_v, grad_weight = _launch(call, rows, grad_out)
    sinks = None
    if share is not None:
        row = -shared if grad_entropy is None else grad_entropy - shared
        sinks = (share * row).nan_to_num(nan=0.0).sum((0, 2))
    return Gradients(grad_q, grad_k, grad_v, grad_weight, None, None, None, sinks)


def _launch(call: Operands, rows: Rows, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v and the weight."""
    batch, heads, queries, width = call.q.shape
    key_heads, keys = call.k.shape[1:3]
    grad_q, grad_k, grad_v = (
        torch.empty_like(x, memory_format=torch.contiguous_format) for x in (call.q, call.k, call.v)
    )
    block, other, warps = (16, 32, 4) if INTERPRETING else (64, 64, 4)
    blocks = -(-queries // block)
    grad_weight = rows.shared.new_zeros(batch, heads, blocks, width)
    if rows.shared.numel() == 0:
        return grad_q, grad_k.zero_(), grad_v.zero_(), grad_weight.sum((0, 2))
    grad_out = grad_out if grad_out.stride(-1) == 1 else grad_out.contiguous()
    tensors = (call.q, call.k, call.v, grad_out)
    given: list[Any] = [
        *tensors, *map(outer_strides, tensors), factors(call.q, call.k, call.terms), call.given,
        *call.sizes, rows,
    ]  # fmt: skip
    with on(call.q.device):
        additive_grad_queries[(blocks, heads, batch)](
            *given, grad_q, grad_weight, ROWS=block, KEYS=other, num_warps=warps, num_stages=1,
            **_flags(call),
        )  # fmt: skip
        additive_grad_keys[(-(-keys // other), key_heads, batch)](
            *given, grad_k, grad_v, ROWS=block, KEYS=other, num_warps=warps, num_stages=1,
            **_flags(call),
        )  # fmt: skip
    return grad_q, grad_k, grad_v, grad_weight.sum((0, 2))


def factors(q: Tensor, k: Tensor, terms: Terms) -> Factors:
    """e^{2q} and e^{2k} with the dimensions first, and the weight; O(n) memory beside q and k."""
    assert terms.additive is not None
    odd = q.shape[-1] % 2  # two dimensions share a reciprocal; one more with weight 0 changes none

    def powers(x: Tensor) -> Tensor:
        x = x.transpose(-1, -2).to(torch.float32, memory_format=torch.contiguous_format)
        x = torch.exp(2 * x)
        return F.pad(x, (0, 0, 0, 1)) if odd else x

    weight = F.pad(terms.additive.float(), (0, odd)).contiguous()
    size = k.abs().amax((-1, -2)).float().repeat_interleave(q.shape[1] // k.shape[1], 1)
    size = size + q.abs().amax((-1, -2)).float()
    return Factors(powers(q).contiguous(), powers(k).contiguous(), weight, size)


def _flags(call: Operands) -> dict[str, Any]:
    flags = call.flags()
    kept = {name: flags[name] for name in ("WIDTH", "VALUES", "PIECES", "CAP", "PRECISION")}
    width, values = call.q.shape[-1], call.v.shape[-1]
    return kept | {
        "EVEN": width + width % 2,
        "PADDED": max(16, 1 << (width - 1).bit_length()),
        "PADDED_VALUES": max(16, 1 << (values - 1).bit_length()),
    }
