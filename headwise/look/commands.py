"""`headwise look`: what can be asked at a terminal."""

from __future__ import annotations

import json
import os
import sys
import webbrowser
from typing import Annotated

import typer
from rich.console import Console

from headwise.look import terminal
from headwise.look.opening import opened
from headwise.look.reading import silent

app = typer.Typer()

Text = Annotated[str | None, typer.Option(help="What the model reads.", show_default=False)]
File = Annotated[
    typer.FileText | None,
    typer.Option(help="A file to read instead; - is standard input.", show_default=False),
]


@app.command()
def look(
    model: Annotated[
        str, typer.Argument(help="gpt, translate, or the folder of a run of headwise train.")
    ] = "gpt",
    text: Text = None,
    file: File = None,
    port: Annotated[int, typer.Option(help="0 is any that is free.", min=0, max=65535)] = 0,
    no_open: Annotated[bool, typer.Option("--no-open", help="Open no browser.")] = False,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1; the GPU if there is one.")
    ] = None,
    in_terminal: Annotated[
        bool, typer.Option("--terminal", help="Draw here, and start no page.")
    ] = False,
    head: Annotated[
        str | None,
        typer.Option(help="Draw this head only, by layer and number: 5.1.", show_default=False),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="List every head, not only those first in something.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Tokens, figures and, with --head, its map.")
    ] = False,
) -> None:
    """Look at attention: a text, its tokens, what the heads of a model do with it, and maps.

    The built-in [b]gpt[/b] reads English; of the built-in translator you see which English token
    each French one looks at.

    [b]Examples[/b]

    headwise look

    headwise look --terminal --text 'to be or not to be' --head 5.1

    headwise look translate --text 'The cat is black.'

    headwise look gpt --file speech.txt
    """
    if text is not None and file is not None:
        raise typer.BadParameter("give --text or --file, not both")
    said = file.read() if file is not None else text
    if in_terminal or as_json:
        draw(model, said, device, head, every, as_json)
    else:
        show_page(model, said, device, port, no_open)


def draw(
    model: str, text: str | None, device: str | None, head: str | None, every: bool, as_json: bool
) -> None:
    """Print what the heads do, for someone to see or for a program to read."""
    try:
        read = opened(model, device).read(terminal.SENTENCE if text is None else text, silent)
        chosen = () if head is None else (read.main.head(head),)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if as_json:
        shown = terminal.as_dictionary(read, chosen)
        typer.echo(json.dumps(shown, indent=2, ensure_ascii=False))
    else:
        terminal.show(Console(), read, chosen, every)


def show_page(model: str, text: str | None, device: str | None, port: int, no_open: bool) -> None:
    """Serve the page until Ctrl-C."""
    from headwise.look.server import application, listening, serve
    from headwise.look.session import Session

    session = Session(sample=text is None)
    try:
        bound = listening(port)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    address = f"http://127.0.0.1:{bound.getsockname()[1]}/"
    session.start(lambda: opened(model, device), text)
    typer.echo(f"{address}   (Ctrl-C stops it)")
    if not no_open and displayed():
        webbrowser.open(address)
    serve(application(session), bound)


def displayed() -> bool:
    """Whether a browser could show something here."""
    return sys.platform != "linux" or bool(
        os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    )
