"""The output of `headwise cost`: tables for people, JSON for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from headwise import Cost
from headwise.apps.cli.cost_question import Model, Sweep
from headwise.apps.interface.pictures import check, drawing, fonts, metadata
from headwise.apps.interface.terminal import in_language
from headwise.costs import DEVICES, Scenario, missing_costs, translated_part
from headwise.messages import Sentence, printable, say

FIGURES = (
    # figure, its name, its unit
    ("params", say("parameters"), ""),
    ("params_active", say("… that a token uses"), ""),
    ("weights", say("weights"), "B"),
    ("kv_cache", say("KV cache"), "B"),
    ("kv_cache_per_token", say("KV cache per token"), "B"),
    ("state", say("recurrent state"), "B"),
    ("activations", say("saved for the backward"), "B"),
    ("memory", say("memory in all"), "B"),
    ("flops", say("FLOPs, visible pairs"), "FLOP"),
    ("flops_dense", say("FLOPs, every pair"), "FLOP"),
    ("flops_executed", say("FLOPs, whole tiles"), "FLOP"),
    ("special", say("exponentials and the like"), ""),
    ("bytes_moved", say("bytes moved"), "B"),
    ("intensity", say("FLOPs per byte"), ""),
    ("seconds", say("time"), "s"),
    ("tokens_per_second", say("tokens per second"), ""),
    ("utilisation", say("share of the peak FLOPs"), "%"),
)
SWEPT = ("memory", "kv_cache", "activations", "flops", "flops_dense", "seconds")
AXES = {"length": say("length"), "batch": say("batch"), "heads": say("heads")}
PHASES = {"training": say("training"), "inference": say("inference")}
LIMITS = {
    "memory": Sentence(""),
    "positions": say("; the model has no more positions"),
    "search": say("; longer ones are not tried"),
}
LISTED = ("bf16", "fp16", "fp8", "fp32")
LARGE = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
SMALL = ((1.0, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n"))


def say_or_show(content: Any, as_json: bool, show: Callable[[], None]) -> None:
    """Print content as JSON, or show it."""
    if as_json:
        print(json.dumps(content, indent=2, ensure_ascii=False))
    else:
        show()


def written(value: float | None, unit: str = "") -> str:
    """A figure in three digits with a prefix.

    >>> written(8_030_261_248), written(1.07e9, "B"), written(0.0077, "s"), written(0.63, "%")
    ('8.03 G', '1.07 GB', '7.70 ms', '63 %')
    """
    if value is None or not math.isfinite(value):
        return "–"
    if unit == "%":
        return f"{100 * value:.2g} %"
    if unit == "s":
        scale, prefix = next((x for x in SMALL if value >= x[0]), SMALL[-1])
        return f"{_digits(value / scale)} {prefix}s"
    for scale, prefix in LARGE:
        if value >= scale:
            return f"{_digits(value / scale)} {prefix}{unit}"
    return f"{value:,.0f} {unit}".rstrip() if value == int(value) else f"{_digits(value)} {unit}"


def show_figures(
    console: Console, asked: Sequence[tuple[Model, Scenario]], zh: bool = False
) -> None:
    """A table: one row per figure, one column per model."""
    models, use = [each for each, _ in asked], asked[0][1]
    columns = [use.figures(each.architecture) for each, use in asked]
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    if len(models) == 1:
        console.print(f"[b]{printable(in_language(models[0].name, zh))}[/b]", highlight=False)
        table.add_column("", justify="right")
        table.add_column(in_language(say("exactly"), zh), justify="right", style="dim")
    else:
        for each in models:
            table.add_column(
                printable(in_language(each.name, zh)), justify="right", overflow="fold"
            )
    alike = len({use.length for _, use in asked}) == 1
    if not alike:
        own = in_language(say("its own"), zh)
        lengths = [own if use.length is None else f"{use.length:,}" for _, use in asked]
        table.add_row(in_language(say("tokens per sequence"), zh), *lengths)
    for name, label, unit in FIGURES:
        found = [column[name] for column in columns]
        if not _shown(name, columns):
            continue
        row = [in_language(label, zh), *(written(value, unit) for value in found)]
        if len(models) == 1:
            row.append(_exactly(found[0]))
        table.add_row(*row)
    console.print(table)
    caption = described(use, "" if alike else "length")
    console.print(f"[dim]{in_language(caption, zh)}[/dim]", highlight=False)
    for each, use in asked:
        for note in missing_costs(use.cost(each.architecture)):
            name = f"{printable(in_language(each.name, zh))}: " if len(models) > 1 else ""
            console.print(f"[yellow]{name}{in_language(note, zh)}[/yellow]", highlight=False)
    if len(models) == 1:
        console.print()
        show_parts(console, use, use.cost(models[0].architecture), zh)


def show_parts(console: Console, use: Scenario, whole: Cost, zh: bool = False) -> None:
    """A table: one row per part of a model, with its share of the FLOPs."""
    training = use.phase == "training"
    table = Table(box=None, pad_edge=False)
    table.add_column(in_language(say("part"), zh))
    kept = "activations" if training else "kv_cache"
    last = say("saved") if training else say("KV cache")
    for head in (say("parameters"), Sentence("FLOPs"), say("of all"), last):
        table.add_column(in_language(head, zh), justify="right")
    total = max(1, whole.training_flops if training else whole.flops)
    for name, part in _parts(whole, zh):
        flops = part.training_flops if training else part.flops
        share = f"{100 * flops / total:.1f} %"
        table.add_row(
            name,
            written(part.params or None),
            written(flops or None, "FLOP"),
            share if flops else "–",
            written(getattr(part, kept) or None, "B"),
        )
    console.print(table)


def show_sweep(
    console: Console,
    found: Mapping[str, list[dict[str, Any]]],
    notes: Mapping[str, Sequence[Sentence]],
    caption: Sentence,
    sweep: Sweep,
    zh: bool = False,
) -> None:
    """A table for each model: one row per value of the axis."""
    for model, rows in found.items():
        names = [name for name in SWEPT if any(row[name] is not None for row in rows)]
        table = Table(
            box=None, pad_edge=False, title=printable(in_language(model, zh)), title_justify="left"
        )
        table.add_column(in_language(AXES[sweep.axis], zh), justify="right")
        labels = {name: (label, unit) for name, label, unit in FIGURES}
        for name in names:
            table.add_column(in_language(labels[name][0], zh), justify="right")
        for row in rows:
            shown = [written(row[name], labels[name][1]) for name in names]
            table.add_row(f"{row[sweep.axis]:,}", *shown)
        console.print(table)
        for note in notes[model]:
            console.print(f"[yellow]{in_language(note, zh)}[/yellow]", highlight=False)
        console.print(f"[dim]{in_language(caption, zh)}[/dim]\n", highlight=False)


def show_fit(console: Console, found: Sequence[Mapping[str, Any]], zh: bool = False) -> None:
    """A line for each model: the longest context that fits."""
    for each in found:
        sentence = say(
            "{model}: {tokens:,} tokens fit into {room} (batch {batch}, {phase}){limit}",
            model=Sentence(printable(each["model"]), printable(in_language(each["model"], True))),
            tokens=each["tokens"],
            room=written(each["room"], "B"),
            batch=each["batch"],
            phase=PHASES[each["phase"]],
            limit=_limit(each),
        )
        console.print(in_language(sentence, zh), highlight=False)


def _limit(fit: Mapping[str, Any]) -> Sentence:
    """What keeps a context from being longer."""
    if fit["limit"] != "stated":
        return LIMITS[fit["limit"]]
    return say(
        "; its configuration states no more positions, and memory has room for {fits:,}",
        fits=fit["fits"],
    )


def show_device(console: Console, device: Mapping[str, Any], zh: bool = False) -> None:
    """The measured rates of a device."""
    table = Table(box=None, pad_edge=False, title=printable(device["name"]), title_justify="left")
    table.add_column("")
    table.add_column("", justify="right")
    rates = [
        (say("matrix products in {dtype}", dtype=dtype), f"{written(rate, 'FLOP')}/s")
        for dtype, rate in device["matrix"].items()
    ]
    rates += [
        (say("memory bandwidth"), f"{written(device['bandwidth'], 'B')}/s"),
        (say("exponentials"), f"{written(device['special'])}/s"),
        (say("memory"), written(device["memory"], "B")),
    ]
    for label, rate in rates:
        table.add_row(in_language(label, zh), rate)
    console.print(table)
    kept = say("kept in {file}; use it with --device this", file=device["file"])
    console.print(f"[dim]{in_language(kept, zh)}[/dim]")


def show_devices(console: Console, zh: bool = False) -> None:
    """The table of known devices: two lines each, the second with its source."""
    for each in DEVICES.values():
        rates = [f"{x} {written(each.matrix[x], 'FLOP')}/s" for x in LISTED if x in each.matrix]
        sizes = [written(each.memory, "B"), f"{written(each.bandwidth, 'B')}/s"]
        line = f"[b]{each.id:<10}[/b] {', '.join([*sizes, *rates])}"
        console.print(line, highlight=False, soft_wrap=True)
        about = say("{name}. Source: {source}", name=each.name, source=each.source)
        about_line = f"{'':<10} [dim]{in_language(about, zh)}[/dim]"
        console.print(about_line, highlight=False, soft_wrap=True)


def described(use: Scenario, without: str = "") -> Sentence:
    """The scenario of a table, in a line.

    >>> described(Scenario("decode", length=8192, batch=2))
    'one token after 8,191 others, batch 2, bf16'
    """
    parts = [_phase(use, without == "length" or use.length is None)]
    parts += [say("batch {count}", count=use.batch)] if without != "batch" else []
    parts.append(Sentence(use.dtype))
    if use.cache:
        parts.append(say("cache in {dtype}", dtype=use.cache))
    if use.mesh:
        mesh = " × ".join(f"{x}={n}" for x, n in use.mesh.items())
        parts.append(say("one rank of {ranks}", ranks=mesh))
    if use.recompute:
        parts.append(say("layers recomputed"))
    if use.device:
        parts.append(say("on {device}", device=use.device.name))
    return Sentence(", ".join(parts), "，".join(part.zh for part in parts))


def _phase(use: Scenario, any_length: bool) -> Sentence:
    """The use of the model, with its length unless that varies."""
    if any_length or use.length is None:
        return {
            "prefill": say("all tokens read at once"),
            "decode": say("one token after the others"),
            "training": say("a training step"),
        }[use.phase]
    count = use.length
    return {
        "prefill": say("{count:,} tokens read at once", count=count),
        "decode": say("one token after {count:,} others", count=count - 1),
        "training": say("a training step on {count:,} tokens per sequence", count=count),
    }[use.phase]


def _parts(
    whole: Cost, zh: bool = False, prefix: str = "", depth: int = 0
) -> Iterator[tuple[str, Cost]]:
    for name, part in whole.parts.items():
        if not (part.params or part.flops or part.kv_cache or part.activations):
            continue
        times = f" × {part.count}" if part.count > 1 and depth == 0 else ""
        yield f"{prefix}{translated_part(name) if zh else name}{times}", part
        if depth < 2:
            yield from _parts(part, zh, prefix + "  ", depth + 1)


def _shown(name: str, columns: Sequence[Mapping[str, float | None]]) -> bool:
    """Leave out figures that no model has, and active parameters where all are active."""
    if name == "params_active":
        return any(column[name] != column["params"] for column in columns)
    return any(column[name] for column in columns)


def _exactly(value: float | None) -> str:
    return "" if value is None or value != int(value) else f"{int(value):,}"


def _digits(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


PANELS = (
    # title, figures with their names, drawn where a row has them
    ("FLOPs", (("flops", "visible pairs"), ("flops_dense", "every pair"))),
    (
        "bytes",
        (("weights", "weights"), ("kv_cache", "KV cache"), ("activations", "saved for backward")),
    ),
    ("seconds", (("seconds", "time"),)),
)
STYLES = ("-", "--", ":")
Rows = Sequence[Mapping[str, float | None]]


def save_picture(path: Path, found: Mapping[str, Rows], axis: str, caption: str) -> None:
    """Draw the figures of one or more models over an axis, on logarithmic scales.

    `found` holds the rows of each model; a panel whose figures nobody has is left out.
    """
    check(path)
    matplotlib, figure_of = drawing()
    panels = [
        (title, [(name, label) for name, label in figures if _there(found, name)])
        for title, figures in PANELS
    ]
    panels = [(title, figures) for title, figures in panels if figures]
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": "headwise", "font.size": 8}
    settings |= {"font.family": fonts(), "text.parse_math": False}
    with matplotlib.rc_context(settings):
        size = (3.2 * len(panels), 3.0)
        figure = figure_of(figsize=size, dpi=200, layout="constrained")
        for place, (title, figures) in enumerate(panels):
            axes = figure.add_subplot(1, len(panels), place + 1)
            _draw(axes, found, axis, figures)
            axes.set_title(title, fontsize=9)
        figure.supxlabel(printable(caption), fontsize=6.5, color="0.3", x=0.02, ha="left")
        figure.savefig(path, bbox_inches="tight", pad_inches=0.05, metadata=metadata(path))


def _draw(
    axes: Any, found: Mapping[str, Rows], axis: str, figures: Sequence[tuple[str, str]]
) -> None:
    """Lines of one panel: a colour for each model, a style for each figure."""
    for colour, (model, rows) in enumerate(found.items()):
        for style, (name, label) in zip(STYLES, figures, strict=False):
            points = [(row[axis], row[name]) for row in rows if row[name]]
            said = label if len(found) == 1 else f"{printable(model)[:24]}, {label}"
            if points:
                axes.plot(*zip(*points, strict=True), style,
                          color=f"C{colour}", marker=".", label=said, linewidth=1)  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel(axis)
    axes.grid(color="0.9", linewidth=0.5)
    axes.legend(fontsize=6, frameon=False)


def _there(found: Mapping[str, Rows], name: str) -> bool:
    return any(row.get(name) for rows in found.values() for row in rows)
