"""The specification: every step materialised in plain PyTorch, with derivatives of any order."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise import dropout
from headwise.core.intervals import inside
from headwise.core.logits import added
from headwise.core.problem import Problem, Terms, without_autocast
from headwise.engines.contract import Engine


class Reference(Engine):
    """The specification as an engine: it serves every problem, with memory for every pair."""

    name = "reference"
    rank = 6
    forward_mode = functional = True

    def attend(self, problem: Problem) -> Tensor:
        return self.observe(problem, (), 1)[0]

    def observe(
        self, problem: Problem, names: tuple[str, ...], sink_keys: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        with without_autocast(problem.q.device):
            out, stats = _observe(problem, sink_keys)
        return out, {name: x for name, x in stats.items() if name in names}

    def backward(self, problem: Problem) -> str:
        return "PyTorch's autograd, step by step"


REFERENCE = Reference()


def _observe(problem: Problem, sink_keys: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Return out and every statistic."""
    terms = problem.terms()
    wide = torch.promote_types(problem.q.dtype, torch.float32)
    group = problem.q.shape[1] // problem.k.shape[1]
    q = problem.q.to(wide)  # (B, Hq, N, D)
    k = problem.k.to(wide).repeat_interleave(group, 1)  # (B, Hq, M, D)
    v = problem.v.to(wide).repeat_interleave(group, 1)  # (B, Hq, M, Dv)
    columns = torch.arange(k.shape[2], device=q.device)
    i, j = terms.position[:, None, :, None], columns + terms.first_key  # (B|1, 1, N, 1), (M,)

    seen = visible(terms, columns)  # (B|1, Hq|1, N, M)
    if seen is not None:  # a key that no row sees may hold anything, even NaN
        unseen = ~seen.any(-2)[..., None]
        k, v = k.masked_fill(unseen, 0), v.masked_fill(unseen, 0)
    s = logits(terms, q, k, i, j)  # (B, Hq, N, M)
    s = s if seen is None else s.masked_fill(~seen, -torch.inf)
    seen = s != -torch.inf

    sink = None if terms.sinks is None else terms.sinks.to(wide)[:, None]  # (Hq, 1)
    max_logit = torch.amax(s, -1) if s.shape[-1] else s.new_full(s.shape[:-1], -torch.inf)
    top = max_logit if sink is None else torch.maximum(max_logit, sink)
    # Any number in place of the largest logit gives the same result; the largest is safe.
    top = top.masked_fill(top == -torch.inf, 0).detach()
    weight = torch.exp(s - top[..., None])
    endless = top == torch.inf  # a sink of inf minus itself would be NaN
    total = weight.sum(-1)
    if sink is not None:
        total = total + torch.exp((sink - top).masked_fill(endless & (sink == top), 0))
    empty = total == 0
    log_total = total.masked_fill(empty, 1).log()
    p = weight / total.masked_fill(empty, 1)[..., None]
    log_p = s - top[..., None] - log_total[..., None]
    log_p = log_p.masked_fill(~seen | endless[..., None], 0)

    dropped = p
    if terms.seed is not None:
        dropped = p * keep(terms, p.shape, i, j) / (1 - terms.dropout)
    out = (dropped @ v).to(problem.q.dtype)

    entropy = -(p * log_p).sum(-1)
    count = seen.sum(-1).clamp_min(1)
    mean = s.masked_fill(~seen, 0).sum(-1) / count
    centred = (s - mean[..., None]).masked_fill(~seen, 0)
    alone = max_logit == -torch.inf
    among = torch.exp(s - max_logit.masked_fill(alone, 0)[..., None])  # p without the sink's share
    start = problem.start()
    start = start[..., None] if isinstance(start, Tensor) else start
    first_keys = (columns >= start) & (columns < start + sink_keys)
    stats = {
        "lse": (top + log_total).masked_fill(empty, -torch.inf),
        "max_logit": max_logit,
        "top_prob": p.amax(-1) if p.shape[-1] else torch.zeros_like(entropy),
        "entropy": entropy,
        "effective_keys": entropy.exp(),
        "participation": among.sum(-1).square() / among.square().sum(-1).masked_fill(alone, 1),
        "logit_mean": mean,
        "logit_var": centred.square().sum(-1) / count,
        "sink_mass": (p * first_keys).sum(-1),
        "self_mass": (p * (j == i)).sum(-1),
        "previous_mass": (p * (j == i - 1)).sum(-1),
        "distance": (p * (i - j)).sum(-1),
        "output_norm": out.to(wide).norm(dim=-1),
    }
    differentiable = ("lse", "entropy")
    return out, {name: x if name in differentiable else x.detach() for name, x in stats.items()}


def visible(terms: Terms, columns: Tensor) -> Tensor | None:
    """The mask as booleans over these keys, (B|1, Hq|1, N, M); None if it shows everything."""
    if terms.dense is not None:
        return terms.dense.expand(*terms.dense.shape[:2], terms.position.shape[-1], len(columns))
    return None if terms.intervals is None else inside(terms.intervals[..., None], columns)


def logits(terms: Terms, q: Tensor, k: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """cap(scale · score) + bias of q (B, Hq, N, D) at i and k (B, Hq, M, D) at j, without mask."""
    if terms.additive is None:
        s = terms.scale * (q @ k.transpose(-1, -2))
    else:
        pairs = torch.tanh(q[..., :, None, :] + k[..., None, :, :])  # (B, Hq, N, M, D)
        s = (pairs * terms.additive.to(q.dtype)[:, None, None]).sum(-1)
    if terms.softcap:
        s = terms.softcap * torch.tanh(s / terms.softcap)
    heads = torch.arange(q.shape[1], device=q.device)[:, None, None]
    for term in added(terms, terms.bias, heads, i, j, s.dtype):
        s = s + term
    return s


def keep(terms: Terms, shape: torch.Size, i: Tensor, j: Tensor) -> Tensor:
    """The weights that dropout keeps, bool (B, Hq, N, M)."""
    batch = torch.arange(shape[0], device=i.device)[:, None, None]
    head = torch.arange(shape[1], device=i.device)[:, None]
    assert terms.seed is not None
    rows = dropout.row_hash(terms.seed, batch, head, i[..., 0].long())
    return dropout.keep(rows, j.long(), terms.dropout)
