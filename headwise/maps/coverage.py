"""The weight that some keys of each row hold: the largest, or those that a policy keeps.

Everything goes through the rows' blocks of keys one by one, and sums weights in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.core.blocks import Unit
from headwise.core.policies import Policy
from headwise.core.row_sums import RowTotals
from headwise.engines.streaming.loop import Selection
from headwise.engines.streaming.selection import Joint, largest, select
from headwise.maps.blockwise import RegionLoop
from headwise.maps.region import Region

ROUNDING = 1e-12  # a share counts as reached if this part of it is missing
FIRST = 256  # largest weights per row that `needed` looks at first; then eight times as many


class Recall(NamedTuple):
    """What a choice of keys found, against the best choice of as many keys; (B, Hq, N) each."""

    keys: Tensor  # how many visible keys were chosen, int64
    found: Tensor  # how many of them are among the row's `keys` largest, int64
    mass: Tensor  # the weight on the chosen keys
    best: Tensor  # the weight on the `keys` largest

    @property
    def of_keys(self) -> Tensor:
        """The share of the largest keys that were chosen; 0 for a row that keeps no key."""
        return self.found / self.keys.clamp_min(1)

    @property
    def of_mass(self) -> Tensor:
        """The weight kept, of the most that as many keys could keep; 0 for a row without keys."""
        return self.mass / self.best.masked_fill(self.best == 0, 1)


def kept(region: Region, totals: RowTotals, counts: list[int]) -> Tensor:
    """The weight of each row's largest keys, (B, Hq, N, counts)."""
    rows, keys = region.box.shape[2:]
    most = min(max(counts), keys)
    out = region.zeros(rows, len(counts))
    place = torch.tensor([min(count, keys) - 1 for count in counts], device=out.device)
    for unit, rows_, best, _ in _largest(region, totals, most) if keys else ():
        _unit_part(out, unit)[..., rows_, :] = best.cumsum(-1)[..., place].to(out.dtype)
    return out.flatten(1, 2)


def kept_by(region: Region, totals: RowTotals, policy: Policy) -> Tensor:
    """The weight of the keys that a policy keeps, (B, Hq, N)."""
    return _kept_mass(region, totals, select(policy, region.q, region.k, region.terms))[1]


def recall(region: Region, totals: RowTotals, policy: Policy) -> Recall:
    """What a policy found, against the best choice of as many keys."""
    call = region.q, region.k, region.terms
    chosen = select(policy, *call)
    keys, mass = _kept_mass(region, totals, chosen)
    best = largest(keys.clamp_min(1), *call)
    most = _kept_mass(region, totals, best)[1].masked_fill(keys == 0, 0)
    found = _kept_mass(region, totals, Joint(chosen, best))[0]
    return Recall(keys, found, mass, most)


def needed(region: Region, totals: RowTotals, share: float) -> Tensor:
    """How many of its largest weights make up a share of each row's sum, int64 (B, Hq, N)."""
    rows, keys = region.box.shape[2:]
    out = region.zeros(rows).long()
    for unit, rows_, best, total in _largest(region, totals, FIRST, share) if keys else ():
        reached = best.cumsum(-1) >= (total * share * (1 - ROUNDING))[..., None]
        count = (~reached).sum(-1) + 1
        _unit_part(out, unit)[..., rows_] = count.clamp_max(keys).masked_fill(total == 0, 0)
    return out.flatten(1, 2)


Largest = tuple[Unit, slice, Tensor, Tensor]


def _largest(
    region: Region, totals: RowTotals, most: int, share: float | None = None
) -> Iterator[Largest]:
    """Rows that see a key: their largest weights in order, (b, h, G, R, most), and their sums.

    With a share, so many that they reach this share of the sum in every row. Both in float64.
    """
    loop, keys = RegionLoop(region, totals), region.k.shape[2]
    for unit, rows in loop.row_blocks() if all(region.box.shape) else ():
        count = min(most, keys)
        while True:
            best, total = _best(loop, unit, rows, count)
            if best is None:
                break
            enough = share is None or bool((best.sum(-1) >= total * share).all())
            if enough or count == keys:
                yield unit, rows, best, total
                break
            count = min(8 * count, keys)


def _best(loop: RegionLoop, unit: Unit, rows: slice, most: int) -> tuple[Tensor | None, Tensor]:
    """The largest weights of some rows and the sums of all, float64; None if no key is seen."""
    best: Tensor | None = None
    total = loop.nothing.double()
    for tile in loop.of_rows(unit, rows, ranked=True):
        new = tile.numbers.topk(min(most, tile.numbers.shape[-1])).values
        if best is not None:
            new = torch.cat((best, new), -1)
        best = new.topk(min(most, new.shape[-1])).values
        total = total + tile.numbers.exp2().sum(-1, dtype=torch.float64)
    if best is None:
        return None, total
    best = torch.nn.functional.pad(best, (0, most - best.shape[-1]), value=-torch.inf)
    return best.exp2_().double(), total


def _kept_mass(region: Region, totals: RowTotals, selection: Selection) -> tuple[Tensor, Tensor]:
    """How many visible keys a selection keeps, int64, and their weight, (B, Hq, N) each."""
    rows = region.q.shape[2]
    keys, mass = region.zeros(rows).long(), region.zeros(rows).double()
    if all(region.box.shape):
        for tile in RegionLoop(region, totals, selection).tiles(ranked=True):
            tile.of(keys)[..., tile.rows] += (tile.numbers != -torch.inf).sum(-1)
            weights = tile.numbers.exp2_().sum(-1, dtype=torch.float64)
            tile.of(mass)[..., tile.rows] += weights
    return keys.flatten(1, 2), mass.to(region.wide).flatten(1, 2)


def _unit_part(target: Tensor, unit: Unit) -> Tensor:
    return target[unit.b0 : unit.b1, unit.h0 : unit.h1]
