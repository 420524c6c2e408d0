"""The report of `headwise sparse` in a terminal: tables, bars and a grid of heads."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from headwise.apps.interface.terminal import in_language
from headwise.apps.look.sparse_report import METHODS, NAMES, HeadNeeds, SparseReport
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
