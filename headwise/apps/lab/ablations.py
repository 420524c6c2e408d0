"""The fair table: which translators are trained, how their BLEU is told and compared."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from headwise import __version__
from headwise.apps.lab import design, record
from headwise.apps.lab.charts import Cell, Listing
from headwise.apps.lab.claim import both
from headwise.apps.lab.estimates import Difference, difference, holm, joined, over_sentences
from headwise.apps.lab.fingerprint import fingerprint
from headwise.apps.lab.laboratory import Lab
from headwise.apps.lab.record import Result
from headwise.apps.lab.translation_runs import (
    TWIN,
    VARIANTS,
    choose,
    seeds_of,
    step_times,
    train,
    twins,
    unpacked,
)
from headwise.apps.train.tasks.metrics import bleu_of, with_totals
from headwise.files import write_whole
from headwise.messages import Sentence

Run = Mapping[str, Any]
FILE = "translation.full.json"
"""The table as it is recorded: every run with its curve, and the time that a GPU took for them."""

COMMAND = "lab table"
LEFT_OUT = ("gradient_norms", "without_head")
"""Figures of a run that claims need and the table does not."""
COUNTS = 6
"""Numbers that are kept of each sentence."""
LONGEST = (8, 12, 16, 24, 255)
"""The most tokens of the source, its end among them, of each column of lengths."""

LABELS: dict[str, Sentence] = {
    "base": both("the base model", "基准模型"),
    "heads-1": both("one head", "单头"),
    "heads-4": both("four heads", "四个头"),
    "heads-16": both("sixteen heads", "十六个头"),
    "keys-half": both("queries and keys half as wide", "Q、K 宽度减半"),
    "shared": both("Q and K share a matrix", "Q、K 共用矩阵"),
    "unprojected": both("no matrices for Q and K", "Q、K 没有矩阵"),
    "unscaled": both("not scaled", "不缩放"),
    "unscaled-narrow": both("not scaled, W_q / √d_k at the start", "不缩放，W_q 初值除以 √d_k"),
    "additive": both("additive", "加性"),
    "fixed": both("fixed weights instead of self-attention", "用固定权重代替自注意力"),
    "convolution": both("convolution instead of self-attention", "用卷积代替自注意力"),
    "recurrence": both(
        "gated linear recurrence instead of self-attention", "用门控线性递归代替自注意力"
    ),
    "lstm-attention": both("LSTM with attention", "带注意力的 LSTM"),
}
"""Every variant of the table, in its order."""


def label(variant: str) -> Sentence:
    """What a row is called."""
    if variant.startswith(TWIN):
        return both("the base model, of that size", "基准模型，同样大小")
    return LABELS[variant]


def plan(lab: Lab) -> list[str]:
    """Every row, twins last; the base model, whose rate its twins have, first."""
    if lab.form == "tiny":
        return ["base", "heads-1", "convolution", "lstm-attention"]
    return [*VARIANTS, *dict.fromkeys(twins(lab).values())]


def collect(lab: Lab, out: Path) -> int:
    """Write the table's file from the rows that a lab has kept; their number."""
    assert lab.folder is not None
    runs: list[Run] = []
    rows: dict[str, Any] = {}
    rates: dict[str, Any] = {}
    timed = lab.kept("step-times", step_times) or {"milliseconds": {}}
    lengths = ""
    for variant in plan(lab):
        settings = {"variant": variant, "seeds": seeds_of(lab, variant)}
        if (kept := lab.kept(f"translate-{variant}", train, **settings)) is None:
            continue
        chosen = lab.kept(f"rate-{variant}", choose, variant=variant)
        if chosen is not None:
            rates[variant] = {name: chosen[name] for name in ("rates", "losses")}
        lengths = kept["lengths"]
        rows[variant] = {"parameters": kept["parameters"]}
        if variant in timed["milliseconds"]:
            rows[variant]["milliseconds"] = timed["milliseconds"][variant]
        runs += [
            {name: x for name, x in run.items() if name not in LEFT_OUT} for run in kept["runs"]
        ]
    table = Translators(
        runs,
        record.sessions(lab.folder, COMMAND),
        rows,
        {row: twin for row, twin in twins(lab).items() if twin in rows},
        rates,
        lengths,
    )
    content = {
        "command": f"headwise {COMMAND}",
        "form": lab.form,
        "planned": len(plan(lab)),
        "sessions": table.sessions,
        "version": __version__,
        "design_hash": design_hash(),
        "commit": design.commit(),
        "rows": table.rows,
        "twins": table.twins,
        "rates": table.rates,
        "by_length": table.bleu_by_length(),
        "lengths": table.lengths,
        "runs": table.runs,
    }
    lines = [f'"{name}": {json.dumps(x, ensure_ascii=False)}' for name, x in content.items()]
    write_whole(out, "{\n" + ",\n".join(lines) + "\n}\n")
    return len(rows)


