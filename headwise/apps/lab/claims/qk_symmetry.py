"""One matrix for Q and K: qk-symmetric, qk-self, qk-parameters."""

from __future__ import annotations

import torch

from headwise.apps.lab.charts import Chart, Listing, series
from headwise.apps.lab.claim import Claim, Figures, Verdict, both, does_not_hold, holds, holds_when
from headwise.apps.lab.counting import parameters
from headwise.apps.lab.experiments import shared_projection as sharing
from headwise.apps.lab.laboratory import Lab
from headwise.apps.lab.moves import Move
from headwise.apps.lab.recall import RecallModel, Relation, learn, recipe_of
from headwise.nn import MultiHeadAttention, Separate, Shared


def symmetry(lab: Lab) -> Figures:
    """‖S − Sᵀ‖ / ‖S‖ of the logits, and of the weights, for random inputs and layers."""
    draws = range(lab.pick("draws", tiny=2, quick=20, full=200))
    rows = []
    for kind in sharing.KINDS:
        heads = [
            sharing.head(sharing.layer(kind, 32, seed), sharing.inputs(32, 0.5, seed))
            for seed in lab.each(draws, f"{kind}, draw")
        ]
        rows.append(
            {
                "kind": kind,
                "logits_least": min(head.asymmetry for head in heads),
                "logits_most": max(head.asymmetry for head in heads),
                "weights_least": min(head.map_asymmetry for head in heads),
            }
        )
    return {"rows": rows}


def judge_symmetric(figures: Figures) -> Verdict:
    """Shared: symmetric to the last bits. Separate: not at all."""
    of = {row["kind"]: row for row in figures["rows"]}
    because = both(
        "‖S − Sᵀ‖/‖S‖ of the logits is at most {shared:.1g} with one matrix and at least "
        "{separate:.2f} with two; softmax breaks the symmetry of the weights ({weights:.2f} and "
        "more)",
        "用一个矩阵时 logit 的 ‖S − Sᵀ‖/‖S‖ 不大于 {shared:.1g}，用两个时不小于 {separate:.2f}；"
        "softmax 之后权重不再对称（不小于 {weights:.2f}）",
        shared=of["shared"]["logits_most"],
        separate=of["separate"]["logits_least"],
        weights=of["shared"]["weights_least"],
    )
    exact = of["shared"]["logits_most"] < 1e-12 and of["separate"]["logits_least"] > 1e-3
    return holds(because) if exact else does_not_hold(because)


def show_symmetric(figures: Figures) -> tuple[Listing, ...]:
    """The asymmetry of both kinds."""
    headings = (
        both("projections", "投影"),
        both("logits, least", "logit，最小"),
        both("logits, most", "logit，最大"),
        both("weights, least", "权重，最小"),
    )
    rows = tuple(
        (row["kind"], row["logits_least"], row["logits_most"], row["weights_least"])
        for row in figures["rows"]
    )
    return (Listing(both("‖S − Sᵀ‖ / ‖S‖", "‖S − Sᵀ‖ / ‖S‖"), headings, rows),)


def diagonals(lab: Lab) -> Figures:
    """The share of rows whose largest weight is their own, as the tokens' norms differ more."""
    draws = lab.pick("draws", tiny=3, quick=30, full=300)
    rows = []
    for spread in lab.each((0.0, 0.25, 0.5, 0.75, 1.0, 1.5), "spread"):
        x = torch.cat([sharing.inputs(32, spread, seed) for seed in range(draws)])
        row: dict[str, float] = {"spread": spread}
        for kind in sharing.KINDS:
            attn = sharing.layer(kind, 32, 0)
            own = torch.arange(x.shape[1])
            row[kind] = float((attn.attention_map(x).top(1)[1][:, 0, :, 0] == own).double().mean())
        attn = sharing.layer("shared", 32, 0)
        norms = attn.prepare(x).k[:, 0].norm(dim=-1)  # (B, N)
        widest = norms.argmax(-1)
        top = attn.attention_map(x).top(1)[1][:, 0, :, 0]
        row["longest"] = float((top.gather(1, widest[:, None])[:, 0] == widest).double().mean())
        rows.append(row)
    return {"tokens": 32, "rows": rows, "trained": trained_diagonal(lab)}


def trained_diagonal(lab: Lab) -> float:
    """The share of rows that attend to themselves most, after training to find another token."""
    task = Relation()
    torch.manual_seed(0)
    attn = MultiHeadAttention(32, 1, projections=Shared())
    model = RecallModel(attn, 32, task)
    steps = lab.pick("steps", tiny=2, quick=300)
    learn(model, task, recipe_of(steps, 1e-2), seed=0)
    drawn = task.draw(100, torch.Generator().manual_seed(1))
    with torch.no_grad():
        x = model.key(drawn.keys) + model.value(drawn.values)
        top = attn.attention_map(x).top(1)[1][:, 0, :, 0]
    return float((top == torch.arange(x.shape[1])).double().mean())


