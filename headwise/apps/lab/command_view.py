"""The output of `headwise lab`: the list of claims, one claim with its figures, the progress."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from headwise.apps.interface.terminal import in_language
from headwise.apps.lab import design, record
from headwise.apps.lab.charts import Shown, cells
from headwise.apps.lab.claim import KINDS, NOTES, TOPICS, VERDICTS, Claim
from headwise.apps.lab.record import Result
from headwise.apps.lab.revisions import REVISIONS
from headwise.apps.lab.runner import RunProgress
from headwise.messages import printable, say

STYLES = {
    "holds": "green",
    "holds when": "yellow",
    "does not hold": "red",
    "right": "green",
    "wrong": "red",
    "undecided": "cyan",
}


def verdict_text(result: Result | None, stale: bool, zh: bool) -> Text:
    """The verdict with its sign; "not run" if there is none."""
    if result is None:
        return Text(in_language(say("not run yet"), zh), style="dim")
    shown = Text(in_language(VERDICTS[result.verdict], zh), style=STYLES[result.verdict])
    if stale:
        shown.append(f" ({in_language(say('stale'), zh)})", style="dim")
    return shown


def show_list(console: Console, found: Sequence[tuple[Claim, Result | None]], zh: bool) -> None:
    """The claims topic by topic, each with its verdict."""
    for topic, title in TOPICS.items():
        within = [(claim, result) for claim, result in found if claim.topic == topic]
        if not within:
            continue
        console.print(Text(f"\n{in_language(title, zh)}", style="bold"))
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(width=20, style="cyan", no_wrap=True)
        grid.add_column(width=17)
        grid.add_column(width=8, style="dim")
        grid.add_column(overflow="fold")
        for claim, result in within:
            stale = result is not None and result.stale(claim)
            shown = verdict_text(result, stale, zh)
            kind = Text(in_language(KINDS[claim.kind], zh))
            grid.add_row(Text(claim.id), shown, kind, Text(in_language(claim.sentence, zh)))
        console.print(grid)


def show_claim(console: Console, claim: Claim, result: Result | None, zh: bool) -> None:
    """One claim: the sentence, the verdict and its origin; then the derivation and the figures."""
    console.print(Text(claim.id, style="bold cyan"))
    console.print(Text(in_language(claim.sentence, zh), style="bold"))
    if result is None:
        advice = say("not run yet; run it: {command}", command=claim.command)
        console.print(Text(in_language(advice, zh)))
    else:
        show_verdict(console, claim, result, zh)
    show_source(console, claim, zh)
    if claim.derivation is not None:
        console.print(Text(f"\n{in_language(claim.derivation, zh)}"))
    if result is not None and not result.stale(claim):
        for shown in claim.shows(result.figures):  # today's drawing may not fit older figures
            console.print()
            console.print(table_of(shown, zh))


def show_verdict(console: Console, claim: Claim, result: Result, zh: bool) -> None:
    """The verdict, its condition and reason, how it came about, and those before it."""
    stale = result.stale(claim)
    line = verdict_text(result, stale, zh)
    line.append(f" · {in_language(KINDS[claim.kind], zh)}", style="dim")
    console.print()
    console.print(line)
    if result.condition is not None:
        console.print(Text(printable(in_language(result.condition, zh))))
    console.print(Text(printable(in_language(result.because, zh))))
    if stale:
        advice = say("measured by other code; run it again: {command}", command=claim.command)
        console.print(Text(in_language(advice, zh), style="yellow"))
    parts = [result.command, result.form]
    if claim.kind != "read":  # a quotation needs no machine
        parts += [result.machine, f"{result.seconds:g} s"]
    console.print(Text(printable(" · ".join([*parts, result.date])), style="dim"))
    told = say("its design was not registered before it ran")
    if result.design_hash is not None:
        told = say(
            "design {hash}, commit {commit}",
            hash=result.design_hash,
            commit=result.commit or say("unknown"),
        )
    console.print(Text(printable(in_language(told, zh)), style="dim"))
    for old in REVISIONS.get(claim.id, ()):
        told = say(
            "until {date}: {verdict}; {reason}",
            date=old.date,
            verdict=VERDICTS[old.verdict],
            reason=old.reason,
        )
        console.print(Text(in_language(told, zh), style="dim"))


def show_source(console: Console, claim: Claim, zh: bool) -> None:
    """Where a claim comes from, its experiment, and what of it can be set."""
    if claim.notes:
        notes = "; ".join(f"{letter} ({in_language(NOTES[letter], zh)})" for letter in claim.notes)
        told = say("from notes: {notes}", notes=notes)
        console.print(Text(f"\n{in_language(told, zh)}", style="dim"))
    told = say("experiment: {source}", source=claim.source)
    console.print(Text(in_language(told, zh), style="dim"))
    there = design.settings(claim)
    if there:
        known = ", ".join(f"{x}={design.written(y['quick'])}" for x, y in sorted(there.items()))
        told = say("settings (--set): {known}", known=known)
        console.print(Text(in_language(told, zh), style="dim"))


def table_of(shown: Shown, zh: bool) -> Table:
    """A chart, listing or map as a table of numbers."""
    table = Table(title=Text(printable(in_language(shown.title, zh))), title_justify="left")
    headings, rows = cells(shown, zh)
    for number, heading in enumerate(headings):
        table.add_column(Text(printable(heading)), justify="left" if number == 0 else "right")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


class LabProgress:
    """A bar on a terminal; a line per claim elsewhere. Called with each report of the runner."""

    def __init__(self, console: Console, bar: Progress) -> None:
        self.console, self.bar = console, bar
        self.shown = bar.add_task("", total=None)
        self.named = ""

    def __call__(self, told: RunProgress) -> None:
        """Show how far the run is."""
        self.named = told.claim.id
        if told.missing:
            self.console.print(Text(f"{told.claim.id:<20} not run: {told.missing}", style="yellow"))
            return
        steps = f" {told.what} ({told.done + 1}/{told.steps})" if told.steps else ""
        self.bar.update(
            self.shown,
            completed=told.number,
            total=told.of,
            description=f"{told.claim.id}{steps}",
        )

    def finished(self, result: Result, zh: bool) -> None:
        """Print a verdict above the bar."""
        line = Text(f"{result.id:<20} ")
        line.append_text(verdict_text(result, False, zh))
        line.append(f"  {result.seconds:g} s", style="dim")
        self.console.print(line)
        self.console.print(Text(f"    {printable(in_language(result.because, zh))}"))

    def beside_recorded(self, claim: Claim, result: Result, zh: bool) -> None:
        """Say of a result at sizes of the user's whether the verdict is the recorded one."""
        known = record.best(claim, [record.RECORDED])
        if known is None or known.stale(claim):
            return
        verdict = in_language(VERDICTS[known.verdict], zh)
        told = say("the verdict is the recorded one")
        if known.verdict != result.verdict:
            told = say("the verdict has changed: recorded is {verdict}", verdict=verdict)
        self.console.print(Text(f"    {in_language(told, zh)}", style="bold"))


@contextmanager
def progress(as_json: bool) -> Iterator[LabProgress]:
    """Show the progress of a run; beside JSON, on the error stream."""
    console = Console(stderr=as_json)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        yield LabProgress(console, bar)
