"""The story of a watched run in a terminal: the loss with its alarms, and each alarm explained."""

from __future__ import annotations

import math

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from headwise.apps.cli.watch_view import spark
from headwise.messages import printable
from headwise.watching import Chapter, Loss, Story, WatchedRun

WIDEST = 96
"""The most characters of the picture of a loss."""


def view(run: WatchedRun, width: int) -> RenderableType:
    """The whole story of a run."""
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
        Text(note, style="dim"),
        Text(drawn, style="cyan"),
        Text("".join(signs).rstrip(), style="bold red"),
    )


def chapter_lines(number: int, chapter: Chapter, explained: bool = True) -> RenderableType:
    """One group of alarms: the finding, the heads before and after, its meaning and its remedy."""
    head = Text(f"{number}  step {chapter.step}: {chapter.rule}: ", style="bold")
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
