"""A watched run in a terminal: layers by heads, coloured by a figure, its trend, the alarms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from headwise.messages import printable
from headwise.watching import Chapter, Loss, Story, WatchedRun, scalars

BARS = "▁▂▃▄▅▆▇█"
"""Eight heights for a sparkline."""

SHADES = (
    ("· ", "#5a6aa8"),
    ("░░", "#3f7f96"),
    ("▒▒", "#21918c"),
    ("▓▓", "#5ec962"),
    ("██", "#f9e721"),
)
"""From the smallest to the largest figure; the characters work without colour too."""

COURSE = 24
"""Characters of a layer's sparkline."""

ALARMS = 8
"""The most lines of alarms; the others are counted."""

NAMES = {"entropy": "entropy_mean", "max_logit": "max_logit_max"}


def view(run: WatchedRun, statistic: str, width: int) -> RenderableType:
    """The whole view of a run as it stands."""
    steps = run.steps
    if not steps:
        return Text(f"{printable(str(run.folder))}: nothing has been written yet", style="dim")
    figure = resolve(run, statistic)
    return Group(
        header(run, steps, figure),
        Text(),
        grid(run, figure, width),
        legend(run, figure),
        *alarm_lines(run),
    )


def resolve(run: WatchedRun, statistic: str) -> str:
    """The figure that a statistic's name stands for: entropy is entropy_mean."""
    there = run.figures
    wanted = NAMES.get(statistic, statistic)
    for name in (wanted, f"{wanted}_mean", f"{wanted}_lower_bound", f"{wanted}_upper_bound"):
        if name in there:
            return name
    raise ValueError(f"there is no statistic {statistic!r}; there are {', '.join(there)}")


def header(run: WatchedRun, steps: Sequence[int], figure: str) -> Text:
    """The run's folder and model, its last step and the options of its watch."""
    looking, model = run.manifest["looking"], run.manifest["model"]
    rows = "all rows" if looking["rows"] is None else f"{looking['rows']} rows per pass"
    every = "" if looking["every"] == 1 else f", one step in {looking['every']}"
    text = Text(f"{printable(str(run.folder))} ", style="bold")
    text.append(f"{printable(model['class'])}, {model['parameters']:,} parameters\n", style="dim")
    text.append(f"step {steps[-1]}", style="bold")
    many = f"{len(steps)} step{'s' if len(steps) > 1 else ''}"
    text.append(f"  {many} recorded, {rows}{every}\n", style="dim")
    if trained := run.training():
        text.append(f"{on_a_line(trained)}\n", style="dim")
    text.append(printable(figure), style="bold cyan")
    if run.unread:
        names = ", ".join(name or "the model" for name in run.unread)
        text.append(f"\nattention that could not be read: {printable(names)}", style="yellow")
    if run.damaged:
        text.append(
            f"\n{len(run.damaged)} damaged files are left out, whole or in part", style="yellow"
        )
    return text


def on_a_line(trained: dict[str, float]) -> str:
    """The figures of a training on one line.

    >>> on_a_line({"loss": 3.14159, "per_second": 1234.5, "mfu": 0.123})
    'loss 3.142, 1,234 per second, MFU 12.3 %'
    """
    parts = [f"loss {trained['loss']:.3f}"] if "loss" in trained else []
    parts += [f"{trained['per_second']:,.0f} per second"] if "per_second" in trained else []
    parts += [f"MFU {100 * trained['mfu']:.3g} %"] if "mfu" in trained else []
    return ", ".join(parts)


