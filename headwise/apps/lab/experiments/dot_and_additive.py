"""Dot product against Bahdanau's additive score: time and memory per pair, and effect of width."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor, nn

from headwise import Additive, Dot, attention, observe
from headwise.apps.interface.settings import Setting, Whole
from headwise.apps.lab.counting import flops, in_turns, kept_bytes
from headwise.apps.lab.experiments.draws import SEED, normals

WIDEST, MOST_TOKENS = 256, 1024
SWEEP_KEYS = 64
SWEEP_HEADS = 8
"""Draws of the additive score's weights per point: at width 1 a draw is a single number."""
MOST_PRODUCTS = 1 << 22
"""The most products q_d k_d in a timed call; beyond it fewer query rows are timed."""

SETTINGS: Mapping[str, Setting] = {
    "d": Whole(64, 1, WIDEST, doubling=True),
    "tokens": Whole(256, 16, MOST_TOKENS, doubling=True),
    "seed": SEED,
}
SCORES = ("scaled", "unscaled", "additive", "additive_unscaled")
Scored = Dot | Additive
Attend = Callable[[Tensor, Tensor, Tensor, Scored], Tensor]


@dataclass(frozen=True)
class ScoreCost:
    """Time, operations and bytes kept for the backward pass of one score, per pair."""

    nanoseconds: float
    flops: float
    textbook_bytes: float  # every step written out
    fused_bytes: float  # block by block, as the library runs it


@dataclass(frozen=True)
class Sharpness:
    """The logits' deviation and the largest weight at one width."""

    d: int
    deviation: float
    top_weight: float


@dataclass(frozen=True)
class Comparison:
    """Both scores at one size, and both against the width, scaled and unscaled."""

    dot: ScoreCost
    additive: ScoreCost
    ratio: float  # additive's time over dot's
    sweep_keys: int
    curves: dict[str, list[Sharpness]]


def measure(d: int, tokens: int, seed: int) -> Comparison:
    """Run both scores on the same tensors, in turns, and count their operations and kept bytes.

    >>> found = measure(d=16, tokens=32, seed=0)
    >>> found.dot.flops, found.additive.flops
    (64.0, 96.0)
    """
    q, k, v = drawn(d, tokens, seed)
    scores: tuple[Scored, Scored] = Dot(), additive(d, seed)
    few = q[:, :, : max(1, MOST_PRODUCTS // (tokens * d))]
    timed = [partial(attention, few, k, v, score=score) for score in scores]
    dot, slow = in_turns(timed)
    dot_cost, additive_cost = (
        ScoreCost(
            nanoseconds=1e9 * seconds / (few.shape[2] * tokens),
            flops=_flops(q, k, v, score) / tokens**2,
            textbook_bytes=_kept_bytes(textbook, q, k, v, score) / tokens**2,
            fused_bytes=_kept_bytes(_fused, q, k, v, score) / tokens**2,
        )
        for score, seconds in zip(scores, (dot, slow), strict=True)
    )
    return Comparison(dot_cost, additive_cost, slow / dot, SWEEP_KEYS, _curves(seed))


def additive(d: int, seed: int, heads: int = 1) -> Additive:
    """Bahdanau's score with freshly initialised weights: uniform within ±1/√d.

    Their variance is 1/(3d), so a sum of d terms of variance about one is divided by about √d, as
    in the scaled dot product.
    """
    generator = torch.Generator().manual_seed(seed)
    weight = torch.empty(heads, d)
    nn.init.uniform_(weight, -(d**-0.5), d**-0.5, generator=generator)
    return Additive(weight)


def textbook(q: Tensor, k: Tensor, v: Tensor, score: Scored) -> Tensor:
    """Attention as it is taught, every logit written out: q (..., N, D), k (..., M, D) -> v's rows.

    >>> q, k, v = drawn(8, 16, seed=0)
    >>> torch.allclose(textbook(q, k, v, Dot()), attention(q, k, v), atol=1e-6)
    True
    """
    if isinstance(score, Dot):
        logits = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    else:
        logits = (
            torch.tanh(q[..., :, None, :] + k[..., None, :, :]) @ score.weight[0]
        )  # (..., N, M)
    out: Tensor = logits.softmax(-1) @ v
    return out


def _fused(q: Tensor, k: Tensor, v: Tensor, score: Scored) -> Tensor:
    return attention(q, k, v, score=score, engine="streaming")


def _flops(q: Tensor, k: Tensor, v: Tensor, score: Scored) -> int:
    return flops(partial(_fused, *without_numbers(q, k, v, score)))


def _kept_bytes(attend: Attend, q: Tensor, k: Tensor, v: Tensor, score: Scored) -> int:
    q, k, v, score = without_numbers(q, k, v, score)
    return kept_bytes(
        lambda: attend(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), score)
    )


def without_numbers(
    q: Tensor, k: Tensor, v: Tensor, score: Scored
) -> tuple[Tensor, Tensor, Tensor, Scored]:
    """The same call on the meta device, where counting takes no time."""
    if isinstance(score, Additive):
        score = Additive(score.weight.to("meta"))
    return q.to("meta"), k.to("meta"), v.to("meta"), score


@lru_cache(maxsize=64)
def _curves(seed: int) -> dict[str, list[Sharpness]]:
    widths = [1 << step for step in range(WIDEST.bit_length())]
    return {name: [_sharpness(name, d, seed) for d in widths] for name in SCORES}


def _sharpness(name: str, d: int, seed: int) -> Sharpness:
    q, k, v = drawn(d, SWEEP_KEYS, seed)
    heads = SWEEP_HEADS if name.startswith("additive") else 1
    q = q.expand(1, heads, -1, -1)
    stats = ("top_prob", "logit_mean", "logit_var")
    _, seen = observe(q, k, v, score=_score(name, d, seed, heads), stats=stats)
    variance = seen.logit_var.mean() + seen.logit_mean.var(2, correction=0).mean()
    return Sharpness(d, float(variance.sqrt()), float(seen.top_prob.mean()))


def _score(name: str, d: int, seed: int, heads: int) -> Scored:
    if name == "scaled":
        return Dot()
    if name == "unscaled":
        return Dot(1.0)
    start = additive(d, seed, heads)
    # the same weights without the division: variance one at every width
    return start if name == "additive" else Additive(math.sqrt(3 * d) * start.weight)


def drawn(d: int, tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v (1, 1, tokens, d), N(0, 1), float32."""
    q, k, v = (
        normals(seed, stream, MOST_TOKENS, WIDEST)[:tokens, :d].float()[None, None]
        for stream in (6, 7, 8)
    )
    return q, k, v
