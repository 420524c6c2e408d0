"""A recurrence that need not be computed step by step: rivals-linear."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headwise.apps.lab.charts import Chart, series
from headwise.apps.lab.claim import Claim, Figures, Verdict, both, does_not_hold, holds, holds_when
from headwise.apps.lab.claims.rivals_time import chain
from headwise.apps.lab.estimates import slope
from headwise.apps.lab.laboratory import Lab
from headwise.apps.lab.moves import Move


def one_by_one(a: Tensor, b: Tensor) -> tuple[Tensor, int]:
    """h_t = a_t·h_{t−1} + b_t as it is written, (N, d) -> (N, d); rounds that wait for others."""
    h, found = torch.zeros_like(b[0]), []
    for gate, new in zip(a, b, strict=True):
        h = gate * h + new
        found.append(h)
    return torch.stack(found), len(found)


def all_at_once(a: Tensor, b: Tensor) -> tuple[Tensor, int]:
    """The same by an associative scan: each round joins stretches twice as long, all together."""
    a, b, step, rounds = a.clone(), b.clone(), 1, 0
    while step < len(a):
        b = torch.cat((b[:step], a[step:] * b[:-step] + b[step:]))
        a = torch.cat((a[:step], a[step:] * a[:-step]))
        step, rounds = 2 * step, rounds + 1
    return b, rounds


def scanning(lab: Lab) -> Figures:
    """Rounds that wait for one another, of a linear recurrence and of an LSTM."""
    rows = []
    for n in lab.each(lab.pick("lengths", tiny=(8, 32), quick=(8, 32, 128, 512)), "tokens"):
        a, b = lab.normal(n, 16, stream=1).cpu().sigmoid(), lab.normal(n, 16, stream=2).cpu()
        (slow, steps), (fast, rounds) = one_by_one(a, b), all_at_once(a, b)
        rows.append(
            {
                "n": n,
                "steps": steps,
                "rounds": rounds,
                "nonlinear": chain("recurrent", n),
                "error": float((slow - fast).abs().max()),
            }
        )
    return {"rows": rows}


def judge_linear(figures: Figures) -> Verdict:
    """Step by step: the rounds of the linear one must grow as those of the LSTM do."""
    rows = figures["rows"]
    lengths = [row["n"] for row in rows]
    last = rows[-1]
    because = both(
        "over {n} tokens a linear recurrence with gates takes {rounds} rounds instead of {steps}, "
        "log₂ n, and agrees to {error:.0e}; the longest chain of an LSTM grows with n to the power "
        "{power:.2f}",
        "{n} 个词元上，带门的线性循环用 {rounds} 轮而不是 {steps} 步，即 log₂ n 轮，误差 "
        "{error:.0e}；LSTM 的最长运算链随 n 的 {power:.2f} 次方增长",
        n=last["n"],
        rounds=last["rounds"],
        steps=last["steps"],
        error=max(row["error"] for row in rows),
        power=slope(lengths, [row["nonlinear"] for row in rows]),
    )
    if max(row["error"] for row in rows) > 1e-9:
        return holds(because)
    if all(row["rounds"] <= math.ceil(math.log2(row["n"])) for row in rows):
        condition = both(
            "the recurrence is nonlinear, as in an LSTM or a GRU; a linear one, as in state-space "
            "models and linear attention, is a sum of products and is computed all at once",
            "循环是非线性的，如 LSTM 与 GRU；线性的循环，如状态空间模型与线性注意力，是乘积之和，"
            "可以一次算完",
        )
        return holds_when(condition, because)
    return does_not_hold(because)


def show_linear(figures: Figures) -> tuple[Chart, ...]:
    """The rounds against the length."""
    curves = series(
        figures["rows"],
        "n",
        ("nonlinear", both("LSTM, longest chain", "LSTM，最长运算链")),
        ("steps", both("linear, one by one", "线性，逐步")),
        ("rounds", both("linear, by a scan", "线性，用扫描")),
    )
    title = both("Operations that wait for one another", "须依次等待的运算")
    rounds = both("rounds", "轮数")
    return (Chart(title, both("tokens", "词元数"), rounds, curves, log_x=True, log_y=True),)


CLAIMS = (
    Claim(
        id="rivals-linear",
        kind="derived",
        sentence=both(
            "A recurrence has to be computed step by step.",
            "循环必须一步一步地计算。",
        ),
        notes="F",
        experiment=scanning,
        rule=judge_linear,
        shows=show_linear,
        moves=(Move("tokens", both("tokens", "词元数"), "n", needs=2),),
        derivation=both(
            "(a, b) then (a', b') is (a'·a, a'·b + b'): steps of a linear recurrence compose to a "
            "step, and composition is associative. tanh(W h + U x) composed with itself is no such "
            "step.",
            "先 (a, b) 后 (a', b')，合起来是 (a'·a, a'·b + b')：线性循环的若干步复合起来仍是一步，"
            "且复合满足结合律。tanh(W h + U x) 与自身复合则不再是这样的一步。",
        ),
    ),
)
