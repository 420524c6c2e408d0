"""The translation table: which translators are trained, and how their BLEU is told."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headwise import __version__
from headwise.apps.lab import session_list
from headwise.apps.lab.charts import Cell, Listing
from headwise.apps.lab.claim import both
from headwise.apps.lab.estimates import Difference, difference, holm
from headwise.apps.lab.laboratory import Lab
from headwise.apps.lab.record import Result
from headwise.apps.lab.translation_runs import train
from headwise.files import write_whole
from headwise.messages import Sentence

Run = Mapping[str, Any]
FILE = "translation.full.json"
"""The table as it is recorded: every run with its curve, and the time that a GPU took for them."""

MANY, FEW = 8, 2
"""Seeds of the variants between which one percent of BLEU has to be told from chance; of others."""

COMMAND = "lab table"
LEFT_OUT = ("gradient_norms", "without_head")
"""Figures of a run that claims need and the table does not."""

OFTEN = ("base", "heads-1", "shared")

LABELS: dict[str, Sentence] = {
    "base": both("the base model", "基准模型"),
    "heads-1": both("one head", "单头"),
    "heads-2": both("two heads", "两个头"),
    "heads-4": both("four heads", "四个头"),
    "heads-16": both("sixteen heads", "十六个头"),
    "heads-32": both("thirty-two heads", "三十二个头"),
    "keys-half": both("queries and keys half as wide", "Q、K 宽度减半"),
    "keys-quarter": both("queries and keys a quarter as wide", "Q、K 宽度为四分之一"),
    "unscaled": both("not scaled", "不缩放"),
    "unscaled-heads-4": both("not scaled, four heads", "不缩放，四个头"),
    "unscaled-heads-2": both("not scaled, two heads", "不缩放，两个头"),
    "unscaled-heads-1": both("not scaled, one head", "不缩放，单头"),
    "shared": both("Q and K share a matrix", "Q、K 共用矩阵"),
    "unprojected": both("no matrices for Q and K", "Q、K 没有矩阵"),
    "cosine": both("cosine", "余弦"),
    "additive": both("additive", "加性"),
    "fixed": both("fixed weights instead of self-attention", "用固定权重代替自注意力"),
    "convolution": both("convolution instead of self-attention", "用卷积代替自注意力"),
    "lstm-attention": both("LSTM with attention", "带注意力的 LSTM"),
    "lstm": both("LSTM without attention", "不带注意力的 LSTM"),
}
"""Every variant of the table, in its order."""


def plan(lab: Lab) -> list[tuple[str, int]]:
    """Every run: a variant and a seed, the most needed first.

    The first seed of every variant, so that a table that is cut short compares them all; then the
    seeds of the close comparisons; then the others' second ones.
    """
    if lab.form == "tiny":
        return [(variant, 0) for variant in ("base", "heads-1", "convolution", "lstm-attention")]
    return [
        *((variant, 0) for variant in LABELS),
        *((variant, seed) for seed in range(1, MANY) for variant in OFTEN),
        *((variant, seed) for seed in range(1, FEW) for variant in LABELS if variant not in OFTEN),
    ]


def collect(lab: Lab, out: Path) -> int:
    """Write the table's file from the runs that a lab has kept; their number."""
    assert lab.folder is not None
    runs = []
    for variant, seed in plan(lab):
        settings = {"variant": variant, "seed": seed}
        kept = lab.kept(f"translate-{variant}-{seed}", train, **settings)
        if kept is not None:
            runs.append({name: x for name, x in kept.items() if name not in LEFT_OUT})
    held = session_list.sessions(lab.folder, COMMAND)
    content = {
        "command": f"headwise {COMMAND}",
        "form": lab.form,
        "planned": len(plan(lab)),
        "sessions": held,
        "version": __version__,
        "runs": runs,
    }
    lines = [f'"{name}": {json.dumps(x, ensure_ascii=False)}' for name, x in content.items()]
    write_whole(out, "{\n" + ",\n".join(lines) + "\n}\n")
    return len(runs)


