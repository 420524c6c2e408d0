"""Single weights: once a row's totals are known, one weight per row costs one dot product."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.core.intervals import inside
from headwise.core.logits import added
from headwise.core.problem import Problem, Terms
from headwise.core.sums import RowTotals

PART = 1 << 22  # elements of the queries of one step, so that their keys take little memory


def weight_on(
    problem: Problem, terms: Terms, totals: RowTotals, column: Tensor, diagonal: int | None = None
) -> Tensor:
    """The weight of each row on one key, (B, Hq, N): 0 where the row does not see it.

    column (B|1, Hq|1, N|1) is the key's number; with `diagonal`, row i's is i + diagonal.
    """
    batch, heads, rows, width = problem.q.shape
    if torch.compiler.is_compiling():  # a loop over a symbolic length would fix the length
        return _part(problem, terms, totals, column.long(), slice(0, rows), None)
    step = max(1, PART // max(1, batch * heads * width))
    first, last = 0, rows
    if diagonal is not None:  # the rows whose key exists
        first, last = max(0, -diagonal), max(0, min(rows, problem.k.shape[2] - diagonal))
    weights = torch.zeros_like(totals.lse)
    for row in range(first, last, step):
        part = slice(row, min(row + step, last))
        at = column if column.shape[-1] == 1 else column[..., part]
        known = RowTotals(*(x[..., part] for x in totals))
        weights[..., part] = _part(problem, terms, known, at.long(), part, diagonal)
    return weights


def _part(
    problem: Problem,
    terms: Terms,
    totals: RowTotals,
    column: Tensor,
    rows: slice,
    diagonal: int | None,
) -> Tensor:
    wide = totals.lse.dtype
    q, k = problem.q[:, :, rows].to(wide), problem.k
    keys, group = k.shape[2], q.shape[1] // k.shape[1]
    if keys == 0 or group == 0:
        return torch.zeros_like(totals.lse)
    within = (column >= 0) & (column < keys)
    column = column.clamp(0, keys - 1)
    if diagonal is None:
        k = _keys_at(k, column, q.shape[1])  # (B, Hkv, G|1, N|1, D)
    else:
        k = k[:, :, None, rows.start + diagonal : rows.stop + diagonal]
    s = _raw(terms, q.unflatten(1, (-1, group)), k.to(wide)).flatten(1, 2)
    if terms.softcap:
        s = terms.softcap * torch.tanh(s / terms.softcap)
    heads = torch.arange(q.shape[1], device=q.device)[:, None]
    bias = None if terms.bias is None else _entry(terms.bias, column, rows, q.shape[:3])
    place = terms.position[:, None, rows], column + terms.first_key
    for term in added(terms, bias, heads, *place, s.dtype):
        s = s + term
    seen = within
    if terms.dense is not None:
        seen = seen & _entry(terms.dense, column, rows, q.shape[:3])
    elif terms.intervals is not None:
        seen = seen & inside(terms.intervals[..., rows], column)
    return totals.weight(s).masked_fill(~seen, 0)


def _raw(terms: Terms, q: Tensor, k: Tensor) -> Tensor:
    """scale · score of queries (B, Hkv, G, N, D) with one key each, (B, Hkv, G, N)."""
    if terms.additive is not None:
        weight = terms.additive.to(q.dtype).unflatten(0, (q.shape[1], -1))
        s: Tensor = (torch.tanh(q + k) * weight[:, :, None]).sum(-1)
        return s
    if k.shape[3] == 1:
        return terms.scale * torch.matmul(q, k.transpose(-1, -2))[..., 0]
    return (q * k).sum(-1).mul_(terms.scale)


def _keys_at(k: Tensor, column: Tensor, heads: int) -> Tensor:
    """k (B, Hkv, M, D) at one key per row, (B, Hkv, G|1, N|1, D)."""
    group = heads // k.shape[1]
    if column.shape[0] == column.shape[1] == 1:  # the same keys for every head
        return k.index_select(2, column.flatten())[:, :, None]
    index = column.expand(k.shape[0], heads, -1).unflatten(1, (k.shape[1], group))
    found = k.gather(2, index.flatten(2)[..., None].expand(-1, -1, -1, k.shape[3]))
    per_row: Tensor = found.unflatten(2, (group, -1))
    return per_row


def _entry(table: Tensor, column: Tensor, rows: slice, shape: torch.Size) -> Tensor:
    """A (B|1, Hq|1, N|1, M|1) tensor at one key per row."""
    table = table if table.shape[2] == 1 else table[:, :, rows]
    if table.shape[3] == 1:
        return table[..., 0]
    index = column.expand(shape)[..., None]
    return table.expand(*shape, table.shape[3]).gather(3, index)[..., 0]
