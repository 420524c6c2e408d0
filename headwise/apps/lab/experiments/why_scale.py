"""Why √d_k: logits, weights and gradient of random queries and keys, for three ways to scale."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from headwise import Dot, attention_map, observe
from headwise.apps.interface.settings import Choice, Setting, Whole
from headwise.apps.lab.experiments.draws import SEED, normals

WIDEST, MOST_KEYS, VALUE_WIDTH = 1024, 1024, 16
ROWS = 256
"""Query rows behind the figures of one setting."""
SWEEP_ROWS = 48
"""Query rows behind each point of the curves, 11 widths of 3 scalings at once."""
BINS = 48

SCALINGS = ("root", "none", "width")
SETTINGS: Mapping[str, Setting] = {
    "d": Whole(64, 1, WIDEST, doubling=True),
    "keys": Whole(64, 2, MOST_KEYS, doubling=True),
    "scaling": Choice("root", SCALINGS),
    "seed": SEED,
}


@dataclass(frozen=True)
class Spread:
    """A figure over rows: its median, its lowest and its highest tenth."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, rows: Tensor) -> Spread:
        """The spread of a figure (rows,).

        >>> Spread.of(torch.arange(11, dtype=torch.float64))
        Spread(low=1.0, median=5.0, high=9.0)
        """
        low, median, high = rows.quantile(rows.new_tensor([0.1, 0.5, 0.9])).tolist()
        return cls(low, median, high)


@dataclass(frozen=True)
class Point:
    """One width of a curve: the rows' mean entropy, and the gradient that softmax lets through."""

    d: int
    entropy: float
    jacobian: Spread


@dataclass(frozen=True)
class Scale:
    """Measurements at one setting, beside the values that theory predicts."""

    rows: int
    logit_mean: float
    logit_variance: float
    theory_variance: float
    edges: list[float]  # of the histogram's bins
    density: list[float]
    ranks: list[int]
    weights: list[float]  # the mean weight at each of these ranks, the largest first
    top_weight: float
    entropy: float
    entropy_limit: float  # of equal weights: log of the number of keys
    jacobian: Spread
    query_gradient: Spread
    curves: dict[str, list[Point]]  # by scaling


def measure(d: int, keys: int, scaling: str, seed: int) -> Scale:
    """Observe `ROWS` random queries of width d over `keys` random keys, scaled as asked.

    >>> found = measure(d=256, keys=64, scaling="none", seed=0)
    >>> found.theory_variance, round(found.logit_variance / 256, 1)
    (256.0, 1.0)
    """
    factor = factor_of(scaling, d)
    q, k, v = drawn(d, keys, seed, ROWS)
    q = q.clone().requires_grad_()
    out, seen = observe(q, k, v, score=Dot(factor))
    (gradient,) = torch.autograd.grad((out * _asked(seed, ROWS)).sum(), q)
    amap = attention_map(q, k, score=Dot(factor), lse=seen.lse)
    logits = amap.to_tensor().log() + seen.lse.detach()[..., None]  # in float64 none is lost
    histogram = torch.histogram(logits.flatten(), BINS, density=True)
    weights = amap.top(keys)[0][0, 0]  # (rows, keys)
    ranks = sorted({round(keys ** (step / 40)) for step in range(41)})
    return Scale(
        rows=ROWS,
        logit_mean=float(logits.mean()),
        # the variance over all pairs, from what each row saw: within rows, and between them
        logit_variance=float(seen.logit_var.mean() + seen.logit_mean.var(correction=0)),
        theory_variance=d * factor**2,
        edges=histogram.bin_edges.tolist(),
        density=histogram.hist.tolist(),
        ranks=ranks,
        weights=weights.mean(0)[[rank - 1 for rank in ranks]].tolist(),
        top_weight=float(seen.top_prob.mean()),
        entropy=float(seen.entropy.detach().mean()),
        entropy_limit=math.log(keys),
        jacobian=Spread.of(jacobian_norm(weights)),
        query_gradient=Spread.of(gradient.norm(dim=-1)[0, 0]),
        curves=_curves(keys, seed),
    )


def factor_of(scaling: str, d: int) -> float:
    """The factor that multiplies the products.

    >>> factor_of("root", 64), factor_of("none", 64), factor_of("width", 64)
    (0.125, 1.0, 0.015625)
    """
    return {"root": 1 / math.sqrt(d), "none": 1.0, "width": 1 / d}[scaling]


def drawn(d: int, keys: int, seed: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """q (1, 1, rows, d), k (1, 1, keys, d) and v (1, 1, keys, 16), independent N(0, 1)."""
    q = normals(seed, 1, ROWS, WIDEST)[:rows, :d]
    k = normals(seed, 2, MOST_KEYS, WIDEST)[:keys, :d]
    v = normals(seed, 3, MOST_KEYS, VALUE_WIDTH)[:keys]
    return q[None, None], k[None, None], v[None, None]


def jacobian_norm(weights: Tensor) -> Tensor:
    """The Frobenius norm of ∂p/∂s = diag(p) − p pᵀ for weights (rows, keys).

    It avoids differences of nearly equal numbers: a saturated row has a norm of about 1e-20, which
    1 − p² − … would round to 1e-8.

    >>> jacobian_norm(torch.full((1, 4), 0.25, dtype=torch.float64))  # √3 / 4
    tensor([0.4330], dtype=torch.float64)
    """
    top, place = weights.max(-1)
    rest = weights.scatter(-1, place[:, None], 0.0)
    others = rest.sum(-1)  # 1 − top
    squares = rest.square().sum(-1)
    diagonal = (top * others).square() + (rest * (1 - rest)).square().sum(-1)
    across = 2 * top.square() * squares + squares.square() - rest.pow(4).sum(-1)
    return (diagonal + across).sqrt()


@lru_cache(maxsize=64)
def _curves(keys: int, seed: int) -> dict[str, list[Point]]:
    """Entropy and gradient against the width, for every scaling."""
    widths = [1 << step for step in range(WIDEST.bit_length())]
    points = [_points(d, keys, seed) for d in widths]
    return {name: [point[name] for point in points] for name in SCALINGS}


def _points(d: int, keys: int, seed: int) -> dict[str, Point]:
    """One width of each curve: the scalings are three heads that share their keys."""
    q, k, v = drawn(d, keys, seed, SWEEP_ROWS)
    q = torch.cat([factor_of(scaling, d) * q for scaling in SCALINGS], 1)
    _, seen = observe(q, k, v, score=Dot(1.0), stats=("entropy", "lse"))
    weights = attention_map(q, k, score=Dot(1.0), lse=seen.lse)[0]  # (3, rows, keys)
    return {
        name: Point(d, float(seen.entropy[0, head].mean()), Spread.of(jacobian_norm(weights[head])))
        for head, name in enumerate(SCALINGS)
    }


def _asked(seed: int, rows: int) -> Tensor:
    """The gradient that arrives at the output, N(0, 1) as well: (rows, 16)."""
    return normals(seed, 4, ROWS, VALUE_WIDTH)[:rows]
