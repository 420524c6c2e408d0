"""`headwise sparse`: the options of the command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from headwise import devices
from headwise.apps.interface.terminal import (
    Zh,
    bar,
    explained,
    in_language,
    json_text,
    shown_in,
)
from headwise.apps.look.places import check_place
from headwise.apps.look.readers import opening
from headwise.apps.look.readers.reader import SAMPLE_TEXT
from headwise.apps.look.sparsity import page, view
from headwise.apps.look.sparsity.survey import Survey

app = typer.Typer()

BUDGETS = (8, 16, 32, 64, 128)


@app.command()
def sparse(
    model: Annotated[
        str, typer.Argument(help="gpt, a run's folder, or a transformers model's folder or name.")
    ] = "gpt",
    text: Annotated[
        str | None,
        typer.Option(
            help="The text to read, or the path of a UTF-8 file; - is standard input.",
            show_default=False,
        ),
    ] = None,
    budget: Annotated[
        list[int] | None,
        typer.Option(help="Keys kept per row; may be repeated. [default: 8 16 32 64 128]", min=1),
    ] = None,
    loss: Annotated[
        float, typer.Option(help="Nats per token that the suggested budgets may cost.", min=0)
    ] = 0.05,
    share: Annotated[
        float, typer.Option(help="The share of a row's weight whose keys are counted.")
    ] = 0.95,
    block: Annotated[int, typer.Option(help="Keys per block.", min=1)] = 16,
    tokens: Annotated[int, typer.Option(help="Read at most so many tokens.", min=32)] = 512,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:1; the GPU if there is one.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the report as a page, one file.html.", show_default=False),
    ] = None,
    zh: Zh = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Tell what a language model would lose if each row saw only a few keys.

    Its loss on a text is measured under sparse attention: the k largest logits of each row, blocks
    of keys, a window with sinks, a cache with evicted keys. Then it counts the keys that each head
    needs, makes one layer after another sparse, and suggests a budget for each layer. The model
    computes exactly what a sparse kernel would; nothing gets faster.

    [b]Examples[/b]

    headwise sparse                                   the built-in GPT, in under a minute

    headwise sparse gpt --text book.txt --loss 0.02   budgets for 0.02 nats per token

    headwise sparse Qwen/Qwen3-0.6B --budget 64 --budget 256 --tokens 2048

    headwise sparse --out report.html                 a page with its charts

    headwise sparse --json > report.json              headwise look report.json opens that page
    """
    with explained(zh):
        if out is not None:
            check_place(out, page=True)
        devices.chosen(device)
        opening.find(model)
        given = SAMPLE_TEXT if text is None else _read(text)
        console = Console()
        with bar() as progress:
            shown = shown_in(progress)

            def report(stage: str, done: float | None) -> None:
                shown(in_language(stage, zh), done)

            reader = opening.opened(model, device)
            survey = Survey(reader, given, tokens, report)
            found = survey.measure(list(budget or BUDGETS), block, share, loss)
        if out is not None:
            typer.echo(f"{out}: {page.write(found, out) / 1e6:.1f} MB", err=as_json)
    if as_json:
        typer.echo(json_text(found.as_dictionary()))
    elif out is None:
        view.show(console, found, zh)


def _read(text: str) -> str:
    """The text itself, or what the file of this name holds."""
    if text == "-":
        return sys.stdin.read()
    short = len(text) < 1000 and "\n" not in text
    return Path(text).read_text(encoding="utf-8") if short and Path(text).is_file() else text
