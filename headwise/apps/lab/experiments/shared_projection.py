"""Why Q and K have separate matrices: with one matrix for both, the logits are symmetric."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from headwise.apps.interface.settings import Setting, Whole
from headwise.apps.lab.counting import parameters
from headwise.apps.lab.experiments.draws import SEED, normals
from headwise.nn import MultiHeadAttention, Projections, Separate, Shared

WIDTH, MOST_TOKENS = 128, 48
SWEEP_DRAWS = 6
"""Inputs behind each point of the curve."""
SPREADS = tuple(range(0, 160, 15))

SETTINGS: Mapping[str, Setting] = {
    "head_width": Whole(32, 1, WIDTH, doubling=True),
    "tokens": Whole(32, 4, MOST_TOKENS),
    "spread": Whole(0, 0, 150),  # in hundredths
    "seed": SEED,
}
KINDS: Mapping[str, Projections] = {
    "separate": Separate(),
    "shared": Shared(),
}


@dataclass(frozen=True)
class HeadMatrices:
    """One head's logits and weights, row by row, and figures on symmetry and the diagonal."""

    logits: list[list[float]]
    weights: list[list[float]]
    asymmetry: float  # ‖S − Sᵀ‖ / ‖S‖, of the logits
    map_asymmetry: float  # the same of the weights
    self_mass: float  # the mean weight of a token on itself
    diagonal_wins: float  # the share of rows whose largest weight is on themselves
    received: list[float]  # by each token, from all rows together


@dataclass(frozen=True)
class Sharing:
    """The same input through separate and through shared projections."""

    parameters: dict[str, int]
    heads: dict[str, HeadMatrices]
    lengths: list[float]  # ‖x_i‖ / √width of the input's tokens
    curves: dict[str, list[float]]  # the share of rows won by the diagonal, against the spread
    spreads: list[float]


def measure(head_width: int, tokens: int, spread: int, seed: int) -> Sharing:
    """Send random tokens, whose lengths differ by e^spread, through both kinds of layer.

    >>> found = measure(head_width=32, tokens=16, spread=0, seed=0)
    >>> found.heads["shared"].asymmetry < 1e-12, found.heads["separate"].asymmetry > 1
    (True, True)
    """
    x = inputs(tokens, spread / 100, seed)
    layers = {kind: layer(kind, head_width, seed) for kind in KINDS}
    return Sharing(
        parameters={kind: parameters(attn) for kind, attn in layers.items()},
        heads={kind: head(attn, x) for kind, attn in layers.items()},
        lengths=(x.norm(dim=-1)[0] / WIDTH**0.5).tolist(),
        curves={kind: _curve(kind, head_width, tokens, seed) for kind in KINDS},
        spreads=[step / 100 for step in SPREADS],
    )


def inputs(tokens: int, spread: float, seed: int) -> Tensor:
    """Tokens (1, tokens, width) with random directions and lengths e^(spread · N(0, 1))."""
    x = normals(seed, 9, MOST_TOKENS, WIDTH)[:tokens]
    lengths = (spread * normals(seed, 10, MOST_TOKENS, 1)[:tokens]).exp()
    return (x * lengths)[None]


def layer(kind: str, head_width: int, seed: int) -> MultiHeadAttention:
    """A layer of one head, freshly initialised; both kinds start with the same query matrix."""
    with torch.device("meta"):
        attn = MultiHeadAttention(
            WIDTH, 1, head_dim=head_width, bias=False, projections=KINDS[kind]
        )
    attn = attn.to_empty(device="cpu").double()
    generator = torch.Generator().manual_seed(seed)
    for parameter in attn.parameters():  # the query's comes first
        # entries of variance 1 / width: a projected token is as long, per entry, as the token was
        nn.init.normal_(parameter, std=WIDTH**-0.5, generator=generator)
    return attn.requires_grad_(False)


def head(attn: MultiHeadAttention, x: Tensor) -> HeadMatrices:
    """Measure the layer's one head on tokens (1, N, width)."""
    _, seen = attn.observe(x, stats=("self_mass",))
    amap = attn.attention_map(x)
    weights, call = amap[0, 0], attn.prepare(x)
    # not from the weights: one below the smallest float has no logarithm
    logits = (call.q @ call.k.transpose(-1, -2) / attn.head_dim**0.5)[0, 0]
    return HeadMatrices(
        logits=_drawable(logits),
        weights=_drawable(weights),
        asymmetry=_asymmetry(logits),
        map_asymmetry=_asymmetry(weights),
        self_mass=float(seen.self_mass.mean()),
        diagonal_wins=_diagonal_wins(attn, x),
        received=amap.received()[0, 0].tolist(),
    )


def _diagonal_wins(attn: MultiHeadAttention, x: Tensor) -> float:
    keys = attn.attention_map(x).top(1)[1][:, 0, :, 0]  # (B, N)
    return float((keys == torch.arange(x.shape[1])).double().mean())


def _drawable(matrix: Tensor) -> list[list[float]]:
    """Numbers rounded to what a picture can show, so that a hundred fit into a kilobyte."""
    return [[round(number, 4) for number in row] for row in matrix.tolist()]


def _asymmetry(matrix: Tensor) -> float:
    return float((matrix - matrix.T).norm() / matrix.norm())


@lru_cache(maxsize=256)
def _curve(kind: str, head_width: int, tokens: int, seed: int) -> list[float]:
    """The share of rows whose largest weight is on themselves, at each spread of lengths."""
    attn = layer(kind, head_width, seed)
    seeds = range(seed, seed + SWEEP_DRAWS)
    return [
        _diagonal_wins(attn, torch.cat([inputs(tokens, step / 100, draw) for draw in seeds]))
        for step in SPREADS
    ]
