"""How far apart positions are: rivals-path, rivals-constant."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headwise.apps.lab.charts import Chart, Listing, Series
from headwise.apps.lab.claim import Claim, Figures, Verdict, both, does_not_hold, holds, holds_when
from headwise.apps.lab.counting import flops
from headwise.apps.lab.estimates import slope
from headwise.apps.lab.laboratory import Lab
from headwise.apps.lab.moves import Move
from headwise.models import GatedConvolution
from headwise.nn import MultiHeadAttention

WIDTH, KERNEL = 16, 3


Tokens = Sequence[Tensor]
"""One (B, WIDTH) per position, so that each can be followed by itself."""


class Recurrent(nn.Module):
    """An LSTM, one step after the other: the output at the last position."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(WIDTH, WIDTH)

    def forward(self, tokens: Tokens) -> Tensor:
        state: tuple[Tensor, Tensor] | None = None
        for token in tokens:
            state = self.cell(token, state)
        assert state is not None
        return state[0]


class AtOnce(nn.Module):
    """A layer that takes all positions at once: the output at the last position."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, tokens: Tokens) -> Tensor:
        out: Tensor = self.layer(torch.stack(list(tokens), 1))
        return out[:, -1]


def convolutions(layers: int, growth: int) -> nn.Module:
    """A stack of causal convolutions of kernel 3, the taps of layer l being growth^l apart."""
    return AtOnce(
        nn.Sequential(*(GatedConvolution(WIDTH, KERNEL, growth**x) for x in range(layers)))
    ).double()


def gradient(model: nn.Module, x: Tensor) -> Tensor:
    """‖∂y_last/∂x_j‖ for every position j: x (1, N, WIDTH) -> (N,)."""
    tokens = [token.detach().requires_grad_() for token in x.unbind(1)]
    found = torch.autograd.grad(model(tokens).sum(), tokens)
    return torch.stack([each.norm() for each in found])


def path(model: nn.Module, x: Tensor) -> int:
    """The fewest operations that lead from the first input to the last output."""
    first, *others = (token.detach() for token in x.unbind(1))
    first.requires_grad_()  # alone: autograd then records only what lies on a way from it
    end: Any = model([first, *others]).sum().grad_fn
    waiting, seen = deque([(end, 0)]), {end}
    while waiting:  # breadth first: the first visit is the shortest way
        node, steps = waiting.popleft()
        if getattr(node, "variable", None) is first:
            return steps
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append((following, steps + 1))
    raise ValueError("the last output does not depend on the first input")


def layers_needed(stack: Callable[[int], nn.Module], x: Tensor) -> int:
    """The fewest layers through which the last output depends on the first input."""
    layers = 1
    while not bool(gradient(stack(layers), x)[0] > 0):
        layers += 1
    return layers


def reaches(lab: Lab) -> Figures:
    """Gradients against distance, shortest paths and layers needed, against the length."""
    rows, curves = [], {}
    lengths = lab.pick("lengths", tiny=(9, 27), quick=(9, 27, 81), full=(9, 27, 81, 243))
    torch.manual_seed(0)
    attention = AtOnce(MultiHeadAttention(WIDTH, 4).requires_grad_(False)).double()
    recurrent = Recurrent().double().requires_grad_(False)
    for n in lab.each(lengths, "tokens"):
        x = lab.normal(1, n, WIDTH).cpu()
        rows.append(
            {
                "n": n,
                "attention_path": path(attention, x),
                "recurrent_path": path(recurrent, x),
                "plain_layers": layers_needed(lambda k: convolutions(k, 1), x),
                "dilated_layers": layers_needed(lambda k: convolutions(k, KERNEL), x),
                "plain_formula": math.ceil((n - 1) / (KERNEL - 1)),
                "dilated_formula": math.ceil(math.log(n, KERNEL) - 1e-9),
            }
        )
    for name, model in (
        ("attention", attention),
        ("recurrent", recurrent),
        ("convolution", convolutions(4, 1)),
    ):
        found = gradient(model, x).flip(0)  # by distance from the last position
        curves[name] = (found / found[1]).tolist()  # from distance 1: at 0 the query counts too
    return {"kernel": KERNEL, "rows": rows, "curves": curves}


def judge_path(figures: Figures) -> Verdict:
    """Exponents of the paths against the length, and the convolutions' layers by the formulas."""
    rows, curves = figures["rows"], figures["curves"]
    lengths = [row["n"] for row in rows]
    attention = slope(lengths, [row["attention_path"] for row in rows])
    recurrent = slope(lengths, [row["recurrent_path"] for row in rows])
    last = rows[-1]
    because = both(
        "from {first} to {n} tokens the shortest path grows with n to the power {attention:.2f} "
        "in attention and {recurrent:.2f} in an LSTM; a convolution of kernel {kernel} needs "
        "{plain} layers over {n} tokens, a dilated one {dilated}; at PyTorch's default "
        "initialisation the LSTM's gradient over {far} tokens is {decay:.0e} of that over one, "
        "attention's, without positions, {flat:.2f}",
        "从 {first} 到 {n} 个词元，最短路径随 n 的增长次方：注意力 {attention:.2f}，LSTM "
        "{recurrent:.2f}；核为 {kernel} 的卷积跨 {n} 个词元需要 {plain} 层，空洞卷积需要 "
        "{dilated} 层；在 PyTorch 默认初始化下，相距 {far} 个词元时，LSTM 的梯度是相邻时的 "
        "{decay:.0e}，无位置的注意力的是 "
        "{flat:.2f}",
        first=lengths[0],
        n=last["n"],
        attention=attention,
        recurrent=recurrent,
        kernel=figures["kernel"],
        plain=last["plain_layers"],
        dilated=last["dilated_layers"],
        far=last["n"] - 1,
        decay=curves["recurrent"][-1],
        flat=curves["attention"][-1],
    )
    right = abs(attention) < 0.05 and 0.8 < recurrent < 1.2
    right &= all(
        row["plain_layers"] == row["plain_formula"]
        and row["dilated_layers"] == row["dilated_formula"]
        for row in rows
    )
    return holds(because) if right else does_not_hold(because)