def adopt(lab: Lab, folders: Sequence[Path]) -> int:
    """Keep the translators of the recorded table, and of claims, as pieces of a lab; their number.

    Those of claims hold more figures than those of the table, and replace them.
    """
    assert lab.folder is not None
    found = dict[tuple[str, int], Run]()
    for folder in folders:
        for file in (folder / FILE, *folder.glob(f"*.{lab.form}.json")):
            content = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
            runs = content.get("runs", []) + content.get("figures", {}).get("runs", [])
            for run in runs:
                key = (run.get("variant", ""), run["seed"])
                if key[0] in LABELS and len(run) >= len(found.get(key, {})):
                    found[key] = run
    for (variant, seed), run in found.items():
        lab.store(f"translate-{variant}-{seed}", train, run, 0.0, variant=variant, seed=seed)
    return len(found)


@dataclass(frozen=True)
class Translators:
    """Trained translators, and the sessions in which they were trained if a table lists them."""

    runs: Sequence[Run]
    sessions: Sequence[Mapping[str, Any]] = ()

    @property
    def seconds(self) -> float:
        """The time of all sessions."""
        return sum(float(session["seconds"]) for session in self.sessions)


def recorded(folders: Sequence[Path], results: Iterable[Result | None]) -> Translators:
    """The translators of the recorded table; without one, those in the results of claims."""
    for folder in folders:
        if (folder / FILE).exists():
            table = json.loads((folder / FILE).read_text(encoding="utf-8"))
            return Translators(table["runs"], table["sessions"])
    found: dict[tuple[str, int], Run] = {}
    for result in results:
        for run in result.figures.get("runs", []) if result else []:
            if "variant" in run:
                found[run["variant"], run["seed"]] = run
    return Translators(list(found.values()))


def scores(runs: Sequence[Run]) -> dict[str, list[float]]:
    """The BLEU of all finished runs by variant, in the order of the table."""
    found: dict[str, list[float]] = {}
    for variant in LABELS:
        mine = [x["bleu"] for x in runs if x["variant"] == variant and not x["diverged"]]
        if mine:
            found[variant] = mine
    return found


def against_base(groups: Mapping[str, Sequence[float]]) -> dict[str, tuple[Difference, float]]:
    """Each variant's BLEU minus the base model's, and its p-value, corrected by Holm for all."""
    others = [variant for variant in groups if variant != "base"] if "base" in groups else []
    gaps = [difference(groups, variant, "base") for variant in others]
    chances = holm([gap.probability() for gap in gaps])
    return dict(zip(others, zip(gaps, chances, strict=True), strict=True))


def table(runs: Sequence[Run]) -> Listing:
    """Every variant: its runs, size, BLEU, its difference from the base model, its test loss."""
    groups = scores(runs)
    against = against_base(groups)
    rows: list[tuple[Cell | Sentence, ...]] = []
    for variant, label in LABELS.items():
        mine = [run for run in runs if run["variant"] == variant]
        done = [run for run in mine if not run["diverged"]]
        if not mine:
            continue
        gap, chance = against.get(variant, (None, None))
        rows.append(
            (
                label,
                len(mine),
                len(mine) - len(done),
                f"{done[0]['parameters'] / 1e6:.2f}" if done and "parameters" in done[0] else None,
                f"{_mean(groups[variant]):.2f}" if done else None,
                None if gap is None else gap.brief,
                None if gap is None or not gap.known else f"{chance:.3f}",
                f"{_mean([run['test_loss'] for run in done]):.3f}" if done else None,
            )
        )
    headings = (
        both("translator", "翻译模型"),
        both("runs", "训练次数"),
        both("diverged", "发散"),
        both("parameters, millions", "参数量，百万"),
        both("BLEU", "BLEU"),
        both("against the base model, BLEU (95 % interval)", "与基准模型相差，BLEU（95% 区间）"),
        both("p, corrected (Holm)", "p，校正后（Holm）"),
        both("test loss", "测试损失"),
    )
    return Listing(both("Translators", "翻译模型"), headings, tuple(rows))


def scatter(runs: Sequence[Run], variant: str) -> float:
    """The standard deviation of a variant's runs, one for each seed, in percent of their BLEU."""
    mine = scores(runs).get(variant, [0.0])
    squares = sum((x / max(_mean(mine), 1e-9) - 1) ** 2 for x in mine)
    return 100 * float((squares / max(1, len(mine) - 1)) ** 0.5)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
