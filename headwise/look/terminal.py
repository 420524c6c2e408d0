"""Attention in a terminal: tokens, a table of heads and maps drawn in characters."""

from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text
from torch import Tensor

from headwise.look.handmade import HEADS, Sight

SHADES = ((0.75, "██"), (0.45, "▓▓"), (0.2, "▒▒"), (0.05, "░░"), (0.0, "· "))
"""From this weight on, these two characters: two of them are about as wide as one is high."""

COLOURS = {"██": "#f9e721", "▓▓": "#5ec962", "▒▒": "#21918c", "░░": "#5a6aa8", "· ": "dim"}
"""Brighter is more; without colour the shades alone say the same."""

LABEL = 12
"""Columns kept for a row's number and its token."""

MOST_ROWS = 32
"""A longer text's map is pooled down to this many rows: about a screen."""

MOST_TOKENS = 40
"""How many tokens are listed before the rest is only counted."""

LARGEST_MAP = 256
"""A program gets every weight up to this many tokens, and a pooled map beyond."""

EXPLAINED = """\
Nothing here is learned: each head was built to do what its name says.
A token sees itself and what came before it.
"""

DEFINED = """
keys is how many tokens a row spreads over, e^entropy; top its largest weight;
first, self and previous its weight on that token; distance how far back it
looks. All are means over the rows, but for max logit, the largest of them all.
"""

COLUMNS = (
    # title, figure of Observation.heads(), format
    ("keys", "effective_keys_mean", "{:.2f}"),
    ("entropy", "entropy_mean", "{:.2f}"),
    ("top", "top_prob_mean", "{:.0%}"),
    ("first", "sink_mass_mean", "{:.0%}"),
    ("self", "self_mass_mean", "{:.0%}"),
    ("previous", "previous_mass_mean", "{:.0%}"),
    ("distance", "distance_mean", "{:.1f}"),
    ("max logit", "max_logit_max", "{:.1f}"),
)
"""The columns of the table of heads."""


def show(console: Console, sight: Sight, heads: Sequence[int]) -> None:
    """Print what the heads saw: the tokens, the statistics of each head, the maps of `heads`."""
    console.print(Text(f"{len(sight.tokens)} tokens", style="bold"))
    console.print(token_lines(sight.tokens, console.width))
    console.print(
        Text("\n4 heads, made by hand", style="bold"), Text(EXPLAINED, style="dim"), sep="\n"
    )
    console.print(head_table(sight))
    console.print(Text(DEFINED, style="dim"))
    console.print(maps_side_by_side(sight, heads, console.width))
    console.print(legend())


def token_lines(tokens: Sequence[str], width: int) -> Text:
    """The tokens with their numbers, as many on a line as fit."""
    text, used = Text(), 0
    for number, token in enumerate(tokens[:MOST_TOKENS]):
        size = cell_len(f"{number} {token}  ")
        if used and used + size > width:
            text.append("\n")
            used = 0
        text.append(f"{number} ", style="dim").append(f"{token}  ")
        used += size
    if len(tokens) > MOST_TOKENS:
        text.append(f"\n… and {len(tokens) - MOST_TOKENS} more", style="dim")
    return text


def head_table(sight: Sight) -> Table:
    """A row a head, a column a statistic."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("head", no_wrap=True)
    for title, *_ in COLUMNS:
        table.add_column(title, justify="right")
    figures = sight.seen.heads()
    for number, head in enumerate(HEADS):
        cells = [form.format(float(figures[figure][number])) for _, figure, form in COLUMNS]
        table.add_row(f"{number} {head.name}", *cells)
    return table


def as_dictionary(sight: Sight, heads: Sequence[int]) -> dict[str, object]:
    """The same for programs: tokens, and for each head its figures and its map."""
    size = min(len(sight.tokens), LARGEST_MAP)
    figures = sight.seen.heads()
    return {
        "tokens": list(sight.tokens),
        "heads": [
            {
                "head": head,
                "name": HEADS[head].name,
                "asks": HEADS[head].asks,
                "made_by_hand": True,
                "statistics": {name: float(figure[head]) for name, figure in figures.items()},
                "map": {
                    "size": size,
                    "pooled": "max" if size < len(sight.tokens) else None,
                    "weights": head_map(sight, head, size).tolist(),
                },
            }
            for head in heads
        ],
    }


def head_map(sight: Sight, head: int, size: int) -> Tensor:
    """A head's weights (size, size): all of them, or the largest of each cell in a longer text."""
    if size < len(sight.tokens):
        return sight.maps.head(0, head).pool(size, how="max")[0, 0]
    return sight.maps[0, head]


def maps_side_by_side(sight: Sight, heads: Sequence[int], width: int) -> Table:
    """As many maps beside each other as the terminal is wide enough for."""
    rows = min(len(sight.tokens), MOST_ROWS, (width - LABEL) // 2)
    abreast = max(1, (width + 2) // (LABEL + 2 * rows + 2))
    grid = Table.grid(padding=(0, 2, 0, 0))
    for start in range(0, len(heads), abreast):
        grid.add_row(*(draw_head(sight, head, rows) for head in heads[start : start + abreast]))
    return grid


def draw_head(sight: Sight, head: int, rows: int) -> Group:
    """One head's map under its name and its question."""
    tokens = len(sight.tokens)
    if rows < tokens:
        labels = [f"{tokens * row // rows}…" for row in range(rows)]
        pooled = [Text(f"a cell is the largest of about {tokens // rows}² weights", style="dim")]
    else:
        labels = [f"{number:>2} {token}" for number, token in enumerate(sight.tokens)]
        pooled = []
    name = Text(f"{head} {HEADS[head].name}", style="bold")
    question = Text(HEADS[head].asks, style="dim italic")
    return Group(name, question, *pooled, *draw(head_map(sight, head, rows), labels), Text())


def draw(weights: Tensor, labels: Sequence[str]) -> list[Text]:
    """A causal map (N, N) in characters, a line a query; what a query may not see stays empty.

    >>> weights = Tensor([[1.0, 0.0], [0.3, 0.7]])
    >>> for line in draw(weights, ["to", "be"]): print(line.plain)
    to          ██
    be          ▒▒▓▓
    """
    lines = []
    for row, label in enumerate(labels):
        line = Text(set_cell_size(label, LABEL - 1) + " ", no_wrap=True)
        for weight in weights[row, : row + 1].tolist():
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


def legend() -> Text:
    """What the shades mean."""
    text = Text("weight  ", style="dim")
    for least, characters in reversed(SHADES):
        text.append(characters, style=COLOURS[characters])
        text.append(f" {least:.0%}+  " if least else " less  ", style="dim")
    return text
