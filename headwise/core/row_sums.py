"""The sums over a row's keys that one pass takes, and the results that they give.

Engines, kernels, partial results and ranks are derived from what is defined here: `RowResults` is
what a pass returns, and `ROW_SUMS` says of each sum how a block of keys adds to it, how it moves to
another base, and which statistic it becomes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

COARSE = 64.0  # an lse beyond this is rounded so much that it shows in the weights
HEAVY = 0.6  # a weight that one key of a row can exceed, however weights are rounded


class RowTotals(NamedTuple):
    """Totals that turn a row's logits s into weights: log p = (s - base) - log_total.

    base = lse and log_total = 0 would do, but lse is rounded: near 1e8, float32 has no fractions.
    The largest logit as the base is exact. Each tensor is (B, Hq, N).
    """

    lse: Tensor
    base: Tensor  # -inf for a row that sees no key
    log_total: Tensor

    @staticmethod
    def known(lse: Tensor, max_logit: Tensor, log_total: Tensor | None) -> RowTotals:
        """Totals from the results of a pass; without log_total, as exact as lse is."""
        if log_total is None:
            return RowTotals.of_lse(lse)
        return RowTotals(lse, max_logit, log_total)

    @staticmethod
    def of_lse(lse: Tensor) -> RowTotals:
        """Totals from lse alone, as exact as lse is."""
        return RowTotals(lse, lse, torch.zeros_like(lse))

    def coarse(self) -> bool:
        """True if some lse is too large to give exact weights on its own."""
        if self.lse.numel() == 0:
            return False
        largest = self.lse.abs().masked_fill(self.lse == -torch.inf, 0).amax()
        return bool(largest > COARSE)

    def safe_base(self) -> Tensor:
        """The base with +inf for rows that see no key, so that their weights are 0."""
        return self.base.masked_fill(self.base == -torch.inf, torch.inf)

    def weight(self, s: Tensor) -> Tensor:
        """The weights of logits that broadcast with the rows; at most 1, whatever rounding does."""
        return torch.exp((s - self.safe_base()).clamp_max(0) - self.log_total)


# What a pass is asked for besides out, lse and max_logit. Plain ints: operators take no flags.
LOG_TOTAL, ENTROPY, DISTANCE, PARTICIPATION, MOMENTS = 1, 2, 4, 8, 16
WIDE = 1 << 10  # out in float32 or wider, because results of other keys are still to be merged
LN_2 = 0.6931471805599453


class RowResults(NamedTuple):
    """out (B, Hq, N, Dv); the rest (B, Hq, N), None if it was not asked for.

    The backward needs the first five. Only out, lse and entropy have gradients.
    """

    out: Tensor
    lse: Tensor
    max_logit: Tensor
    log_total: Tensor | None = None  # lse - max_logit before rounding; 0 for a row without keys
    entropy: Tensor | None = None
    distance: Tensor | None = None
    participation: Tensor | None = None
    logit_mean: Tensor | None = None
    logit_var: Tensor | None = None
    visible: Tensor | None = None  # how many keys the row sees

    def totals(self) -> RowTotals:
        """The totals that turn logits into weights; exact if log_total was asked for."""
        return RowTotals.known(self.lse, self.max_logit, self.log_total)

    def weight_of(self, part: RowResults) -> Tensor:
        """The weight of the rows on some of their keys, from a pass over those without sinks.

        Both passes have log_total. A row that sees none of those keys has weight 0.
        """
        assert self.log_total is not None and part.log_total is not None
        none = part.max_logit == -torch.inf
        above = (part.max_logit - self.max_logit).masked_fill(none, 0)
        return (above + part.log_total - self.log_total).exp().masked_fill(none, 0).clamp_max(1)

    def rows(self, **others: Tensor | None) -> RowResults:
        """The results as a kernel writes them, without out, and with others in place of some."""
        return self._replace(out=None, **others)  # type: ignore[arg-type]

    def packed(self) -> tuple[Tensor, ...]:
        """The results as an operator returns them: empty (0,) in place of None."""
        return tuple(self.lse.new_empty(0) if x is None else x for x in self)


def unpacked(found: Iterable[Tensor]) -> tuple[Tensor | None, ...]:
    """The fields of `RowResults` that an operator returned, with None for those not asked for."""
    return tuple(x if x.ndim > 1 else None for x in found)


class RowParts(NamedTuple):
    """The sums of rows whose keys are split, (B, Hq, N, splits) each, before they are joined.

    After the first three come the sums behind the results of the same names; None if not asked for.
    """

    mixed: Tensor  # (B, Hq, N, splits, Dv): Σ exp(s - maximum) v; `values` is a name of Triton's
    maximum: Tensor
    total: Tensor
    entropy: Tensor | None = None
    distance: Tensor | None = None
    participation: Tensor | None = None
    logit_mean: Tensor | None = None
    logit_var: Tensor | None = None  # Σ (s - mean)²
    visible: Tensor | None = None


class Block(NamedTuple):
    """A block of keys of some rows, as the streaming loop hands it to the sums; all (..., keys)."""

    weight: Tensor  # exp(s - base)
    exponent: Tensor  # (s - base) in base 2; a sum that is the last to read it may write to it
    steps: Tensor  # (keys,): how far each key lies behind the rows' origin


class RowSum(ABC):
    """A sum over a row's keys that a pass takes if it is asked for."""

    flag: int  # what asks for it

    @abstractmethod
    def of_block(self, block: Block) -> Tensor:
        """The sum over a block of keys, (...)."""

    @abstractmethod
    def rebased(self, x: Tensor, total: Tensor, step: Tensor, scale: Tensor) -> Tensor:
        """A sum x and its total on a base that is lower by `step`; scale is exp(step)."""

    @abstractmethod
    def finished(self, x: Tensor, total: Tensor, above: Tensor, weight: Tensor) -> Tensor:
        """The statistic of rows that have seen all keys.

        `above` is lse - base, the sinks included; `weight`, exp(-above), turns a sum into one
        weighted by p, and is 0 for a row without keys.
        """

    @abstractmethod
    def undone(self, rows: RowResults, total: Tensor, above: Tensor) -> Tensor:
        """The sum behind a finished statistic; total is Σ exp(s - max_logit), above its log."""


