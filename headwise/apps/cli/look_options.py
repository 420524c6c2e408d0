"""The options of `headwise look`, with their help."""

from pathlib import Path
from typing import Annotated

import typer


def _hidden_default(help: str) -> typer.models.OptionInfo:
    found: typer.models.OptionInfo = typer.Option(help=help, show_default=False)
    return found


Model = Annotated[
    str,
    typer.Argument(
        help="gpt, translate, a run's folder, or a transformers model's folder or name."
    ),
]
Text = Annotated[str | None, _hidden_default("The text to read.")]
File = Annotated[
    typer.FileText | None,
    typer.Option(
        help="A UTF-8 file to read; - is standard input.", encoding="utf-8", show_default=False
    ),
]
Image = Annotated[
    Path | None,
    _hidden_default("A PNG or JPEG for a vision model; with --text for one that reads both."),
]
Heads = Annotated[list[str] | None, _hidden_default("A head by layer and number: 5.1, cross:0.3.")]
Spans = Annotated[
    list[str] | None, _hidden_default("Show the weight on a range of tokens: system=0:57.")
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1; the GPU if there is one.")]
Port = Annotated[int, typer.Option(help="0 takes any free port.", min=0, max=65535)]
NoOpen = Annotated[bool, typer.Option("--no-open", help="Open no browser.")]
Out = Annotated[Path | None, _hidden_default("Write the page as one file.html.")]
Limit = Annotated[str, typer.Option(help="The largest file that --out writes.")]
Picture = Annotated[Path | None, _hidden_default("Draw --head as an .svg, .pdf or .png.")]
InTerminal = Annotated[bool, typer.Option("--terminal", help="Draw in the terminal.")]
Every = Annotated[bool, typer.Option("--all", help="With --terminal: list every head.")]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print tokens, figures and, with --head, maps.")
]
