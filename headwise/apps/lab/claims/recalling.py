"""Models trained to recall: qkv-content, qkv-length, rivals-long-range."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise.apps.lab.charts import Chart, Listing, Series
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
from headwise.apps.lab.counting import parameters
from headwise.apps.lab.laboratory import Lab, Piece
from headwise.apps.lab.recall import Delay, Recall, RecallModel, Task, accuracy, learn
from headwise.models import GatedConvolution
from headwise.nn import FixedAttention, MultiHeadAttention

PAIRS = 16
WIDTH = 32


def trained(layer: nn.Module, width: int, task: Task, steps: int, seed: int) -> RecallModel:
    """A reader around this layer, trained on a task."""
    torch.manual_seed(seed)
    model = RecallModel(layer, width, task)
    learn(model, task, steps, seed=seed, rate=5e-3)
    return model


def by_content(lab: Lab) -> list[Piece]:
    """The trainings of `fixed_and_qkv`."""
    return [(f"content-{kind}", asked, {"kind": kind}) for kind in ("qkv", "fixed")]


def asked(lab: Lab, folder: Path | None, kind: str) -> dict[str, Any]:
    """Train a layer on recall of 16 pairs and ask it at 16, 32 and 64, for every seed."""
    steps = lab.pick(tiny=3, quick=400, full=800)
    rows = []
    for seed in range(lab.pick(tiny=1, quick=3, full=8)):
        torch.manual_seed(seed)
        layer: nn.Module = MultiHeadAttention(WIDTH, 1)
        if kind == "fixed":
            layer = FixedAttention(WIDTH, 1, length=PAIRS + 1)
        model = trained(layer, WIDTH, Recall(PAIRS), steps, seed)
        row: dict[str, object] = {"kind": kind, "seed": seed, "parameters": parameters(model)}
        for times in (1, 2, 4):
            row[f"x{times}"] = at_length(model, times * PAIRS)
        rows.append(row)
    return {"rows": rows}


def fixed_and_qkv(lab: Lab) -> Figures:
    """Train both layers on recall of 16 pairs; ask them at 16, 32 and 64 pairs."""
    found = lab.keep_all(by_content(lab))
    rows = [row for each in found for row in each["rows"]]
    return {"pairs": PAIRS, "chance": 1 / Recall(PAIRS).values, "rows": rows}


def at_length(model: RecallModel, pairs: int) -> float | None:
    """The accuracy at this many pairs, None if the model can't take so many tokens."""
    try:
        return accuracy(model, Recall(pairs))
    except ValueError as error:
        if "positions" not in str(error):
            raise
        return None


def of(figures: Figures, kind: str, name: str) -> list[float | None]:
    """One figure of all runs of a kind."""
    return [row[name] for row in figures["rows"] if row["kind"] == kind]


def judge_content(figures: Figures) -> Verdict:
    """QKV must recall, and fixed weights must not."""
    qkv, fixed = ([x or 0.0 for x in of(figures, kind, "x1")] for kind in ("qkv", "fixed"))
    because = both(
        "with {pairs} new keys in every sequence, the worst layer with Q, K and V recalls "
        "{qkv:.0%} of the values, the best one with fixed weights {fixed:.0%}; chance is "
        "{chance:.0%}",
        "每个序列都换 {pairs} 个新的键：最差的 QKV 层答对 {qkv:.0%}，最好的固定权重层答对 "
        "{fixed:.0%}；乱猜是 {chance:.0%}",
        qkv=min(qkv),
        fixed=max(fixed),
        pairs=figures["pairs"],
        chance=figures["chance"],
    )
    if min(qkv) > 0.9 and max(fixed) < 0.5:
        return holds(because)
    return does_not_hold(because) if max(fixed) > 0.9 else undecided(because)


