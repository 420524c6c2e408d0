"""`headwise look`: what can be asked at a terminal."""

from __future__ import annotations

import os
import re
import select
import stat
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer()

Model = Annotated[
    str,
    typer.Argument(
        help="gpt, translate, a run's folder, or a transformers model by its folder or name."
    ),
]
Said = Annotated[str | None, typer.Option(help="What the model reads.", show_default=False)]
File = Annotated[
    typer.FileText | None,
    typer.Option(
        help="A UTF-8 file to read instead; - is standard input.",
        encoding="utf-8",
        show_default=False,
    ),
]
ImageFile = Annotated[
    Path | None,
    typer.Option(help="What a vision model looks at: PNG or JPEG.", show_default=False),
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1; the GPU if there is one.")]
Heads = Annotated[
    list[str] | None,
    typer.Option(help="These heads, by layer and number: 5.1, cross:0.3.", show_default=False),
]


@app.command()
def look(
    model: Model = "gpt",
    text: Said = None,
    file: File = None,
    image: ImageFile = None,
    head: Heads = None,
    device: Device = None,
    port: Annotated[int, typer.Option(help="0 is any that is free.", min=0, max=65535)] = 0,
    no_open: Annotated[bool, typer.Option("--no-open", help="Open no browser.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Write the page as one file.html.", show_default=False)
    ] = None,
    limit: Annotated[str, typer.Option(help="The most --out writes.")] = "20MB",
    picture: Annotated[
        Path | None,
        typer.Option(help="Draw --head as an .svg, .pdf or .png.", show_default=False),
    ] = None,
    in_terminal: Annotated[bool, typer.Option("--terminal", help="Draw in the terminal.")] = False,
    every: Annotated[bool, typer.Option("--all", help="With --terminal: list every head.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Tokens, figures and, with --head, maps.")
    ] = False,
) -> None:
    """Look at attention: a page in your browser that shows what a model's heads do with a text.

    The built-in [b]gpt[/b] reads English; of the built-in [b]translate[/b] you see which English
    token each French one looks at. The page is served to this machine alone.

    [b]Examples[/b]

    headwise look

    headwise look translate --text 'The cat is black.'

    headwise look gpt --file speech.txt --out speech.html

    headwise look --text 'to be or not to be' --head 5.1 --picture head.svg

    headwise look --terminal --text 'to be or not to be' --head 5.1
    """
    from headwise.look import request as asking

    if (in_terminal or as_json) and (out is not None or picture is not None):
        raise typer.BadParameter("--terminal and --json print; --out and --picture write")
    what = given(text, file, image)
    asked = asking.Asked(model, what, tuple(head or ()), device)
    try:
        if in_terminal or as_json:
            asking.draw(asked, every, as_json)
        elif out is not None or picture is not None:
            asking.write(asked, out, number_of_bytes(limit), picture)
        else:
            asking.serve(asked, port, no_open)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        raise typer.BadParameter(str(error)) from error


def given(text: str | None, file: typer.FileText | None, image: Path | None) -> str | bytes | None:
    """What the model shall read; what is piped in, where nothing else is named."""
    if sum(x is not None for x in (text, file, image)) > 1:
        raise typer.BadParameter("give one of --text, --file and --image")
    try:
        if image is not None:
            return image.read_bytes()
        if file is not None:
            return file.read()
        if text is None and piped():
            return sys.stdin.buffer.read().decode() or None
    except UnicodeDecodeError as error:
        name = "standard input" if file is None else file.name
        raise typer.BadParameter(f"{name} is no text in UTF-8: {error}") from error
    except OSError as error:
        raise typer.BadParameter(f"the input can't be read: {error}") from error
    return text


def piped() -> bool:
    """Whether another program or a file feeds standard input, and has begun to."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError):  # closed, or replaced by what has no number
        return False
    if stat.S_ISFIFO(mode):
        # A pipe that nobody writes to is no text, and would be waited for without end.
        begun = sys.platform != "win32" and bool(select.select([sys.stdin], [], [], 1)[0])
        if not begun:
            said = "standard input said nothing within a second and is passed over; --file - waits"
            typer.echo(said, err=True)
        return begun
    return stat.S_ISREG(mode)


def number_of_bytes(written: str) -> int:
    """A size such as 20MB, 512kB or 1 GB.

    >>> number_of_bytes("1.5MB")
    1500000
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]?)b?\s*", written, re.IGNORECASE)
    if match is None or len(match[1]) > 15:
        raise typer.BadParameter(f"--limit {written[:40]!r} is no size; 20MB would be one")
    return int(float(match[1]) * 1000 ** " kmg".index(match[2].lower() or " "))
