"""Where tokens stand: position-order, position-length, position-relative, position-decay."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise import mask as masks
from headwise.apps.lab.charts import Chart, Series, series
from headwise.apps.lab.claim import (
    Claim,
    Figures,
    Verdict,
    both,
    does_not_hold,
    holds,
    holds_when,
    undecided,
)
from headwise.apps.lab.laboratory import Lab, Piece
from headwise.apps.lab.moves import Move
from headwise.apps.lab.recall import RecallModel, Sequences, accuracy, learn, recipe_of
from headwise.nn import (
    GELU,
    ALiBi,
    Block,
    Learned,
    MultiHeadAttention,
    Position,
    Rotary,
    Sinusoidal,
)

BACK = 2
TRAINED = 16
ASKED = (8, 16, 32, 64)
WIDTH, HEADS = 32, 4
RIGHT = 0.9
"""The share of right answers from which on a task counts as learnt."""


@dataclass(frozen=True)
class Earlier:
    """Every token asks for the value two places before it; the first token is marked."""

    length: int
    values: int = 16
    keys: int = 2

    def draw(self, count: int, generator: torch.Generator) -> Sequences:
        """Draw sequences in which only the order says what to answer."""
        values = torch.randint(self.values, (count, self.length), generator=generator)
        keys = torch.zeros_like(values)
        keys[:, 0] = 1
        asking = torch.arange(BACK, self.length)
        far = torch.full((count, self.length - BACK), BACK)
        return Sequences(keys, values, asking, values[:, :-BACK], far)


KINDS: dict[str, tuple[Position | None, bool]] = {
    # what they know of positions, and whether a causal mask hides what comes later
    "nothing": (None, False),
    "mask": (None, True),
    "learned": (Learned(ASKED[-1]), True),
    "sinusoidal": (Sinusoidal(), True),
    "rotary": (Rotary(), True),
    "ALiBi": (ALiBi(), True),
}
NAMES = {
    "nothing": both("no positions, no mask", "没有位置，没有掩码"),
    "mask": both("no positions, causal mask", "没有位置，因果掩码"),
    "learned": both("learned, at the input", "学习的位置，加在输入上"),
    "sinusoidal": both("sines, at the input", "正弦位置，加在输入上"),
    "rotary": both("rotary", "旋转位置"),
    "ALiBi": both("ALiBi", "ALiBi"),
}


def layers(kind: str) -> nn.Module:
    """Two blocks that know positions in this way."""
    position, causal = KINDS[kind]
    at_input = position is not None and position.at_input
    mask = masks.causal() if causal else None
    blocks = [
        Block(
            WIDTH,
            # What is added to the input is added once, below the first block.
            MultiHeadAttention(
                WIDTH,
                HEADS,
                mask=mask,
                position=None if at_input and number else position,
            ),
            GELU(2 * WIDTH).build(WIDTH),
        )
        for number in range(2)
    ]
    return nn.Sequential(*blocks)


def readings(lab: Lab) -> list[Piece]:
    """The trainings of `reading`."""
    return [(f"earlier-{kind}", read_back, {"kind": kind}) for kind in KINDS]


def read_back(lab: Lab, folder: Path | None, kind: str) -> dict[str, Any]:
    """Train one kind at one length and ask it at several, for every seed."""
    steps = lab.pick("steps", tiny=2, quick=500, full=1500)
    rows = []
    for seed in range(lab.pick("seeds", tiny=1, quick=3, full=6)):
        torch.manual_seed(seed)
        task: Any = Earlier(TRAINED)
        model = RecallModel(layers(kind), WIDTH, task)
        learn(model, task, recipe_of(steps, 5e-3), seed=seed, batch=64)
        for length in ASKED:
            asked: Any = Earlier(length)
            right = accuracy(model, asked, count=200)
            rows.append({"kind": kind, "seed": seed, "length": length, "accuracy": right})
    return {"steps": steps, "rows": rows}


def reading(lab: Lab) -> Figures:
    """Every kind of position on a task of order, trained at one length and asked at others."""
    found = lab.keep_all(readings(lab))
    return {
        "steps": found[0]["steps"],
        "trained": TRAINED,
        "chance": 1 / Earlier(TRAINED).values,
        "rows": [row for each in found for row in each["rows"]],
    }


def right_at(figures: Figures, kind: str, length: int) -> list[float]:
    """The accuracy of every run of a kind at a length."""
    rows = figures["rows"]
    return [x["accuracy"] for x in rows if (x["kind"], x["length"]) == (kind, length)]


def judge_order(figures: Figures) -> Verdict:
    """Without positions the task can't be learnt, unless a causal mask gives the order away."""
    trained = figures["trained"]
    found = {kind: right_at(figures, kind, trained) for kind in KINDS}
    because = both(
        "asked for the token two places before, after {steps} steps the best run without "
        "positions answers {nothing:.0%} right (chance is {chance:.0%}), the worst with a causal "
        "mask and no positions {mask:.0%}, the best {best:.0%}; the worst with rotary positions "
        "{rotary:.0%}",
        "问两个位置之前的词元，训练 {steps} 步后：没有位置时，最好的一次答对 {nothing:.0%}（乱猜是 "
        "{chance:.0%}）；有因果掩码而没有位置时，最差的一次 {mask:.0%}，最好的 {best:.0%}；"
        "旋转位置最差的一次 {rotary:.0%}",
        steps=figures["steps"],
        nothing=max(found["nothing"]),
        chance=figures["chance"],
        mask=min(found["mask"]),
        best=max(found["mask"]),
        rotary=min(found["rotary"]),
    )
    if min(found["rotary"]) < RIGHT:
        return undecided(because)
    if max(found["nothing"]) > RIGHT:
        return does_not_hold(because)
    if max(found["mask"]) > 3 * figures["chance"]:
        condition = both(
            "every token sees all others; a causal mask tells a token how many come before it, and "
            "from that a second layer reads the order without any positions",
            "每个词元都能看到其余全部；因果掩码会让词元知道前面有多少个，第二层便能由此读出顺序，"
            "不需要任何位置",
        )
        return holds_when(condition, because)
    return holds(because)


