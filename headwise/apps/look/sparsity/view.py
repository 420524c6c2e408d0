"""The report of `headwise sparse` in a terminal: tables, bars and a grid of heads."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from headwise.apps.look.sparsity.report import METHODS, HeadNeeds, SparseReport
from headwise.messages import printable

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


def show(console: Console, report: SparseReport) -> None:
    """Print the whole report."""
    console.print(Text(printable(report.model), style="bold"), end=" ")
    console.print(
        f"{report.tokens} tokens; loss {report.loss:.4f} nats per token over the last "
        f"{report.scored}, all keys kept\n"
    )
    console.print(losses(report))
    console.print(chart(report))
    console.print(heads(report))
    console.print(layers(report))
    console.print(suggestion(report), soft_wrap=True)
    console.print(
        "\nThis simulates sparse attention: it says what would be lost, and is not faster. "
        "Small models and short texts are kinder to few keys than large models and long ones.",
        style="dim",
    )


def losses(report: SparseReport) -> Grid:
    """The increase of the loss by method and budget."""
    budgets = sorted({point.budget for points in report.methods.values() for point in points})
    grid = Grid(title="Loss above the whole model's, by keys kept per row", title_justify="left")
    grid.add_column("method")
    for budget in budgets:
        grid.add_column(str(budget), justify="right")
    grid.add_column("keeps", style="dim")
    for method, points in report.methods.items():
        known = {point.budget: point.increase for point in points}
        cells = [f"{known[x]:+.3f}" if x in known else "–" for x in budgets]
        grid.add_row(method, *cells, METHODS[method])
    return grid


def chart(report: SparseReport) -> Text:
    """Bars of the loss at each budget, method by method."""
    most = max(point.increase for points in report.methods.values() for point in points)
    text = Text("\nThe same as bars\n", style="bold")
    for method, points in report.methods.items():
        text.append(f"{method}\n", style="cyan")
        for point in points:
            length = round(BAR * max(0.0, point.increase) / most) if most > 0 else 0
            text.append(f"  {point.budget:>5} ", style="dim")
            text.append(f"{'█' * length}▏{point.increase:+.3f}\n")
    return text


def heads(report: SparseReport) -> Text:
    """A grid of the keys that each head needs, and the heads that need most."""
    rows: dict[int, list[HeadNeeds]] = {}
    for head in report.heads:
        rows.setdefault(head.layer, []).append(head)
    most = max(head.needed_mean for head in report.heads)
    text = Text(
        f"Keys that a row needs for {report.share:.0%} of its weight (mean)\n", style="bold"
    )
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
    text.append(f"most: {named}\n")
    return text


def layers(report: SparseReport) -> Grid:
    """What each layer costs when it alone is sparse, and the budget that is suggested for it."""
    budgets = [point.budget for point in report.layers[0].points]
    grid = Grid(title="Loss when one layer alone keeps its top k", title_justify="left")
    grid.add_column("layer")
    for budget in budgets:
        grid.add_column(str(budget), justify="right")
    grid.add_column("suggested", justify="right")
    for layer in report.layers:
        cells = [f"{point.increase:+.4f}" for point in layer.points]
        keys = "all" if layer.suggested is None else str(layer.suggested)
        grid.add_row(f"{layer.layer} {printable(layer.name)}", *cells, keys)
    return grid


def suggestion(report: SparseReport) -> Text:
    """The suggested budgets in one line of Python."""
    chosen = {x.layer: x.suggested for x in report.layers if x.suggested is not None}
    found = report.suggestion
    text = Text(
        f"\nFor at most {report.allowed:+.3f}: a mean of {found.budget} of {report.tokens} keys, "
        f"measured {found.increase:+.4f}\n"
    )
    if chosen:
        policies = ", ".join(f"{layer}: hw.sparse.TopK({k})" for layer, k in chosen.items())
        text.append(f"with hw.sparsify(model, {{{policies}}}): ...", style="cyan")
    return text