class Shifted(RowSum):
    """Σ exp(s - base) (s - base), for the entropy."""

    flag = ENTROPY

    def of_block(self, block: Block) -> Tensor:
        return block.exponent.mul_(block.weight).sum(-1).mul_(LN_2)

    def rebased(self, x: Tensor, total: Tensor, step: Tensor, scale: Tensor) -> Tensor:
        return scale * (x + total * step)

    def finished(self, x: Tensor, total: Tensor, above: Tensor, weight: Tensor) -> Tensor:
        # A sink may be so far above the logits that this is 0 · inf.
        return (weight * (total * above - x)).masked_fill(weight == 0, 0)

    def undone(self, rows: RowResults, total: Tensor, above: Tensor) -> Tensor:
        return total * (above - rows.entropy)  # type: ignore[operator]


class Reach(RowSum):
    """Σ exp(s - base) (i - j), for the distance."""

    flag = DISTANCE

    def of_block(self, block: Block) -> Tensor:
        return torch.matmul(block.weight, block.steps)

    def rebased(self, x: Tensor, total: Tensor, step: Tensor, scale: Tensor) -> Tensor:
        return x * scale

    def finished(self, x: Tensor, total: Tensor, above: Tensor, weight: Tensor) -> Tensor:
        return weight * x

    def undone(self, rows: RowResults, total: Tensor, above: Tensor) -> Tensor:
        return total * rows.distance  # type: ignore[operator]


class Squared(RowSum):
    """Σ exp(s - base)², for the participation, which no sink changes."""

    flag = PARTICIPATION

    def of_block(self, block: Block) -> Tensor:
        return torch.mul(block.weight, block.weight, out=block.exponent).sum(-1)

    def rebased(self, x: Tensor, total: Tensor, step: Tensor, scale: Tensor) -> Tensor:
        return x * scale.square()

    def finished(self, x: Tensor, total: Tensor, above: Tensor, weight: Tensor) -> Tensor:
        return total.square() / x.masked_fill(total == 0, 1)

    def undone(self, rows: RowResults, total: Tensor, above: Tensor) -> Tensor:
        assert rows.participation is not None
        return total.square() / rows.participation.masked_fill(rows.participation == 0, 1)


ROW_SUMS: dict[str, RowSum] = {
    "entropy": Shifted(),
    "distance": Reach(),
    "participation": Squared(),
}
"""The sums by the fields of `RowResults` that they become, in their order."""

FLAGS: dict[str, int] = {
    "log_total": LOG_TOTAL,
    **{name: each.flag for name, each in ROW_SUMS.items()},
    **dict.fromkeys(("logit_mean", "logit_var", "visible"), MOMENTS),
}
"""What asks for each optional field of `RowResults`."""
EVERYTHING = sum(set(FLAGS.values()))


def asked_sums(wants: int) -> list[str]:
    """The names of the sums that `wants` asks for."""
    return [name for name, each in ROW_SUMS.items() if wants & each.flag]


def empty_results(q: Tensor, v: Tensor, wants: int) -> RowResults:
    """Unwritten results for q (B, Hq, N, D) and v (B, Hkv, M, Dv)."""
    rows = q.shape[:-1]
    wide = q.dtype if q.dtype == torch.float64 else torch.float32
    return RowResults(
        q.new_empty(*rows, v.shape[-1], dtype=wide if wants & WIDE else q.dtype),
        q.new_empty(rows, dtype=wide),
        q.new_empty(rows, dtype=wide),
        *(q.new_empty(rows, dtype=wide) if wants & flag else None for flag in FLAGS.values()),
    )
