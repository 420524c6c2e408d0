"""Pages made of recorded results: the benchmarks of bench/results, and the claims of the lab."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headwise.apps.lab import ablations, drawing, record
from headwise.apps.lab.claim import TOPICS
from headwise.apps.lab.claims import CLAIMS
from headwise.apps.lab.handbook import ChapterWriter
from website.contents import ROOT, Language

TITLES = {
    "cpu": ("CPU engines", "python -m bench.cpu"),
    "cpu_amd": ("CPU engines, on an AMD processor", "python -m bench.cpu"),
    "modules": ("Modules", "python -m bench.modules"),
    "gpu": ("GPU engines", "python -m bench.gpu"),
    "watch": ("Watching", "python -m bench.watch"),
    "look": ("The page of headwise look", "python -m bench.look"),
    "cost_cpu": ("Predicted times", "python -m bench.cost"),
    "cost_cuda": ("Predicted times, on a GPU", "python -m bench.cost"),
}
"""The files of bench/results that list figures with targets, and the commands that made them."""

SPANS = ("64 keys", "a quarter", "all keys")
"""The spans of bench.spans, by the keys that they hold."""


def benchmarks() -> str:
    """All measured figures with their targets, met or missed, as recorded."""
    parts = [
        "# Benchmarks",
        "Every figure that has a target, as it was recorded, with the machine and the command that "
        "measures it again. [CPU speed](../speed.md) and [GPU engines](../gpu.md) "
        "explain them.",
    ]
    for name, (title, command) in TITLES.items():
        found = json.loads((ROOT / "bench/results" / f"{name}.json").read_text(encoding="utf-8"))
        missed = sum(not figure["met"] for figure in found["figures"])
        machine = found.get("machine") or found.get("device") or ""
        total = len(found["figures"])
        parts += [
            f"## {title}",
            f"`{command}` on {_machine(machine)}: {total - missed} of {total} targets met.",
            _table(
                ["figure", "measured", "target", ""],
                [
                    [_named(x), f"{x['value']:.2f} {x['unit']}", x["target"], _judged(x)]
                    for x in found["figures"]
                ],
            ),
        ]
    return "\n\n".join([*parts, "## Spans", *map(_spans, ("cpu", "gpu"))]) + "\n"


def _spans(device: str) -> str:
    """The time that a span adds to a call and to a watched layer, as recorded on a device."""
    found = json.loads((ROOT / f"bench/results/spans_{device}.json").read_text(encoding="utf-8"))
    rows = [
        [call, f"{times['plain']:.2f} ms"]
        + [f"+{max(0.0, times[span] - times['plain']):.2f} ms" for span in SPANS]
        for call, times in found["ms"].items()
    ]
    about = f"`python -m bench.spans` on {found['machine']}, {found['keys']:,} tokens."
    return about + "\n\n" + _table(["call", "without", *SPANS], rows)


def lab(language: Language, folder: Path) -> str:
    """The claims of the lab by topic, each with its verdict and figures; draws them to `folder`."""
    chinese = language == "zh"
    parts = (
        ["# 实验室：全部结论", "教科书怎么说，测出来是什么。判定由规则根据记录的数值得出；"
         "[实验室](../lab.md)说明怎样重跑。"]
        if chinese
        else ["# Lab: all claims", "What textbooks say, and what was measured. A rule turns the "
              "recorded figures into the verdict; [Lab](../lab.md) says how to run them again."]
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    results = {claim.id: record.best(claim, [record.RECORDED]) for claim in CLAIMS}
    translators = ablations.recorded([record.RECORDED], results.values())
    writer = ChapterWriter(results, translators, chinese)
    for topic, title in TOPICS.items():
        parts.append(f"## {writer.say(title)}")
        for claim in CLAIMS:
            if claim.topic == topic:
                parts += [f"### {claim.id}", writer.quotation(claim.id)]
                result = results[claim.id]
                shown = () if result is None else claim.shows(result.figures)
                if drawn := drawing.draw(shown, folder / f"{claim.id}.svg"):
                    parts.append(f"![{claim.id}](lab/{drawn[chinese].name})")
    return "\n\n".join(parts) + "\n"


def _machine(machine: Any) -> str:
    """A machine in words.

    >>> _machine({"cpu": "EPYC", "cores": 2, "torch": "2.13", "dtype": "fp32", "quiet": False})
    'EPYC, 2 cores, torch 2.13, fp32'
    """
    if not isinstance(machine, dict):
        return str(machine)
    words = [
        f"{value} {name}" if isinstance(value, int) else
        f"{name} {value}" if name in ("torch", "triton", "python") else str(value)
        for name, value in machine.items()
        if not isinstance(value, bool)
    ]  # fmt: skip
    return ", ".join(dict.fromkeys(words))


def _named(figure: dict[str, Any]) -> str:
    return f"{figure['name']} ({figure['detail']})" if figure["detail"] else str(figure["name"])


def _judged(figure: dict[str, Any]) -> str:
    return "met" if figure["met"] else "**missed**"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(x.replace("|", "\\|") for x in line) + " |" for line in lines
    )
