"""Attention in a terminal: tokens, a table of heads and maps drawn in characters.

At the end, what `headwise look --why "token"` prints: the edges behind a prediction.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.console import Group as Stack
from rich.table import Table
from rich.text import Text
from torch import Tensor

from headwise.apps.look.fit import remarks
from headwise.apps.look.reasons import ReasonEdge, Reasons
from headwise.apps.look.scene import Group, Head, Input
from headwise.extend import SPAN_PREFIX
from headwise.messages import printable

SENTENCE = "Anarchism is a political philosophy. Many anarchists say that anarchism is a"
"""The text to read if none is given: some of its words return."""

SHADES = ((0.75, "██"), (0.45, "▓▓"), (0.2, "▒▒"), (0.05, "░░"), (0.0, "· "))
"""The least weight of each shade; two characters are about as wide as one is high."""

COLOURS = {"██": "#f9e721", "▓▓": "#5ec962", "▒▒": "#21918c", "░░": "#5a6aa8", "· ": "dim"}
"""Brighter is more; without colours the shades say the same."""

LABEL = 12
"""Columns kept for a row's number and its token."""

MOST_ROWS = 32
"""A longer text's map is pooled down to this many rows: about a screen."""

MOST_TOKENS = 40
"""The most tokens to list; the rest is counted."""

LARGEST_MAP = 256
"""JSON has every weight up to this many tokens, and a pooled map beyond."""

DEFINED = (
    "keys is how many tokens a row spreads over, e^entropy; top its largest weight; "
    "first, self and previous its weight on that token; {distance}. "
    "All are means over the rows, but for max logit, the largest of them all."
)

DEFINED_ACROSS = (
    "keys is how many tokens a row spreads over, e^entropy; top its largest weight; "
    "first its weight on the first token. "
    "All are means over the rows, but for max logit, the largest of them all."
)

COLUMNS = (
    # title, figure, format
    ("keys", "effective_keys_mean", "{:.2f}"),
    ("entropy", "entropy_mean", "{:.2f}"),
    ("top", "top_prob_mean", "{:.0%}"),
    ("first", "sink_mass_mean", "{:.0%}"),
    ("self", "self_mass_mean", "{:.0%}"),
    ("previous", "previous_mass_mean", "{:.0%}"),
    ("distance", "distance_mean", "{:.1f}"),
    ("patches", "patch_distance_mean", "{:.1f}"),
    ("max logit", "max_logit_max", "{:.1f}"),
)
"""The columns of the table of heads."""

WITHIN = ("self", "previous", "distance")
"""Columns without a meaning where one text looks at another."""

DRAWN = 3
"""The number of leading heads to draw."""


def show(console: Console, read: Input, chosen: Sequence[Head] = (), every: bool = False) -> None:
    """Print the tokens, the figures of some or all heads, and some maps."""
    group = _group_of(read, chosen)
    console.print(Text(f"{len(group.columns)} tokens", style="bold"))
    console.print(token_lines(group.columns, console.width))
    for note in (*read.notes, *remarks(read)):
        console.print(Text(printable(note), style="italic"))
    firsts = group.leaders()
    listed = group.heads if every else chosen or [head for head, _ in firsts]
    counted = f"{len(listed)} of " if len(listed) < len(group.heads) else ""
    console.print(Text(f"\n{counted}{len(group.heads)} heads", style="bold"))
    for table in head_tables(listed, group.square, console.width):
        console.print(table)
    over = read.kind == "image"
    away = "patches how many patches away it looks" if over else "distance how far back it looks"
    defined = DEFINED.format(distance=away) if group.square else DEFINED_ACROSS
    console.print(Text(f"\n{defined}\n", style="dim"))
    said = {head.name: reason for head, reason in firsts}
    drawn = chosen or [head for head, _ in firsts[:DRAWN]]
    if any(head.name in said for head in drawn):
        # "looks most at" compares heads: it may still be little
        console.print(Text(f"of all {len(group.heads)} heads", style="dim italic"))
    console.print(maps_side_by_side(group, drawn, said, console.width))
    console.print(legend(group.square))


def token_lines(tokens: Sequence[str], width: int) -> Text:
    """The tokens with their numbers, as many on a line as fit."""
    text, used = Text(), 0
    for number, token in enumerate(map(printable, tokens[:MOST_TOKENS])):
        token = token or "·"  # continues the character of the token before
        size = cell_len(f"{number} {token}  ")
        if used and used + size > width:
            text.append("\n")
            used = 0
        text.append(f"{number} ", style="dim").append(f"{token}  ")
        used += size
    if len(tokens) > MOST_TOKENS:
        text.append(f"\n… and {len(tokens) - MOST_TOKENS} more", style="dim")
    return text


