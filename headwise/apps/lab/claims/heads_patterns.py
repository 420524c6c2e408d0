"""The patterns of heads: heads-diversity, heads-blur."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn

from headwise import watch
from headwise.apps.lab.charts import Chart, Listing, Series
from headwise.apps.lab.claim import Claim, Figures, Verdict, both, does_not_hold, holds, undecided
from headwise.apps.lab.experiments.many_heads import unread
from headwise.apps.lab.laboratory import Lab
from headwise.apps.lab.translation_runs import translated
from headwise.messages import Sentence
from headwise.models import GPT
from headwise.models.trained import load

TEXT = (
    "When the sun rose over the old harbour, the fishermen who had stayed at sea all night came "
    "home with empty nets. The oldest of them, a man called Martin, said that the fish had gone "
    "north, and that the young men should follow them. The young men laughed, because the oldest "
    "of them had said so every year, and every year the fish had come back to the harbour. "
)


TYPES = {
    "content": "内容",
    "dormant": "休眠",
    "induction": "归纳",
    "local": "局部",
    "previous-token": "前一词元",
    "self": "自身",
    "sink": "注意力汇",
    "uniform": "均匀",
}
"""The types of heads in 中文."""


def diversity(lab: Lab) -> Figures:
    """Distances between heads and their types, in the built-in GPT before and after training."""
    trained = load("gpt", lab.device)
    torch.manual_seed(0)
    fresh = GPT(trained.model.config).to(lab.device).eval()
    tokens = trained.encode(TEXT * lab.pick(tiny=1, quick=3))
    return {"trained": heads_of(trained.model, tokens), "fresh": heads_of(fresh, tokens)}


def heads_of(model: nn.Module, tokens: Tensor) -> dict[str, object]:
    """The mean distance between two heads of a layer, and how many heads there are of each type."""
    with torch.no_grad(), watch(model) as seen:
        model(tokens)
    layers: dict[str, list[Tensor]] = {}
    for row in seen.heads():
        weights = seen.map(str(row["name"]), int(row["head"])).to_tensor()[0, 0]  # (N, N)
        layers.setdefault(str(row["name"]), []).append(weights)
    distances = [
        float((a - b).abs().sum(-1).mean() / 2)  # total variation: 0 alike, 1 disjoint
        for heads in layers.values()
        for number, a in enumerate(heads)
        for b in heads[:number]
    ]
    types = Counter(str(row["type"]) for row in seen.types())
    return {
        "heads": sum(types.values()),
        "distance": sum(distances) / len(distances),
        "types": dict(sorted(types.items())),
    }


def judge_diversity(figures: Figures) -> Verdict:
    """Trained heads must differ more than fresh ones, and be of several types."""
    trained, fresh = figures["trained"], figures["fresh"]
    several = sum(count >= 2 for count in trained["types"].values())
    types = trained["types"].items()
    listed = Sentence(
        ", ".join(f"{count} {name}" for name, count in types),
        "、".join(f"{TYPES[name]} {count}" for name, count in types),
    )
    because = both(
        "two heads of a layer differ in {trained:.0%} of their weight after training and in "
        "{fresh:.0%} before; the {heads} trained heads are of {kinds} types: {listed}",
        "同一层的两个头，训练后有 {trained:.0%} 的权重不同，训练前是 {fresh:.0%}；{heads} "
        "个训练好的头分为 {kinds} 类：{listed}",
        trained=trained["distance"],
        fresh=fresh["distance"],
        heads=trained["heads"],
        kinds=len(trained["types"]),
        listed=listed,
    )
    if trained["distance"] > 1.5 * fresh["distance"] and several >= 3:
        return holds(because)
    if trained["distance"] < fresh["distance"] or len(trained["types"]) == 1:
        return does_not_hold(because)
    return undecided(because)


def show_diversity(figures: Figures) -> tuple[Listing, ...]:
    """The types before and after training."""
    names = sorted({*figures["trained"]["types"], *figures["fresh"]["types"]})
    rows = tuple(
        (
            Sentence(name, TYPES[name]),
            figures["trained"]["types"].get(name, 0),
            figures["fresh"]["types"].get(name, 0),
        )
        for name in names
    )
    distance = (
        both("mean distance of two heads", "两个头的平均距离"),
        figures["trained"]["distance"],
        figures["fresh"]["distance"],
    )
    headings = both("type", "类型"), both("trained", "训练后"), both("fresh", "训练前")
    title = both("Heads of the built-in GPT", "内置 GPT 的头")
    return (Listing(title, headings, (*rows, distance)),)


def blur(lab: Lab) -> Figures:
    """Reading several tokens at once: the share of their content that heads can't give back.

    Beside it the effective number of keys of trained translators with one head and with several.
    """
    places, heads = 8, (1, 2, 4, 8, 16)
    draws = lab.pick(tiny=1, quick=5)
    lost = [
        sum(unread(count, places, seed) for seed in range(draws)) / draws
        for count in lab.each(heads, "heads")
    ]
    translators = [
        {"variant": variant, "effective_keys": translated(lab, variant, 0)["effective_keys"]}
        for variant in ("heads-1", "base")
    ]
    return {"places": places, "heads": heads, "lost": lost, "translators": translators}


def judge_blur(figures: Figures) -> Verdict:
    """One head must lose content, and many must lose less."""
    places, heads, lost = figures["places"], figures["heads"], figures["lost"]
    enough = next((h for h, share in zip(heads, lost, strict=True) if share < 0.01), None)
    because = both(
        "of the content of {places} tokens read at once, one head loses {one:.1%} to its "
        "average, {two} heads lose {part:.1%}, {many} heads {rest:.1%}; a row of a trained "
        "translator reads {single:.1f} keys in one head and {several:.1f} in each of several",
        "同时读取 {places} 个词元的内容时，一个头因取平均损失 {one:.1%}，{two} 个头损失 "
        "{part:.1%}，{many} 个头损失 {rest:.1%}；训练好的翻译模型中，单头的一行读 {single:.1f} "
        "个键，多头时每个头读 {several:.1f} 个",
        places=places,
        one=lost[0],
        two=heads[1],
        part=lost[1],
        many=heads[-1],
        rest=lost[-1],
        single=figures["translators"][0]["effective_keys"],
        several=figures["translators"][1]["effective_keys"],
    )
    return holds(because) if lost[0] > 0.5 and enough is not None else does_not_hold(because)


def show_blur(figures: Figures) -> tuple[Chart, ...]:
    """The share that is lost against the number of heads."""
    title = both(
        "Content of {places} tokens, read at once",
        "同时读取 {places} 个词元",
        places=figures["places"],
    )
    curve = Series(both("lost", "损失"), figures["heads"], figures["lost"])
    return (Chart(title, both("heads", "头数"), both("share", "比例"), (curve,), log_x=True),)


CLAIMS = (
    Claim(
        id="heads-diversity",
        sentence=both(
            "Different heads learn different patterns, such as position and long-range relations.",
            "不同的头会学到不同的模式，如位置、句法与长距离关系。",
        ),
        notes="ACE",
        experiment=diversity,
        rule=judge_diversity,
        shows=show_diversity,
    ),
    Claim(
        id="heads-blur",
        sentence=both(
            "Attention is a weighted average and blurs what it reads; many heads ease this.",
            "注意力是加权平均，会使信息模糊；多头可以缓解。",
        ),
        notes="B",
        experiment=blur,
        rule=judge_blur,
        shows=show_blur,
        gpu=True,
        derivation=both(
            "A head returns one average Σ p_j v_j. Of m uncorrelated values of equal variance, "
            "their mean tells 1/m: a linear readout of one head loses 1 − 1/m, of h heads 1 − h/m.",
            "一个头只返回一个平均 Σ p_j v_j。m 个方差相等、互不相关的值，其均值只含 1/m 的信息："
            "线性读出时，一个头损失 1 − 1/m，h 个头损失 1 − h/m。",
        ),
    ),
)
