"""Where parameters are shared: rivals-sharing."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.apps.lab.charts import Listing
from headwise.apps.lab.claim import Claim, Figures, Verdict, both, does_not_hold, holds
from headwise.apps.lab.counting import parameters
from headwise.apps.lab.laboratory import Lab
from headwise.nn import MultiHeadAttention

WIDTH, HEADS = 64, 8


def sharing(lab: Lab) -> Figures:
    """Permute positions; count parameters at several lengths; ask which heads a weight reaches."""
    torch.manual_seed(0)
    attn = MultiHeadAttention(WIDTH, HEADS).double()
    errors = []
    for draw in range(lab.pick("draws", tiny=2, quick=20)):
        x = lab.normal(1, 30, WIDTH, stream=draw).cpu()
        order = torch.randperm(30, generator=torch.Generator().manual_seed(draw))
        with torch.no_grad():
            moved, still = attn(x[:, order]), attn(x)[:, order]
        errors.append(float((moved - still).abs().max()))
    with torch.no_grad():
        served = [attn(lab.normal(1, n, WIDTH).cpu()).shape[1] for n in (1, 7, 100)]
    return {
        "permutation_error": max(errors),
        "lengths": served,
        "parameters": parameters(attn),
        "touched": [[touched(attn, lab, mine, other) for other in range(3)] for mine in range(3)],
    }


def touched(attn: MultiHeadAttention, lab: Lab, head: int, other: int) -> float:
    """The gradient of one head's output with respect to another head's W_q, W_k and W_v."""
    attn.zero_grad()
    call = attn.prepare(lab.normal(1, 30, WIDTH).cpu())
    call.attend()[:, head].square().sum().backward()
    width = attn.head_dim
    rows = slice(other * width, (other + 1) * width)
    total = 0.0
    for projection in (attn.query, attn.key, attn.value):
        weight = getattr(projection, "weight", None)
        assert isinstance(weight, Tensor) and weight.grad is not None
        total += float(weight.grad[rows].norm())
    return total


def judge_sharing(figures: Figures) -> Verdict:
    """Both halves are judged: shared over positions, and shared between heads."""
    error = figures["permutation_error"]
    across = [
        value
        for mine, row in enumerate(figures["touched"])
        for other, value in enumerate(row)
        if mine != other
    ]
    own = min(figures["touched"][head][head] for head in range(len(figures["touched"])))
    positions_shared = error < 1e-9
    heads_shared = max(across) > 0
    because = both(
        "permuted inputs give permuted outputs (to {error:.0e}) and {count:,} parameters serve 1 "
        "to {longest} positions: they are shared over positions; a head's output depends on the "
        "matrices of other heads by {across:.1f}, on its own by {own:.1f} or more: heads share "
        "nothing",
        "输入换序则输出同样换序（误差 {error:.0e}），同样的 {count:,} 个参数用于 1 到 {longest} "
        "个位置：参数在位置间共享；一个头的输出对其他头的矩阵的依赖是 {across:.1f}，"
        "对自己的不小于 {own:.1f}：头之间什么也不共享",
        error=error,
        count=figures["parameters"],
        longest=max(figures["lengths"]),
        across=max(across),
        own=own,
    )
    right = not positions_shared and heads_shared
    return holds(because) if right else does_not_hold(because)


def show_sharing(figures: Figures) -> tuple[Listing, ...]:
    """Whose matrices a head's output depends on."""
    headings = (
        both("output of head", "头的输出"),
        *(both("matrices of head {n}", "头 {n} 的矩阵", n=n) for n in range(3)),
    )
    rows = tuple((head, *row) for head, row in enumerate(figures["touched"]))
    title = both("Gradient of a head's output", "头的输出的梯度")
    return (Listing(title, headings, rows),)


CLAIMS = (
    Claim(
        id="rivals-sharing",
        kind="derived",
        sentence=both(
            "Self-attention shares no parameters over positions, but its heads share weights.",
            "自注意力无位置参数共享，但多头共享权重。",
        ),
        notes="B",
        experiment=sharing,
        rule=judge_sharing,
        shows=show_sharing,
        derivation=both(
            "q_i = x_i W_q uses one W_q for every position i, so attention(PX) = P·attention(X) "
            "for every permutation P. Head h reads its own columns of W_q, W_k and W_v.",
            "q_i = x_i W_q 对每个位置 i 都用同一个 W_q，因此对任何置换 P 有 attention(PX) = "
            "P·attention(X)。头 h 只用 W_q、W_k、W_v 中属于自己的列。",
        ),
    ),
)
