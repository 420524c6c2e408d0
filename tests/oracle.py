"""What attention is, written down a second time: every weight in float64, and nothing of headwise.

The mask is a Python predicate asked for every pair, positions are counted one by one, T5's buckets
and the dropout hash are integers of Python. Slow, and independent of everything it checks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.problems import Call


@dataclass(frozen=True)
class Answer:
    """Every step of a call in float64, differentiable."""

    raw: Tensor  # scale · score, (B, Hq, N, M)
    added: Tensor  # the bias
    s: Tensor  # the logits, -inf where a row does not see a key
    p: Tensor  # the weights
    sink: Tensor  # the weight on the sink, (B, Hq, N)
    lse: Tensor
    entropy: Tensor
    out: Tensor  # (B, Hq, N, Dv)
    kept: Tensor  # what dropout multiplies the weights by

    @property
    def seen(self) -> Tensor:
        return self.s != -torch.inf


def answer(call: Call) -> Answer:
    """The call in float64."""
    group = call.sizes.heads // call.sizes.key_heads
    k, v = (x.double().repeat_interleave(group, 1) for x in (call.k, call.v))
    raw = _score(call, call.q.double(), k)
    added = _bias(call)
    s = raw if call.softcap is None else call.softcap * torch.tanh(raw / call.softcap)
    s = (s + added).masked_fill(~call.visible, -torch.inf)

    columns = s
    if call.sinks is not None:  # the sink is one more column, whose value is nothing
        sink = call.sinks.double()[None, :, None, None].expand(*s.shape[:3], 1)
        columns = torch.cat([s, sink], -1)
    blind = (columns == -torch.inf).all(-1)
    lse = columns.masked_fill(blind[..., None], 0).logsumexp(-1).masked_fill(blind, -torch.inf)
    log_p = s - lse.masked_fill(blind, 0)[..., None]
    seen = s != -torch.inf
    p = log_p.exp().masked_fill(~seen, 0)
    entropy = -(p * log_p.masked_fill(~seen, 0)).sum(-1)
    kept = _kept(call)
    share = torch.zeros_like(entropy)
    if call.sinks is not None:
        share = torch.exp(call.sinks.double()[:, None] - lse)
    return Answer(raw, added, s, p, share, lse, entropy, (p * kept) @ v, kept)


def statistics(
    call: Call, found: Answer, sink_keys: int = 1, start: Tensor | None = None
) -> dict[str, Tensor]:
    """Every statistic by its definition, row by row; start (B, Hq, N): the first key of a row."""
    B, H, N = found.lse.shape
    made: dict[str, Tensor] = {}
    for b in range(B):
        for h in range(H):
            for i in range(N):
                first = 0 if start is None else int(start[b, h, i])
                row = _row(
                    found, b, h, i, int(call.positions[b, i]), range(first, first + sink_keys)
                )
                for name, value in row.items():
                    empty = torch.zeros(B, H, N, dtype=torch.float64)
                    made.setdefault(name, empty)[b, h, i] = value
    return made


def _row(found: Answer, b: int, h: int, i: int, own: int, sinks: range) -> dict[str, float]:
    s, p = found.s[b, h, i].tolist(), found.p[b, h, i].tolist()
    keys = [j for j in range(len(s)) if s[j] != -math.inf]
    entropy = -sum(p[j] * math.log(p[j]) for j in keys if p[j] > 0)
    mean = math.fsum(s[j] for j in keys) / max(1, len(keys))
    among = [math.exp(s[j] - max(s[j] for j in keys)) for j in keys]
    among = [x / math.fsum(among) for x in among]  # the keys' shares of what the sink leaves
    return {
        "lse": float(found.lse[b, h, i]),
        "max_logit": max((s[j] for j in keys), default=-math.inf),
        "top_prob": max((p[j] for j in keys), default=0.0),
        "entropy": entropy,
        "effective_keys": math.exp(entropy),
        "participation": 1 / math.fsum(x * x for x in among) if among else 0.0,
        "logit_mean": mean,
        "logit_var": math.fsum((s[j] - mean) ** 2 for j in keys) / max(1, len(keys)),
        "sink_mass": math.fsum(p[j] for j in keys if j in sinks),
        "self_mass": math.fsum(p[j] for j in keys if j == own),
        "previous_mass": math.fsum(p[j] for j in keys if j == own - 1),
        "distance": math.fsum(p[j] * (own - j) for j in keys),
        "output_norm": math.sqrt(math.fsum(x * x for x in found.out[b, h, i].tolist())),
    }


def _score(call: Call, q: Tensor, k: Tensor) -> Tensor:
    """scale · score of every pair. q (B, Hq, N, D), k (B, Hq, M, D)."""
    weight = None if call.weight is None else call.weight.double()
    if call.score == "additive":
        w = weight.expand(call.sizes.heads, -1)
        return torch.einsum("bhnmd,hd->bhnm", torch.tanh(q[:, :, :, None] + k[:, :, None]), w)
    if call.score == "general":
        w = weight.expand(call.sizes.heads, -1, -1)
        return torch.einsum("bhnd,hde,bhme->bhnm", q, w, k)
    dots = torch.einsum("bhnd,bhmd->bhnm", q, k)
    if call.score == "cosine":
        norms = q.norm(dim=-1)[..., None] * k.norm(dim=-1)[:, :, None]
        return weight.reshape(-1, 1, 1) * dots / norms
    return dots * (1 / math.sqrt(call.sizes.width) if call.scale is None else call.scale)


def _bias(call: Call) -> Tensor:
    """What is added to every logit, broadcastable to (B, Hq, N, M)."""
    if call.bias == "none":
        return torch.zeros((), dtype=torch.float64)
    table = call.table.double()
    distance = call.positions[:, None, :, None] - torch.arange(call.sizes.keys)
    if call.bias == "alibi":
        return -table[:, None, None] * distance.abs()
    if call.bias == "buckets":
        rows = [bucket(d, call) for d in distance.flatten().tolist()]
        index = torch.tensor(rows).reshape(distance.shape)[:, 0]  # (B, N, M)
        return table[index].permute(0, 3, 1, 2)
    return table


def bucket(distance: int, call: Call) -> int:
    """T5's bucket of the distance i - j, as its paper's code counts it."""
    buckets, base = call.table.shape[0], 0
    if call.bidirectional:
        buckets //= 2
        base = buckets if distance < 0 else 0
        distance = abs(distance)
    else:
        distance = max(distance, 0)
    exact = buckets // 2
    if distance < exact:
        return base + distance
    ratio = math.log(distance / exact) / math.log(call.max_distance / exact)
    return base + min(exact + int(ratio * (buckets - exact)), buckets - 1)


def _kept(call: Call) -> Tensor:
    """1 / (1 - rate) where dropout keeps a weight, 0 where it does not."""
    sizes = call.sizes
    shape = sizes.batch, sizes.heads, sizes.queries, sizes.keys
    if not call.dropout:
        return torch.ones(shape, dtype=torch.float64)
    flat = [
        kept(call.seed, b, h, int(call.positions[b, i]), j, call.dropout) / (1 - call.dropout)
        for b, h, i, j in sizes.pairs()
    ]
    return torch.tensor(flat, dtype=torch.float64).reshape(shape)


def kept(seed: int, batch: int, head: int, i: int, j: int, rate: float) -> bool:
    """The published hash, on Python's own integers."""
    word, golden = 2**32 - 1, 0x9E3779B9
    seed = _mix((seed & word) ^ _mix((seed >> 32) & word))
    place = _mix(seed ^ ((_mix((batch * golden) & word) + head) & word))
    row = _mix((place + ((i * golden) & word)) & word)
    return _mix(row ^ ((j * golden) & word)) >= int(rate * 2**32)


def _mix(x: int) -> int:
    word = 2**32 - 1
    x ^= x >> 16
    x = (x * 0x7FEB352D) & word
    x ^= x >> 15
    x = (x * 0x846CA68B) & word
    return x ^ (x >> 16)
