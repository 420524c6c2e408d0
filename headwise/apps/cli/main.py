"""The command `headwise`: its subcommands, and --version."""

import sys
from typing import Annotated

try:
    import typer
except ModuleNotFoundError as missing:
    raise SystemExit(
        f"The command line needs {missing.name}: pip install 'headwise[cli]'"
    ) from missing

from headwise import __version__
from headwise.apps.cli import cost, doctor, lab, look, train, watch

app = typer.Typer(
    name="headwise",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
)
for command in (look, watch, cost, train, lab, doctor):
    app.add_typer(command.app)


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

    Every command has --help with more examples; most have --json.
    """


def main() -> None:
    """Run the command line."""
    # A terminal that can't show a block character shows a question mark instead of an error.
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    app(prog_name="headwise")
