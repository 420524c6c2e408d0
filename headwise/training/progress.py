"""What `headwise train` shows: a bar and figures for a reader, lines of JSON for a program."""

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)


@contextmanager
def told() -> Iterator[None]:
    """What goes wrong for a known reason is told in a sentence, not in a traceback."""
    try:
        yield
    except ModuleNotFoundError as error:
        known = "pip install" in str(error)  # who asked for it knows which extra brings it
        said = str(error) if known else f"{error.name} is missing: pip install 'headwise[train]'"
        raise typer.BadParameter(said) from error
    except (ValueError, OSError, RuntimeError) as error:
        if type(error) is RuntimeError:  # torch's: a traceback says more
            raise
        typer.echo(f"headwise train: {error}", err=True)
        raise typer.Exit(2) from error


@contextmanager
def stopping() -> Iterator[Callable[[], bool]]:
    """Whether an interrupt or a request to end came: the step is finished and saved first."""
    asked = False

    def remember(*_: object) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    signals = [signal.SIGINT, signal.SIGTERM]
    before = [signal.signal(each, remember) for each in signals]
    try:
        yield lambda: asked
    finally:
        for each, handler in zip(signals, before, strict=True):
            signal.signal(each, handler)


@contextmanager
def shown(as_json: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Measurements as lines of JSON, or as a bar with the latest figures beside it."""
    if as_json:
        yield lambda measured: typer.echo(json.dumps(measured, ensure_ascii=False))
        return
    console = Console()
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        bar: TaskID = progress.add_task("reading the data", total=None)

        def report(measured: dict[str, Any]) -> None:
            step, steps = measured["step"], measured["steps"]
            if "loss" in measured:
                text = f"loss {measured['loss']:.3f} · {measured['per_second']:,.0f}/s"
                progress.update(bar, completed=step, total=steps, description=text)
                return
            figures = measured.get("test", measured)
            rest = {k: v for k, v in figures.items() if k not in ("step", "steps", "samples")}
            title = "test" if "test" in measured else f"step {step}"
            console.print(f"{title:>12}  {told_briefly(rest)}", highlight=False, markup=False)
            for source, said in figures.get("samples", []):
                console.print(f"{'':>12}  {source} → {said}", highlight=False, markup=False)

        yield report


def told_briefly(figures: dict[str, Any]) -> str:
    """Figures on a line.

    >>> told_briefly({"valid_loss": 3.14159, "sentences": 12})
    'valid_loss 3.142 · sentences 12'
    """
    return " · ".join(
        f"{name} {value:.3f}" if isinstance(value, float) else f"{name} {value}"
        for name, value in figures.items()
    )


def show_result(figures: dict[str, Any], as_json: bool) -> None:
    """Print figures for a program or for a reader."""
    if as_json:
        typer.echo(json.dumps(figures, indent=2, ensure_ascii=False))
        return
    for name, value in figures.items():
        typer.echo(
            f"{name:>16}  {value:.4f}" if isinstance(value, float) else f"{name:>16}  {value}"
        )
