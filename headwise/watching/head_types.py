"""Types of heads, each by a stated rule, from what was seen of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.maps.attention_map import AttentionMap
from headwise.watching.recorder.layer import WatchedLayer

HALF = 0.5
"""A head is of a type if at least this much of its weight is there, on average."""

REPEATED = 0.3
"""The threshold for induction: on tokens that did not occur before such a head rests."""

NEAR = 8
"""Keys this close are local."""

FEW = 4 * NEAR
"""Rows that see fewer keys can't tell near from far."""

QUIET = 0.1
"""A dormant head's output norm is below this share of the mean of its layer's heads."""

BROAD = 0.5
"""A uniform head spreads its weight over at least this share of the keys that it sees."""

LEAST = {
    "induction": REPEATED,
    "previous-token": HALF,
    "self": HALF,
    "sink": HALF,
    "local": HALF,
    "uniform": BROAD,
}
"""The least score of each type, in the order in which the types are tried."""

SAMPLE = 64
"""Rows of a layer whose weights are looked at one by one."""

RULES = {
    "dormant": f"its output is under {QUIET:.0%} of the mean of its layer's heads",
    "induction": f"of tokens seen before, {REPEATED:.0%} of the weight is on what followed them",
    "previous-token": "half of the weight is on the token before",
    "self": "half of the weight is on the token itself",
    "sink": "half of the weight is on the first token",
    "local": f"half of the weight is on the {NEAR} tokens to each side",
    "uniform": f"it spreads its weight over {BROAD:.0%} of the keys it sees, or more (exp entropy)",
    "content": "none of these: it looks for something in the text",
}
"""The types and their rules; a head is of the first that fits."""


@dataclass(frozen=True)
class Scores:
    """The numbers that the rules read, one per head (Hq,) each; NaN if unknown."""

    dormant: Tensor
    induction: Tensor
    previous: Tensor
    self: Tensor
    sink: Tensor
    local: Tensor
    uniform: Tensor

    def by_type(self) -> list[dict[str, float]]:
        """The scores of each head by the type that they speak for; unknown ones are left out."""
        named = {
            "dormant": self.dormant,
            "induction": self.induction,
            "previous-token": self.previous,
            "self": self.self,
            "sink": self.sink,
            "local": self.local,
            "uniform": self.uniform,
        }
        each = [
            {name: float(score[head]) for name, score in named.items()}
            for head in range(len(self.sink))
        ]
        return [{name: x for name, x in head.items() if not math.isnan(x)} for head in each]

    def types(self) -> list[str]:
        """The type of each head."""
        return [_type(scores) for scores in self.by_type()]


def _type(scores: dict[str, float]) -> str:
    """The first type whose rule the scores of a head fit."""
    if scores.get("dormant", 1.0) < QUIET:
        return "dormant"
    fits = (name for name, least in LEAST.items() if scores.get(name, 0.0) >= least)
    return next(fits, "content")


def scores(layer: WatchedLayer, tokens: Tensor | None) -> Scores:
    """The scores of a layer's heads; tokens (B, N), if known, show induction."""
    seen = layer.observation
    within = layer.kind == "self"
    needed = ["sink_mass", "output_norm", *(["self_mass", "previous_mass"] if within else [])]
    missing = [name for name in needed if name not in seen.values]
    if missing:
        raise ValueError(
            f"types need {', '.join(missing)}, which this watch left out; use hw.watch(model) "
            "without stats="
        )
    counted = seen.sees & ~_early(layer)[:, None]
    means = {name: _mean(seen.values[name], counted) for name in needed}
    unknown = torch.full_like(means["sink_mass"], torch.nan)
    norms = means["output_norm"]
    local = induction = uniform = unknown
    if within or (layer.last is not None and layer.last.call is not None):
        weights, rows = sampled_weights(layer)
        uniform = _spread(weights)
    if within:
        local = _local(weights, rows)
        if tokens is not None and tokens.shape == (seen.sees.shape[0], layer.map().shape[2]):
            induction = _induction(layer.map(), _told_apart(tokens[0], layer))
    return Scores(
        dormant=norms / norms.mean().clamp_min(1e-30),
        induction=induction,
        previous=means.get("previous_mass", unknown),
        self=means.get("self_mass", unknown),
        sink=means["sink_mass"],
        local=local,
        uniform=uniform,
    )