def judge_length(figures: Figures) -> Verdict:
    """Fixed weights must fail at two and four times the length, and QKV must not."""
    values = {
        (kind, name): of(figures, kind, name) for kind in ("qkv", "fixed") for name in ("x2", "x4")
    }
    qkv = min(x or 0.0 for name in ("x2", "x4") for x in values["qkv", name])
    took = [x for name in ("x2", "x4") for x in values["fixed", name] if x is not None]
    because = both(
        "trained at {pairs} pairs, the worst layer with Q, K and V recalls {two:.0%} at twice "
        "and {four:.0%} at four times the length; fixed weights {fixed}",
        "在 {pairs} 对上训练后，最差的 QKV 层在两倍长度上答对 {two:.0%}，四倍长度上 "
        "{four:.0%}；固定权重{fixed}",
        pairs=figures["pairs"],
        two=min(x or 0.0 for x in values["qkv", "x2"]),
        four=min(x or 0.0 for x in values["qkv", "x4"]),
        fixed=both("have none for further positions", "没有更远位置的权重")
        if not took
        else both("recall at most {most:.0%}", "至多答对 {most:.0%}", most=max(took)),
    )
    if took and max(took) > 0.9:
        return does_not_hold(because)
    return holds(because) if qkv > 0.8 else undecided(because)


def show_fixed(figures: Figures) -> tuple[Listing, ...]:
    """The accuracy of every run at each length."""
    headings = (
        both("weights", "权重"),
        both("seed", "种子"),
        both("parameters", "参数量"),
        *(both("{n} pairs", "{n} 对", n=n * figures["pairs"]) for n in (1, 2, 4)),
    )
    rows = tuple(
        (row["kind"], row["seed"], row["parameters"], row["x1"], row["x2"], row["x4"])
        for row in figures["rows"]
    )
    title = both("Share of right answers", "答对的比例")
    return (Listing(title, headings, rows),)


def attention(width: int) -> nn.Module:
    """One layer of attention."""
    return MultiHeadAttention(width, 4)


def recurrence(width: int) -> nn.Module:
    """One LSTM."""
    return nn.LSTM(width, width, batch_first=True)


def four_convolutions(width: int) -> nn.Module:
    """Four layers of kernel 3, which see nine tokens."""
    return nn.Sequential(*(GatedConvolution(width, 3, 1) for _ in range(4)))


def five_dilated(width: int) -> nn.Module:
    """Five layers of kernel 3, each with taps three times as far apart as the one before."""
    return nn.Sequential(*(GatedConvolution(width, 3, 3**layer) for layer in range(5)))


RIVALS: dict[str, tuple[int, Callable[[int], nn.Module]]] = {
    # name: its width, chosen so that all have about the same number of parameters; the layer
    "attention": (36, attention),
    "LSTM": (28, recurrence),
    "4 convolutions": (16, four_convolutions),
    "5 dilated convolutions": (14, five_dilated),
}


def far(lab: Lab) -> tuple[int, ...]:
    """The distances to remember over."""
    return lab.pick(tiny=(4, 12), quick=(4, 16, 64), full=(4, 8, 16, 32, 64, 128))


def over_distances(lab: Lab) -> list[Piece]:
    """The trainings of `distances`."""
    return [
        (
            f"remember-{rival.replace(' ', '-')}-{distance}",
            remember,
            {"rival": rival, "distance": distance},
        )
        for rival in RIVALS
        for distance in far(lab)
    ]


def distances(lab: Lab) -> Figures:
    """Train each rival to remember one token over a distance, anew for every distance."""
    rows = lab.keep_all(over_distances(lab))
    trained = {name: rows[0][name] for name in ("steps", "seeds")}
    return {**trained, "chance": 1 / Delay(1).values, "rows": rows}


def remember(lab: Lab, folder: Path | None, rival: str, distance: int) -> dict[str, Any]:
    """Train one rival with several seeds at one distance; how much it remembers."""
    steps = lab.pick(tiny=2, quick=250, full=600)
    seeds = lab.pick(tiny=1, quick=2, full=4)
    task, (width, build) = Delay(distance), RIVALS[rival]
    models = []
    for seed in range(seeds):
        torch.manual_seed(seed)
        models.append(trained(build(width), width, task, steps, seed))
    found = [accuracy(model, task) for model in models]
    return {
        "rival": rival,
        "distance": distance,
        "steps": steps,
        "seeds": seeds,
        "accuracy": sum(found) / seeds,
        "least": min(found),
        "parameters": parameters(models[0]),
    }


