"""`headwise watch`: the options of the command."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live

from headwise.apps.cli import watch_view
from headwise.apps.interface.terminal import json_text
from headwise.messages import printable
from headwise.watching import Story, WatchedRun, open_run

app = typer.Typer()


@app.command()
def watch(
    run: Annotated[Path, typer.Argument(help="The folder of a watched run.", show_default=False)],
    statistic: Annotated[
        str,
        typer.Option(
            help="Colour heads by it: entropy, max_logit, sink_mass_max, span_<name>, ..."
        ),
    ] = "entropy",
    once: Annotated[bool, typer.Option("--once", help="Show the run now, and exit.")] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print the last step, trends and alarms as JSON."),
    ] = False,
    story: Annotated[
        bool,
        typer.Option("--story", help="Tell the run: its loss, each alarm, and what to do."),
    ] = False,
    beside: Annotated[
        Path | None,
        typer.Option(help="With --story: another run to compare with.", show_default=False),
    ] = None,
    seconds: Annotated[
        float, typer.Option(help="Seconds between updates.", min=0.1, max=3600)
    ] = 1.0,
) -> None:
    """Watch a run: the health of every head, layer by layer, while the model trains.

    [b]Examples[/b]

    headwise train language --preset tiny --out runs/first --watch 10

    headwise watch runs/first

    headwise watch runs/first --statistic max_logit --once

    headwise watch runs/first --story
    """
    if beside is not None and not story:
        raise typer.BadParameter("--beside belongs to --story")
    console = Console()
    try:
        opened = open_run(run)
        if story and not as_json:
            for each in (opened, *([] if beside is None else [open_run(beside)])):
                console.print(watch_view.story(each, console.width))
            return
        if as_json:
            found = watch_view.as_dictionary(opened, statistic)
            if story:
                found["story"] = Story.of(opened).to_dict()
            typer.echo(json_text(_plain(found)))
        elif once or not console.is_terminal:
            watch_view.show(console, opened, statistic)
        else:
            follow(console, opened, statistic, seconds)
    except (ModuleNotFoundError, OSError, ValueError) as error:
        raise typer.BadParameter(printable(str(error))) from error


def follow(console: Console, run: WatchedRun, statistic: str, seconds: float) -> None:
    """Show a run until it ends, or until Ctrl-C."""
    with Live(console=console, auto_refresh=False, vertical_overflow="visible") as live:
        try:
            while True:
                run.refresh()
                live.update(watch_view.view(run, statistic, console.width), refresh=True)
                if run.ended:
                    return
                time.sleep(seconds)
        except KeyboardInterrupt:
            return


def _plain(value: Any) -> Any:
    """The value for JSON: NaN and infinities become null."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
