"""Draw what a claim shows as SVG, in English and in 中文, if matplotlib is there."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headwise.apps.lab.charts import Bars, Chart, Listing, Shown, WeightMap, text
from headwise.messages import Sentence

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette, which colour-blind people can tell apart."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
"""A curve is known by its marker too, in print without colours."""


def available() -> bool:
    """True if pictures can be drawn here."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(shown: Sequence[Shown], path: Path) -> list[Path]:
    """Write `path` and its twin in 中文 (.zh.svg); nothing without matplotlib or things to show."""
    if not available() or not shown:
        return []
    chinese = path.with_name(path.name.removesuffix(".svg") + ".zh.svg")
    for file, zh in ((path, False), (chinese, True)):
        _save(shown, file, zh)
    return [path, chinese]


def _save(shown: Sequence[Shown], path: Path, zh: bool) -> None:
    with drawn(path) as figure:
        columns = min(len(shown), 2)
        rows = -(-len(shown) // columns)
        figure.set_size_inches(4.9 * columns, 3.5 * rows)
        for number, each in enumerate(shown):
            axes = figure.add_subplot(rows, columns, number + 1)
            axes.set_title(plain(each.title, zh), fontsize=10)
            if isinstance(each, Chart):
                _curves(axes, each, zh)
            elif isinstance(each, Listing):
                _table(axes, each, zh)
            elif isinstance(each, Bars):
                _bars(axes, each, zh)
            else:
                _weights(figure, axes, each)


@contextmanager
def drawn(path: Path) -> Iterator[Any]:
    """A figure to draw on, light and in the fonts of the reader's viewer, saved as SVG."""
    import matplotlib
    from matplotlib.figure import Figure

    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": "headwise", "font.size": 9}
    settings |= {"font.family": "sans-serif", "text.parse_math": False}
    settings |= {"axes.spines.top": False, "axes.spines.right": False}
    with matplotlib.rc_context(settings), _without_warnings():
        figure = Figure(layout="constrained")
        yield figure
        figure.savefig(path, metadata={"Date": None})


def _without_warnings() -> Any:
    import warnings

    # A letter that no font here has: the viewer of the SVG brings its own.
    return warnings.catch_warnings(action="ignore", category=UserWarning)


def plain(sentence: Sentence, zh: bool) -> str:
    """A sentence for a picture, which has no index letters: d_k is written dₖ."""
    return (sentence.zh if zh else str(sentence)).replace("d_k", "dₖ")


def _curves(axes: Any, chart: Chart, zh: bool) -> None:
    for number, line in enumerate(chart.series):
        look = {
            "color": COLOURS[number % len(COLOURS)],
            "marker": MARKERS[number % len(MARKERS)],
            "markersize": 4,
            "linewidth": 1.2,
            "linestyle": ("-", "--", ":")[number // len(COLOURS) % 3],
        }
        axes.plot(line.x, line.y, label=plain(line.label, zh), **look)
        if line.low is not None and line.high is not None:
            axes.fill_between(line.x, line.low, line.high, color=look["color"], alpha=0.18, lw=0)
    if chart.log_x:
        axes.set_xscale("log", base=2)
        ticks = sorted({x for line in chart.series for x in line.x})
        axes.set_xticks(ticks[:: -(-len(ticks) // 5)], minor=False)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    if chart.log_y:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        axes.yaxis.set_minor_formatter(lambda y, _: "")
    axes.set_xlabel(plain(chart.x, zh))
    axes.set_ylabel(plain(chart.y, zh))
    axes.grid(alpha=0.25, linewidth=0.5)
    axes.legend(fontsize=8, frameon=False)


def _bars(axes: Any, shown: Bars, zh: bool) -> None:
    count, names = len(shown.groups), [plain(name, zh) for name in shown.names]
    for number, group in enumerate(shown.groups):
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
        places = [at + (number - (count - 1) / 2) * 0.8 / count for at in group.x]
        label = plain(group.label, zh)
        if group.low is None or group.high is None:
            left = [sum(x.y[at] for x in shown.groups[:number]) for at in range(len(names))]
            if shown.stacked:
                axes.barh(group.x, group.y, 0.74, left=left, color=colour, label=label)
            else:
                axes.barh(places, group.y, 0.74 / count, color=colour, label=label)
            continue
        ends = [
            [y - low for y, low in zip(group.y, group.low, strict=True)],
            [high - y for y, high in zip(group.y, group.high, strict=True)],
        ]
        axes.errorbar(group.y, places, xerr=ends, fmt=marker, color=colour, ms=4, label=label, lw=1)
        axes.axvline(0, color="#888888", lw=0.8)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel(plain(shown.x, zh))
    axes.grid(alpha=0.25, linewidth=0.5, axis="x")
    if count > 1:
        axes.legend(fontsize=8, frameon=False)


def _table(axes: Any, listing: Listing, zh: bool) -> None:
    axes.axis("off")
    cells = [[text(cell, zh) for cell in row] for row in listing.rows]
    names = [plain(heading, zh) for heading in listing.headings]
    drawn = axes.table(cells, colLabels=names, loc="upper center", cellLoc="right")
    drawn.auto_set_font_size(False)
    drawn.set_fontsize(8)
    drawn.auto_set_column_width(list(range(len(names))))
    for (row, _), cell in drawn.get_celld().items():
        cell.set_linewidth(0.4)
        if row == 0:
            cell.set_facecolor("#e8eef4")


def _weights(figure: Any, axes: Any, shown: WeightMap) -> None:
    image = axes.imshow(shown.weights, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    axes.set_xticks(range(len(shown.columns)), list(shown.columns), rotation=90)
    axes.set_yticks(range(len(shown.rows)), list(shown.rows))
    figure.colorbar(image, ax=axes, shrink=0.8)