def judge_length(figures: Figures) -> Verdict:
    """Relative positions must serve the greatest length, and learned ones must not."""
    longest = max(row["length"] for row in figures["rows"])
    found = {kind: right_at(figures, kind, longest) for kind in KINDS if kind != "nothing"}
    means = {kind: sum(x) / len(x) for kind, x in found.items()}
    because = both(
        "trained at {trained} tokens, at {longest} the right answers are: rotary {rotary:.0%}, "
        "ALiBi {alibi:.0%}, sines at the input {sines:.0%}, learned {learned:.0%}, a causal mask "
        "alone {mask:.0%} (mean of the runs)",
        "在 {trained} 个词元上训练，到 {longest} 个时答对：旋转位置 {rotary:.0%}，ALiBi "
        "{alibi:.0%}，"
        "输入上的正弦 {sines:.0%}，学习的位置 {learned:.0%}，只有因果掩码 {mask:.0%}"
        "（各次平均）",
        trained=figures["trained"],
        longest=longest,
        rotary=means["rotary"],
        alibi=means["ALiBi"],
        sines=means["sinusoidal"],
        learned=means["learned"],
        mask=means["mask"],
    )
    if longest <= figures["trained"]:
        return undecided(because)
    good = [kind for kind in ("rotary", "ALiBi") if means[kind] > RIGHT]
    if len(good) == 2 and means["learned"] < RIGHT:
        return holds(because)
    if good and means["learned"] < RIGHT:
        condition = both(
            "{kind} is meant, and not every relative position",
            "指的是{kind}，而不是每一种相对位置",
            kind=NAMES[good[0]],
        )
        return holds_when(condition, because)
    return does_not_hold(because)


