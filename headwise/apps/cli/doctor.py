"""`headwise doctor`: what this machine can run."""

import dataclasses
import json
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headwise.apps.cli.machine import gather
from headwise.engines import engines

app = typer.Typer()


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    tune: Annotated[
        bool,
        typer.Option("--tune", help="Measure the GPU kernels' block shapes and keep the fastest."),
    ] = False,
) -> None:
    """Check this machine: versions, devices, engines, and known problems with their cures.

    [b]Examples[/b]

    headwise doctor

    headwise doctor --json > machine.json

    headwise doctor --tune
    """
    if tune:
        tune_kernels(as_json)
        return
    facts = gather()
    if as_json:
        print_json(dataclasses.asdict(facts))
        return
    console = Console()
    section(console, "versions")
    for package, version in facts.versions.items():
        item(console, package, version or "not installed", "" if version else "dim")
    section(console, "devices")
    for device in facts.devices:
        item(console, device.kind, device.name, "", device.detail)
    section(console, "engines")
    for engine, reason in facts.engines.items():
        item(console, engine, reason or "ready", "yellow" if reason else "green")
    section(console, "known problems of this machine")
    for trap in facts.traps:
        item(console, trap.name, trap.what, "yellow", trap.cure)
    if not facts.traps:
        item(console, "none", "no known problem", "green")


def tune_kernels(as_json: bool) -> None:
    """Measure the block shapes of each kernel, print the gains, and keep the fastest."""
    reason = engines()["triton"] if torch.cuda.is_available() else "there is none here"
    if reason is not None:
        raise SystemExit(f"headwise doctor --tune needs an NVIDIA GPU: {reason}")
    from headwise.engines.triton import tuning

    console, device = Console(), torch.device("cuda", torch.cuda.current_device())
    if as_json:
        tuned = list(tuning.tune(device))
        kept = str(tuning.keep(device, tuned))
        print_json({"kernels": [dataclasses.asdict(x) for x in tuned], "kept_in": kept})
        return
    section(console, f"block shapes on {torch.cuda.get_device_name(device)}")
    found = []
    for x in tuning.tune(device):
        tile = (
            f"{x.chosen.rows} x {x.chosen.keys}, {x.chosen.warps} warps, {x.chosen.stages} stages"
        )
        gain = f"{tile}: {x.usual / x.best:.2f} times as fast as the usual shape"
        item(console, f"{x.kernel} {x.width}", gain, "")
        found.append(x)
    item(console, "kept in", str(tuning.keep(device, found)), "green")


def section(console: Console, title: str) -> None:
    """Print the title of a list."""
    console.print(Text(f"\n{title}", style="bold"))


def item(console: Console, name: str, value: str, style: str, more: str = "") -> None:
    """Print a name and its value in columns that line up across lists."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(width=14, style="cyan")
    grid.add_column(overflow="fold")
    # Text, not str: "pip install 'headwise[triton]'" is not markup.
    grid.add_row(Text(f"  {name}"), Text(value, style=style))
    if more:
        grid.add_row("", Text(more, style="dim"))
    console.print(grid)


def print_json(value: object) -> None:
    """Print JSON, the same on a terminal and in a pipe."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))
