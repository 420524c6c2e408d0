"""The output of `headwise train`: a progress bar, plain lines, or lines of JSON."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from headwise.apps.train.torchrun import launched
from headwise.messages import printable

Report = Callable[[dict[str, Any]], None]


@contextmanager
def explained() -> Iterator[None]:
    """Print an expected error as one sentence instead of a traceback."""
    try:
        yield
    except ModuleNotFoundError as error:
        known = "pip install" in str(error)  # the message already names the extra
        message = str(error) if known else f"{error.name} is missing: pip install 'headwise[train]'"
        raise typer.BadParameter(message) from error
    except typer.Exit:  # a RuntimeError too: the command has ended as it meant to
        raise
    except (ValueError, OSError, RuntimeError) as error:
        if type(error) is RuntimeError:  # torch's own: the traceback says more
            raise
        rank = f" (rank {os.environ['RANK']})" if launched() else ""
        said = "\n".join(map(printable, str(error).splitlines()))
        typer.echo(f"headwise train{rank}: {said}", err=True)
        raise typer.Exit(2) from error


@contextmanager
def stopping() -> Iterator[Callable[[], bool]]:
    """Catch the first Ctrl-C or SIGTERM, so that the current step is finished and saved."""
    requested = False

    def remember(*_: object) -> None:
        nonlocal requested
        if requested:
            raise KeyboardInterrupt
        requested = True

    signals = [signal.SIGINT, signal.SIGTERM]
    before = [signal.signal(each, remember) for each in signals]
    try:
        yield lambda: requested
    finally:
        for each, handler in zip(signals, before, strict=True):
            signal.signal(each, handler)


@contextmanager
def progress(as_json: bool, task: str, out: Path) -> Iterator[Report]:
    """Show measurements: a bar on a terminal, a line each in a file, JSON if wanted."""
    if as_json:
        yield lambda measured: typer.echo(json.dumps(measured, ensure_ascii=False))
        return
    console = Console()
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        yield TrainView(task, out, console, bar)


def unseen(measured: dict[str, Any]) -> None:
    """Show nothing: another process shows the measurements."""


class TrainView:
    """Measurements for a reader; called with one measurement at a time."""

    def __init__(self, task: str, out: Path, console: Console, bar: Progress) -> None:
        self.task, self.out, self.console, self.bar = task, out, console, bar
        self.shown = bar.add_task("reading the data", total=None)
        self.began: tuple[float, int] | None = None  # the time and the step it started from
        self.unit = ""

    def __call__(self, measured: dict[str, Any]) -> None:
        """Show a measurement of the training loop."""
        if "parameters" in measured:
            self.header(measured)
        elif "loss" in measured:
            self.line(measured)
        else:
            self.figures(measured)

    def header(self, started: dict[str, Any]) -> None:
        """The model, its data and its device, before the first step."""
        self.began, self.unit = (time.monotonic(), started["step"]), started["unit"]
        size, device = started["parameters"], started["device"]
        data = started["settings"]["setup"]["data"]
        resumed = f", resumed at step {started['step']:,}" if started["step"] else ""
        many = f" and {started['ranks'] - 1} more" if started["ranks"] > 1 else ""
        where = f"on {device}{many}, in {self.out}{resumed}"
        self.say(f"{self.task}: {size:,} parameters, {data}, {where}")
        self.bar.update(self.shown, completed=started["step"], total=started["steps"])

    def line(self, measured: dict[str, Any]) -> None:
        """Loss, speed and the time left."""
        step, steps = measured["step"], measured["steps"]
        speed = f"{measured['per_second']:,.0f} {self.unit}/s"
        used = f" · MFU {100 * measured['mfu']:.3g} %" if "mfu" in measured else ""
        text = f"loss {measured['loss']:.3f} · {speed}{used}{self.left(step, steps)}"
        self.bar.update(self.shown, completed=step, total=steps, description=text)
        if not self.console.is_terminal:
            self.say(f"{f'{step}/{steps}':>12}  {text}")

    def left(self, step: int, steps: int) -> str:
        """The time left, at the speed so far.

        >>> view = TrainView("language", Path("run"), Console(), Progress(disable=True))
        >>> view.began = (time.monotonic() - 60, 0)
        >>> view.left(10, 30)
        ' · 0:02:00 left'
        """
        if self.began is None or step <= self.began[1] or step == steps:
            return ""
        seconds = (time.monotonic() - self.began[0]) * (steps - step) / (step - self.began[1])
        return f" · {timedelta(seconds=round(min(seconds, 1e9)))} left"

    def figures(self, measured: dict[str, Any]) -> None:
        """The figures of an evaluation, and its samples."""
        figures = measured.get("test", measured)
        rest = {k: v for k, v in figures.items() if k not in ("step", "steps", "samples")}
        title = "test" if "test" in measured else f"step {measured['step']}"
        self.say(f"{title:>12}  {on_a_line(rest)}")
        for source, translation in figures.get("samples", []):
            self.say(f"{'':>12}  {source} → {translation}", cut=True)

    def say(self, text: str, cut: bool = False) -> None:
        """Print a line above the bar; `cut` shortens it to the width of the terminal."""
        cut = cut and self.console.is_terminal
        self.console.print(
            Text(printable(text)),
            no_wrap=cut,
            overflow="ellipsis" if cut else None,
            soft_wrap=not cut,
        )


def on_a_line(figures: dict[str, Any]) -> str:
    """Figures on one line.

    >>> on_a_line({"valid_loss": 3.14159, "sentences": 12})
    'valid_loss 3.142 · sentences 12'
    """
    return " · ".join(
        f"{name} {value:.3f}" if isinstance(value, float) else f"{name} {value}"
        for name, value in figures.items()
    )


def show_result(figures: dict[str, Any], as_json: bool) -> None:
    """Print figures, one per line or as JSON."""
    if as_json:
        typer.echo(json.dumps(figures, indent=2, ensure_ascii=False))
        return
    for name, value in figures.items():
        typer.echo(
            f"{name:>16}  {value:.4f}" if isinstance(value, float) else f"{name:>16}  {value}"
        )
