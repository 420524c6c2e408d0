"""What a narrow head can't do: heads-rank."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.apps.lab.charts import Chart, series
from headwise.apps.lab.claim import Claim, Figures, Verdict, both, does_not_hold, holds, holds_when
from headwise.apps.lab.laboratory import Lab
from headwise.apps.lab.moves import Move


def ranks(lab: Lab) -> Figures:
    """How well scores of rank d_k can give a random pattern and a shifted one."""
    n, steps = lab.pick("keys", tiny=16, quick=64), lab.pick("steps", tiny=20, quick=400)
    widths = lab.pick("d_k", tiny=(2, 16), quick=(2, 4, 8, 16, 32, 64))
    random = (2 * lab.normal(n, n, stream=1).cpu()).softmax(-1)
    shifted = torch.eye(n, dtype=torch.float64).roll(1, 1) * 0.9 + 0.1 / n
    rows = []
    for d in lab.each(widths, "d_k"):
        row: dict[str, float] = {"d": d}
        for name, wanted in (("random", random), ("shifted", shifted)):
            row[name] = missed(wanted, d, steps)
        rows.append(row)
    return {"keys": n, "rows": rows}


def missed(wanted: Tensor, d: int, steps: int) -> float:
    """The weight that the best found q and k of this width put elsewhere: wanted (n, n)."""
    n, best = len(wanted), 1.0
    for q, k in (by_singular_values(wanted, d), on_a_circle(n, d)):
        optimizer = torch.optim.Adam((q, k), lr=0.05)
        for _ in range(steps):
            scores = q @ k.T
            best = min(best, float((scores.softmax(-1) - wanted).abs().sum(-1).mean().detach()) / 2)
            loss = -(wanted * scores.log_softmax(-1)).sum(-1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return best


def by_singular_values(wanted: Tensor, d: int) -> tuple[Tensor, Tensor]:
    """q and k (n, d) of the pattern's logarithm, cut to rank d: where a search starts."""
    logits = wanted.log() - wanted.log().mean(-1, keepdim=True)
    u, s, vh = torch.linalg.svd(logits)
    root = s[:d].sqrt()
    q, k = (u[:, :d] * root).contiguous(), (vh[:d].T * root).contiguous()
    return q.requires_grad_(), k.requires_grad_()


def on_a_circle(n: int, d: int) -> tuple[Tensor, Tensor]:
    """q and k (n, d) on a large circle, each query at the place of the next key: another start."""
    turn = 2 * torch.pi * torch.arange(n, dtype=torch.float64) / n
    k = torch.zeros(n, d, dtype=torch.float64)
    k[:, 0], k[:, 1] = turn.cos(), turn.sin()
    k = n**0.5 * 4 * k
    return k.roll(-1, 0).requires_grad_(), k.requires_grad_()


def judge_rank(figures: Figures) -> Verdict:
    """Any pattern: under two percent of the weight goes elsewhere, at every width."""
    rows, n = figures["rows"], figures["keys"]
    narrow, wide = rows[0], rows[-1]
    because = both(
        "to {n} keys, the best scores that were found for a random pattern put {some:.0%} of the "
        "weight elsewhere at d_k = {first} and {little:.1%} at {last}; for “look at the next "
        "token” {shift:.0%} and {end:.1%}",
        "对 {n} 个键，随机的模式用找到的最好的分数来表示，d_k = {first} 时有 {some:.0%} "
        "的权重放错地方，{last} 时有 {little:.1%}；“看下一个词元”则是 {shift:.0%} 与 {end:.1%}",
        n=n,
        some=narrow["random"],
        first=narrow["d"],
        little=wide["random"],
        last=wide["d"],
        shift=narrow["shifted"],
        end=wide["shifted"],
    )
    good = [row["d"] for row in rows if row["random"] < 0.02]
    if len(good) == len(rows):
        return holds(because)
    if not good:
        return does_not_hold(because)
    condition = both(
        "a head is about as wide as there are keys (here from d_k = {d} on), or its pattern is a "
        "simple one: n × n scores of a head have rank d_k at most",
        "头的宽度与键数相近（这里从 d_k = {d} 起），或者模式很简单：一个头的 n × n 分数，"
        "秩至多是 d_k",
        d=min(good),
    )
    return holds_when(condition, because)


def show_rank(figures: Figures) -> tuple[Chart, ...]:
    """The weight elsewhere, against the width."""
    curves = series(
        figures["rows"],
        "d",
        ("random", both("random pattern", "随机的模式")),
        ("shifted", both("the next token", "下一个词元")),
    )
    title = both("Patterns over {n} keys", "{n} 个键上的模式", n=figures["keys"])
    weight = both("weight put elsewhere", "放错地方的权重")
    return (Chart(title, both("d_k", "d_k"), weight, curves, log_x=True),)


CLAIMS = (
    Claim(
        id="heads-rank",
        kind="derived",
        sentence=both(
            "A narrow head can give every pattern of weights that a wide one can.",
            "窄的头能给出宽的头所能给出的任何权重模式。",
        ),
        notes="F",
        experiment=ranks,
        rule=judge_rank,
        shows=show_rank,
        moves=(
            Move("from", both("d_k"), "d", how="from"),
            Move("to", both("d_k"), "d"),
        ),
        derivation=both(
            "S = Q Kᵀ with Q and K of d_k columns: rank(S) ≤ d_k. Softmax changes the rank and "
            "needs only differences within a row, which saves one dimension and rarely more.",
            "S = Q Kᵀ，Q 与 K 各有 d_k 列，故 rank(S) ≤ d_k。softmax 会改变秩，且只需要行内的差值，"
            "但一般也只省下一维。",
        ),
    ),
)
