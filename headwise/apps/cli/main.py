"""The command `headwise`: its subcommands, and --version."""

from __future__ import annotations

import gc
import sys
from importlib import import_module
from typing import Annotated, Any, NamedTuple

try:
    import typer
    from typer.core import TyperGroup
except ModuleNotFoundError as missing:
    raise SystemExit(
        f"The command line needs {missing.name}: pip install 'headwise[cli]'"
    ) from missing

from headwise.version import __version__


class Command(NamedTuple):
    """A command: what it does, and the module whose `app` does it."""

    about: str
    module: str


COMMANDS = {
    "look": Command(
        "See what a model's attention heads do with a text, on a page in your browser.",
        "headwise.apps.look.command",
    ),
    "watch": Command(
        "Watch a run: the health of every head, layer by layer, while the model trains.",
        "headwise.apps.cli.watch",
    ),
    "cost": Command(
        "Count what a model takes before it runs: parameters, FLOPs, memory and time.",
        "headwise.apps.cli.cost",
    ),
    "sparse": Command(
        "Tell what a language model would lose if each row saw only a few keys.",
        "headwise.apps.look.sparsity.command",
    ),
    "train": Command(
        "Train a small model: translate, continue text, or classify images.",
        "headwise.apps.train.command",
    ),
    "lab": Command(
        "Test what textbooks say about attention: every claim is an experiment with a verdict.",
        "headwise.apps.lab.command",
    ),
    "doctor": Command(
        "Check this machine: versions, devices, engines, and known problems with their cures.",
        "headwise.apps.cli.doctor",
    ),
}
"""The commands by name; an application brings its own."""


class Commands(TyperGroup):
    """Knows the commands by name, and loads the one that runs: all together take seconds."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        return name, None if name is None else loaded(name), rest


def loaded(name: str) -> Any:
    """The command of this name, with its options."""
    collecting = gc.isenabled()
    gc.disable()  # of what is being loaded nothing can be freed: searching it takes a sixth longer
    try:
        made = typer.main.get_command(import_module(COMMANDS[name].module).app)
    finally:
        if collecting:
            gc.enable()
    for command in (made, *getattr(made, "commands", {}).values()):
        command.help = unwrapped(command.help or "")
    return made


def unwrapped(help: str) -> str:
    """A help text whose paragraphs are one line each, for a terminal of any width to wrap.

    >>> unwrapped("Counts are\\nexact.\\n\\nheadwise cost\\nheadwise lab")
    'Counts are exact.\\n\\nheadwise cost\\nheadwise lab'
    """
    parts = help.split("\n\n")
    joined = [x if "\nheadwise " in f"\n{x}" else " ".join(x.split("\n")) for x in parts]
    return "\n\n".join(joined)


app = typer.Typer(
    cls=Commands,
    name="headwise",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
)
for name, command in COMMANDS.items():
    app.command(name, help=command.about)(lambda: None)


def print_version(wanted: bool) -> None:
    """Print the version and exit, if --version was given."""
    if wanted:
        typer.echo(f"headwise {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Attention you can see inside, at full speed.

    See what the attention heads of a model do with a text; train a small
    model, and follow its heads while it learns; know what a model takes
    before it runs.

    [b]Examples[/b]

    headwise look                            the built-in GPT, in a browser
    headwise look --terminal                 the same, in this terminal
    headwise look translate --text 'Hello.'  which word each word looks at
    headwise train language --out runs/first --watch 10
    headwise watch runs/first                its heads, while it trains
    headwise look runs/first                 what it has learnt
    headwise lab                             what textbooks claim, tested
    headwise cost gpt --length 32k           its parameters, FLOPs and memory
    headwise sparse                          what few keys per row would lose

    Every command has --help with more examples; most have --json.
    """


def main() -> None:
    """Run the command line."""
    # A terminal that can't show a block character shows a question mark instead of an error.
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    app(prog_name="headwise")
