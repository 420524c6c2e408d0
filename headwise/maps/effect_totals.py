"""The totals of a row that turn its logits and its products grad · v into effects of its edges.

Removing key j from row i and renormalising changes grad · out by p/(1 - p) · grad · (out - v_j).
That formula has two small differences where one key holds nearly all of the weight, and at most one
key of a row does: the one with the largest logit, the peak. Its effect is computed here, from the
other keys alone, and is that of the key with a weight above `HEAVY`, if there is one; for smaller
weights the formula is as exact as p.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.core.row_sums import RowTotals


class EffectTotals(NamedTuple):
    """Per row: an edge's effect is p/(1 - p) · (product - grad · v_j); a heavy peak's is known."""

    lse: Tensor  # these three as in RowTotals
    base: Tensor
    log_total: Tensor
    product: Tensor  # grad · out
    peak_effect: Tensor  # of the key with the largest logit

    @property
    def weights(self) -> RowTotals:
        """The totals that turn logits into weights."""
        return RowTotals(self.lse, self.base, self.log_total)


class Sums(NamedTuple):
    """Sums over some keys of each row, in units of exp(base); base -inf for no keys."""

    base: Tensor
    total: Tensor  # Σ exp(s - base)
    product: Tensor  # Σ exp(s - base) · grad · v

    def join(self, other: Sums) -> Sums:
        """The sums over the keys of both."""
        base = torch.maximum(self.base, other.base)
        safe = base.masked_fill(base == -torch.inf, 0)
        here, there = torch.exp(self.base - safe), torch.exp(other.base - safe)
        return Sums(
            base,
            here * self.total + there * other.total,
            here * self.product + there * other.product,
        )

    def mean(self) -> Tensor:
        """grad · out of attention over these keys alone; 0 if there are none."""
        return torch.where(self.total == 0, 0, self.product / self.total)


class PeakSums(NamedTuple):
    """The key with the largest logit of each row, and the sums over its other keys."""

    best: Tensor  # its logit; -inf if the row sees no key
    product: Tensor  # grad · v of it
    rest: Sums

    def join(self, other: PeakSums) -> PeakSums:
        """The same over the keys of both; of equal logits, the first is the peak."""
        higher = other.best > self.best

        def both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return torch.where(higher, y, x), torch.where(higher, x, y)

        best, lesser = both(self.best, other.best)
        product, lost = both(self.product, other.product)
        joined = Sums(lesser, (lesser != -torch.inf).to(lost.dtype), lost)
        return PeakSums(best, product, self.rest.join(other.rest).join(joined))

    def totals(self, sinks: Tensor | None, whole: Whole | None) -> EffectTotals:
        """The totals of the rows (B, Hq, N); `whole` if they see keys that are not here."""
        rest = self.rest
        if sinks is not None:
            logit = sinks.to(self.best.dtype)[:, None].expand_as(self.best)
            rest = rest.join(Sums(logit, torch.ones_like(logit), torch.zeros_like(logit)))
        found = self._finished(rest)
        if whole is None:
            return found
        return self._finished(rest.join(whole.elsewhere(found)))

    def _finished(self, rest: Sums) -> EffectTotals:
        none = self.best == -torch.inf
        level = rest.base + rest.total.log()  # the log of the rest's weight
        above = (rest.base - self.best + rest.total.log()).masked_fill(none, 0)
        log_total = torch.logaddexp(above, torch.zeros_like(above))
        share, others = torch.sigmoid(-above), rest.mean()
        product = share * self.product + torch.sigmoid(above) * others
        return EffectTotals(
            torch.where(none, level, self.best + log_total),
            self.best,
            log_total,
            product.masked_fill(none, 0),
            (share * (others - self.product)).masked_fill(none, 0),
        )


class Whole(NamedTuple):
    """What is known of whole rows of which only some keys are at hand, (B, Hq, N) each."""

    lse: Tensor
    product: Tensor | None  # grad · out

    def at(self, rows: Tensor) -> Whole:
        """What is known of these rows."""
        return self.cut(lambda x: x.index_select(2, rows))

    def cut(self, part: Callable[[Tensor], Tensor]) -> Whole:
        """What is known of some of the rows."""
        return Whole(part(self.lse), None if self.product is None else part(self.product))

    def elsewhere(self, here: EffectTotals) -> Sums:
        """The sums over the keys that are not here: none where lse is the lse of those that are."""
        lse = self.lse.to(here.lse.dtype)
        more = (lse - here.lse).nan_to_num(nan=0.0)  # of two rows without keys
        near = (256 * torch.finfo(lse.dtype).eps) * lse.abs().clamp_min(1)
        same = more <= near
        if self.product is None:
            if bool(same.logical_not().any()):
                raise ValueError(
                    "lse is not that of these keys; give out of the whole rows as well"
                )
            product = here.product
        else:
            product = self.product.to(lse.dtype)
        return Sums(
            lse.masked_fill(same, -torch.inf),
            torch.expm1(-more).neg().masked_fill(same, 0),
            (product - here.product * torch.exp(-more)).masked_fill(same, 0),
        )
