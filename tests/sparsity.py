"""What the policies of sparse attention keep, written down a second time, row by row in Python."""

from __future__ import annotations

import math
import random

import torch
from torch import Tensor

import headwise as hw
from tests.oracle import Answer
from tests.problems import Call


def kept(call: Call, found: Answer, policy: hw.sparse.Policy) -> Tensor:
    """The visible keys that a policy keeps, bool (B, Hq, N, M)."""
    mine = torch.zeros(found.s.shape, dtype=torch.bool)
    B, H, N, M = found.s.shape
    for b in range(B):
        for h in range(H):
            for i in range(N):
                s = found.s[b, h, i].tolist()
                seen = [j for j in range(M) if s[j] != -math.inf]
                chosen = _row(call, found, policy, (b, h, i), s, seen)
                mine[b, h, i, [j for j in seen if j in chosen]] = True
    return mine


def _row(
    call: Call,
    found: Answer,
    policy: hw.sparse.Policy,
    place: tuple[int, int, int],
    s: list[float],
    seen: list[int],
) -> set[int]:
    b, h, i = place
    own = int(call.positions[b, i])
    if isinstance(policy, hw.sparse.TopK):
        return set(sorted(seen, key=lambda j: (-s[j], j))[: amount(policy.k, h)])
    if isinstance(policy, hw.sparse.Window):
        return {j for j in seen if own - policy.left <= j <= own or j < policy.sinks}
    if isinstance(policy, hw.sparse.Indices):
        rows = policy.keys.expand(*found.s.shape[:3], -1)
        return set(rows[b, h, i].tolist())
    if isinstance(policy, hw.sparse.Evicted):
        return _left(call, policy, b, h)
    return _blocks(call, found, policy, place, seen)


def _left(call: Call, policy: hw.sparse.Evicted, b: int, h: int) -> set[int]:
    entries, heads, keys = policy.scores.shape
    group = call.sizes.heads // call.sizes.key_heads
    head = h if heads == call.sizes.heads else (h // group if heads > 1 else 0)
    row = policy.scores[b if entries > 1 else 0, head].tolist()
    best = sorted(range(keys), key=lambda j: (-row[j], j))[: amount(policy.budget, head)]
    return {*best, *range(keys, call.sizes.keys)}


def _blocks(
    call: Call,
    found: Answer,
    policy: hw.sparse.Blocks,
    place: tuple[int, int, int],
    seen: list[int],
) -> set[int]:
    b, h, i = place
    size, sizes = policy.size, call.sizes
    blocks = {
        n: [j for j in range(sizes.keys) if j // size == n] for n in {j // size for j in seen}
    }
    if policy.by == "exact":
        scores = {n: math.fsum(found.p[b, h, i, keys].tolist()) for n, keys in blocks.items()}
    else:
        group = sizes.heads // sizes.key_heads
        heads = range(h // group * group, h // group * group + group)
        known = call.visible[b, list(heads)].any(0).any(0)  # (M,): by some row of the key head
        scale = sizes.width**-0.5 if call.scale is None else call.scale
        q = scale * call.q[b, h, i].detach().double()
        k = call.k[b, h // group].detach().double()
        scores = {}
        for n, keys in blocks.items():
            some = k[[j for j in keys if known[j]]]
            if policy.by == "mean":
                scores[n] = float(q @ some.mean(0))
            else:
                scores[n] = float(torch.maximum(q * some.amin(0), q * some.amax(0)).sum())
        own = int(call.positions[b, i]) // size
        if own in scores:
            scores[own] = math.inf
    best = sorted(scores, key=lambda n: (-scores[n], n))[: amount(policy.count, h)]
    return {j for n in best for j in blocks[n]}


def amount(given: int | tuple[int, ...], head: int) -> int:
    return given if isinstance(given, int) else given[head]


def attend(call: Call, found: Answer, some: Tensor) -> Tensor:
    """The output over some of the visible keys, renormalised; the sink stays, (B, Hq, N, Dv)."""
    s = found.s.masked_fill(~some, -torch.inf)
    columns = s
    if call.sinks is not None:
        sink = call.sinks.double()[None, :, None, None].expand(*s.shape[:3], 1)
        columns = torch.cat([s, sink], -1)
    blind = (columns == -torch.inf).all(-1, keepdim=True)
    p = columns.masked_fill(blind, 0).softmax(-1)[..., : s.shape[-1]] * ~blind
    v = call.v.double().repeat_interleave(call.sizes.heads // call.sizes.key_heads, 1)
    return p.masked_fill(~some, 0) @ v


def policies(call: Call, dice: random.Random) -> list[hw.sparse.Policy]:
    """One policy of each kind that fits a call."""
    sizes, numbers = call.sizes, torch.Generator().manual_seed(dice.getrandbits(32))

    def some(heads: int) -> int | tuple[int, ...]:
        several = tuple(dice.randint(1, sizes.keys + 2) for _ in range(heads))
        return several if dice.random() < 0.4 else several[0]

    shape = [dice.choice((1, n)) for n in (sizes.batch, sizes.heads)]
    rows = (*shape, sizes.queries, dice.randint(1, 6))
    heads = dice.choice((1, sizes.key_heads, sizes.heads))
    scores = torch.rand(sizes.batch, heads, dice.randint(1, sizes.keys), generator=numbers)
    size = dice.choice((1, 2, 3, 5))
    by = ("mean", "max", "exact") if call.score in ("dot", "scaled") else ("exact",)
    return [
        hw.sparse.TopK(some(sizes.heads)),
        hw.sparse.Window(dice.randint(0, sizes.keys), sinks=dice.randint(0, 3)),
        *(hw.sparse.Blocks(size, some(sizes.heads), each) for each in by),
        hw.sparse.Indices(torch.randint(-2, sizes.keys + 2, rows, generator=numbers)),
        hw.sparse.Evicted((scores * 4).round(), some(heads)),
    ]
