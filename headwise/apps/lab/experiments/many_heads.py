"""Why many heads: their cost, the rank of each head's matrix, and a task that one head can't do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from headwise import attention
from headwise.apps.interface.settings import Setting, Whole
from headwise.apps.lab.counting import flops, parameters
from headwise.apps.lab.experiments.draws import SEED, normals
from headwise.nn import MultiHeadAttention

WIDEST, MOST_HEADS = 512, 64
TASK_TOKENS = 128
SHARP = 60.0
"""The logit of a place that is looked at; exp(−60) of the weight goes anywhere else."""
SETTINGS: Mapping[str, Setting] = {
    "width": Whole(256, 64, WIDEST, doubling=True),
    "heads": Whole(8, 1, MOST_HEADS, doubling=True),
    "tokens": Whole(128, 16, 4096, doubling=True),
    "places": Whole(4, 1, 16),
    "seed": SEED,
}


@dataclass(frozen=True)
class LayerCount:
    """The size of a layer with this many heads, counted on a module: narrow or full-width heads."""

    heads: int
    head_width: int
    parameters: int
    flops: int
    full_width_parameters: int
    maps: int  # attention weights, over all heads


@dataclass(frozen=True)
class ManyHeads:
    """Layers of one width cut into 1 to 64 heads; one head's matrix; reading several places."""

    layers: list[LayerCount]
    singular_values: list[float]  # of W_q W_kᵀ of the first head, the largest first
    rank: int
    unread: list[float]  # the share of the asked content that is lost, for each of the layers


def measure(width: int, heads: int, tokens: int, places: int, seed: int) -> ManyHeads:
    """Count layers with every number of heads; take the matrix of one head of the chosen one.

    >>> found = measure(width=64, heads=4, tokens=16, places=4, seed=0)
    >>> {layer.parameters for layer in found.layers}, found.rank
    ({16640}, 16)
    """
    counts = [1 << step for step in range(MOST_HEADS.bit_length())]
    values = singular_values(width, heads, seed)
    return ManyHeads(
        layers=[count_layer(width, number, tokens) for number in counts],
        singular_values=values.tolist(),
        rank=int((values > values[0] * width * torch.finfo(values.dtype).eps).sum()),
        unread=[unread(number, places, seed) for number in counts],
    )


@lru_cache(maxsize=1024)
def count_layer(width: int, heads: int, tokens: int) -> LayerCount:
    """Count the parameters and operations of a real layer, on the meta device."""
    with torch.device("meta"):
        layer = MultiHeadAttention(width, heads)
        full_width = MultiHeadAttention(width, heads, head_dim=width)
        x = torch.empty(1, tokens, width)
    return LayerCount(
        heads=heads,
        head_width=layer.head_dim,
        parameters=parameters(layer),
        flops=flops(lambda: layer(x)),
        full_width_parameters=parameters(full_width),
        maps=heads * tokens**2,
    )


def singular_values(width: int, heads: int, seed: int) -> Tensor:
    """Singular values of the first head's W_q W_kᵀ (width, width) in a freshly initialised layer.

    >>> values = singular_values(64, 8, seed=0)
    >>> len(values), int((values > 1e-12).sum())
    (64, 8)
    """
    with torch.device("meta"):
        layer = MultiHeadAttention(width, heads, bias=False)
    layer = layer.to_empty(device="cpu").double()
    generator = torch.Generator().manual_seed(seed)
    for parameter in layer.parameters():
        nn.init.xavier_uniform_(parameter, generator=generator)
    assert isinstance(layer.query, nn.Linear) and isinstance(layer.key, nn.Linear)
    query, key = layer.query.weight, layer.key.weight
    head = slice(0, layer.head_dim)
    with torch.no_grad():
        values: Tensor = torch.linalg.svdvals(query[head].T @ key[head])
    return values


@lru_cache(maxsize=1024)
def unread(heads: int, places: int, seed: int) -> float:
    """The share of what was asked for that no linear readout recovers, 0 to 1.

    Token i has to recover the content of tokens i−1, i−2, …, i−places separately. Head p mod heads
    looks at place p, so a head with several places gives their mean. The error is that of the best
    readout (least squares), relative to the variance of what was asked for.

    >>> round(unread(heads=1, places=2, seed=0), 6), round(unread(heads=2, places=2, seed=0), 6)
    (0.5, 0.0)
    """
    content = _white(seed)
    asked = torch.stack([content.roll(place + 1) for place in range(places)], 1)  # (N, places)
    working = min(heads, places)  # further heads have nothing to do
    logits = torch.zeros(1, working, TASK_TOKENS, TASK_TOKENS, dtype=content.dtype)
    row = torch.arange(TASK_TOKENS)
    for place in range(places):
        logits[0, place % working, row, (row - place - 1) % TASK_TOKENS] = SHARP
    blank = logits.new_zeros(1, working, TASK_TOKENS, 1)  # q·k = 0: the logits come as a bias
    values = content[:, None].expand(1, working, TASK_TOKENS, 1)
    given = attention(blank, blank, values, bias=logits)[0, :, :, 0].T  # (N, working)
    readout = torch.linalg.lstsq(given, asked).solution
    return float((given @ readout - asked).square().sum() / asked.square().sum())


def _white(seed: int) -> Tensor:
    """Noise (N,) that is uncorrelated with every shift of itself, exactly: a flat spectrum.

    Ordinary noise is uncorrelated only on average, and a fitted readout would recover some of it.
    """
    phases = normals(seed, 5, 1, TASK_TOKENS // 2 + 1)[0] * math.pi
    spectrum = torch.polar(torch.ones_like(phases), phases)
    spectrum[0] = spectrum[-1] = 1.0  # real for a real sequence
    noise: Tensor = torch.fft.irfft(spectrum, TASK_TOKENS)
    return noise
