"""The edges behind a prediction in a terminal: `headwise look --why "token"`."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from headwise.apps.look.reasons import ReasonEdge, Reasons
from headwise.apps.look.scene import Input
from headwise.messages import printable

LISTED = 20
"""The number of edges that are listed."""

BAR = 16
"""Characters of the longest bar."""


def explained(read: Input, token: str) -> Reasons:
    """The edges behind the prediction at a token: its number, or its last occurrence in the text.

    ValueError if there is no such token, or the input has no predictions.
    """
    predictor, group = read.predictor, read.main
    if predictor is None or group.id not in predictor.groups:
        raise ValueError("--why needs a model that predicts tokens or classes")
    found = [at for at, piece in enumerate(group.rows) if token.strip() == piece.strip()]
    if not found and token.isdecimal() and int(token) < len(group.rows):
        found = [int(token)]
    if not found:
        there = ", ".join(repr(piece.strip()) for piece in group.rows[-8:])
        raise ValueError(f"--why {token!r}: there is no such token; the last ones are {there}")
    return Reasons.of(read, predictor, found[-1])


def show(console: Console, told: Reasons) -> None:
    """Print the prediction, and a line for each edge that matters most."""
    read = told.read
    at = printable(read.main.rows[told.row])
    where = "for the image" if _of_class(read) else f"at token {told.row}, {at!r}"
    console.print(Text(f"The prediction {where}: {printable(told.answer)!r}", style="bold"))
    console.print(
        Text(
            f"probability {told.probability:.1%}, a logit {told.lead:.3g} above the second answer, "
            f"{printable(told.second)!r}\n",
            style="dim",
        )
    )
    edges = told.edges(LISTED)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    for title in ("head", "query", "key", "weight", "support", ""):
        side = "right" if title in ("weight", "support") else "left"
        table.add_column(title, justify=side, no_wrap=True)  # type: ignore[arg-type]
    for edge in edges:
        table.add_row(*_cells(read, edge), _bar(edge, edges[0]))
    console.print(table)
    console.print(
        Text(
            "\nsupport: how much of that lead goes without the edge, to first order; < 0 speaks "
            "against the prediction",
            style="dim",
        )
    )


def _cells(read: Input, edge: ReasonEdge) -> list[str]:
    group = read.group(edge.group)
    query, key = (printable(axis[at].strip()) for axis, at in (
        (group.rows, edge.query), (group.columns, edge.key)
    ))  # fmt: skip
    name = f"{edge.layer}.{edge.head}"
    head = name if len(read.groups) == 1 else f"{edge.group}:{name}"
    return [head, f"{edge.query} {query}", f"{edge.key} {key}", f"{edge.weight:.3f}",
            f"{edge.support:+.3f}"]  # fmt: skip


def _bar(edge: ReasonEdge, largest: ReasonEdge) -> Text:
    size = round(BAR * abs(edge.support) / (abs(largest.support) or 1.0))
    return Text("█" * size, style="blue" if edge.support > 0 else "red")


def _of_class(read: Input) -> bool:
    return read.predictor is not None and read.predictor.predicts == "class"