def show_reading(figures: Figures) -> tuple[Chart, ...]:
    """Right answers against the length."""
    lengths = sorted({row["length"] for row in figures["rows"]})

    def curve(kind: str) -> Series:
        found = [right_at(figures, kind, length) for length in lengths]
        return Series(
            NAMES[kind],
            lengths,
            [sum(x) / len(x) for x in found],
            [min(x) for x in found],
            [max(x) for x in found],
        )

    title = both(
        "The token two places before, trained at {n} tokens",
        "两个位置之前的词元，在 {n} 个词元上训练",
        n=figures["trained"],
    )
    right = both("share of right answers", "答对的比例")
    curves = tuple(curve(kind) for kind in KINDS)
    return (Chart(title, both("tokens", "词元数"), right, curves, log_x=True),)


TYPES = {"float64": torch.float64, "float32": torch.float32, "bf16": torch.bfloat16}


def angles(positions: Tensor, width: int) -> Tensor:
    """The angle of each pair of entries at each position: (N,) -> (N, width/2), in their dtype."""
    steps = torch.arange(0, width, 2, dtype=torch.float64)
    return positions[:, None] * (10_000 ** (-steps / width)).to(positions.dtype)


def rotated(x: Tensor, turned: Tensor) -> Tensor:
    """Pairs of entries of x (..., width) turned by angles (..., width/2)."""
    a, b = x.unflatten(-1, (2, -1)).unbind(-2)
    c, s = turned.cos(), turned.sin()
    return torch.cat((a * c - b * s, a * s + b * c), -1)


def shifting(lab: Lab) -> Figures:
    """How far scores move when both tokens are shifted, by dtype, beside positions at the input."""
    width, pairs, apart = 64, lab.pick("pairs", tiny=50, quick=1000), 5
    q, k = (lab.normal(pairs, width, stream=s).cpu() for s in (1, 2))
    # Positions at the input go through both projections, so that a score has four products.
    w_q, w_k = (lab.normal(width, width, stream=s).cpu() / math.sqrt(width) for s in (3, 4))
    shifts = lab.pick("shifts", tiny=(0, 65_536), quick=(0, 16, 256, 4096, 65_536))
    rows = []
    for shift in lab.each(shifts, "shift"):
        at = torch.tensor([shift + apart, shift], dtype=torch.float64)
        row: dict[str, float] = {"shift": shift}
        for name, dtype in TYPES.items():
            turned = angles(at.to(dtype), width)
            row[name] = float(score(q.to(dtype), k.to(dtype), turned).double().std())
            row[f"{name}_scores"] = 0.0
            scores = score(q.to(dtype), k.to(dtype), turned).double()
            first = angles(torch.tensor([apart, 0], dtype=torch.float64).to(dtype), width)
            start = score(q.to(dtype), k.to(dtype), first).double()
            row[name] = float((scores - start).abs().max() / start.std())
            del row[f"{name}_scores"]
        waves = torch.cat((angles(at, width).sin(), angles(at, width).cos()), -1)  # (2, width)
        zero = angles(torch.tensor([apart, 0], dtype=torch.float64), width)
        still = torch.cat((zero.sin(), zero.cos()), -1)
        one, other = ((((q + p[0]) @ w_q) * ((k + p[1]) @ w_k)).sum(-1) for p in (waves, still))
        row["input"] = float((one - other).abs().max() / other.std())
        rows.append(row)
    return {"width": width, "apart": apart, "rows": rows}


def score(q: Tensor, k: Tensor, turned: Tensor) -> Tensor:
    """q·k of pairs (P, width), each turned by its own angles (2, width/2)."""
    return (rotated(q, turned[0]) * rotated(k, turned[1])).sum(-1)


