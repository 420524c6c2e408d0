"""Attention over three tokens in numbers that can be checked by hand, and its drawing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.apps.lab.claim import both
from headwise.apps.lab.drawing import COLOURS, available, drawn, plain
from headwise.messages import Sentence

TOKENS = (both("the", "我"), both("cat", "爱"), both("sleeps", "猫"))
X = ((1, 0), (0, 1), (1, 1))
W_Q = ((1, 0), (1, 1))
W_K = ((0, 1), (1, 0))
W_V = ((2, 0), (0, 1))


def three_tokens() -> dict[str, Tensor]:
    """Every step from the tokens to the output: three tokens, two numbers each.

    >>> steps = three_tokens()
    >>> steps["scores"]
    tensor([[0., 1., 1.],
            [1., 1., 2.],
            [1., 2., 3.]])
    >>> steps["weights"][0].sum()
    tensor(1.)
    """
    x, w_q, w_k, w_v = (torch.tensor(each, dtype=torch.float32) for each in (X, W_Q, W_K, W_V))
    q, k, v = x @ w_q, x @ w_k, x @ w_v  # (3, 2) each
    scores = q @ k.T  # (3, 3)
    weights = (scores / math.sqrt(k.shape[-1])).softmax(-1)
    return {
        "x": x, "w_q": w_q, "w_k": w_k, "w_v": w_v, "q": q, "k": k, "v": v,
        "scores": scores, "weights": weights, "out": weights @ v,
    }  # fmt: skip


def draw(path: Path) -> list[Path]:
    """Draw the example as SVG, in English and in 中文 beside it; nothing without matplotlib."""
    if not available():
        return []
    chinese = path.with_name(path.name.removesuffix(".svg") + ".zh.svg")
    for file, zh in ((path, False), (chinese, True)):
        with drawn(file) as figure:
            figure.set_size_inches(9.6, 4.6)
            axes = figure.add_subplot()
            axes.set_xlim(0, 26.4)
            axes.set_ylim(12.8, 0)
            axes.set_aspect("equal")
            axes.axis("off")
            _fill(axes, zh)
    return [path, chinese]


BLUE, ORANGE, GREEN, PINK = COLOURS[:4]


def _fill(axes: Any, zh: bool) -> None:
    steps = three_tokens()
    names = [plain(token, zh) for token in TOKENS]

    def says(x: float, y: float, sentence: Sentence, **look: Any) -> None:
        axes.text(x, y, plain(sentence, zh), ha="center", va="center", **({"fontsize": 8} | look))

    _matrix(axes, steps["x"], 2.2, 4.9, "X", "#555555", rows=names)
    for name, weight, title, colour, y in (
        ("q", "w_q", "Q = X·W_q", BLUE, 1.0),
        ("k", "w_k", "K = X·W_k", ORANGE, 5.3),
        ("v", "w_v", "V = X·W_v", GREEN, 9.6),
    ):
        _matrix(axes, steps[weight], 6.0, y + 0.5, title.rpartition("·")[2], colour)
        _matrix(axes, steps[name], 9.4, y, title.partition(" ")[0], colour)
        _arrow(axes, (4.4, 6.4), (5.8, y + 1.5), colour)
        _arrow(axes, (8.2, y + 1.5), (9.2, y + 1.5), colour)
    _matrix(axes, steps["scores"], 13.3, 3.0, "Q·Kᵀ", PINK)
    _arrow(axes, (11.6, 2.5), (13.1, 3.9), BLUE)
    _arrow(axes, (11.6, 6.8), (13.1, 5.4), ORANGE)
    _matrix(axes, steps["weights"], 19.6, 3.0, "", PINK, shaded=True, columns=names)
    _arrow(axes, (16.5, 4.5), (19.4, 4.5), PINK)
    says(17.9, 3.6, both("÷ √2, then\nsoftmax", "÷ √2，再\nsoftmax"), color=PINK)
    says(21.6, 6.6, both("weights: each row sums to one", "权重：每行之和为一"), color=PINK)
    _matrix(axes, steps["out"], 20.25, 9.6, "", GREEN)
    _arrow(axes, (21.6, 7.1), (21.6, 9.4), PINK)
    _arrow(axes, (11.6, 11.1), (20.0, 11.1), GREEN)
    averages = both("output: averages\nof the rows of V", "输出：V 各行\n的加权平均")
    says(24.9, 11.1, averages, color=GREEN)


def _matrix(
    axes: Any,
    values: Tensor,
    x: float,
    y: float,
    title: str,
    colour: str,
    rows: Sequence[str] = (),
    columns: Sequence[str] = (),
    shaded: bool = False,
) -> None:
    """A grid of numbers with its title above; the depth of a cell is its number if `shaded`."""
    from matplotlib.patches import Rectangle

    wide = 1.35 if shaded or bool((values % 1).any()) else 1.0
    for row, line in enumerate(values.tolist()):
        for column, value in enumerate(line):
            face = _mixed(colour, value if shaded else 0.12)
            place = (x + column * wide, y + row)
            axes.add_patch(Rectangle(place, wide, 1, facecolor=face, edgecolor="white", lw=1.5))
            said = f"{value:.2f}" if wide > 1 else f"{value:g}"
            dark = shaded and value > 0.75
            axes.text(
                place[0] + wide / 2, place[1] + 0.52, said, ha="center", va="center",
                fontsize=9, color="white" if dark else "#1d1f23",
            )  # fmt: skip
    if title:
        axes.text(
            x + wide * values.shape[1] / 2, y - 0.45, title, ha="center", va="center",
            color=colour, fontsize=9.5, fontweight="bold",
        )  # fmt: skip
    for at, name in enumerate(rows):
        axes.text(x - 0.2, y + at + 0.52, name, ha="right", va="center", fontsize=8.5)
    for at, name in enumerate(columns):
        axes.text(x + (at + 0.5) * wide, y - 0.4, name, ha="center", va="center", fontsize=8)


def _mixed(colour: str, share: float) -> tuple[float, ...]:
    """A colour diluted with white."""
    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return tuple(1 - share * (1 - part) for part in parts)


def _arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    look = {"arrowstyle": "-|>", "color": colour, "lw": 1.1, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", xy=end, xytext=start, arrowprops=look)