def grid(run: WatchedRun, figure: str, width: int) -> Grid:
    """One line per layer: its heads, and a sparkline of the layer's figure over all steps."""
    table, kinds = run.heads(), {}
    values: dict[int, dict[int, float]] = {}
    for row in table:
        values.setdefault(int(row["layer"]), {})[int(row["head"])] = float(row[figure])
        kinds[int(row["layer"])] = str(row["kind"])
    finite = [x for line in values.values() for x in line.values() if math.isfinite(x)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    course = courses(run, figure)
    heads = sorted({head for line in values.values() for head in line})
    wide = 1 + max(6, max((len(short(x)) for x in finite), default=0))
    cell = wide if 10 + wide * len(heads) + COURSE <= width else 2
    drawn = Grid(box=None, padding=(0, 1, 0, 0), header_style="dim")
    drawn.add_column("layer", justify="right", no_wrap=True)
    numbers = "".join(
        f"{head:>{cell}}"[-cell:] if cell == 2 else f"{head:>{cell - 1}} " for head in heads
    )
    drawn.add_column(numbers, no_wrap=True)
    drawn.add_column("over the steps", no_wrap=True)
    for layer, line in values.items():
        name = f"{layer}" if kinds[layer] == "self" else f"{layer} cross"
        cells = Text.assemble(
            *(_cell(line[head], low, high, cell) if head in line else " " * cell for head in heads)
        )
        drawn.add_row(name, cells, Text(spark(course[layer]), style="cyan"))
    return drawn


def courses(run: WatchedRun, figure: str) -> dict[int, list[float]]:
    """Each layer's figure over all steps, reduced over heads by the end of its name."""
    steps, heads = run.history(figure)
    reduce = max if "_max" in figure else min if "_min" in figure else _mean
    layers: dict[int, list[list[float]]] = {}
    for (layer, _), line in heads.items():
        layers.setdefault(layer, []).append(line)
    return {
        layer: [reduce([x for line in lines if math.isfinite(x := line[n])] or [math.nan])
                for n in range(len(steps))]
        for layer, lines in layers.items()
    }  # fmt: skip


def spark(values: Sequence[float], width: int = COURSE) -> str:
    """A sparkline of at most `width` characters, the lowest value ▁ and the highest █.

    >>> spark([0, 1, 2, 3])
    '▁▃▆█'
    """
    size = min(width, len(values))
    bins = [values[n * len(values) // size : (n + 1) * len(values) // size] for n in range(size)]
    means = [_mean([x for x in some if math.isfinite(x)] or [math.nan]) for some in bins]
    finite = [x for x in means if math.isfinite(x)]
    if not finite:
        return "×" * size
    low, high = min(finite), max(finite)
    return "".join(
        BARS[round((x - low) / (high - low or 1) * (len(BARS) - 1))] if math.isfinite(x) else "×"
        for x in means
    )


def alarm_lines(run: WatchedRun) -> list[RenderableType]:
    """The alarms by rule and layer, the first first, and what to do."""
    told = Story.of(run)
    if not told.chapters:
        return [Text("\nno alarm", style="green")]
    count = len(run.alarms)
    title = Text(f"\n{count} alarm{'s' if count > 1 else ''}", style="bold red")
    lines = [
        Text(f"  {printable(chapter_line(x))}", overflow="fold") for x in told.chapters[:ALARMS]
    ]
    left = len(told.chapters) - ALARMS
    more = [Text(f"  and {left} more: headwise watch {run.folder} --story")] if left > 0 else []
    remedies = dict.fromkeys(x.remedy for x in told.chapters if x.remedy is not None)
    advice = [Text(f"  → {line}", style="cyan", overflow="fold") for line in remedies]
    return [title, *lines, *more, *advice]


def chapter_line(chapter: Chapter) -> str:
    """The alarms of a rule in a layer, on a line.

    >>> from headwise.watching import Alarm
    >>> alarms = [Alarm(3 + head, "dead head", 0, head, "it is silent") for head in range(9)]
    >>> chapter_line(Chapter("dead head", 0, "h.0", alarms))
    'step 3 to 11: dead head: 9 heads (0.0, 0.1, 0.2, 0.3, …): it is silent'
    """
    last = chapter.alarms[-1].step
    until = f" to {last}" if last > chapter.step else ""
    return f"step {chapter.step}{until}: {chapter.rule}: {chapter.where}: {chapter.says}"


def legend(run: WatchedRun, figure: str) -> Text:
    """The range of values that the shades cover."""
    values = [x for x in run.heads()[figure] if math.isfinite(x)]
    text = Text("\n")
    if values:
        text.append(f"{min(values):.3g} ", style="dim")
        for characters, colour in SHADES:
            text.append(characters, style=colour)
        text.append(f" {max(values):.3g}", style="dim")
    if len(values) < len(run.heads()):
        text.append("  " if values else "")
        text.append("×", style="bold red").append(" NaN or infinite", style="dim")
    return text


def as_dictionary(run: WatchedRun, statistic: str) -> dict[str, Any]:
    """The same for programs: all figures of the last step, the statistic over time, the alarms."""
    steps = run.steps
    figure = resolve(run, statistic) if steps else statistic
    table = run.heads()
    return {
        "folder": str(run.folder),
        "manifest": run.manifest,
        "statistic": figure,
        "steps": steps,
        "courses": {str(k): v for k, v in courses(run, figure).items()} if steps else {},
        "scalars": scalars(table),
        "heads": list(table),
        "alarms": [alarm.to_dict() for alarm in run.alarms],
        "training": run.training() or None,
        "unread": run.unread,
        "maps": [vars(kept) for kept in run.kept],
        "damaged": run.damaged,
    }


def show(console: Console, run: WatchedRun, statistic: str) -> None:
    """Print a run as it stands."""
    console.print(view(run, statistic, console.width))


def _cell(value: float, low: float, high: float, width: int) -> tuple[str, str]:
    if not math.isfinite(value):
        return "×".rjust(width), "bold red"
    step = (value - low) / (high - low) if high > low else 0.0
    characters, colour = SHADES[min(len(SHADES) - 1, int(step * len(SHADES)))]
    return (characters if width == 2 else f"{short(value):>{width - 1}} "), colour


def short(value: float) -> str:
    """Up to four digits, and fewer if they would take more than six characters.

    >>> short(3.14159), short(0.008228), short(6.342e-05), short(-123.456)
    ('3.142', '0.0082', '6e-05', '-123.5')
    """
    tried = [f"{value:.{digits}g}" for digits in (4, 3, 2, 1)]
    return next((text for text in tried if len(text) <= 6), tried[-1])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


WIDEST = 96
"""The most characters of the picture of a loss."""


def story(run: WatchedRun, width: int) -> RenderableType:
    """The story of a run: its loss, and its alarms from the first on."""
    told = Story.of(run)
    style = "bold red" if told.chapters else "bold green"
    title = Text(
        f"{printable(str(run.folder))}: {printable(told.headline)}", style, overflow="fold"
    )
    parts: list[RenderableType] = [title]
    if told.loss is not None:
        parts.append(loss_lines(told, told.loss, min(WIDEST, width - 2)))
    elif told.steps:
        parts.append(Text("watch.log(loss=loss) would show the loss here", style="dim"))
    rules: set[str] = set()
    for number, chapter in enumerate(told.chapters, 1):
        parts.append(chapter_lines(number, chapter, chapter.rule not in rules))
        rules.add(chapter.rule)
    return Group(*parts)


def loss_lines(told: Story, loss: Loss, width: int) -> RenderableType:
    """The course of the loss, below it a sign for each first alarm, and its lowest point."""
    drawn = spark(loss.values, width)
    first, last = loss.steps[0], loss.steps[-1]
    signs = [" "] * len(drawn)
    for number, chapter in enumerate(told.chapters, 1):
        share = (chapter.step - first) / max(1, last - first)
        at = min(len(signs) - 1, max(0, round(share * (len(signs) - 1))))
        signs[at] = str(number) if number < 10 else "+"
    finite = [x for x in loss.values if math.isfinite(x)]
    low = f"lowest {min(finite):.3g} at step {loss.lowest}" if finite else "NaN throughout"
    note = f"{loss.name}, steps {first} to {last}: {low}, last {loss.values[-1]:.3g}"
    return Group(
        Text(printable(note), style="dim"),
        Text(drawn, style="cyan"),
        Text("".join(signs).rstrip(), style="bold red"),
    )


def chapter_lines(number: int, chapter: Chapter, explained: bool = True) -> RenderableType:
    """One group of alarms: the finding, the heads before and after, its meaning and its remedy."""
    head = Text(f"{number}  step {chapter.step}: {printable(chapter.rule)}: ", style="bold")
    head.append(
        printable(f"{chapter.where}, {chapter.module}" if chapter.module else chapter.where)
    )
    lines: list[RenderableType] = [Text(printable(chapter.says), overflow="fold")]
    if explained and chapter.meaning:
        lines.append(Text(chapter.meaning, style="dim", overflow="fold"))
    if chapter.compared:
        lines.append(compared(chapter))
    if explained and chapter.remedy:
        lines.append(Text(f"→ {chapter.remedy}", style="cyan", overflow="fold"))
    return Group(Text(), head, Padding(Group(*lines), (0, 0, 0, 3)))


def compared(chapter: Chapter) -> Grid:
    """The heads' figures in the first step, when the alarm came, and in the last step."""
    table = Grid(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("mean of these heads", no_wrap=True)
    for title in ("first step", f"step {chapter.step}", "last step"):
        table.add_column(title, justify="right", no_wrap=True)
    for name, values in chapter.compared.items():
        limit = ""
        if name == chapter.figure and chapter.limit is not None:
            limit = f" (alarm {'above' if chapter.above else 'below'} {chapter.limit:.3g})"
        table.add_row(f"{name}{limit}", *(f"{value:.3g}" for value in values))
    return table
