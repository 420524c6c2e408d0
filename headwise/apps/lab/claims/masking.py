"""Which keys a query may see: mask-half, mask-after, mask-window, mask-sinks."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from headwise import Dot, attention, cost, sparse, sparsify
from headwise import mask as masks
from headwise.apps.lab.charts import Chart, Series, series
from headwise.apps.lab.claim import (
    Claim,
    Figures,
    Verdict,
    both,
    does_not_hold,
    holds,
    holds_when,
    undecided,
)
from headwise.apps.lab.claims.heads_removed import CHOOSING, TESTING
from headwise.apps.lab.laboratory import Lab
from headwise.apps.lab.moves import Move
from headwise.models.trained import load
from headwise.nn import MultiHeadAttention


def halves(lab: Lab) -> Figures:
    """The operations of causal attention over those of full attention: scores, and a layer."""
    rows, width = [], lab.pick("d_model", tiny=512, quick=512)
    lengths = lab.pick("tokens", tiny=(16, 65_536), quick=(16, 128, 1024, 8192, 65_536))
    for n in lab.each(lengths, "tokens"):
        with torch.device("meta"):
            full = MultiHeadAttention(width, 8, bias=False)
            causal = MultiHeadAttention(width, 8, bias=False, mask=masks.causal())
        whole, seen = cost(full, batch=1, queries=n), cost(causal, batch=1, queries=n)
        projections = 8 * n * width**2
        rows.append(
            {
                "n": n,
                "pairs": (n + 1) / (2 * n),
                "scores": (seen.flops - projections) / (whole.flops - projections),
                "layer": seen.flops / whole.flops,
                "dense": seen.flops_dense / whole.flops_dense,
            }
        )
    return {"width": width, "rows": rows}


def judge_half(figures: Figures) -> Verdict:
    """Half: within a tenth of one half, for a whole layer, however it is computed."""
    rows, d = figures["rows"], figures["width"]
    because = both(
        "of {first} to {last:,} tokens a query sees on average {short:.1%} to {long:.1%} of the "
        "pairs; the operations of a whole layer of width {d} fall to {some:.1%} of those without "
        "a mask at {first} tokens and to {half:.1%} at {last:,}; written out, where hidden scores "
        "are computed and then hidden, to {dense:.0%}",
        "从 {first} 到 {last:,} 个词元，查询平均看到 {short:.1%} 到 {long:.1%} 的词元对；"
        "宽 {d} 的整层，运算量降到无掩码时的：{first} 个词元时 {some:.1%}，{last:,} 个时 "
        "{half:.1%}；"
        "逐步写出时，隐藏的分数先算再遮，仍是 {dense:.0%}",
        first=rows[0]["n"],
        last=rows[-1]["n"],
        short=rows[0]["pairs"],
        long=rows[-1]["pairs"],
        d=d,
        some=rows[0]["layer"],
        half=rows[-1]["layer"],
        dense=rows[-1]["dense"],
    )
    if any(abs(row["scores"] - row["pairs"]) > 1e-9 for row in rows):
        return undecided(because)  # counted otherwise than by pairs
    if all(abs(row["layer"] - 0.5) < 0.05 and row["dense"] < 0.55 for row in rows):
        return holds(because)
    condition = both(
        "the kernel skips hidden keys, and sequences are so much longer than d_model that the "
        "projections, which a mask leaves alone, do not count",
        "内核跳过隐藏的键，且序列比 d_model 长得多，使不受掩码影响的投影可以忽略",
    )
    if abs(rows[-1]["layer"] - 0.5) < 0.05:
        return holds_when(condition, because)
    return does_not_hold(because)


def show_half(figures: Figures) -> tuple[Chart, ...]:
    """The shares against the length."""
    curves = series(
        figures["rows"],
        "n",
        ("scores", both("scores and averages", "分数与加权平均")),
        ("layer", both("whole layer", "整层")),
        ("dense", both("whole layer, written out", "整层，逐步写出")),
    )
    title = both(
        "Operations under a causal mask, d_model {d}",
        "因果掩码下的运算量，d_model {d}",
        d=figures["width"],
    )
    share = both("share of those without a mask", "占无掩码时的比例")
    return (Chart(title, both("tokens", "词元数"), share, curves, log_x=True),)


def zeroing(lab: Lab) -> Figures:
    """Hidden keys: −inf before softmax, zero after it, and zero with the rest renormalised."""
    n, d = 64, 32
    q, k, v = lab.normal(3, n, d, stream=1).cpu()
    hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
    rows = []
    for size in lab.pick("size", tiny=(0.0, 2.0), quick=(0.0, 1.0, 2.0, 4.0, 8.0)):
        logits = size * q @ k.T / d**0.5
        before = logits.masked_fill(hidden, -torch.inf).softmax(-1)
        after = logits.softmax(-1).masked_fill(hidden, 0)
        again = after / after.sum(-1, keepdim=True)
        louder = k.clone()
        louder[-1] *= 3  # a key that only the last row may see
        moved = (size * q @ louder.T / d**0.5).softmax(-1).masked_fill(hidden, 0)
        score = Dot(size / d**0.5)
        right = attention(*(x[None, None] for x in (q, k, v)), score=score, mask=masks.causal())[
            0, 0
        ]
        rows.append(
            {
                "size": size,
                "left": float(after.sum(-1).mean()),
                "least": float(after.sum(-1).min()),
                "error": float((after @ v - right).norm() / right.norm()),
                "renormalised": float((again @ v - right).norm() / right.norm()),
                "before": float((before @ v - right).norm() / right.norm()),
                "leak": float((moved - after)[:-1].abs().sum(-1).max()),
            }
        )
    return {"n": n, "rows": rows}


def judge_after(figures: Figures) -> Verdict:
    """The same: equal outputs, at every size of the scores."""
    rows = figures["rows"]
    because = both(
        "with −inf before softmax the output equals masked attention to {before:.0e}; with zeros "
        "after it rows sum to {least:.2f} or more, {left:.2f} on average, the output is off by "
        "{error:.0%} to {worst:.0%}, and a hidden key still moves up to {leak:.2f} of a row's "
        "weight; with the rest renormalised it is off by {again:.0e}",
        "softmax 之前置 −inf，输出与带掩码的注意力相差 {before:.0e}；之后置零，每行之和不小于 "
        "{least:.2f}、平均 {left:.2f}，输出偏差 {error:.0%} 到 {worst:.0%}，"
        "隐藏的键仍能移动一行中多达 "
        "{leak:.2f} 的权重；再把其余的归一化，偏差 {again:.0e}",
        before=max(row["before"] for row in rows),
        least=min(row["least"] for row in rows),
        left=rows[1]["left"],
        error=min(row["error"] for row in rows),
        worst=max(row["error"] for row in rows),
        leak=max(row["leak"] for row in rows),
        again=max(row["renormalised"] for row in rows),
    )
    if max(row["error"] for row in rows) < 1e-9:
        return holds(because)
    if max(row["renormalised"] for row in rows) < 1e-9:
        condition = both(
            "the weights that stay are divided by their sum again, which is the same as −inf",
            "留下的权重再除以它们的和，那就等于置 −inf",
        )
        return holds_when(condition, because)
    return does_not_hold(because)


def show_after(figures: Figures) -> tuple[Chart, ...]:
    """What is left of a row, and the error, against the size of the scores."""
    curves = series(
        figures["rows"],
        "size",
        ("left", both("sum of a row, mean", "每行之和，平均")),
        ("error", both("error of the output", "输出的误差")),
        ("leak", both("weight moved by a hidden key", "隐藏的键移动的权重")),
    )
    title = both("Hidden weights set to zero after softmax", "softmax 之后才把隐藏的权重置零")
    spread = both("deviation of the scores", "分数的标准差")
    return (Chart(title, spread, both("share", "比例"), curves),)


def windows(lab: Lab) -> Figures:
    """How far back the last output depends on inputs, through layers that see a window each."""
    d = 16
    sizes = lab.pick("window", tiny=(2, 4), quick=(2, 4, 8))
    depths = lab.pick("layers", tiny=(1, 3), quick=(1, 2, 3, 4, 6, 8))
    n = max(sizes) * max(depths) + 8
    draws = lab.pick("draws", tiny=1, quick=5, full=20)
    found = []
    for left in lab.each(sizes, "window"):
        for depth in depths:
            reach, middle = 0, 0.0
            for draw in range(draws):
                torch.manual_seed(draw)
                x = lab.normal(1, n, d, stream=draw).cpu().requires_grad_()
                y = x
                for _ in range(depth):
                    layer = MultiHeadAttention(d, 2, mask=masks.causal() & masks.window(left))
                    y = y + layer.double().requires_grad_(False)(y)
                (gradient,) = torch.autograd.grad(y[0, -1].sum(), x)
                norms = gradient[0].norm(dim=-1).flip(0)  # by distance back
                norms = norms[1:]  # without the token itself, which the residual carries
                reach = max(reach, int(norms.nonzero().max()) + 1)
                share = norms.cumsum(0) / norms.sum()
                middle += float((share < 0.9).sum() + 1) / draws
            found.append({"window": left, "layers": depth, "reach": reach, "most": middle})
    return {"n": n, "rows": found}


def judge_window(figures: Figures) -> Verdict:
    """The reach must be layers times window; where most of the gradient lies is told beside it."""
    rows = figures["rows"]
    exact = all(row["reach"] == row["layers"] * row["window"] for row in rows)
    last = rows[-1]
    because = both(
        "through {layers} layers with {window} keys to the left each, the last output depends on "
        "inputs up to {reach} places back, and nine tenths of its gradient, at the start of "
        "training, lie within {most:.0f}",
        "{layers} 层、每层向左看 {window} 个键时，最后的输出依赖至多 {reach} 个位置之前的输入；"
        "训练开始时，九成的梯度在 {most:.0f} 个位置之内",
        layers=last["layers"],
        window=last["window"],
        reach=last["reach"],
        most=last["most"],
    )
    if not exact:
        return does_not_hold(because)
    if last["most"] > 0.8 * last["reach"]:
        return holds(because)
    condition = both(
        "“sees” means that there is a path; most of the signal comes from much nearer",
        "“看到”指的是有路可通；大部分信号来自近得多的地方",
    )
    return holds_when(condition, because)


def show_window(figures: Figures) -> tuple[Chart, ...]:
    """Reach, and where most of the gradient lies, against depth."""
    sizes = sorted({row["window"] for row in figures["rows"]})

    def curve(name: str, size: int, label: tuple[str, str]) -> Series:
        rows = [row for row in figures["rows"] if row["window"] == size]
        text = both(f"{label[0]}, window {{n}}", f"{label[1]}，窗口 {{n}}", n=size)
        return Series(text, [row["layers"] for row in rows], [row[name] for row in rows])

    curves = (
        *(curve("reach", size, ("reach", "能到达")) for size in sizes),
        *(curve("most", size, ("nine tenths", "九成")) for size in sizes),
    )
    title = both("How far back an output depends", "输出依赖多远之前的输入")
    return (Chart(title, both("layers", "层数"), both("places", "位置数"), curves),)


def sinks(lab: Lab) -> Figures:
    """What the built-in GPT loses under a window, with and without the first tokens kept."""
    gpt = load("gpt", lab.device)
    text = "".join((*TESTING, *CHOOSING))
    ids = gpt.encode(text)[:, : lab.pick(tiny=40, quick=None)]

    def loss() -> float:
        with torch.no_grad():
            return float(F.cross_entropy(gpt.model(ids)[0, :-1], ids[0, 1:]))

    whole, rows = loss(), []
    for window in lab.each(lab.pick("window", tiny=(8,), quick=(8, 16, 32, 64, 128)), "window"):
        for kept in lab.pick("sinks", tiny=(0, 4), quick=(0, 1, 4, 16)):
            with sparsify(gpt.model, sparse.Window(window, sinks=kept)):
                rows.append({"window": window, "sinks": kept, "lost": loss() - whole})
    return {"tokens": int(ids.shape[-1]), "whole": whole, "rows": rows}


def judge_sinks(figures: Figures) -> Verdict:
    """Mended: four first tokens bring back four fifths of what a window loses, at every window."""
    lost: dict[int, dict[int, float]] = {}
    for row in figures["rows"]:
        lost.setdefault(row["window"], {})[row["sinks"]] = row["lost"]
    some = 4
    hurt = {window: x for window, x in lost.items() if x[0] > 0.05}
    back = {window: 1 - x[some] / x[0] for window, x in hurt.items()}
    least, most = min(lost), max(lost)
    because = both(
        "on {tokens} tokens a window of {least} keys costs the built-in GPT {short:.2f} nats per "
        "token and one of {most} {long:.2f}; keeping the first {some} tokens as well brings back "
        "{low:.0%} to {high:.0%} of it",
        "在 {tokens} 个词元上，窗口为 {least} 个键时，内置 GPT 每词元多损失 {short:.2f} nat，"
        "为 {most} 个时 "
        "{long:.2f}；同时保留最前的 {some} 个词元，能挽回其中的 {low:.0%} 到 {high:.0%}",
        tokens=figures["tokens"],
        least=least,
        short=lost[least][0],
        most=most,
        long=lost[most][0],
        some=some,
        low=min(back.values(), default=0.0),
        high=max(back.values(), default=0.0),
    )
    if not back:
        return undecided(because)
    if min(back.values()) > 0.8:
        return holds(because)
    return does_not_hold(because) if max(back.values()) < 0.4 else undecided(because)


def show_sinks(figures: Figures) -> tuple[Chart, ...]:
    """The loss against the window, by how many first tokens are kept."""
    kept = sorted({row["sinks"] for row in figures["rows"]})
    curves = tuple(
        Series(
            both("first {n} kept", "保留最前 {n} 个", n=number),
            [row["window"] for row in figures["rows"] if row["sinks"] == number],
            [row["lost"] for row in figures["rows"] if row["sinks"] == number],
        )
        for number in kept
    )
    title = both("The built-in GPT under a window", "只看一个窗口的内置 GPT")
    lost = both("nats per token lost", "每词元多出的 nat")
    return (Chart(title, both("keys in the window", "窗口内的键数"), lost, curves, log_x=True),)


CLAIMS = (
    Claim(
        id="mask-half",
        kind="derived",
        sentence=both(
            "A causal mask halves the work of attention.",
            "因果掩码使注意力的计算量减半。",
        ),
        notes="F",
        experiment=halves,
        rule=judge_half,
        shows=show_half,
        moves=(Move("tokens", both("tokens", "词元数"), "n"),),
        derivation=both(
            "Row i of n sees i keys: n(n + 1)/2 of n² pairs, a little over a half. The projections "
            "take 8·n·d² with any mask.",
            "n 行中的第 i 行看到 i 个键：n² 对中有 n(n + 1)/2 对，略多于一半。"
            "投影在任何掩码下都需要 8·n·d²。",
        ),
    ),
    Claim(
        id="mask-after",
        kind="derived",
        sentence=both(
            "It is the same to set hidden weights to zero after softmax as to hide them before.",
            "softmax 之后把隐藏的权重置零，与之前就遮住效果相同。",
        ),
        notes="F",
        experiment=zeroing,
        rule=judge_after,
        shows=show_after,
        moves=(Move("size", both("size of the scores", "分数的大小"), "size"),),
        derivation=both(
            "Before: p_j = e^{s_j} / Σ_{visible} e^{s_k}. After: e^{s_j} / Σ_{all} e^{s_k}: the "
            "hidden keys stay in the denominator, so the row sums to less than one and depends on "
            "what it must not see.",
            "之前：p_j = e^{s_j} / Σ_{可见} e^{s_k}。之后：e^{s_j} / Σ_{全部} e^{s_k}："
            "隐藏的键仍在分母里，一行之和小于一，并且依赖于它不该看到的内容。",
        ),
    ),
    Claim(
        id="mask-window",
        kind="derived",
        sentence=both(
            "With windows of w keys, a model of L layers sees L·w tokens back.",
            "每层窗口为 w 个键时，L 层的模型能看到 L·w 个词元之前。",
        ),
        notes="F",
        experiment=windows,
        rule=judge_window,
        shows=show_window,
        moves=(
            Move("window", both("window", "窗口"), "window", how="only"),
            Move("layers", both("layers", "层数"), "layers"),
        ),
        derivation=both(
            "A layer carries what stands w places back to its row; the next layer carries that w "
            "places further. But each layer also averages over its window, and an average of "
            "averages gathers around its middle.",
            "一层把 w 个位置之前的内容带到自己的行，下一层再带 w 个位置。但每层同时在窗口内取平均，"
            "平均的平均会聚拢在中间。",
        ),
    ),
    Claim(
        id="mask-sinks",
        sentence=both(
            "A window harms a trained model only because it hides the first tokens; keeping these "
            "mends it.",
            "窗口损害训练好的模型，只是因为遮住了最前的词元；保留它们就能复原。",
        ),
        notes="F",
        experiment=sinks,
        rule=judge_sinks,
        shows=show_sinks,
        moves=(
            Move("from", both("window", "窗口"), "window", how="from"),
            Move("to", both("window", "窗口"), "window"),
        ),
    ),
)