def sampled_weights(layer: WatchedLayer) -> tuple[Tensor, Tensor]:
    """Weights (Hq, R, M) of some rows of the first sequence, and the rows' positions (R,).

    The rows are spread evenly over those that see enough keys to tell heads apart.
    """
    amap = layer.map()
    _, _, queries, keys = amap.shape
    looked, early = layer.observation.rows, _early(layer)[0].cpu()
    rows = torch.arange(queries) if looked is None else looked.cpu()
    rows = rows[~early] if not early.all() else rows
    chosen = rows[torch.linspace(0, len(rows) - 1, min(SAMPLE, len(rows))).long()]
    weights = torch.stack([amap[0, :, int(row), :] for row in chosen], 1).cpu()
    return weights, chosen + keys - queries


def similarity(layer: WatchedLayer) -> Tensor:
    """The similarity of a layer's heads, (Hq, Hq): 1 minus the mean distance of their rows.

    The distance of two rows is the total variation ½ Σ |p − p'|, as Bhojanapalli et al. (2021) take
    it: 1 means the same weights everywhere, 0 no key in common.
    """
    weights, _ = sampled_weights(layer)
    distance = torch.stack([torch.cdist(row, row, p=1) / 2 for row in weights.unbind(1)])
    return 1 - distance.mean(0)


def _early(layer: WatchedLayer) -> Tensor:
    """The first rows, which see too little to tell types apart, and padding: (B, rows seen)."""
    seen = layer.observation
    batch, _, count = seen.sees.shape
    number = torch.arange(count, device=seen.sees.device) if seen.rows is None else seen.rows
    padding = layer.padding
    if padding is None:
        start = number.new_zeros(batch, 1)
        hidden = seen.sees.new_zeros(batch, count)
    else:
        start = padding.long().cumprod(1).sum(1, keepdim=True)  # padding on the left
        hidden = padding.index_select(1, number)
    last = int(number.max()) + 1 if count else 0
    return hidden | (number - start < min(NEAR, last // 2))


def _mean(value: Tensor, counted: Tensor) -> Tensor:
    total = value.double().masked_fill(~counted, 0).sum((0, 2))
    return (total / counted.sum((0, 2)).clamp_min(1)).cpu()


def _spread(weights: Tensor) -> Tensor:
    """exp(entropy) as a share of the keys that are seen, (Hq,): the mean over rows (Hq, R, M).

    Keys to which no head gives any weight are taken for hidden; rows that see one key are left out.
    """
    p = weights.double()
    seen = (p > 0).any(0).sum(-1)  # (R,)
    share = torch.special.entr(p).sum(-1).exp() / seen.clamp_min(1)
    found: Tensor = share[:, seen > 1].mean(1)
    return found


def _local(weights: Tensor, positions: Tensor) -> Tensor:
    """The weight on the keys beside the query, (Hq,), over rows that see many more."""
    far = positions >= FEW
    if not far.any():
        return torch.full((weights.shape[0],), torch.nan, dtype=torch.float64)
    columns = torch.arange(weights.shape[2])
    near = (columns - positions[far, None]).abs() <= NEAR
    return weights[:, far].double().mul(near).sum(-1).mean(1)


def _told_apart(tokens: Tensor, layer: WatchedLayer) -> list[int]:
    """Tokens (N,); those of images and padding, which share an id, are numbered."""
    apart = tokens.tolist()
    padding = () if layer.padding is None else (layer.padding,)
    for shared in (*layer.parts.values(), *padding):
        for place in shared[0, : len(apart)].nonzero().flatten().tolist():
            apart[place] = -1 - place
    return apart


def _induction(amap: AttentionMap, ids: list[int]) -> Tensor:
    """The weight on what followed earlier occurrences of a row's token, (Hq,)."""
    followed: dict[int, list[int]] = {}
    pairs: list[tuple[int, list[int]]] = []
    for row, token in enumerate(ids):
        after = [key for key in followed.get(token, []) if key < row]
        if after:
            pairs.append((row, after))
        followed.setdefault(token, []).append(row + 1)
    pairs = pairs[-SAMPLE:]
    if len(pairs) < 4:
        return torch.full((amap.shape[1],), torch.nan, dtype=torch.float64)
    found = [amap[0, :, row, :].cpu().double()[:, after].sum(1) for row, after in pairs]
    return torch.stack(found).mean(0)
