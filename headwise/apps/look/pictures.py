"""A head's map as a figure for a paper: SVG, PDF or PNG."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headwise.apps.interface.pictures import check, drawing, fonts, metadata, without_font
from headwise.apps.look.scene import Group, Head, Input
from headwise.messages import printable

MOST_LABELS = 40
"""Longer axes have numbers instead of tokens."""

MOST_CELLS = 256
"""A larger map is pooled: a figure has no more dots."""

LEAST = 1e-3
"""The lowest value of a logarithmic colour scale."""

CAPTION = (
    # figure, how it is written
    ("entropy_mean", "entropy {:.2f} nats"),
    ("effective_keys_mean", "{:.1f} effective keys"),
    ("max_logit_max", "largest logit {:.1f}"),
    ("sink_mass_mean", "{:.0%} on the first token"),
    ("distance_mean", "mean distance {:.1f}"),
    ("patch_distance_mean", "mean distance {:.1f} patches"),
)


def save(path: Path, model: str, group: Group, head: Head) -> str:
    """Write a head's map with a colour scale, its figures below and, if they are few, its tokens.

    Weights are coloured linearly from 0 to 1. In a pooled map a cell holds the largest of its
    weights and the colours are logarithmic, and the figure says so. Returns the letters that are
    drawn as boxes because no font here has them; an SVG has none: its viewer brings the fonts.
    """
    check(path)
    matplotlib, figure_of = drawing()
    from matplotlib.colors import LogNorm, Normalize

    _, _, rows, columns = head.map.shape
    pooled = max(rows, columns) > MOST_CELLS
    weights = head.map.pool(MOST_CELLS, how="max")[0, 0] if pooled else head.map[0, 0]
    few = max(rows, columns) <= MOST_LABELS
    side = 4.2 if few else 3.4
    # SVG keeps its text as text: it can be searched, and edited.
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": "headwise", "font.size": 8}
    settings |= {"font.family": fonts(), "text.parse_math": False}  # a dollar is a dollar
    names = [
        [label(token) for token in axis] if few else [] for axis in (group.columns, group.rows)
    ]
    title = printable(f"{model} · {group.name} · head {head.name}")
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        height = side * max(0.3, rows / columns) + 1.1
        figure = figure_of(figsize=(side + 0.9, height), dpi=300, layout="constrained")
        axes = figure.add_subplot()
        edges = (-0.5, columns - 0.5, rows - 0.5, -0.5)
        shown = axes.imshow(
            weights.cpu().numpy(),
            cmap="Blues",
            norm=LogNorm(LEAST, 1, clip=True) if pooled else Normalize(0, 1),
            extent=edges,
            interpolation="nearest",
        )
        if few:
            axes.set_xticks(range(columns), names[0], rotation=90)
            axes.set_yticks(range(rows), names[1])
        axes.set_xlabel("key")
        axes.set_ylabel("query")
        axes.set_title(title, fontsize=9)
        scale = figure.colorbar(shown, ax=axes, shrink=0.8)
        scale.set_label("largest weight of a cell" if pooled else "weight")
        said = caption(group, head, pooled)
        figure.supxlabel(said, fontsize=6.5, color="0.3", x=0.02, ha="left")
        figure.savefig(path, bbox_inches="tight", pad_inches=0.05, metadata=metadata(path))
    return "" if path.suffix.lower() == ".svg" else without_font([title, *names[0], *names[1]])


def chosen(read: Input, heads: Sequence[str]) -> tuple[Group, Head]:
    """The one head that is asked for, else the first that leads in a figure."""
    if len(heads) > 1:
        raise ValueError(f"a picture shows one head, and {len(heads)} were named; name one --head")
    if heads:
        return read.find(heads[0])
    return read.main, read.main.leaders()[0][0]


def caption(group: Group, head: Head, pooled: bool) -> str:
    """A head's figures in a few lines."""
    said = [form.format(head.figures[name]) for name, form in CAPTION if name in head.figures]
    size = f"{len(group.rows):,} × {len(group.columns):,} tokens"
    if pooled:
        size += f" in at most {MOST_CELLS} × {MOST_CELLS} cells"
    return f"{size}; means over the rows:\n{', '.join(said[:3])}\n{', '.join(said[3:])}"


def label(token: str) -> str:
    """A token as a label on one line."""
    return printable(token.strip(" "))[:16]