def design_hash() -> str:
    """Sixteen hexadecimal digits of what is trained for the table, and how rows are compared."""
    parts = (train, plan, against_base, against_twins, Translators)
    text = json.dumps([fingerprint(part) for part in parts])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Translators:
    """Trained translators, and what a table knows of them besides."""

    runs: Sequence[Run]
    sessions: Sequence[Mapping[str, Any]] = ()
    rows: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # parameters, milliseconds
    twins: Mapping[str, str] = field(default_factory=dict)  # of the variants that have one
    rates: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    lengths: str = ""  # of the test sentences, in tokens
    by_length: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """The time of all sessions."""
        return sum(float(session["seconds"]) for session in self.sessions)

    def bleu_by_length(self) -> dict[str, list[float]]:
        """The BLEU of each variant, a mean of its runs, by the length of the source."""
        sizes = [size for (size,) in unpacked(self.lengths, 1)] if self.lengths else []
        found: dict[str, list[float]] = {}
        for name, runs in counted(self.runs).items():
            for least, most in zip((0, *LONGEST), LONGEST, strict=False):
                there = [place for place, size in enumerate(sizes) if least < size <= most]
                each = (
                    [
                        bleu_of(list(map(sum, zip(*(run[x] for x in there), strict=True))))
                        for run in runs
                    ]
                    if there
                    else []
                )
                found.setdefault(name, []).append(sum(each) / len(each) if each else 0.0)
        return found


def recorded(folders: Sequence[Path], results: Iterable[Result | None]) -> Translators:
    """The translators of the recorded table; without one, those in the results of claims."""
    for folder in folders:
        if (folder / FILE).exists():
            table = json.loads((folder / FILE).read_text(encoding="utf-8"))
            names = ("sessions", "rows", "twins", "rates", "lengths", "by_length")
            return Translators(table["runs"], **{x: table[x] for x in names if x in table})
    found: dict[tuple[str, int], Run] = {}
    for result in results:
        for run in result.figures.get("runs", []) if result else []:
            if "variant" in run:
                found[run["variant"], run["seed"]] = run
    return Translators(list(found.values()))


def scores(runs: Sequence[Run], name: str = "bleu") -> dict[str, list[float]]:
    """The BLEU, or another figure, of all finished runs by variant."""
    found: dict[str, list[float]] = {}
    for run in runs:
        if not run["diverged"]:
            found.setdefault(run["variant"], []).append(run[name])
    return found


def counted(runs: Sequence[Run]) -> dict[str, list[list[list[int]]]]:
    """The counts behind BLEU of every sentence, by variant, of finished runs that kept them."""
    found: dict[str, list[list[list[int]]]] = {}
    for run in runs:
        if not run["diverged"] and "statistics" in run:
            counts = [with_totals(each) for each in unpacked(run["statistics"], COUNTS)]
            found.setdefault(run["variant"], []).append(counts)
    return found


def gain(runs: Sequence[Run], one: str, other: str) -> Difference:
    """The BLEU of one variant minus that of the other: the one interval of this comparison.

    It is over seeds and, if the runs kept their counts, over test sentences too.
    """
    pair = [run for run in runs if run["variant"] in (one, other)]
    gap, counts = difference(scores(pair), one, other), counted(pair)
    if not {one, other} <= set(counts):
        return gap
    return joined(gap, over_sentences(counts[one], counts[other], bleu_of))


def against_base(runs: Sequence[Run]) -> dict[str, tuple[Difference, float]]:
    """Each variant's BLEU minus the base model's, and its p-value, corrected by Holm for all."""
    groups = scores(runs)
    others = [variant for variant in groups if variant != "base"] if "base" in groups else []
    gaps = [gain(runs, variant, "base") for variant in others]
    chances = holm([gap.probability() for gap in gaps])
    return dict(zip(others, zip(gaps, chances, strict=True), strict=True))


def against_twins(table: Translators) -> dict[str, tuple[Difference, float]]:
    """Each variant's BLEU minus its twin's, and its p-value, corrected by Holm for all."""
    groups = scores(table.runs)
    pairs = [(row, twin) for row, twin in table.twins.items() if {row, twin} <= set(groups)]
    gaps = [gain(table.runs, row, twin) for row, twin in pairs]
    chances = holm([gap.probability() for gap in gaps])
    found = zip(pairs, gaps, chances, strict=True)
    return {row: (gap, chance) for (row, _), gap, chance in found}


