"""Attention over the keys that a policy keeps: what tells them, then the engine's own kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from headwise.core.policies import Blocks, Evicted, Indices, Policy, TopK, Window, per_head
from headwise.core.problem import Terms
from headwise.core.row_sums import LOG_TOTAL, MOMENTS, RowResults
from headwise.core.schedule import GPU_BLOCK
from headwise.engines.gradients import BackwardInputs, Gradients
from headwise.engines.triton.host.backward_call import differentiate_dot
from headwise.engines.triton.host.forward_call import run_forward
from headwise.engines.triton.host.launches import Launches
from headwise.engines.triton.host.map_call import (
    Side,
    known_totals,
    largest_bounds,
    log_totals,
    map_call,
    reduce_cells,
)
from headwise.engines.triton.host.marked_rows import best_of, marked
from headwise.engines.triton.host.operands import widened
from headwise.engines.triton.kernels.kept_runs import Marks
from headwise.engines.triton.kernels.maps.map_held import Bounds

Found = tuple[RowResults, Tensor, Tensor | None]
Estimates = Callable[[slice], Tensor]
"""The scores of the blocks for some rows, (B, Hq, R, blocks)."""


def whole(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> RowResults:
    """The results of every row over all of its keys."""
    dtype = q.dtype
    q, k, v = widened(q, k, v)
    rows = run_forward(Launches(), q, k, v, terms, LOG_TOTAL)
    return rows._replace(out=rows.out.to(dtype))


def attend(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms, policy: Policy, estimates: Estimates | None
) -> Found | None:
    """The results of every row over the keys that it keeps, and the tensors of the choice.

    None for a window, which is a mask. `estimates` are for blocks that are not ranked exactly.
    """
    if isinstance(policy, Window):
        return None
    dtype = q.dtype
    q, k, v = widened(q, k, v)
    if isinstance(policy, TopK):
        bounds = _bounds(q, k, terms, per_head(policy.k, q.device).reshape(1, -1, 1))
        rows = run_forward(Launches(), q, k, v, terms, LOG_TOTAL, bounds)
        edges = torch.stack((bounds.least, bounds.above))
        return rows._replace(out=rows.out.to(dtype)), edges, bounds.last
    chosen = _chosen(q, k, terms, policy, estimates)
    parts = [
        run_forward(Launches(), q[:, :, rows], k, v, terms.of_rows(rows), LOG_TOTAL, None, marks)
        for rows, marks in _marked(chosen, policy_run(policy), q, k)
    ]
    found = _joined(parts)
    return found._replace(out=found.out.to(dtype)), chosen, None


def differentiate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: Terms,
    given: BackwardInputs,
    run: int,
    chosen: Tensor,
    last: Tensor | None,
) -> Gradients:
    """The gradients of every input from that of out; `chosen` and `last` as `attend` gave them."""
    q, k, v, out, grad_out = widened(q, k, v, given.out, given.grad_out)
    given = given._replace(out=out, grad_out=grad_out)
    if last is not None:
        least, above = (x.contiguous() for x in chosen.unbind(0))
        bounds = Bounds(last, least, above, last.contiguous())
        return differentiate_dot(q, k, v, terms, given, bounds)
    parts = []
    for rows, marks in _marked(chosen, run, q, k):
        if (rows.start, rows.stop) != (0, q.shape[2]):  # more will be added
            given = given._replace(out=given.out.float())
        part = q[:, :, rows], k, v, terms.of_rows(rows), given.of_rows(rows)
        parts.append(differentiate_dot(*part, None, marks))
    return parts[0] if len(parts) == 1 else _added(parts, terms)


def recall(
    q: Tensor, k: Tensor, terms: Terms, policy: Policy, estimates: Estimates | None
) -> tuple[Tensor, Tensor, RowResults, RowResults] | None:
    """The numbers of keys that rows keep and of those that are among as many largest ones.

    And the results over the kept and over the largest. None for policies that mark no keys.
    """
    if isinstance(policy, TopK | Window):
        return None
    q, k = widened(q, k)
    terms = terms._replace(sinks=None)
    found = []
    chosen = _chosen(q, k, terms, policy, estimates)
    for rows, marks in _marked(chosen, policy_run(policy), q, k):
        call = q[:, :, rows], k, k[..., :0], terms.of_rows(rows)
        kept = run_forward(Launches(), *call, LOG_TOTAL | MOMENTS, None, marks)
        assert kept.visible is not None
        bounds = _bounds(call[0], k, call[3], kept.visible.clamp_min(1))
        best = run_forward(Launches(), *call, LOG_TOTAL, bounds)
        both = run_forward(Launches(), *call, LOG_TOTAL | MOMENTS, bounds, marks)
        found.append((kept, best, both))
    kept, best, both = (_joined(parts) for parts in zip(*found, strict=True))
    assert kept.visible is not None and both.visible is not None
    return kept.visible.long(), both.visible.long(), kept, best


def policy_run(policy: Policy) -> int:
    """The neighbouring keys that a policy keeps together."""
    return policy.size if isinstance(policy, Blocks) else 1


def _bounds(q: Tensor, k: Tensor, terms: Terms, count: Tensor) -> Bounds:
    """What tells the `count` largest keys of each row, which broadcasts to (B, Hq, N)."""
    return largest_bounds(q, k, terms, count.int().expand(q.shape[:3]))


def _chosen(
    q: Tensor, k: Tensor, terms: Terms, policy: Policy, estimates: Estimates | None
) -> Tensor:
    """The numbers of the kept runs, (B|1, Hq|1, N, count); of evicted keys, those that stay."""
    if isinstance(policy, Indices):
        return policy.keys.to(k.device)
    if isinstance(policy, Evicted):
        return policy.kept().to(k.device)
    assert isinstance(policy, Blocks)
    return _best_blocks(q, k, terms, policy, estimates)


def _marked(chosen: Tensor, run: int, q: Tensor, k: Tensor) -> Iterator[tuple[slice, Marks]]:
    """Rows and their marks; `chosen` as `_chosen` gives it."""
    keys, heads = k.shape[2], q.shape[1]
    if chosen.dtype == torch.bool:  # (B|1, H|1, M'): the same for every row; later keys stay
        stays = torch.nn.functional.pad(chosen, (0, keys - chosen.shape[-1]), value=True)
        if 1 < stays.shape[1] < heads:
            stays = stays.repeat_interleave(heads // stays.shape[1], 1)
        numbers = torch.arange(keys, dtype=torch.int32, device=k.device)
        chosen = numbers.where(stays, -1)[:, :, None]
    return marked(chosen, run, q.shape[2], keys)


def _best_blocks(
    q: Tensor, k: Tensor, terms: Terms, policy: Blocks, estimates: Estimates | None
) -> Tensor:
    """The numbers of the blocks that rank highest in each row, (B, Hq, N, count)."""
    batch, heads, queries, _ = q.shape
    keys, count = k.shape[2], per_head(policy.count, q.device)
    blocks = -(-keys // policy.size)
    most, step = min(int(count.max()), blocks), max(1, GPU_BLOCK // max(1, batch * heads * blocks))
    found = []
    for first in range(0, queries, step):
        rows = slice(first, min(first + step, queries))
        if estimates is None:
            scores = _masses(q[:, :, rows], k, terms.of_rows(rows), policy.size)
        else:
            scores = estimates(rows)
        found.append(best_of(scores, count, most))
    return torch.cat(found, 2)


def _masses(q: Tensor, k: Tensor, terms: Terms, size: int) -> Tensor:
    """The weight of each block, (B, Hq, N, blocks)."""
    call, keys = map_call(q, k, terms), k.shape[2]
    side = Side(-(-keys // size), size, min(size, keys))
    out = q.new_zeros(*q.shape[:3], side.cells, dtype=torch.float32)
    reduce_cells(call, known_totals(log_totals(call)), out, Side(q.shape[2], 1, 1), side)
    return out


def _joined(parts: Sequence[RowResults]) -> RowResults:
    """The results of all rows from those of parts."""
    if len(parts) == 1:
        return parts[0]
    fields = zip(RowResults._fields, zip(*parts, strict=True), strict=True)
    return parts[0]._replace(
        **{name: torch.cat(field, 2) for name, field in fields if field[0] is not None}
    )


def _added(parts: Sequence[Gradients], terms: Terms) -> Gradients:
    """The gradients of a call from those of parts of its rows."""
    rows = {"q"} if terms.bias is None or terms.bias.shape[2] == 1 else {"q", "bias"}
    found = {}
    for name, field in zip(Gradients._fields, zip(*parts, strict=True), strict=True):
        if field[0] is not None:
            found[name] = torch.cat(field, 2) if name in rows else torch.stack(field).sum(0)
    return parts[0]._replace(**found)
