"""The patterns of heads: heads-diversity, heads-blur."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headwise import watch
from headwise.apps.lab.charts import Bars, Chart, Listing, Series, bars
from headwise.apps.lab.claim import Claim, Figures, Verdict, both, does_not_hold, holds, holds_when
from headwise.apps.lab.experiments.many_heads import unread
from headwise.apps.lab.laboratory import Lab
from headwise.apps.lab.moves import Move
from headwise.messages import Sentence
from headwise.models import GPT
from headwise.models.trained import LanguageModel, load

TEXTS = (
    "When the sun rose over the old harbour, the fishermen who had stayed at sea all night came "
    "home with empty nets. The oldest of them, a man called Martin, said that the fish had gone "
    "north, and that the young men should follow them. The young men laughed, because the oldest "
    "of them had said so every year, and every year the fish had come back to the harbour. ",
    "A triangle has three sides and three angles, and the sum of its angles is always the same. "
    "If two of its sides are equal, two of its angles are equal as well. Nobody had to measure "
    "this, since it follows from a few simple rules that were written down long ago. ",
    "The committee met on Monday to discuss the budget for the next year. Several members asked "
    "why the costs of the new library had doubled, and the chair promised to answer in writing. "
    "After three hours the meeting was closed, and the vote was moved to the following week. ",
)

SUBJECTS = ("key", "dog", "teacher", "letter", "friend", "book", "child", "window")
BETWEEN = (
    "",
    "near the river",
    "with the old red hat",
    "that the tall man saw",
    "from the house behind the church",
    "that my brother and his wife wanted to see",
)
VERBS = ("was", "stood", "came", "looked")
"""Sentences are the subjects, what stands between, and the verbs, in every combination."""

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
    """The heads of the built-in GPT before and after training, on several texts, and their syntax.

    Distances between heads and their types; the mean distance that a head looks back; and how
    often a head looks from a verb to its subject, beside the best fixed number of words back.
    """
    trained = load("gpt", lab.device)
    torch.manual_seed(0)
    fresh = GPT(trained.model.config).to(lab.device).eval()
    found: dict[str, list[dict[str, object]]] = {"trained": [], "fresh": []}
    for text in lab.each(TEXTS[: lab.pick("texts", tiny=2, quick=3)], "text"):
        tokens = trained.encode(text * 2)
        for name, model in (("trained", trained.model), ("fresh", fresh)):
            found[name].append(heads_of(model, tokens))
    subjects = SUBJECTS[: lab.pick("subjects", tiny=2, quick=8)]
    return {
        **found,
        "syntax": {
            x: to_subject(trained, m, subjects)
            for x, m in (("trained", trained.model), ("fresh", fresh))
        },
    }


def to_subject(reader: LanguageModel, model: nn.Module, subjects: Sequence[str]) -> dict[str, Any]:
    """How often the best head looks most from a verb to its subject, and the best fixed offset.

    Both are chosen on the sentences of the first half of the subjects and told of the others'.
    The verb itself and the first token are left out: rows rest there.
    """
    hits: dict[str, list[tuple[int, list[bool]]]] = {}  # by way to look: the half, right or not
    for number, subject in enumerate(subjects):
        half = int(number >= len(subjects) / 2)
        for between, verb in itertools.product(BETWEEN, VERBS):
            begun = f"The {subject}"
            whole = " ".join(filter(None, (begun, between, verb)))
            place = reader.encode(begun).shape[-1] - 1
            tokens = reader.encode(whole)
            last = tokens.shape[-1] - 1
            with torch.no_grad(), watch(model, maps=True) as seen:
                model(tokens)
            for row in seen.heads():
                weights = seen.map(str(row["name"]), int(row["head"])).to_tensor()[0, 0, last]
                looked = int(weights[1:last].argmax()) + 1
                hits.setdefault(f"{row['name']}.{row['head']}", []).append(
                    (half, [looked == place])
                )
            for back in range(1, 12):
                hits.setdefault(f"{back} back", []).append((half, [last - back == place]))

    def share(way: str, half: int) -> float:
        right = [hit for at, each in hits[way] if at == half for hit in each]
        return sum(right) / len(right)

    def best(offsets: bool) -> str:
        ways = [way for way in hits if way.endswith(" back") == offsets]
        return max(ways, key=lambda way: share(way, 0))

    return {
        "head": share(best(offsets=False), 1),
        "offset": share(best(offsets=True), 1),
        "sentences": sum(at == 1 for at, _ in hits["1 back"]),
    }


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
        "back": sorted(float(row["distance_mean"]) for row in seen.heads()),
        "tokens": int(tokens.shape[-1]),
    }


def judge_diversity(figures: Figures) -> Verdict:
    """Position, long range and syntax must each be found, on every text, in trained heads only."""
    trained, fresh, syntax = figures["trained"], figures["fresh"], figures["syntax"]
    apart = all(a["distance"] > 1.5 * b["distance"] for a, b in zip(trained, fresh, strict=True))
    near = all(sum(x["types"].get(name, 0) for name in NEAR) >= 1 for x in trained)
    far = [sum(back > x["tokens"] / 4 for back in x["back"]) for x in trained]
    idle = [x["types"].get("uniform", 0) for x in trained]
    chance = binomial(
        syntax["trained"]["head"], syntax["trained"]["sentences"], syntax["trained"]["offset"]
    )
    because = both(
        "on {texts} texts two heads of a layer differ in {least:.0%} to {most:.0%} of their weight "
        "after training and in at most {before:.0%} before; of {heads} heads {near} look at "
        "neighbouring tokens, {far} look back over a quarter of the text or more on average, and "
        "{idle} are nearly uniform; from a verb to its subject the best head looks in {head:.0%} "
        "of "
        "{count} sentences that it was not chosen on (untrained {fresh:.0%}), a fixed number of "
        "tokens back in {offset:.0%}",
        "在 {texts} 篇文本上，同一层的两个头训练后有 {least:.0%} 到 {most:.0%} 的权重不同，"
        "训练前至多 "
        "{before:.0%}；{heads} 个头中，看相邻词元的有 {near} 个，平均回看超过全文四分之一的有 "
        "{far} 个，"
        "近乎均匀的有 {idle} 个；从动词看主语，最好的头在 {count} 个未用于挑选的句子中对 {head:.0%}"
        "（未训练时 {fresh:.0%}），固定回看若干词元对 {offset:.0%}",
        texts=len(trained),
        least=min(x["distance"] for x in trained),
        most=max(x["distance"] for x in trained),
        before=max(x["distance"] for x in fresh),
        heads=trained[0]["heads"],
        near=span([sum(x["types"].get(name, 0) for name in NEAR) for x in trained]),
        far=span(far),
        idle=span(idle),
        head=syntax["trained"]["head"],
        fresh=syntax["fresh"]["head"],
        offset=syntax["trained"]["offset"],
        count=syntax["trained"]["sentences"],
    )
    if not apart or not near:
        return does_not_hold(because)
    grammar = chance < 0.01 and syntax["fresh"]["head"] < syntax["trained"]["head"]
    if min(far) >= 1 and grammar:
        return holds(because)
    found = [
        *([both("long range", "长距离")] if min(far) >= 1 else []),
        *([both("the subject of a verb", "动词的主语")] if grammar else []),
    ]
    condition = both(
        "patterns of position are meant{found}; the rest was not found in this small model",
        "指的是位置模式{found}；其余在这个小模型里没有发现",
        found=Sentence("".join(f", and {x}" for x in found), "".join(f"与{x.zh}" for x in found)),
    )
    return holds_when(condition, because)


NEAR = ("previous-token", "local", "self")
"""Types of heads that follow position."""


def binomial(share: float, count: int, chance: float) -> float:
    """How often so large a share of so many comes about by chance."""
    hits = round(share * count)
    return sum(
        math.comb(count, x) * chance**x * (1 - chance) ** (count - x)
        for x in range(hits, count + 1)
    )


def span(values: Sequence[int]) -> str:
    """The least and the greatest of some counts."""
    least, most = min(values), max(values)
    return f"{least}" if least == most else f"{least}–{most}"


def show_diversity(figures: Figures) -> tuple[Listing | Bars, ...]:
    """The types before and after training, on the first text, and the distances on each."""
    trained, fresh = figures["trained"], figures["fresh"]
    names = sorted({*trained[0]["types"], *fresh[0]["types"]})
    rows = tuple(
        (
            Sentence(name, TYPES[name]),
            trained[0]["types"].get(name, 0),
            fresh[0]["types"].get(name, 0),
        )
        for name in names
    )
    distances = tuple(
        (
            both(
                "mean distance of two heads, text {n}", "两个头的平均距离，文本 {n}", n=number + 1
            ),
            a["distance"],
            b["distance"],
        )
        for number, (a, b) in enumerate(zip(trained, fresh, strict=True))
    )
    syntax = (
        both("best head: from a verb to its subject", "最好的头：从动词看主语"),
        figures["syntax"]["trained"]["head"],
        figures["syntax"]["fresh"]["head"],
    )
    headings = both("type", "类型"), both("trained", "训练后"), both("fresh", "训练前")
    title = both("Heads of the built-in GPT", "内置 GPT 的头")
    found = bars(
        both("Types of heads, text 1", "头的类型，文本 1"),
        both("heads", "头数"),
        [Sentence(name, TYPES[name]) for name in names],
        (headings[1], [trained[0]["types"].get(name, 0) for name in names]),
        (headings[2], [fresh[0]["types"].get(name, 0) for name in names]),
    )
    return Listing(title, headings, (*rows, *distances, syntax)), found


def blur(lab: Lab) -> Figures:
    """Reading several tokens at once: the share of their content that heads can't give back."""
    places, heads = 8, (1, 2, 4, 8, 16)
    draws = lab.pick("draws", tiny=1, quick=5)
    lost = [
        sum(unread(count, places, seed) for seed in range(draws)) / draws
        for count in lab.each(heads, "heads")
    ]
    return {"places": places, "heads": heads, "lost": lost}


