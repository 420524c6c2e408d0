"""The two example sentences: example-cat, example-self."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headwise import watch
from headwise.apps.lab.charts import Listing, WeightMap
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
from headwise.apps.lab.laboratory import Lab
from headwise.apps.lab.masked_characters import PROJECTIONS, read_sentence
from headwise.apps.lab.masked_characters import SENTENCE as SELF
from headwise.models.trained import Translator, load

SENTENCE = "The cat sat on the mat."
CHANGED = ("The dog sat on the mat.", "The cat sat on the bed.", "The cat ran to the door.")
MOVED = 0.01
"""A row has changed if at least this share of its weight is elsewhere."""


def maps(translator: Translator, sentence: str) -> tuple[list[str], Tensor]:
    """The tokens (N) of a sentence and the weights (heads of all layers, N, N) of the encoder."""
    tokens = translator.encode(sentence)
    with torch.no_grad(), watch(translator.model) as seen:
        translator.model.encode(tokens)
    weights = [
        seen.map(str(row["name"]), int(row["head"])).to_tensor()[0, 0] for row in seen.heads()
    ]
    return translator.tokeniser.pieces(tokens[0].tolist()), torch.stack(weights)


def causal(lab: Lab) -> dict[str, Any]:
    """The built-in GPT, whose words see only those before: how much rows move around a change."""
    gpt = load("gpt", lab.device)

    def read(sentence: str) -> tuple[list[int], Tensor]:
        tokens = gpt.encode(sentence)
        with torch.no_grad(), watch(gpt.model) as seen:
            gpt.model(tokens)
        maps = [seen.map(str(x["name"]), int(x["head"])).to_tensor()[0, 0] for x in seen.heads()]
        return tokens[0].tolist(), torch.stack(maps)

    tokens, weights = read(SENTENCE)
    others, theirs = read(CHANGED[0])
    different = [n for n, (a, b) in enumerate(zip(tokens, others, strict=True)) if a != b]
    moved = (weights - theirs).abs().sum(-1) / 2  # (heads, N)
    return {
        "heads": len(weights),
        "sentence": CHANGED[0],
        "before": float(moved[:, : different[0]].max()),
        "after": float(moved[:, different[-1] + 1 :].mean()),
    }


def cat(lab: Lab) -> Figures:
    """The maps of the built-in translator and GPT: for the sentence, and with words changed."""
    translator = load("translate", lab.device)
    pieces, weights = maps(translator, SENTENCE)
    rows, largest = [], (0.0, 0, weights, pieces)
    for changed in CHANGED:
        others, theirs = maps(translator, changed)
        if len(others) != len(pieces):
            continue  # rows can be compared only if the positions are the same
        same = [number for number in range(len(pieces)) if others[number] == pieces[number]]
        moved = (weights - theirs).abs().sum(-1) / 2  # total variation (heads, N)
        moved = moved[:, same]
        rows.append(
            {
                "sentence": changed,
                "unchanged_words": len(same),
                "mean": float(moved.mean()),
                "share": float((moved > MOVED).double().mean()),
                "most": float(moved.max()),
            }
        )
        head = int(moved.mean(-1).argmax())
        largest = max(
            largest, (float(moved[head].mean()), head, theirs, others), key=lambda x: x[0]
        )
    _, head, theirs, others = largest
    return {
        "tokens": pieces,
        "heads": len(weights),
        "rows": rows,
        "head": head,
        "before": [[round(x, 4) for x in row] for row in weights[head].tolist()],
        "after": [[round(x, 4) for x in row] for row in theirs[head].tolist()],
        "after_tokens": others,
        "causal": causal(lab),
    }


def judge_cat(figures: Figures) -> Verdict:
    """The weights of words that stayed must change in most rows, whatever the mask."""
    rows = figures["rows"]
    if not rows:
        return undecided(
            both("no changed sentence has as many tokens", "改动后的句子词元数都不同，无法比较")
        )
    share = min(row["share"] for row in rows)
    because = both(
        "in the {heads} heads of a trained encoder, a word that stayed puts {mean:.0%} of its "
        "weight elsewhere on average when another word changes; at least {share:.0%} of the rows "
        "change by more than {moved:.0%}; in a causal GPT ({causal} heads) the words after the "
        "change move {after:.0%}, those before it {before:.0%}",
        "在训练好的编码器的 {heads} 个头中，别的词改变时，未变的词平均有 {mean:.0%} "
        "的权重移到别处；至少 {share:.0%} 的行变化超过 {moved:.0%}；在因果的 GPT（{causal} "
        "个头）中，改动之后的词移动 {after:.0%}，之前的词移动 {before:.0%}",
        heads=figures["heads"],
        mean=sum(row["mean"] for row in rows) / len(rows),
        share=share,
        moved=MOVED,
        causal=figures["causal"]["heads"],
        after=figures["causal"]["after"],
        before=figures["causal"]["before"],
    )
    if share <= 0.5:
        return does_not_hold(because) if share < 0.05 else undecided(because)
    if figures["causal"]["before"] > MOVED:
        return holds(because)
    condition = both(
        "a word can see what changed: in a causal model the words before it keep their weights",
        "这个词看得到改动之处：在因果模型中，改动之前的词权重不变",
    )
    return holds_when(condition, because)


def show_cat(figures: Figures) -> tuple[WeightMap | Listing, ...]:
    """The head that changes most, before and after; the change for each sentence."""
    tokens, after = figures["tokens"], figures["after_tokens"]
    headings = (
        both("changed sentence", "改动后的句子"),
        both("words that stayed", "未变的词元"),
        both("weight moved, mean", "移动的权重，平均"),
        both("rows that changed", "变化的行"),
    )
    return (
        WeightMap(both("before", "改动前"), tokens, tokens, figures["before"]),
        WeightMap(both("after", "改动后"), after, after, figures["after"]),
        Listing(
            both("Weights of the words that stayed", "未变词元的权重"),
            headings,
            tuple(
                (row["sentence"], row["unchanged_words"], row["mean"], row["share"])
                for row in figures["rows"]
            ),
        ),
    )


def himself(lab: Lab) -> Figures:
    """Encoders of Chinese text with separate and with shared Q and K, on 「他打了自己」."""
    return {
        "tokens": list(SELF),
        "runs": [
            lab.keep(f"chinese-{kind}-{seed}", read_sentence, kind=kind, seed=seed)
            for kind, seed in chinese_runs(lab)
        ],
    }


def chinese_runs(lab: Lab) -> list[tuple[str, int]]:
    """The trainings of `himself`: the projections and the seed of each."""
    seeds = range(lab.pick(tiny=1, quick=2, full=3))
    return [(kind, seed) for kind in PROJECTIONS for seed in seeds]


HIT, HE = SELF.index("打"), SELF.index("他")


def looking(run: dict[str, Any], at: int) -> int:
    """How many heads of a run give the largest weight of the row 打 to this token."""
    return sum(row[HIT].index(max(row[HIT])) == at for row in run["maps"])


def judge_self(figures: Figures) -> Verdict:
    """A head for 他 in every run with separate matrices, and in none with shared ones."""
    found = {kind: [run for run in figures["runs"] if run["kind"] == kind] for kind in PROJECTIONS}
    he = {kind: [looking(run, HE) for run in of] for kind, of in found.items()}
    own = {
        kind: sum(row[HIT][HIT] for run in of for row in run["maps"])
        / sum(len(run["maps"]) for run in of)
        for kind, of in found.items()
    }
    because = both(
        "of {heads} heads, {separate} look most from 打 to 他 with separate matrices and "
        "{shared} with a shared one; 打 keeps {own_separate:.0%} and {own_shared:.0%} of its "
        "weight for itself; one sentence is an illustration and not a proof",
        "每次训练的 {heads} 个头中，从“打”最关注“他”的：独立矩阵 {separate} 个，共享矩阵 "
        "{shared} 个；“打”留给自身的权重分别是 {own_separate:.0%} 与 {own_shared:.0%}；"
        "一个句子只是例子，不是证明",
        heads=len(figures["runs"][0]["maps"]),
        separate=counted(he["separate"]),
        shared=counted(he["shared"]),
        own_separate=own["separate"],
        own_shared=own["shared"],
    )
    if not any(he["separate"]):
        return does_not_hold(because)
    if all(he["separate"]) and not any(he["shared"]):
        return holds(because)
    if max(he["shared"]) < min(he["separate"]) and own["separate"] < 0.5 < own["shared"]:
        condition = both(
            "a tendency is meant: with a shared matrix most of the weight of 打 stays on itself, "
            "yet single heads look at 他 all the same",
            "只就倾向而言：共享矩阵时“打”的大部分权重留在自身，但仍有个别的头看“他”",
        )
        return holds_when(condition, because)
    # sharing does not keep 打 from looking at 他
    return does_not_hold(because) if all(he["shared"]) else undecided(because)


def counted(numbers: list[int]) -> str:
    """Numbers of several runs in one phrase.

    >>> counted([3, 5])
    '3–5'
    """
    low, high = min(numbers), max(numbers)
    return f"{low}" if low == high else f"{low}–{high}"


def show_self(figures: Figures) -> tuple[WeightMap | Listing, ...]:
    """The head of each kind that looks most from 打 to 他, and the weight that moves elsewhere."""
    shown: list[WeightMap | Listing] = []
    names = {"separate": both("separate", "独立"), "shared": both("shared", "共享")}
    for kind, name in names.items():
        maps = [x for run in figures["runs"] if run["kind"] == kind for x in run["maps"]]
        best = max(maps, key=lambda weights: weights[HIT][HE])
        shown.append(WeightMap(name, figures["tokens"], figures["tokens"], best))
    headings = (
        both("changed sentence", "改动后的句子"),
        *(both("weight moved, {name}", "移动的权重，{name}", name=x) for x in names.values()),
    )
    rows = []
    for number, changed in enumerate(figures["runs"][0]["moved"]):
        found = {
            kind: [x["moved"][number]["mean"] for x in figures["runs"] if x["kind"] == kind]
            for kind in names
        }
        rows.append((changed["sentence"], *(sum(x) / len(x) for x in found.values())))
    title = both("Weights of the characters that stayed", "未变的字的权重")
    return (*shown, Listing(title, headings, tuple(rows)))


CLAIMS = (
    Claim(
        id="example-cat",
        sentence=both(
            "“The cat sat on the mat.”: whenever the input changes, each word's weights change "
            "too.",
            "“The cat sat on the mat.”：输入内容一变，每个词的注意力权重也跟着变。",
        ),
        notes="B",
        experiment=cat,
        rule=judge_cat,
        shows=show_cat,
    ),
    Claim(
        id="example-self",
        sentence=both(
            "「他打了自己」: 打 should attend to 他, and sharing Q and K makes it attend to "
            "itself.",
            "「他打了自己」：“打”应关注“他”，而共用 Q、K 会迫使它更关注自身。",
        ),
        notes="C",
        experiment=himself,
        rule=judge_self,
        shows=show_self,
        gpu=True,
    ),
)
