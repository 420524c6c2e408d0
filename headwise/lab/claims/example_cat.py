"""The sentence "The cat sat on the mat.": example-cat."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.lab.charts import Listing, WeightMap
from headwise.lab.claim import Claim, Figures, Verdict, both, does_not_hold, holds, undecided
from headwise.lab.laboratory import Lab
from headwise.training.loading import Translator, load
from headwise.watching.watch import watch

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


def cat(lab: Lab) -> Figures:
    """The encoder's maps of the built-in translator: for the sentence, and with words changed."""
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
    }


def judge_cat(figures: Figures) -> Verdict:
    """The weights of words that stayed must change in most rows of most heads."""
    rows = figures["rows"]
    if not rows:
        return undecided(
            both("no changed sentence has as many tokens", "改动后的句子词元数都不同，无法比较")
        )
    share = min(row["share"] for row in rows)
    because = both(
        "in the {heads} heads of a trained encoder, a word that stayed puts {mean:.0%} of its "
        "weight elsewhere on average when another word changes; at least {share:.0%} of the rows "
        "change by more than {moved:.0%}",
        "在训练好的编码器的 {heads} 个头中，别的词改变时，未变的词平均有 {mean:.0%} "
        "的权重移到别处；"
        "至少 {share:.0%} 的行变化超过 {moved:.0%}",
        heads=figures["heads"],
        mean=sum(row["mean"] for row in rows) / len(rows),
        share=share,
        moved=MOVED,
    )
    if share > 0.5:
        return holds(because)
    return does_not_hold(because) if share < 0.05 else undecided(because)


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
)