def judge_blur(figures: Figures) -> Verdict:
    """One head must lose content, and many must lose less."""
    places, heads, lost = figures["places"], figures["heads"], figures["lost"]
    enough = next((h for h, share in zip(heads, lost, strict=True) if share < 0.01), None)
    because = both(
        "of the content of {places} tokens read at once, one head loses {one:.1%} to its "
        "average, {two} heads lose {part:.1%}, {many} heads {rest:.1%}",
        "同时读取 {places} 个词元的内容时，一个头因取平均损失 {one:.1%}，{two} 个头损失 "
        "{part:.1%}，{many} 个头损失 {rest:.1%}",
        places=places,
        one=lost[0],
        two=heads[1],
        part=lost[1],
        many=heads[-1],
        rest=lost[-1],
    )
    if lost[0] <= 0.5 or enough is None:
        return does_not_hold(because)
    condition = both(
        "a linear readout of unrelated values is meant, where it is an identity",
        "指的是对互不相关的值作线性读出，那是恒等式",
    )
    return holds_when(condition, because)


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
            "Different heads learn different patterns, such as position, syntax and long-range "
            "relations.",
            "不同的头会学到不同的模式，如位置、句法与长距离关系。",
        ),
        notes="ACE",
        experiment=diversity,
        rule=judge_diversity,
        shows=show_diversity,
        moves=(Move("texts", both("texts", "文本数"), tables=("trained", "fresh")),),
    ),
    Claim(
        id="heads-blur",
        kind="derived",
        sentence=both(
            "Attention is a weighted average and blurs what it reads; many heads ease this.",
            "注意力是加权平均，会使信息模糊；多头可以缓解。",
        ),
        notes="B",
        experiment=blur,
        rule=judge_blur,
        shows=show_blur,
        derivation=both(
            "A head returns one average Σ p_j v_j. Of m uncorrelated values of equal variance, "
            "their mean tells 1/m: a linear readout of one head loses 1 − 1/m, of h heads 1 − h/m.",
            "一个头只返回一个加权平均 Σ p_j v_j。m 个方差相等、互不相关的值，其均值只含 1/m "
            "的信息：线性读出时，一个头损失 1 − 1/m，h 个头损失 1 − h/m。",
        ),
    ),
)
