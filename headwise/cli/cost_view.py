"""The output of `headwise cost`: tables for people, JSON for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from headwise.cli.cost_question import Model, Sweep
from headwise.costs.cost import Cost
from headwise.costs.machines.hardware import DEVICES
from headwise.costs.uses.scenario import Scenario
from headwise.look.scene import printable

FIGURES = (
    # figure, its name, its unit
    ("params", "parameters", ""),
    ("params_active", "… that a token uses", ""),
    ("weights", "weights", "B"),
    ("kv_cache", "KV cache", "B"),
    ("state", "recurrent state", "B"),
    ("activations", "saved for the backward", "B"),
    ("memory", "memory in all", "B"),
    ("flops", "FLOPs, visible pairs", "FLOP"),
    ("flops_dense", "FLOPs, every pair", "FLOP"),
    ("flops_executed", "FLOPs, whole tiles", "FLOP"),
    ("special", "exponentials and the like", ""),
    ("bytes_moved", "bytes moved", "B"),
    ("intensity", "FLOPs per byte", ""),
    ("seconds", "time", "s"),
    ("tokens_per_second", "tokens per second", ""),
    ("utilisation", "share of the peak FLOPs", "%"),
)
SWEPT = ("memory", "kv_cache", "activations", "flops", "flops_dense", "seconds")
LIMITS = {
    "memory": "",
    "positions": "; the model has no more positions",
    "search": "; longer ones are not tried",
}
LISTED = ("bf16", "fp16", "fp8", "fp32")
LARGE = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
SMALL = ((1.0, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n"))


def say(content: Any, as_json: bool, show: Callable[[], None]) -> None:
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


def show_figures(console: Console, asked: Sequence[tuple[Model, Scenario]]) -> None:
    """A table: one row per figure, one column per model."""
    models, use = [each for each, _ in asked], asked[0][1]
    columns = [use.figures(each.architecture) for each, use in asked]
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    if len(models) == 1:
        console.print(f"[b]{printable(models[0].name)}[/b]", highlight=False)
        table.add_column("", justify="right")
        table.add_column("exactly", justify="right", style="dim")
    else:
        for each in models:
            table.add_column(printable(each.name), justify="right", overflow="fold")
    alike = len({use.length for _, use in asked}) == 1
    if not alike:
        lengths = ["its own" if use.length is None else f"{use.length:,}" for _, use in asked]
        table.add_row("tokens per sequence", *lengths)
    for name, label, unit in FIGURES:
        found = [column[name] for column in columns]
        if not _shown(name, columns):
            continue
        row = [label, *(written(value, unit) for value in found)]
        if len(models) == 1:
            row.append(_exactly(found[0]))
        table.add_row(*row)
    console.print(table)
    caption = described(use, "" if alike else "length")
    console.print(f"[dim]{caption}[/dim]", highlight=False)
    if len(models) == 1:
        console.print()
        show_parts(console, use, use.cost(models[0].architecture))


def show_parts(console: Console, use: Scenario, whole: Cost) -> None:
    """A table: one row per part of a model, with its share of the FLOPs."""
    training = use.phase == "training"
    table = Table(box=None, pad_edge=False)
    table.add_column("part")
    kept = "activations" if training else "kv_cache"
    heads = ("parameters", "FLOPs", "of all", "saved" if training else "KV cache")
    for head in heads:
        table.add_column(head, justify="right")
    total = max(1, whole.training_flops if training else whole.flops)
    for name, part in _parts(whole):
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
    console: Console, found: Mapping[str, list[dict[str, Any]]], caption: str, sweep: Sweep
) -> None:
    """A table for each model: one row per value of the axis."""
    for model, rows in found.items():
        names = [name for name in SWEPT if any(row[name] is not None for row in rows)]
        table = Table(box=None, pad_edge=False, title=printable(model), title_justify="left")
        table.add_column(sweep.axis, justify="right")
        labels = {name: (label, unit) for name, label, unit in FIGURES}
        for name in names:
            table.add_column(labels[name][0], justify="right")
        for row in rows:
            shown = [written(row[name], labels[name][1]) for name in names]
            table.add_row(f"{row[sweep.axis]:,}", *shown)
        console.print(table)
        console.print(f"[dim]{caption}[/dim]\n", highlight=False)


def show_fit(console: Console, found: Sequence[Mapping[str, Any]]) -> None:
    """A line for each model: the longest context that fits."""
    for each in found:
        room = written(each["room"], "B")
        console.print(
            f"{printable(each['model'])}: {each['tokens']:,} tokens fit into {room} "
            f"(batch {each['batch']}, {each['phase']})" + LIMITS[each["limit"]],
            highlight=False,
        )


def show_device(console: Console, device: Mapping[str, Any]) -> None:
    """The measured rates of a device."""
    table = Table(box=None, pad_edge=False, title=printable(device["name"]), title_justify="left")
    table.add_column("")
    table.add_column("", justify="right")
    for dtype, rate in device["matrix"].items():
        table.add_row(f"matrix products in {dtype}", f"{written(rate, 'FLOP')}/s")
    table.add_row("memory bandwidth", f"{written(device['bandwidth'], 'B')}/s")
    table.add_row("exponentials", f"{written(device['special'])}/s")
    table.add_row("memory", written(device["memory"], "B"))
    console.print(table)
    console.print(f"[dim]kept in {device['file']}; use it with --device this[/dim]")


def show_devices(console: Console) -> None:
    """The table of known devices: two lines each, the second with its source."""
    for each in DEVICES.values():
        rates = [f"{x} {written(each.matrix[x], 'FLOP')}/s" for x in LISTED if x in each.matrix]
        sizes = [written(each.memory, "B"), f"{written(each.bandwidth, 'B')}/s"]
        line = f"[b]{each.id:<10}[/b] {', '.join([*sizes, *rates])}"
        console.print(line, highlight=False, soft_wrap=True)
        about = f"{'':<10} [dim]{each.name}. Source: {each.source}[/dim]"
        console.print(about, highlight=False, soft_wrap=True)


def described(use: Scenario, without: str = "") -> str:
    """The scenario of a table, in a line.

    >>> described(Scenario("decode", length=8192, batch=2))
    'one token after 8,191 others, batch 2, bf16'
    """
    if without == "length" or use.length is None:
        sentence = {"prefill": "all tokens read at once", "decode": "one token after the others"}
        parts = [sentence.get(use.phase, "a training step")]
    else:
        sentence = {
            "prefill": f"{use.length:,} tokens read at once",
            "decode": f"one token after {use.length - 1:,} others",
            "training": f"a training step on {use.length:,} tokens per sequence",
        }
        parts = [sentence[use.phase]]
    parts += [*([f"batch {use.batch}"] if without != "batch" else []), use.dtype]
    if use.cache:
        parts.append(f"cache in {use.cache}")
    if use.mesh:
        parts.append("one rank of " + " × ".join(f"{x}={n}" for x, n in use.mesh.items()))
    if use.recompute:
        parts.append("layers recomputed")
    if use.device:
        parts.append(f"on {use.device.name}")
    return ", ".join(parts)


def _parts(whole: Cost, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Cost]]:
    for name, part in whole.parts.items():
        if not (part.params or part.flops or part.kv_cache or part.activations):
            continue
        times = f" × {part.count}" if part.count > 1 and depth == 0 else ""
        yield f"{prefix}{name}{times}", part
        if depth < 2:
            yield from _parts(part, prefix + "  ", depth + 1)


def _shown(name: str, columns: Sequence[Mapping[str, float | None]]) -> bool:
    """Leave out figures that no model has, and active parameters where all are active."""
    if name == "params_active":
        return any(column[name] != column["params"] for column in columns)
    return any(column[name] for column in columns)


def _exactly(value: float | None) -> str:
    return "" if value is None or value != int(value) else f"{int(value):,}"


def _digits(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"
