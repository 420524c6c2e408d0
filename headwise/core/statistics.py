"""From the results of a pass to the statistics of an `Observation`.

Once a row's totals are known, the weight on a single key costs one dot product per row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.core.intervals import inside
from headwise.core.logits import added
from headwise.core.observation import STATISTICS
from headwise.core.problem import Problem, Terms
from headwise.core.row_sums import FLAGS, LOG_TOTAL, RowResults, RowTotals

PART = 1 << 22  # elements of the queries of one step, so that their keys take little memory

FEW_KEYS = ("sink_mass", "self_mass", "previous_mass")
"""The statistics that are the weight on one key or a few, wherever the row looks."""

SINGLE = ("top_prob", *FEW_KEYS)

_NEEDS = FLAGS | {"effective_keys": FLAGS["entropy"]} | dict.fromkeys(SINGLE, LOG_TOTAL)


def wanted(stats: tuple[str, ...]) -> int:
    """Return the flags of a pass whose results give these statistics."""
    wants = 0
    for name in stats:
        wants |= _NEEDS.get(name, 0)
    return wants


def complete(
    problem: Problem,
    rows: RowResults,
    stats: tuple[str, ...],
    sink_keys: int,
    terms: Terms | None = None,
) -> dict[str, Tensor]:
    """The named statistics, (B, Hq, N) each, from the results of a pass; `terms`, if known."""
    asked = set(stats)
    with torch.no_grad():
        found = of_whole_rows(rows.out, rows.entropy, asked)
        if not asked.isdisjoint(SINGLE):
            start = problem.start() if "sink_mass" in asked else 0
            terms = problem.terms() if terms is None else terms
            found |= single_weights(
                problem.q, problem.k, terms, rows.totals(), rows.max_logit, asked,
                start, sink_keys, problem.diagonal(),
            )  # fmt: skip
    return named(rows, found, stats)


def of_whole_rows(out: Tensor, entropy: Tensor | None, asked: set[str]) -> dict[str, Tensor]:
    """The statistics that need no single weight, (B, Hq, N) each."""
    found = {}
    if "effective_keys" in asked and entropy is not None:
        found["effective_keys"] = entropy.exp()
    if "output_norm" in asked:
        wide = torch.promote_types(out.dtype, torch.float32)
        found["output_norm"] = torch.linalg.vector_norm(out, dim=-1, dtype=wide)
    return found


def named(rows: RowResults, more: dict[str, Tensor], stats: tuple[str, ...]) -> dict[str, Tensor]:
    """The named statistics in their usual order: `more`, and those that a pass returns."""
    found = rows._asdict() | more
    return {name: found[name] for name in STATISTICS if name in stats}


def single_weights(
    q: Tensor,
    k: Tensor,
    terms: Terms,
    totals: RowTotals,
    max_logit: Tensor,
    asked: set[str],
    start: int | Tensor,
    sink_keys: int,
    diagonal: int | None = None,
) -> dict[str, Tensor]:
    """The statistics that are single weights, or sums of a few, (B, Hq, N) each.

    `start` is the key at which each row's sequence begins; `diagonal` that of `Problem`, if known.
    """
    found: dict[str, Tensor] = {}
    own = (terms.position - terms.first_key)[:, None]  # (B|1, 1, N): the key beside the query
    if "top_prob" in asked:
        found["top_prob"] = totals.weight(max_logit)
    if "self_mass" in asked:
        found["self_mass"] = weight_on(q, k, terms, totals, own, diagonal)
    if "previous_mass" in asked:
        before = None if diagonal is None else diagonal - 1
        found["previous_mass"] = weight_on(q, k, terms, totals, own - 1, before)
    if "sink_mass" in asked:
        first = start if isinstance(start, Tensor) else own.new_full((1, 1, 1), start)
        found["sink_mass"] = sum(
            (weight_on(q, k, terms, totals, first + step) for step in range(sink_keys)),
            torch.zeros_like(max_logit),
        )
    return found


def weight_on(
    q: Tensor,
    k: Tensor,
    terms: Terms,
    totals: RowTotals,
    column: Tensor,
    diagonal: int | None = None,
) -> Tensor:
    """The weight of each row on one key, (B, Hq, N): 0 where the row does not see it.

    column (B|1, Hq|1, N|1) is the key's number; with `diagonal`, row i's is i + diagonal.
    """
    batch, heads, rows, width = q.shape
    if torch.compiler.is_compiling():  # a loop over a symbolic length would fix the length
        return _part(q, k, terms, totals, column.long(), slice(0, rows), None)
    step = max(1, PART // max(1, batch * heads * width))
    first, last = 0, rows
    if diagonal is not None:  # the rows whose key exists
        first, last = max(0, -diagonal), max(0, min(rows, k.shape[2] - diagonal))
    weights = torch.zeros_like(totals.lse)
    for row in range(first, last, step):
        part = slice(row, min(row + step, last))
        at = column if column.shape[-1] == 1 else column[..., part]
        known = RowTotals(*(x[..., part] for x in totals))
        weights[..., part] = _part(q, k, terms, known, at.long(), part, diagonal)
    return weights


def _part(
    q: Tensor,
    k: Tensor,
    terms: Terms,
    totals: RowTotals,
    column: Tensor,
    rows: slice,
    diagonal: int | None,
) -> Tensor:
    wide = totals.lse.dtype
    q = q[:, :, rows].to(wide)
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
