"""A task that counts heads: bring to each token, in order, what stands at several other places."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

import headwise as hw
from headwise.look.experiments.draws import normals

TOKENS = 128
SHARP = 60.0
"""The logit of a place that is looked at; exp(−60) of the weight goes anywhere else."""


@lru_cache(maxsize=1024)
def unread(heads: int, places: int, seed: int) -> float:
    """The share of what was asked for that no linear readout recovers, 0 to 1.

    Token i is to know the content of tokens i−1, i−2, …, i−places, each for itself. Place p is
    looked at by head p mod heads, so a head with several places gives their mean. The error is that
    of the best readout (least squares), relative to the variance of what was asked for.

    >>> round(unread(heads=1, places=2, seed=0), 6), round(unread(heads=2, places=2, seed=0), 6)
    (0.5, 0.0)
    """
    content = _white(seed)
    asked = torch.stack([content.roll(place + 1) for place in range(places)], 1)  # (N, places)
    working = min(heads, places)  # further heads would have nothing to do
    logits = torch.zeros(1, working, TOKENS, TOKENS, dtype=content.dtype)
    row = torch.arange(TOKENS)
    for place in range(places):
        logits[0, place % working, row, (row - place - 1) % TOKENS] = SHARP
    blank = logits.new_zeros(1, working, TOKENS, 1)  # q·k = 0: the logits come as a bias
    values = content[:, None].expand(1, working, TOKENS, 1)
    given = hw.attention(blank, blank, values, bias=logits)[0, :, :, 0].T  # (N, working)
    readout = torch.linalg.lstsq(given, asked).solution
    return float((given @ readout - asked).square().sum() / asked.square().sum())


def _white(seed: int) -> Tensor:
    """Noise (N,) that is uncorrelated with every shift of itself, exactly: a flat spectrum.

    Ordinary noise is so only on average, and a readout fitted to it would recover some by chance.
    """
    phases = normals(seed, 5, 1, TOKENS // 2 + 1)[0] * math.pi
    spectrum = torch.polar(torch.ones_like(phases), phases)
    spectrum[0] = spectrum[-1] = 1.0  # real for a real sequence
    noise: Tensor = torch.fft.irfft(spectrum, TOKENS)
    return noise
