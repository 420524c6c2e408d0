"""`headwise sparse`: its options, and its report in a terminal: tables, bars, a grid of heads."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

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
from headwise.apps.look.sparse_report import METHODS, NAMES, HeadNeeds, SparseReport
from headwise.apps.look.sparsity import page
from headwise.apps.look.sparsity.survey import Survey
from headwise.messages import Sentence, printable, say

BAR = 30  # characters of the longest bar
WORST = 5  # heads that are listed by name
SHADES = (
    ("· ", "#5a6aa8"),
    ("░░", "#3f7f96"),
    ("▒▒", "#21918c"),
    ("▓▓", "#5ec962"),
    ("██", "#f9e721"),
)
"""From few keys to many."""


def show(console: Console, report: SparseReport, zh: bool = False) -> None:
    """Print the whole report, in English or in 中文."""
    console.print(Text(printable(report.model), style="bold"), end=" ")
    whole = say(
        "{tokens} tokens; loss {loss:.4f} nats per token over the last {scored}, all keys kept",
        tokens=report.tokens, loss=report.loss, scored=report.scored,
    )  # fmt: skip
    console.print(in_language(whole, zh) + "\n")
    console.print(losses(report, zh))
    console.print(chart(report, zh))
    console.print(heads(report, zh))
    console.print(layers(report, zh))
    console.print(suggestion(report, zh), soft_wrap=True)
    limits = say(
        "This simulates sparse attention: it says what would be lost, and is not faster. "
        "Small models and short texts are kinder to few keys than large models and long ones."
    )
    console.print("\n" + in_language(limits, zh), style="dim")


def losses(report: SparseReport, zh: bool) -> Grid:
    """The increase of the loss by method and budget."""
    budgets = sorted({point.budget for points in report.methods.values() for point in points})
    title = say("Loss above the whole model's, by keys kept per row")
    grid = _grid(title, say("method"), budgets, say("keeps"), zh)
    for method, points in report.methods.items():
        known = {point.budget: point.increase for point in points}
        cells = [f"{known[x]:+.3f}" if x in known else "–" for x in budgets]
        about = in_language(METHODS[method], zh)
        grid.add_row(in_language(NAMES[method], zh), *cells, Text(about, style="dim"))
    return grid


def _grid(title: Sentence, first: Sentence, budgets: list[int], last: Sentence, zh: bool) -> Grid:
    grid = Grid(title=in_language(title, zh), title_justify="left")
    grid.add_column(in_language(first, zh))
    for budget in budgets:
        grid.add_column(str(budget), justify="right")
    grid.add_column(in_language(last, zh))
    return grid


def chart(report: SparseReport, zh: bool) -> Text:
    """Bars of the loss at each budget, method by method."""
    most = max(point.increase for points in report.methods.values() for point in points)
    text = Text(f"\n{in_language(say('The same as bars'), zh)}\n", style="bold")
    for method, points in report.methods.items():
        text.append(f"{in_language(NAMES[method], zh)}\n", style="cyan")
        for point in points:
            length = round(BAR * max(0.0, point.increase) / most) if most > 0 else 0
            text.append(f"  {point.budget:>5} ", style="dim")
            text.append(f"{'█' * length}▏{point.increase:+.3f}\n")
    return text


def heads(report: SparseReport, zh: bool) -> Text:
    """A grid of the keys that each head needs, and the heads that need most."""
    rows: dict[int, list[HeadNeeds]] = {}
    for head in report.heads:
        rows.setdefault(head.layer, []).append(head)
    most = max(head.needed_mean for head in report.heads)
    title = say("Keys that a row needs for {share:.0%} of its weight (mean)", share=report.share)
    text = Text(f"{in_language(title, zh)}\n", style="bold")
    for layer, line in rows.items():
        text.append(f"{layer:>4}  ", style="dim")
        for head in line:
            place = min(len(SHADES) - 1, int(len(SHADES) * head.needed_mean / max(most, 1e-9)))
            shade, colour = SHADES[place]
            text.append(shade, style=colour)
        needed = ", ".join(f"{head.needed_mean:.0f}" for head in line[:16])
        text.append(f"  {needed}{', …' if len(line) > 16 else ''}\n")
    worst = sorted(report.heads, key=lambda head: -head.needed_mean)[:WORST]
    named = ", ".join(f"{head.layer}.{head.head} ({head.needed_mean:.0f})" for head in worst)
    text.append(f"{in_language(say('most: {heads}', heads=named), zh)}\n")
    return text


def layers(report: SparseReport, zh: bool) -> Grid:
    """What each layer costs when it alone is sparse, and the budget that is suggested for it."""
    budgets = [point.budget for point in report.layers[0].points]
    title = say("Loss when one layer alone keeps its top k")
    grid = _grid(title, say("layer"), budgets, say("suggested"), zh)
    for layer in report.layers:
        cells = [f"{point.increase:+.4f}" for point in layer.points]
        keys = in_language(say("all"), zh) if layer.suggested is None else str(layer.suggested)
        grid.add_row(f"{layer.layer} {printable(layer.name)}", *cells, keys)
    return grid


def suggestion(report: SparseReport, zh: bool) -> Text:
    """The suggested budgets in one line of Python."""
    found = report.suggestion
    said = say(
        "For at most {allowed:+.3f}: a mean of {budget} of {tokens} keys, measured {increase:+.4f}",
        allowed=report.allowed, budget=found.budget, tokens=report.tokens, increase=found.increase,
    )  # fmt: skip
    text = Text(f"\n{in_language(said, zh)}\n")
    if report.policies:
        text.append(f"with hw.sparsify(model, {report.policies}): ...", style="cyan")
    return text


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
        float,
        typer.Option(help="The share of a row's weight whose keys are counted.", min=0.01, max=1),
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
        show(console, found, zh)


def _read(text: str) -> str:
    """The text itself, or what the file of this name holds."""
    if text == "-":
        return sys.stdin.read()
    file = Path(text)
    if len(text) < 1000 and "\n" not in text:
        if file.is_file():
            return file.read_text(encoding="utf-8")
        if file.suffix and len(text.split()) == 1:
            raise ValueError(say("there is no file {file}", file=text))
    return text
