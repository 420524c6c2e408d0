"""Operations and time of a layer: rivals-compute, rivals-parallel, rivals-cnn-parallel."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from headwise.apps.lab.charts import Chart, series
from headwise.apps.lab.claim import Claim, Figures, Verdict, both, does_not_hold, holds, undecided
from headwise.apps.lab.counting import flops, in_turns
from headwise.apps.lab.estimates import slope
from headwise.apps.lab.laboratory import Lab
from headwise.apps.lab.moves import Move
from headwise.messages import Sentence
from headwise.models import GatedConvolution
from headwise.nn import MultiHeadAttention

NAMES = {
    "attention": both("attention", "注意力"),
    "recurrent": both("LSTM", "LSTM"),
    "convolution": both("convolution", "卷积"),
}


def layer(name: str, width: int, kernel: int = 3) -> nn.Module:
    """One layer of each kind: (B, N, width) -> (B, N, width)."""
    if name == "attention":
        return MultiHeadAttention(width, 4, bias=False)
    if name == "recurrent":
        return nn.LSTM(width, width, batch_first=True)
    return GatedConvolution(width, kernel, 1)


def flops_of(name: str, width: int, n: int, batch: int = 1, kernel: int = 3) -> int:
    """Operations of a layer; an LSTM's are those of its steps, as PyTorch's counter skips them."""
    with torch.device("meta"):
        if name == "recurrent":
            cell, token = nn.LSTMCell(width, width), torch.empty(batch, width)
            return n * flops(partial(cell, token))
        return flops(partial(layer(name, width, kernel), torch.empty(batch, n, width)))


def operations(lab: Lab) -> Figures:
    """Operations and seconds of a layer of each kind against n, and of a convolution against k."""
    width = lab.pick("width", tiny=16, quick=32, full=64)
    counted = (64, 256, 1024, 4096, 16384)
    timed = lab.pick(
        "timed", tiny=(64, 128), quick=(512, 1024, 2048), full=(4096, 8192, 16384, 32768)
    )
    rows, times = [], []
    for n in counted:
        rows.append({"n": n} | {name: flops_of(name, width, n) for name in NAMES})
    for n in lab.each(timed, "tokens"):
        x = lab.normal(1, n, width).float()
        calls = [partial(layer(name, width).to(lab.device), x) for name in NAMES]
        taken = in_turns(calls, lab.pick("repeats", tiny=1, quick=5), device=lab.device)
        times.append({"n": n} | dict(zip(NAMES, taken, strict=True)))
    kernels = (1, 3, 9, 27)
    return {
        "width": width,
        "rows": rows,
        "times": times,
        "kernels": kernels,
        "by_kernel": [flops_of("convolution", width, 1024, kernel=k) for k in kernels],
    }


def judge_compute(figures: Figures) -> Verdict:
    """The exponents of the counted operations over the two longest sequences."""
    last = figures["rows"][-2:]
    powers = {
        name: slope([row["n"] for row in last], [row[name] for row in last]) for name in NAMES
    }
    times = {
        name: slope([row["n"] for row in figures["times"]], [row[name] for row in figures["times"]])
        for name in NAMES
    }
    kernel = slope(figures["kernels"], figures["by_kernel"])
    because = both(
        "the operations of a layer grow with n to the power {attention:.2f} in attention, "
        "{recurrent:.2f} in an LSTM, {convolution:.2f} in a convolution, and there with the "
        "kernel to the power {kernel:.2f}; the time to the power {time_a:.1f}, {time_r:.1f} and "
        "{time_c:.1f}",
        "一层的运算量随 n 增长：注意力 {attention:.2f} 次方，LSTM {recurrent:.2f} 次方，卷积 "
        "{convolution:.2f} 次方，卷积又随核大小的 {kernel:.2f} 次方增长；时间分别是 "
        "{time_a:.1f}、{time_r:.1f}、{time_c:.1f} 次方",
        **powers,
        kernel=kernel,
        time_a=times["attention"],
        time_r=times["recurrent"],
        time_c=times["convolution"],
    )
    right = abs(powers["attention"] - 2) < 0.1 and abs(kernel - 1) < 0.05
    right &= all(abs(powers[name] - 1) < 0.05 for name in ("recurrent", "convolution"))
    return holds(because) if right else does_not_hold(because)


def show_compute(figures: Figures) -> tuple[Chart, ...]:
    """Operations and seconds against length."""

    return (
        _against_n(both("One layer", "一层"), both("FLOPs", "FLOPs"), figures["rows"]),
        _against_n(both("One layer", "一层"), both("seconds", "秒"), figures["times"]),
    )


def parallelism(lab: Lab) -> Figures:
    """The longest chain of operations in a layer, and its speed against n at a fixed n · batch."""
    chains = []
    for n in lab.pick("lengths", tiny=(4, 16), quick=(8, 32, 128)):
        chains.append({"n": n} | {name: chain(name, n) for name in NAMES})
    width = lab.pick("width", tiny=16, quick=64, full=512)
    tokens = lab.pick("tokens", tiny=256, quick=4096, full=65536)
    lengths = lab.pick(
        "lengths", tiny=(16, 256), quick=(32, 128, 512, 2048), full=(64, 512, 4096, 32768)
    )
    rows = []
    for n in lab.each(lengths, "tokens"):
        x = lab.normal(tokens // n, n, width).float()
        calls = [partial(layer(name, width).to(lab.device), x) for name in NAMES]
        taken = in_turns(calls, lab.pick("repeats", tiny=1, quick=5), device=lab.device)
        rows.append(
            {"n": n}
            | {
                name: flops_of(name, width, n, tokens // n) / seconds
                for name, seconds in zip(NAMES, taken, strict=True)
            }
        )
    return {"tokens": tokens, "on_gpu": lab.device.type == "cuda", "chains": chains, "rows": rows}


def chain(name: str, n: int, width: int = 16) -> int:
    """The most operations of a layer that have to wait for one another."""
    x = torch.zeros(1, n, width, requires_grad=True)
    if name == "recurrent":
        cell, state = nn.LSTMCell(width, width), None
        for token in x.unbind(1):
            state = cell(token, state)
        assert state is not None
        out = state[0]
    else:
        out = layer(name, width)(x)
    depth: dict[Any, int] = {}
    waiting: list[Any] = [out.grad_fn]
    while waiting:  # a node's depth is one more than the greatest of those it waits for
        node = waiting[-1]
        before = [following for following, _ in node.next_functions if following is not None]
        missing = [following for following in before if following not in depth]
        if missing:
            waiting += missing
            continue
        depth[waiting.pop()] = 1 + max((depth[following] for following in before), default=0)
    return depth[out.grad_fn]


def growths(figures: Figures) -> dict[str, float]:
    """The exponents with which the longest chains grow with n."""
    rows = figures["chains"]
    return {name: slope([row["n"] for row in rows], [row[name] for row in rows]) for name in NAMES}


def kept(figures: Figures, name: str) -> float:
    """The speed at the longest sequences over the best speed: 1 if n does not matter."""
    speeds = [row[name] for row in figures["rows"]]
    return float(speeds[-1] / max(speeds))


def judge_parallel(figures: Figures) -> Verdict:
    """By the longest chains; on a GPU, which has room for all positions, the speed must agree."""
    because, power = _said(figures), growths(figures)
    if power["attention"] > 0.1 or power["recurrent"] < 0.5:
        return does_not_hold(because)
    slower = kept(figures, "recurrent") < 0.5 * kept(figures, "attention")
    return undecided(because) if figures["on_gpu"] and not slower else holds(because)


def judge_cnn_parallel(figures: Figures) -> Verdict:
    """Only partly parallel: the longest chain of a layer grows with n."""
    because, power = _said(figures), growths(figures)
    if power["convolution"] > 0.1:
        return holds(because)
    slower = kept(figures, "convolution") < 0.5 * kept(figures, "attention")
    return undecided(because) if figures["on_gpu"] and slower else does_not_hold(because)


def _said(figures: Figures) -> Sentence:
    return both(
        "the longest chain of operations that wait for one another grows with n to the power "
        "{attention:.2f} in attention, {recurrent:.2f} in an LSTM, {convolution:.2f} in a "
        "convolution; of {tokens:,} tokens, sequences of {n:,} run at {speed_a:.0%}, "
        "{speed_r:.0%} and {speed_c:.0%} of the best speed of each on {device}",
        "须依次等待的最长运算链随 n 增长：注意力 {attention:.2f} 次方，LSTM {recurrent:.2f} "
        "次方，卷积 {convolution:.2f} 次方；在{device}上，{tokens:,} 个词元分成长 {n:,} "
        "的序列时，速度分别是各自最快的 {speed_a:.0%}、{speed_r:.0%}、{speed_c:.0%}",
        **growths(figures),
        tokens=figures["tokens"],
        n=figures["rows"][-1]["n"],
        device=both("a GPU", "GPU ") if figures["on_gpu"] else both("one core", "单核"),
        speed_a=kept(figures, "attention"),
        speed_r=kept(figures, "recurrent"),
        speed_c=kept(figures, "convolution"),
    )


def show_parallel(figures: Figures) -> tuple[Chart, ...]:
    """The longest chain, and operations per second, against length."""
    spread = both(
        "Speed, {tokens:,} tokens in sequences of n",
        "速度，{tokens:,} 个词元，序列长 n",
        tokens=figures["tokens"],
    )
    speeds = [row | {name: row[name] / 1e9 for name in NAMES} for row in figures["rows"]]
    chains = both("Operations that wait for one another", "须依次等待的运算")
    return (
        _against_n(chains, both("operations", "运算数"), figures["chains"]),
        _against_n(spread, both("GFLOP/s", "GFLOP/s"), speeds),
    )


def _against_n(title: Sentence, y: Sentence, rows: list[dict[str, float]]) -> Chart:
    curves = series(rows, "n", *NAMES.items())
    return Chart(title, both("n", "n"), y, curves, log_x=True, log_y=True)


CLAIMS = (
    Claim(
        id="rivals-compute",
        sentence=both(
            "A layer costs O(n²) in self-attention, O(n) in an RNN and O(k·n) in a CNN.",
            "一层的计算复杂度：自注意力 O(n²)，RNN O(n)，CNN O(k·n)。",
        ),
        notes="B",
        experiment=operations,
        rule=judge_compute,
        shows=show_compute,
        moves=(Move("tokens", both("tokens", "词元数"), "n", needs=2),),
        gpu=True,
        derivation=both(
            "Attention: 8·n·d² + 4·n²·d, of which the second is larger from n = 2·d on. LSTM: "
            "16·n·d². Gated convolution: 4·k·n·d².",
            "注意力：8·n·d² + 4·n²·d，n > 2·d 时后一项更大。LSTM：16·n·d²。门控卷积：4·k·n·d²。",
        ),
    ),
    Claim(
        id="rivals-parallel",
        sentence=both(
            "Self-attention is parallel over positions; an RNN is not.",
            "自注意力对所有位置完全并行；RNN 有序列依赖，难以并行。",
        ),
        notes="B",
        experiment=parallelism,
        rule=judge_parallel,
        shows=show_parallel,
        moves=(Move("tokens", both("tokens", "词元数"), "n", needs=2),),
        gpu=True,
    ),
    Claim(
        id="rivals-cnn-parallel",
        sentence=both(
            "A CNN is only partly parallel, within its window.",
            "CNN 只能部分并行（窗口内可并行）。",
        ),
        notes="B",
        experiment=parallelism,
        rule=judge_cnn_parallel,
        shows=show_parallel,
        moves=(Move("tokens", both("tokens", "词元数"), "n", needs=2),),
        gpu=True,
        derivation=both(
            "y_t = Σ_i W_i x_{t−i} depends on inputs only, never on another output: all "
            "positions of a layer can be computed at once. Only the layers follow one another, "
            "as in attention.",
            "y_t = Σ_i W_i x_{t−i} 只依赖输入，不依赖其他输出：一层的所有位置可以同时计算。"
            "只有层与层之间有先后，注意力也是如此。",
        ),
    ),
)