def judge_long_range(figures: Figures) -> Verdict:
    """Attention must recall at every distance; the LSTM and the shallow convolution must not."""
    rows = figures["rows"]
    longest = max(row["distance"] for row in rows)

    def reach(name: str) -> int:
        """The largest distance up to which nine of ten answers are right."""
        mine = sorted((x for x in rows if x["rival"] == name), key=lambda x: x["distance"])
        good = 0
        for row in mine:
            if row["accuracy"] < 0.9:
                break
            good = row["distance"]
        return int(good)

    reaches = {name: reach(name) for name in RIVALS}
    because = both(
        "after {steps} steps attention recalls over {attention} of {longest} tokens, an LSTM "
        "over {lstm}, four layers of convolution over {plain} (they see 9 tokens), five dilated "
        "ones over {dilated}, with {least:,} to {most:,} parameters each",
        "训练 {steps} 步后，注意力能记住 {longest} 个词元中相距 {attention} 的内容，LSTM {lstm}，"
        "四层卷积 {plain}（只能看到 9 个词元），五层空洞卷积 {dilated}；参数各为 {least:,} 到 "
        "{most:,} 个",
        steps=figures["steps"],
        longest=longest,
        attention=reaches["attention"],
        lstm=reaches["LSTM"],
        plain=reaches["4 convolutions"],
        dilated=reaches["5 dilated convolutions"],
        least=min(row["parameters"] for row in rows),
        most=max(row["parameters"] for row in rows),
    )
    if reaches["attention"] < longest:
        return undecided(because)
    if reaches["LSTM"] < longest and reaches["4 convolutions"] < longest:
        return holds(because)
    if reaches["4 convolutions"] < longest:
        condition = both(
            "the distance is beyond what an LSTM learns in this training: up to {longest} tokens "
            "it remembers as well",
            "距离超出 LSTM 在这样的训练中能学会的范围：{longest} 个词元以内它同样记得住",
            longest=longest,
        )
        return holds_when(condition, because)
    return does_not_hold(because)


def show_long_range(figures: Figures) -> tuple[Chart, ...]:
    """Accuracy against distance."""
    names = {
        "attention": both("attention", "注意力"),
        "LSTM": both("LSTM", "LSTM"),
        "4 convolutions": both("4 layers of convolution", "4 层卷积"),
        "5 dilated convolutions": both("5 dilated layers", "5 层空洞卷积"),
    }
    curves = tuple(
        Series(
            label,
            [row["distance"] for row in figures["rows"] if row["rival"] == name],
            [row["accuracy"] for row in figures["rows"] if row["rival"] == name],
        )
        for name, label in names.items()
    )
    title = both("Remembering one token", "记住一个词元")
    right = both("share of right answers", "答对的比例")
    return (Chart(title, both("distance", "距离"), right, curves, log_x=True),)


CLAIMS = (
    Claim(
        id="qkv-content",
        sentence=both(
            "Weights learnt directly are fixed, whatever the content: they do not generalise.",
            "直接学习的注意力权重是固定的，与内容无关，不能泛化。",
        ),
        notes="B",
        experiment=fixed_and_qkv,
        rule=judge_content,
        shows=show_fixed,
    ),
    Claim(
        id="qkv-length",
        sentence=both(
            "Weights learnt directly do not serve sequences of another length.",
            "直接学习的注意力权重不支持变化长度的序列。",
        ),
        notes="B",
        experiment=fixed_and_qkv,
        rule=judge_length,
        shows=show_fixed,
    ),
    Claim(
        id="rivals-long-range",
        sentence=both(
            "Attention has no decay over distance, RNNs suffer from vanishing or exploding "
            "gradients, and CNNs need depth.",
            "注意力没有距离衰减，RNN 受梯度消失或爆炸之苦，CNN 需要堆叠多层。",
        ),
        notes="B",
        experiment=distances,
        rule=judge_long_range,
        shows=show_long_range,
    ),
)