def judge_relative(figures: Figures) -> Verdict:
    """Exact up to rounding, where angles are computed in enough digits."""
    last = figures["rows"][-1]
    because = both(
        "shifting both tokens by {shift:,} places changes a rotary score by at most {double:.0e} "
        "of the scores' deviation in float64, {single:.0e} in float32 and {half:.1f} in bf16; a "
        "score of tokens with sines at the input changes by {input:.1f}",
        "两个词元一起平移 {shift:,} 个位置，旋转位置的分数变化（以分数的标准差计）：float64 "
        "不超过 {double:.0e}，float32 {single:.0e}，bf16 {half:.1f}；"
        "输入上加正弦的词元，分数变化 {input:.1f}",
        shift=last["shift"],
        double=last["float64"],
        single=last["float32"],
        half=last["bf16"],
        input=last["input"],
    )
    if last["float64"] > 1e-6:
        return does_not_hold(because)
    if last["bf16"] < 0.05:
        return holds(because)
    condition = both(
        "the angles are computed in enough digits: in bf16 a position above 256 is rounded, and "
        "its angle with it, which is why libraries turn in float32",
        "角度算得足够精确：bf16 会舍入 256 以上的位置，角度随之出错，所以各个库都用 float32 来旋转",
    )
    return holds_when(condition, because)


def show_relative(figures: Figures) -> tuple[Chart, ...]:
    """The change against the shift."""
    rows = [
        {name: max(value, 1e-17) if name != "shift" else value for name, value in row.items()}
        for row in figures["rows"]
        if row["shift"]
    ]
    curves = series(
        rows,
        "shift",
        *((name, both(f"rotary, {name}", f"旋转位置，{name}")) for name in TYPES),
        ("input", both("sines at the input", "输入上的正弦")),
    )
    title = both("Both tokens shifted", "两个词元一起平移")
    change = both("change of a score, in deviations", "分数的变化，以标准差计")
    return (Chart(title, both("places", "位置数"), change, curves, log_x=True, log_y=True),)


def decaying(lab: Lab) -> Figures:
    """Rotary scores against distance: of equal vectors, of unrelated ones, of a turned key."""
    width, pairs = 64, lab.pick("pairs", tiny=100, quick=4000)
    distances = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    q, k = (lab.normal(pairs, width, stream=s).cpu() for s in (1, 2))
    turned_to = 16  # a key that has learnt to be sought this far away
    back = angles(torch.tensor([float(turned_to)], dtype=torch.float64), width)[0]
    rows = []
    for distance in lab.each(distances, "distance"):
        at = angles(torch.tensor([float(distance), 0.0], dtype=torch.float64), width)
        same, unrelated = score(q, q, at), score(q, k, at)
        sought = score(q, rotated(q, back), at)
        rows.append(
            {
                "distance": distance,
                "same": float(same.mean()) / width,
                "unrelated": float(unrelated.mean()) / width,
                "size": float(unrelated.std()) / math.sqrt(width),
                "sought": float(sought.mean()) / width,
            }
        )
    return {"width": width, "sought": turned_to, "rows": rows}


def judge_decay(figures: Figures) -> Verdict:
    """Scores of every kind of query and key must fall with distance."""
    rows = figures["rows"]
    last, sizes = rows[-1], [row["size"] for row in rows]
    best = max(rows, key=lambda row: row["sought"])
    because = both(
        "from distance 0 to {far} the mean score of a key that equals its query falls from "
        "{near:.2f} to {end:.2f} of ‖q‖²; the size of scores of unrelated ones stays within "
        "{low:.2f} to {high:.2f} of √d; a key turned by {sought} places scores highest at "
        "distance {best}",
        "距离从 0 到 {far}，与查询相同的键的平均分数从 ‖q‖² 的 {near:.2f} 降到 {end:.2f}；"
        "互不相关时分数的大小保持在 √d 的 {low:.2f} 到 {high:.2f}；转了 {sought} 个位置的键，"
        "在距离 {best} 处分数最高",
        far=last["distance"],
        near=rows[0]["same"],
        end=last["same"],
        low=min(sizes),
        high=max(sizes),
        sought=figures["sought"],
        best=best["distance"],
    )
    falls = last["same"] < 0.5 * rows[0]["same"]
    if not falls:
        return does_not_hold(because)
    if max(sizes) / min(sizes) > 1.2 and best["distance"] == rows[0]["distance"]:
        return holds(because)
    condition = both(
        "query and key point the same way before they are turned; unrelated ones do not decay, and "
        "W_k can turn keys so that the best distance is another one",
        "查询与键在旋转之前同向；互不相关的不会衰减，而 W_k 可以转动键，使最佳距离落在别处",
    )
    return holds_when(condition, because)


