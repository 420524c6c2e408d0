"""The command line: it reads what was asked and prints what the rest of the package found out."""

import dataclasses
import json
import sys
from typing import Annotated

try:
    import typer
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text
except ModuleNotFoundError as missing:
    raise SystemExit(
        f"The command line needs {missing.name}: pip install 'headwise[cli]'"
    ) from missing

import torch

import headwise
from headwise.cli import look as look_commands
from headwise.cli import train as training_commands
from headwise.cli import watch as watching_commands
from headwise.cli.doctor import gather
from headwise.engines.plan import engines

app = typer.Typer(
    name="headwise",
    help="Attention you can see inside, at full speed.",
    epilog="Start with: headwise look",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
)


app.add_typer(look_commands.app)
app.add_typer(training_commands.app)
app.add_typer(watching_commands.app)


def print_version(wanted: bool) -> None:
    """Print the version and leave, if that was asked for."""
    if wanted:
        typer.echo(f"headwise {headwise.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=print_version, is_eager=True, help="Print the version and leave."
        ),
    ] = False,
) -> None:
    """Attention you can see inside, at full speed."""


@app.command()
def doctor(
    as_json: Annotated[
        bool, typer.Option("--json", help="The same for a program to read.")
    ] = False,
    tune: Annotated[
        bool,
        typer.Option("--tune", help="Measure the GPU kernels' block shapes and keep the fastest."),
    ] = False,
) -> None:
    """Say what this machine can run: versions, devices, engines, and traps known to hurt here."""
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
    section(console, "known traps of this machine")
    for trap in facts.traps:
        item(console, trap.name, trap.what, "yellow", trap.cure)
    if not facts.traps:
        item(console, "none", "nothing known to go wrong here", "green")


def tune_kernels(as_json: bool) -> None:
    """Print what each kernel gained, and where the fastest shapes are kept."""
    reason = engines()["triton"] if torch.cuda.is_available() else "there is none here"
    if reason is not None:
        raise SystemExit(f"headwise doctor --tune measures an NVIDIA GPU: {reason}")
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
        said = f"{tile}: {x.usual / x.best:.2f} times as fast as the usual shape"
        item(console, f"{x.kernel} {x.width}", said, "")
        found.append(x)
    item(console, "kept in", str(tuning.keep(device, found)), "green")


def section(console: Console, title: str) -> None:
    """Print the title of a list."""
    console.print(Text(f"\n{title}", style="bold"))


def item(console: Console, name: str, said: str, style: str, more: str = "") -> None:
    """Print a name and what there is to say of it, in columns that line up across lists."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(width=14, style="cyan")
    grid.add_column(overflow="fold")
    # Text, not str: a reason such as "pip install 'headwise[triton]'" is no markup.
    grid.add_row(Text(f"  {name}"), Text(said, style=style))
    if more:
        grid.add_row("", Text(more, style="dim"))
    console.print(grid)


def print_json(value: object) -> None:
    """Print for programs: plain, and the same on a terminal and in a pipe."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def main() -> None:
    """Run the command line; what `headwise` starts."""
    # A terminal that can't show a block character shows a question mark instead of an error.
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    app(prog_name="headwise")