def judge_self(figures: Figures) -> Verdict:
    """Every position: at least 99 % of rows, whatever the norms."""
    rows = figures["rows"]
    equal, unequal = rows[0], rows[-1]
    because = both(
        "with one matrix {equal:.0%} of rows attend to themselves most if all tokens have one "
        "norm, {unequal:.0%} if norms differ by e^±{spread}; the token with the largest "
        "projected norm does in {longest:.0%} of cases; after training to find another token "
        "{trained:.0%} of rows do; with two matrices {separate:.0%}",
        "用一个矩阵时，若各词元范数相同，{equal:.0%} 的行最关注自身；若范数相差 e^±{spread}，"
        "则为 {unequal:.0%}；投影后范数最大的词元在 {longest:.0%} 的情形下如此；"
        "训练它去找别的词元之后，{trained:.0%} 的行如此；用两个矩阵时为 {separate:.0%}",
        equal=equal["shared"],
        unequal=unequal["shared"],
        spread=unequal["spread"],
        longest=min(row["longest"] for row in rows),
        trained=figures["trained"],
        separate=equal["separate"],
    )
    if all(row["shared"] > 0.99 for row in rows):
        return holds(because)
    if equal["shared"] > 0.9 and min(row["longest"] for row in rows) > 0.99:
        condition = both(
            "the projected tokens have about the same norm: s_ii = ‖k_i‖², and a longer key k_j "
            "at a small angle wins over it",
            "投影后的词元范数相近：s_ii = ‖k_i‖²，夹角小而更长的键 k_j 会胜过它",
        )
        return holds_when(condition, because)
    return does_not_hold(because)


def show_self(figures: Figures) -> tuple[Chart, ...]:
    """The share against the spread of the norms."""
    curves = series(
        figures["rows"],
        "spread",
        ("shared", both("one matrix", "一个矩阵")),
        ("separate", both("two matrices", "两个矩阵")),
        ("longest", both("one matrix, the longest token", "一个矩阵，范数最大的词元")),
    )
    return (
        Chart(
            both("Rows that attend to themselves most", "最关注自身的行"),
            both("spread of log norms", "范数对数的离散度"),
            both("share of rows", "行的比例"),
            curves,
        ),
    )


def counts(lab: Lab) -> Figures:
    """The parameters of Q and K, and of the whole layer, counted on modules."""
    rows = []
    for d in (64, 512, 4096):
        with torch.device("meta"):
            two = MultiHeadAttention(d, 8, bias=False, projections=Separate())
            one = MultiHeadAttention(d, 8, bias=False, projections=Shared())
        assert two.key is not None
        rows.append(
            {
                "d": d,
                "separate": parameters(two.query) + parameters(two.key),
                "shared": parameters(one.query),
                "layer_separate": parameters(two),
                "layer_shared": parameters(one),
            }
        )
    return {"rows": rows}


def judge_parameters(figures: Figures) -> Verdict:
    """Exactly twice, at every width."""
    rows = figures["rows"]
    double = all(row["separate"] == 2 * row["shared"] for row in rows)
    last = rows[-1]
    because = both(
        "at d_model = {d} Q and K have {two:,} parameters, {ratio:.2f} times those of one "
        "matrix; the whole layer has {layer:.2f} times as many",
        "d_model = {d} 时，Q 与 K 共有 {two:,} 个参数，是一个矩阵的 {ratio:.2f} 倍；整层是 "
        "{layer:.2f} 倍",
        d=last["d"],
        two=last["separate"],
        ratio=last["separate"] / last["shared"],
        layer=last["layer_separate"] / last["layer_shared"],
    )
    return holds(because) if double else does_not_hold(because)


def show_parameters(figures: Figures) -> tuple[Listing, ...]:
    """The counts."""
    headings = (
        both("d_model", "d_model"),
        both("two matrices", "两个矩阵"),
        both("one matrix", "一个矩阵"),
        both("layer with two", "整层，两个"),
        both("layer with one", "整层，一个"),
    )
    return (
        Listing(
            both("Parameters of Q and K", "Q 与 K 的参数量"),
            headings,
            tuple(tuple(row.values()) for row in figures["rows"]),
        ),
    )


CLAIMS = (
    Claim(
        id="qk-symmetric",
        kind="derived",
        sentence=both(
            "One matrix for Q and K makes the matrix of scores symmetric.",
            "Q 与 K 共用一个矩阵时，分数矩阵是对称的。",
        ),
        notes="C",
        experiment=symmetry,
        rule=judge_symmetric,
        shows=show_symmetric,
        derivation=both(
            "S = (XW)(XW)ᵀ, and Sᵀ = ((XW)(XW)ᵀ)ᵀ = (XW)(XW)ᵀ = S. Softmax divides each row by a "
            "sum of its own, so the weights are not symmetric.",
            "S = (XW)(XW)ᵀ，而 Sᵀ = ((XW)(XW)ᵀ)ᵀ = (XW)(XW)ᵀ = S。softmax 把每一行除以各自的和，"
            "所以权重并不对称。",
        ),
    ),
    Claim(
        id="qk-self",
        sentence=both(
            "That symmetry forces every position to attend to itself most.",
            "这种对称性会强制每个位置最关注自身。",
        ),
        notes="C",
        experiment=diagonals,
        rule=judge_self,
        shows=show_self,
        moves=(Move("spread", both("spread of log norms", "范数对数的离散度"), "spread"),),
        derivation=both(
            "s_ij = ‖k_i‖ ‖k_j‖ cos(k_i, k_j) and s_ii = ‖k_i‖². By Cauchy and Schwarz the token "
            "with the largest norm attends to itself most; any other one only if no longer key "
            "is close enough in direction. Symmetry alone says nothing about the diagonal.",
            "s_ij = ‖k_i‖ ‖k_j‖ cos(k_i, k_j)，s_ii = ‖k_i‖²。由柯西–施瓦茨不等式，"
            "范数最大的词元最关注自身；其他词元只有在没有方向足够接近且更长的键时才如此。"
            "对称性本身与对角线无关。",
        ),
    ),
    Claim(
        id="qk-parameters",
        kind="derived",
        sentence=both(
            "Separate matrices for Q and K only double their parameters.",
            "Q 与 K 使用独立的矩阵，参数量只增加一倍。",
        ),
        notes="C",
        experiment=counts,
        rule=judge_parameters,
        shows=show_parameters,
        moves=(Move("width", both("d_model"), "d"),),
    ),
)
