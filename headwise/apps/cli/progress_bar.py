"""The progress bar of commands that take a while."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from headwise.apps.look.readers.reader import Report


def bar(console: Console | None = None) -> Progress:
    """A progress bar that vanishes at the end."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console or Console(stderr=True), transient=True)


def shown_in(progress: Progress) -> Report:
    """A report that moves a progress bar."""
    task = progress.add_task("loading the model", total=None)

    def report(stage: str, done: float | None) -> None:
        total = None if done is None else 1.0
        progress.update(task, description=stage, completed=done or 0, total=total)

    return report