def show_path(figures: Figures) -> tuple[Chart | Listing, ...]:
    """Gradients against distance; paths and layers against length."""
    names = {
        "attention": both("attention", "注意力"),
        "recurrent": both("LSTM", "LSTM"),
        "convolution": both("4 layers of convolution", "4 层卷积"),
    }
    curves = tuple(
        Series(
            label,
            list(range(len(figures["curves"][x]))),
            [y or 1e-30 for y in figures["curves"][x]],
        )
        for x, label in names.items()
    )
    headings = (
        both("tokens", "词元数"),
        both("attention: operations on the way", "注意力：途经运算"),
        both("LSTM: operations on the way", "LSTM：途经运算"),
        both("convolution: layers", "卷积：层数"),
        both("dilated: layers", "空洞卷积：层数"),
    )
    keys = ("n", "attention_path", "recurrent_path", "plain_layers", "dilated_layers")
    rows = tuple(tuple(row[key] for key in keys) for row in figures["rows"])
    title = both("How far a gradient reaches", "梯度能传多远")
    distance, norm = both("distance", "距离"), both("‖∂y_i/∂x_j‖, relative", "‖∂y_i/∂x_j‖，相对值")
    return (
        Chart(title, distance, norm, curves, log_y=True),
        Listing(both("From the first token to the last", "从第一个词元到最后一个"), headings, rows),
    )


