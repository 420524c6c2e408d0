"""Why many heads: what they cost, what each head's matrix becomes, and what one head can't do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import headwise as hw
from headwise.look.experiments.reading_task import unread
from headwise.look.experiments.settings import SEED, Setting, Whole

WIDEST, MOST_HEADS = 512, 64
SETTINGS: Mapping[str, Setting] = {
    "width": Whole(256, 64, WIDEST, doubling=True),
    "heads": Whole(8, 1, MOST_HEADS, doubling=True),
    "tokens": Whole(128, 16, 4096, doubling=True),
    "places": Whole(4, 1, 16),
    "seed": SEED,
}


@dataclass(frozen=True)
class Layer:
    """A layer of this many heads, counted on the module: narrow heads, and full-width ones."""

    heads: int
    head_width: int
    parameters: int
    flops: int
    full_width_parameters: int
    maps: int  # attention weights, over all heads


@dataclass(frozen=True)
class Heads:
    """Layers of one width cut into 1 to 64 heads; one head's matrix; reading several places."""

    layers: list[Layer]
    singular_values: list[float]  # of W_q W_kᵀ of the first head, the largest first
    rank: int
    unread: list[float]  # the share of what was to be read that is lost, in each of the layers


def measure(width: int, heads: int, tokens: int, places: int, seed: int) -> Heads:
    """Count layers of every number of heads, and look at the matrix of one head of the chosen one.

    >>> found = measure(width=64, heads=4, tokens=16, places=4, seed=0)
    >>> {layer.parameters for layer in found.layers}, found.rank
    ({16640}, 16)
    """
    counts = [1 << step for step in range(MOST_HEADS.bit_length())]
    values = singular_values(width, heads, seed)
    return Heads(
        layers=[count_layer(width, number, tokens) for number in counts],
        singular_values=values.tolist(),
        rank=int((values > values[0] * width * torch.finfo(values.dtype).eps).sum()),
        unread=[unread(number, places, seed) for number in counts],
    )


@lru_cache(maxsize=1024)
def count_layer(width: int, heads: int, tokens: int) -> Layer:
    """Parameters and operations of a real layer; on the meta device, so nothing is computed."""
    with torch.device("meta"):
        layer = hw.nn.MultiHeadAttention(width, heads)
        full_width = hw.nn.MultiHeadAttention(width, heads, head_dim=width)
        with FlopCounterMode(display=False) as counter:
            layer(torch.empty(1, tokens, width))
    return Layer(
        heads=heads,
        head_width=layer.head_dim,
        parameters=size(layer),
        flops=counter.get_total_flops(),
        full_width_parameters=size(full_width),
        maps=heads * tokens**2,
    )


def singular_values(width: int, heads: int, seed: int) -> Tensor:
    """Of the first head's W_q W_kᵀ (width, width) in a freshly initialised layer, all of them.

    >>> values = singular_values(64, 8, seed=0)
    >>> len(values), int((values > 1e-12).sum())
    (64, 8)
    """
    with torch.device("meta"):
        layer = hw.nn.MultiHeadAttention(width, heads, bias=False)
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


def size(module: nn.Module) -> int:
    """How many parameters a module has."""
    return sum(parameter.numel() for parameter in module.parameters())
