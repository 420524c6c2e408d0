"""A sweep of costs as a figure for a paper or a report: SVG, PDF or PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headwise.apps.interface.pictures import check, drawing, fonts, metadata
from headwise.messages import printable

PANELS = (
    # title, figures with their names, drawn where a row has them
    ("FLOPs", (("flops", "visible pairs"), ("flops_dense", "every pair"))),
    (
        "bytes",
        (("weights", "weights"), ("kv_cache", "KV cache"), ("activations", "saved for backward")),
    ),
    ("seconds", (("seconds", "time"),)),
)
STYLES = ("-", "--", ":")
Rows = Sequence[Mapping[str, float | None]]


def save(path: Path, found: Mapping[str, Rows], axis: str, caption: str) -> None:
    """Draw the figures of one or more models over an axis, on logarithmic scales.

    `found` holds the rows of each model; a panel whose figures nobody has is left out.
    """
    check(path)
    matplotlib, figure_of = drawing()
    panels = [
        (title, [(name, label) for name, label in figures if _there(found, name)])
        for title, figures in PANELS
    ]
    panels = [(title, figures) for title, figures in panels if figures]
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": "headwise", "font.size": 8}
    settings |= {"font.family": fonts(), "text.parse_math": False}
    with matplotlib.rc_context(settings):
        size = (3.2 * len(panels), 3.0)
        figure = figure_of(figsize=size, dpi=200, layout="constrained")
        for place, (title, figures) in enumerate(panels):
            axes = figure.add_subplot(1, len(panels), place + 1)
            _draw(axes, found, axis, figures)
            axes.set_title(title, fontsize=9)
        figure.supxlabel(printable(caption), fontsize=6.5, color="0.3", x=0.02, ha="left")
        figure.savefig(path, bbox_inches="tight", pad_inches=0.05, metadata=metadata(path))


def _draw(
    axes: Any, found: Mapping[str, Rows], axis: str, figures: Sequence[tuple[str, str]]
) -> None:
    """Lines of one panel: a colour for each model, a style for each figure."""
    for colour, (model, rows) in enumerate(found.items()):
        for style, (name, label) in zip(STYLES, figures, strict=False):
            points = [(row[axis], row[name]) for row in rows if row[name]]
            said = label if len(found) == 1 else f"{printable(model)[:24]}, {label}"
            if points:
                axes.plot(*zip(*points, strict=True), style,
                          color=f"C{colour}", marker=".", label=said, linewidth=1)  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel(axis)
    axes.grid(color="0.9", linewidth=0.5)
    axes.legend(fontsize=6, frameon=False)


def _there(found: Mapping[str, Rows], name: str) -> bool:
    return any(row.get(name) for rows in found.values() for row in rows)