def show_decay(figures: Figures) -> tuple[Chart, ...]:
    """Mean scores against distance, and the size of unrelated ones."""
    sought = both("key turned by {n} places", "转了 {n} 个位置的键", n=figures["sought"])
    curves = series(
        figures["rows"],
        "distance",
        ("same", both("key equal to the query", "键与查询相同")),
        ("unrelated", both("unrelated key", "互不相关的键")),
        ("sought", sought),
    )
    title = both("Rotary scores against distance", "旋转位置的分数与距离")
    return (
        Chart(
            title,
            both("distance", "距离"),
            both("mean score / ‖q‖²", "平均分数 / ‖q‖²"),
            curves,
        ),
    )


CLAIMS = (
    Claim(
        id="position-order",
        sentence=both(
            "Attention without positions can't tell the order of its tokens.",
            "没有位置信息的注意力分不出词元的顺序。",
        ),
        notes="F",
        experiment=reading,
        rule=judge_order,
        shows=show_reading,
        moves=(Move("seeds", both("seeds", "种子数"), "seed"),),
        derivation=both(
            "A sum over keys does not depend on their order: attention(PX) = P·attention(X) for "
            "every permutation P. A causal mask is not permuted with the tokens: row i averages i "
            "of them, and the size of that average tells i.",
            "对键求和与它们的顺序无关：对任何置换 P 有 attention(PX) = P·attention(X)。"
            "因果掩码不随词元一起置换：第 i 行对 i 个词元取平均，平均值的大小透露了 i。",
        ),
    ),
    Claim(
        id="position-length",
        sentence=both(
            "Relative positions (rotary, ALiBi) serve longer sequences than those of the "
            "training; learned ones do not.",
            "相对位置（旋转位置、ALiBi）能用于比训练时更长的序列，学习的位置不能。",
        ),
        notes="F",
        experiment=reading,
        rule=judge_length,
        shows=show_reading,
        moves=(
            Move("tokens", both("tokens", "词元数"), "length"),
            Move("seeds", both("seeds", "种子数"), "seed"),
        ),
    ),
    Claim(
        id="position-relative",
        kind="derived",
        sentence=both(
            "With rotary positions a score depends only on the distance between two tokens.",
            "用旋转位置时，分数只取决于两个词元之间的距离。",
        ),
        notes="F",
        experiment=shifting,
        rule=judge_relative,
        shows=show_relative,
        moves=(Move("shift", both("shift", "平移"), "shift"),),
        derivation=both(
            "A rotation R keeps angles: (R_i q)·(R_j k) = q·(R_{j−i} k), because R_iᵀ R_j = "
            "R_{j−i}. Vectors added to the input give four products, of which only one depends on "
            "both positions.",
            "旋转 R 保持夹角：(R_i q)·(R_j k) = q·(R_{j−i} k)，因为 R_iᵀ R_j = R_{j−i}。"
            "加在输入上的向量会产生四个乘积，其中只有一个同时取决于两个位置。",
        ),
    ),
    Claim(
        id="position-decay",
        kind="derived",
        sentence=both(
            "Rotary positions make scores decay with distance.",
            "旋转位置使分数随距离衰减。",
        ),
        notes="F",
        experiment=decaying,
        rule=judge_decay,
        shows=show_decay,
        moves=(Move("distance", both("distance", "距离"), "distance"),),
        derivation=both(
            "q·(R_r k) sums d/2 cosines, one per frequency. They agree at r = 0 if q and k do, "
            "and cancel as r grows. For unrelated q and k they have random phases at every r.",
            "q·(R_r k) 是 d/2 个余弦之和，每个频率一个。若 q 与 k 同向，它们在 r = 0 处一致，"
            "随 r 增大而相互抵消。q 与 k 互不相关时，在任何 r 处相位都是随机的。",
        ),
    ),
)