def constants(lab: Lab) -> Figures:
    """The shortest path and the operations of a layer, both against the length."""
    rows = []
    for n in lab.each(lab.pick("lengths", tiny=(64, 256), quick=(64, 256, 1024, 4096)), "tokens"):
        attn = AtOnce(MultiHeadAttention(WIDTH, 4).requires_grad_(False))
        way = path(attn, lab.normal(1, n, WIDTH).float().cpu())
        with torch.device("meta"):
            bare, x = MultiHeadAttention(WIDTH, 4), torch.empty(1, n, WIDTH)
        rows.append({"n": n, "path": way, "flops": flops(partial(bare, x))})
    return {"rows": rows}


def judge_constant(figures: Figures) -> Verdict:
    """Constant: an exponent below a tenth."""
    rows = figures["rows"]
    lengths = [row["n"] for row in rows]
    way = slope(lengths, [row["path"] for row in rows])
    cost = slope(lengths[-2:], [row["flops"] for row in rows[-2:]])
    because = both(
        "with n the path between two positions grows to the power {way:.2f}, the operations of a "
        "layer to the power {cost:.2f}",
        "随 n 增长：两个位置之间的路径是 {way:.2f} 次方，一层的运算量是 {cost:.2f} 次方",
        way=way,
        cost=cost,
    )
    if abs(cost) < 0.1:
        return holds(because)
    if abs(way) < 0.1:
        condition = both(
            "“cost” means the number of steps between two positions; the computation of a layer "
            "grows as n²",
            "“代价”指两个位置之间的步数；一层的计算量按 n² 增长",
        )
        return holds_when(condition, because)
    return does_not_hold(because)


def show_constant(figures: Figures) -> tuple[Chart, ...]:
    """Both against the length, relative to the shortest."""
    rows = figures["rows"]
    lengths = [row["n"] for row in rows]
    curves = tuple(
        Series(label, lengths, [row[name] / rows[0][name] for row in rows])
        for name, label in (
            ("path", both("path between two positions", "两个位置之间的路径")),
            ("flops", both("operations of a layer", "一层的运算量")),
        )
    )
    title, n = both("Self-attention against length", "自注意力与长度"), both("tokens", "词元数")
    return (Chart(title, n, both("relative", "相对值"), curves, log_x=True, log_y=True),)


CLAIMS = (
    Claim(
        id="rivals-path",
        kind="derived",
        sentence=both(
            "In self-attention any two positions are one step apart; it takes n steps in an RNN, "
            "n/k or log_k n layers in a CNN.",
            "自注意力中任意两个位置一步可达；RNN 需要 n 步，CNN 需要 n/k 或 log_k n 层。",
        ),
        notes="B",
        experiment=reaches,
        rule=judge_path,
        shows=show_path,
        moves=(Move("tokens", both("tokens", "词元数"), "n", needs=2),),
        derivation=both(
            "y_i = Σ_j p_ij v_j holds every v_j at once. h_t = f(h_{t−1}, x_t) reaches x_1 "
            "through t applications of f. A layer of kernel k adds k − 1 positions to what an "
            "output sees, and with dilations k^l multiplies it by k.",
            "y_i = Σ_j p_ij v_j 同时包含所有 v_j。h_t = f(h_{t−1}, x_t) 要经过 t 次 f 才到达 "
            "x_1。核为 k 的一层使输出多看到 k − 1 个位置，空洞按 k^l 增长时则乘以 k。",
        ),
    ),
    Claim(
        id="rivals-constant",
        kind="derived",
        sentence=both(
            "Self-attention makes the cost of relating distant positions constant.",
            "自注意力把学习远距离依赖的代价降低为常数复杂度。",
        ),
        notes="B",
        experiment=constants,
        rule=judge_constant,
        shows=show_constant,
        moves=(Move("tokens", both("tokens", "词元数"), "n", needs=2),),
        derivation=both(
            "The number of steps is one for every distance, but each of n positions computes n "
            "scores: 4·n²·d operations beside the 8·n·d² of the projections.",
            "任何距离都只需一步，但 n 个位置各要算 n 个分数：4·n²·d 次运算，另加投影的 8·n·d²。",
        ),
    ),
)