def table(translators: Translators) -> Listing:
    """Every row: its size, rate, time, BLEU, and its difference from the base model."""
    groups = scores(translators.runs)
    against = against_base(translators.runs)
    rows: list[tuple[Cell | Sentence, ...]] = []
    for variant in order(translators):
        mine = [run for run in translators.runs if run["variant"] == variant]
        gap, chance = against.get(variant, (None, None))
        about = translators.rows.get(variant, {})
        done = groups.get(variant, [])
        known = gap is not None and gap.known
        rows.append(
            (
                named(translators, variant),
                len(mine),
                f"{about['parameters'] / 1e6:.2f}" if "parameters" in about else None,
                f"{mine[0]['rate']:.1e}".replace("e-0", "e-") if "rate" in mine[0] else None,
                about.get("milliseconds"),
                f"{_mean(done):.2f}" if done else both("diverged", "发散"),
                None if gap is None else gap.brief,
                f"{chance:.3f}" if known else None,
                f"{_mean(scores(mine, 'test_loss')[variant]):.3f}" if done else None,
            )
        )
    headings = (
        both("translator", "翻译模型"),
        both("runs", "训练次数"),
        both("parameters, millions", "参数量，百万"),
        both("rate", "学习率"),
        both("milliseconds per step of all runs", "全部训练一步的毫秒数"),
        both("BLEU", "BLEU"),
        both("against the base model, BLEU (95 % interval)", "与基准模型相差，BLEU（95% 区间）"),
        both("p, corrected (Holm)", "p，校正后（Holm）"),
        both("test loss", "测试损失"),
    )
    return Listing(both("Translators", "翻译模型"), headings, tuple(rows))


def planned(translators: Translators) -> Listing:
    """The table, with the rows that are still to be trained."""
    found = table(translators)
    there = {run["variant"] for run in translators.runs}
    missing = both("not trained yet", "尚未训练")
    left = tuple(
        (label(variant), *(None,) * 4, missing, *(None,) * 3)
        for variant in LABELS
        if variant not in there
    )
    return replace(found, rows=found.rows + left)


def sizes(translators: Translators) -> Listing:
    """The variants of another size beside base models of their size."""
    groups = scores(translators.runs)
    rows = tuple(
        (
            label(row),
            f"{translators.rows[row]['parameters'] / 1e6:.2f}",
            f"{_mean(groups[row]):.2f}",
            f"{_mean(groups[translators.twins[row]]):.2f}",
            gap.brief,
            f"{chance:.3f}",
        )
        for row, (gap, chance) in against_twins(translators).items()
    )
    headings = (
        both("translator", "翻译模型"),
        both("parameters, millions", "参数量，百万"),
        both("BLEU", "BLEU"),
        both("a base model of this size", "同样大小的基准模型"),
        both("difference, BLEU (95 % interval)", "相差，BLEU（95% 区间）"),
        both("p, corrected (Holm)", "p，校正后（Holm）"),
    )
    return Listing(both("At equal size", "同样大小"), headings, rows)


def lengths(translators: Translators) -> Listing:
    """The BLEU of every row by the length of the source."""
    rows = tuple(
        (named(translators, variant), *(f"{x:.1f}" for x in translators.by_length[variant]))
        for variant in order(translators)
        if variant in translators.by_length
    )
    tokens = [
        both("{least} to {most} tokens", "{least} 到 {most} 个词元", least=least + 1, most=most)
        for least, most in zip((0, *LONGEST), LONGEST[:-1], strict=False)
    ]
    longer = both("more, which none was trained on", "更长，训练中没有")
    headings = (both("translator", "翻译模型"), *tokens, longer)
    return Listing(both("BLEU by length", "按长度的 BLEU"), headings, rows)


def order(translators: Translators) -> list[str]:
    """The variants that there are, in the order of the table; twins last."""
    there = {run["variant"] for run in translators.runs}
    return [x for x in (*LABELS, *dict.fromkeys(translators.twins.values())) if x in there]


def named(translators: Translators, variant: str) -> Sentence:
    """The label of a row; of a twin with the rows whose size it has."""
    of = [label(row) for row, twin in translators.twins.items() if twin == variant]
    if not of:
        return label(variant)
    english, chinese = "; ".join(of), "；".join(x.zh for x in of)
    return both(
        "the base model, of the size of: {a}", "基准模型，大小同：{a}", a=Sentence(english, chinese)
    )


def scatter(runs: Sequence[Run], variant: str) -> float:
    """The standard deviation of a variant's runs, one for each seed, in percent of their BLEU."""
    mine = scores(runs).get(variant, [0.0])
    squares = sum((x / max(_mean(mine), 1e-9) - 1) ** 2 for x in mine)
    return 100 * float((squares / max(1, len(mine) - 1)) ** 0.5)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
