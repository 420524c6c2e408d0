"""Any history of a cache, with steps taken back, reordered and refused, equals a fresh forward."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.nn import Cache, FixedCache, GrowingCache, Int8Cache, PagedCache, PagePool

D, HEADS, WINDOW, LONGEST = 32, 4, 5, 38
CAUSAL, NEAR = hw.mask.causal(), hw.mask.causal() & hw.mask.window(WINDOW - 1)
CACHES: dict[str, tuple[Callable[[], Cache], hw.mask.Mask]] = {
    "growing": (GrowingCache, CAUSAL),
    "fixed": (lambda: FixedCache(40), CAUSAL),
    "sliding": (lambda: hw.nn.SlidingCache(WINDOW, spare=6), NEAR),
    "paged": (lambda: PagedCache(PagePool(128, 4)), CAUSAL),
    "int8": (Int8Cache, CAUSAL),
}
POSITIONS = [
    None,
    hw.nn.Rotary(),
    hw.nn.Rotary(width=4, layout="adjacent"),
    hw.nn.ALiBi(),
    hw.nn.RelativeBuckets(8, 6, bidirectional=False),
    hw.nn.Learned(40),
]
STATS = ("lse", "max_logit", "entropy", "sink_mass", "self_mass", "previous_mass", "distance")
IDS = torch.arange(40)[None] // 4
PAIRS = torch.rand(40, 40, generator=torch.Generator().manual_seed(0))


def of_a_step(kind: str, first: int, last: int, batch: int) -> dict[str, Any]:
    """The options of a call for tokens [first, last) of a sequence."""
    rows = PAIRS[first:last, :last]
    start = torch.arange(batch)[:, None, None]
    return {
        "nothing": {},
        "left padding": {"mask": hw.mask.between(start, torch.full_like(start, 1000))},
        "right padding": {"mask": hw.mask.lengths(torch.tensor([30, 3, 9])[:batch])},
        "dense": {"mask": hw.mask.dense(rows > 0.3)},
        "documents": {"mask": hw.mask.documents(IDS[:, :last])},
        "bias": {"bias": rows},
    }[kind]


class History:
    """A layer and a cache that have seen x (B, N, D)."""

    def __init__(self, kind: str, dice: random.Random) -> None:
        make, mask = CACHES[kind]
        position = dice.choice(POSITIONS)
        options = ["nothing", "left padding", "right padding", "dense"]
        options += [] if kind == "fixed" else ["documents"]
        biased = isinstance(position, hw.nn.ALiBi | hw.nn.RelativeBuckets)
        options += [] if biased else ["bias"]
        self.option, self.dice, self.cache = dice.choice(options), dice, make()
        sinks, cap = dice.random() < 0.3, dice.choice([None, 3.0])
        self.attn = hw.nn.MultiHeadAttention(
            D, HEADS, kv_heads=2, mask=mask, position=position, sinks=sinks, softcap=cap
        ).eval()
        for parameter in self.attn.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        self.x = torch.empty(dice.randint(1, 3), 0, D)
        self.close = {"rtol": 1e-3, "atol": 0.5 if kind == "int8" else 2e-4}

    def append(self) -> None:
        new = torch.randn(self.x.shape[0], self.dice.choice([0, 1, 1, 1, 2, 3, 7]), D)
        first, last = self.x.shape[1], self.x.shape[1] + new.shape[1]
        if last > LONGEST or last == 0:
            return
        self.x = torch.cat((self.x, new), 1)
        step = of_a_step(self.option, first, last, self.x.shape[0])
        whole = of_a_step(self.option, 0, last, self.x.shape[0])
        expected, seen = self.attn.observe(self.x, **whole, stats=STATS)
        if self.dice.random() < 0.5:
            self.same(self.attn(new, cache=self.cache, **step), expected[:, first:])
            return
        out, found = self.attn.observe(new, cache=self.cache, **step, stats=STATS)
        self.same(out, expected[:, first:])
        if not isinstance(self.cache, Int8Cache):
            for name in STATS:
                self.same(getattr(found, name), getattr(seen, name)[..., first:])

    def rollback(self) -> None:
        count = self.dice.randint(0, min(6, self.x.shape[1]))
        self.cache.rollback(count)
        self.x = self.x[:, : self.x.shape[1] - count]

    def reorder(self) -> None:
        if self.x.shape[1]:
            batch = range(self.x.shape[0])
            index = torch.tensor(self.dice.choices(batch, k=self.dice.randint(1, 3)))
            self.cache.reorder(index)
            self.x = self.x[index]

    def refused(self) -> None:
        mask = hw.mask.dense(torch.ones(2, 77, dtype=torch.bool))
        if self.x.shape[1] + 2 <= LONGEST:
            with pytest.raises(ValueError, match="77"):
                self.attn(torch.randn(self.x.shape[0], 2, D), cache=self.cache, mask=mask)

    def same(self, a: Tensor, b: Tensor) -> None:
        torch.testing.assert_close(a, b, **self.close)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", CACHES)
@torch.no_grad()
def test_a_history_equals_a_fresh_forward(kind: str, seed: int) -> None:
    torch.manual_seed(seed)
    dice = random.Random(seed)
    history = History(kind, dice)
    steps = [history.append] * 4 + [history.rollback, history.reorder, history.refused]
    for _ in range(12):
        dice.choice(steps)()
        assert int(history.cache.length) == history.x.shape[1]