def head_tables(heads: Sequence[Head], square: bool, width: int) -> list[Table]:
    """One row per head, one column per figure; below each other if they are too wide together."""
    names = ["head", *(head.name for head in heads)]
    tables: list[list[list[str]]] = []
    left = 0
    spans = [name for name in heads[0].figures if name.startswith(SPAN_PREFIX)] if heads else []
    named = [(name[len(SPAN_PREFIX) : -len("_mean")], name, "{:.0%}") for name in spans]
    for title, figure, form in (*COLUMNS, *named):
        there = all(figure in head.figures for head in heads)
        if there and (square or title not in WITHIN):
            column = [title, *(form.format(head.figures[figure]) for head in heads)]
            taken = 1 + max(map(len, column))
            if taken > left:
                tables.append([names])
                left = width - max(map(len, names))
            tables[-1].append(column)
            left -= taken
    return [_table(columns) for columns in tables]


def _table(columns: Sequence[Sequence[str]]) -> Table:
    """A table of columns, each with its title first."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", pad_edge=False)
    for number, (title, *_) in enumerate(columns):
        table.add_column(title, justify="right" if number else "left", no_wrap=True)
    for row in zip(*(cells for _, *cells in columns), strict=True):
        table.add_row(*row)
    return table


def as_dictionary(read: Input, chosen: Sequence[Head] = ()) -> dict[str, object]:
    """The same for programs: the tokens, the figures of each head, and the maps of chosen ones."""
    group = _group_of(read, chosen)
    return {
        "rows": list(group.rows),
        "columns": list(group.columns),
        "notes": [*read.notes, *remarks(read)],
        "heads": [
            {"layer": head.layer, "head": head.number, "statistics": head.figures}
            | ({"map": _map(head)} if head in chosen else {})
            for head in group.heads
            if not chosen or head in chosen
        ],
    }


def _group_of(read: Input, chosen: Sequence[Head]) -> Group:
    """The group of the first chosen head; the main one if none is chosen."""
    return next((x for x in read.groups if chosen and chosen[0] in x.heads), read.main)


def _map(head: Head) -> dict[str, object]:
    weights = head_map(head, LARGEST_MAP)
    pooled = tuple(weights.shape) != tuple(head.map.shape[2:])
    return {"pooled": "max" if pooled else None, "weights": weights.tolist()}


def head_map(head: Head, size: int) -> Tensor:
    """A head's weights, pooled by their maximum to at most size × size."""
    if max(head.map.shape[2:]) > size:
        return head.map.pool(size, how="max")[0, 0]
    return head.map[0, 0]


def maps_side_by_side(
    group: Group, heads: Sequence[Head], said: dict[str, str], width: int
) -> Table:
    """As many maps side by side as fit the terminal."""
    size = min(max(len(group.rows), len(group.columns)), MOST_ROWS, max(1, (width - LABEL) // 2))
    abreast = max(1, (width + 2) // (LABEL + 2 * size + 2))
    grid = Table.grid(padding=(0, 2, 0, 0))
    for start in range(0, len(heads), abreast):
        some = heads[start : start + abreast]
        grid.add_row(*(draw_head(group, head, said.get(head.name, ""), size) for head in some))
    return grid


def draw_head(group: Group, head: Head, reason: str, size: int) -> Stack:
    """One head's map under its name and the figure in which it leads."""
    weights, tokens = head_map(head, size), len(group.rows)
    if weights.shape[0] < tokens:
        labels = [f"{tokens * row // len(weights)}…" for row in range(len(weights))]
        width = tokens // len(weights)
        pooled = [Text(f"a cell is the largest of about {width}² weights", style="dim")]
    else:
        labels = [
            f"{number:>2} {printable(token.strip())}" for number, token in enumerate(group.rows)
        ]
        pooled = []
    name = Text(f"head {head.name} ", style="bold").append(reason, style="dim italic")
    return Stack(name, *pooled, *draw(weights, labels, group.causal), Text())


def draw(weights: Tensor, labels: Sequence[str], causal: bool = True) -> list[Text]:
    """A map (N, M) in characters, one line per query; keys that it may not see stay empty.

    >>> weights = Tensor([[1.0, 0.0], [0.3, 0.7]])
    >>> for line in draw(weights, ["to", "be"]): print(line.plain)
    to          ██
    be          ▒▒▓▓
    """
    lines = []
    for row, label in enumerate(labels):
        line = Text(set_cell_size(label, LABEL - 1) + " ", no_wrap=True)
        for weight in weights[row, : row + 1 if causal else None].tolist():
            characters = shade(weight)
            line.append(characters, style=COLOURS[characters])
        lines.append(line)
    return lines


def shade(weight: float) -> str:
    """The two characters that stand for a weight.

    >>> [shade(weight) for weight in (0.01, 0.3, 1.0)]
    ['· ', '▒▒', '██']
    """
    return next(characters for least, characters in SHADES if weight >= least)


def legend(square: bool = True) -> Text:
    """The weights that the shades stand for."""
    text = Text("" if square else "columns are the tokens above, in order\n", style="dim")
    text.append("weight  ", style="dim")
    for least, characters in reversed(SHADES):
        text.append(characters, style=COLOURS[characters])
        text.append(f" {least:.0%}+  " if least else " less  ", style="dim")
    return text


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


def show_reasons(console: Console, told: Reasons) -> None:
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
