"""Attention over some of the keys, as a value that merges with attention over the rest.

A `Partial` holds sums over the keys seen so far, all scaled by exp(-base), where base is at or near
the largest logit. `merge` joins two of them and is associative, so blocks, splits of a cache,
chunks of a prompt and ranks of a ring are all the same operation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.core.row_sums import ROW_SUMS, RowResults


class Moments(NamedTuple):
    """The moments of a row's visible logits s, (...) each."""

    keys: Tensor  # how many
    mean: Tensor
    spread: Tensor  # Σ (s - mean)²


@dataclass(frozen=True, eq=False)
class Partial:
    """Attention of some rows over some keys, before the division. Rows (...) have any shape."""

    base: Tensor  # (...): finite; the sums are scaled by exp(-base)
    maximum: Tensor  # (...): the largest logit; -inf where no key was seen
    total: Tensor  # (...): Σ exp(s - base)
    values: Tensor  # (..., Dv): Σ exp(s - base) v
    sums: Mapping[str, Tensor] = field(default_factory=dict)  # (...): of ROW_SUMS, if asked for
    moments: Moments | None = None  # if asked for
    sinks: Tensor | None = None  # broadcasts to (...): join once, at the end
    dtype: torch.dtype | None = None  # of the output; None for that of the sums

    @staticmethod
    def from_results(rows: RowResults, sinks: Tensor | None, dtype: torch.dtype) -> Partial:
        """The sums behind a pass with log_total; gradients flow through out, lse and entropy."""
        assert rows.log_total is not None
        unseen = rows.lse == -torch.inf
        maximum = rows.max_logit.detach()
        # log of the total: the value of log_total, which is exact, with the gradient of lse
        gradient = (rows.lse - rows.lse.detach()).masked_fill(unseen, 0)
        above = (rows.log_total + gradient).masked_fill(unseen, -torch.inf)
        total, log = above.exp(), above.masked_fill(unseen, 0)
        sums = {
            name: each.undone(rows, total, log)
            for name, each in ROW_SUMS.items()
            if getattr(rows, name) is not None
        }
        moments = None
        if rows.visible is not None and rows.logit_mean is not None and rows.logit_var is not None:
            moments = Moments(rows.visible, rows.logit_mean, rows.logit_var * rows.visible)
        return Partial(
            maximum.masked_fill(unseen, 0),
            maximum,
            total,
            rows.out * total[..., None],
            sums,
            moments,
            None if sinks is None else sinks.to(total.dtype)[:, None],
            dtype,
        )

    def results(self, out: Tensor, log_total: bool = True) -> RowResults:
        """The results of rows that have seen all keys, with the output `out`."""
        found = {name: self._finished(name) for name in self.sums}
        if self.moments is not None:
            count, mean, spread = self.moments
            variance = spread / count.clamp_min(1)
            found |= {"visible": count, "logit_mean": mean, "logit_var": variance}
        if log_total:
            found["log_total"] = self.log_total()
        return RowResults(out, self.lse(), self.maximum, **found)

    def lse(self) -> Tensor:
        """log Σ exp(s), the sinks included, (...)."""
        base, total = self._with_sinks()
        empty = total == 0
        return (base + total.masked_fill(empty, 1).log()).masked_fill(empty, -torch.inf)

    def log_total(self) -> Tensor:
        """lse - maximum, without the rounding of lse, (...): 0 where no key was seen."""
        base, total = self._with_sinks()
        unseen = self.maximum == -torch.inf
        return (base - self.maximum + total.log()).masked_fill(unseen, 0)

    def finish(self) -> Tensor:
        """The output, (..., Dv): 0 where no key was seen."""
        return (self.values * self.weight()[..., None]).to(self.dtype)

    def entropy(self) -> Tensor:
        """-Σ p log p, (...), from shifted sums, which are exact for large logits too."""
        if "entropy" not in self.sums:
            raise ValueError(
                "this partial has no sums for the entropy; use one made by hw.partial(...)"
            )
        return self._finished("entropy")

    def weight(self) -> Tensor:
        """exp(base - lse), which turns a sum over the keys into one weighted by p, (...)."""
        base, total = self._with_sinks()
        total = total.masked_fill(total == 0, 1)
        return total.reciprocal() if self.sinks is None else _scale(self, base) / total

    def _finished(self, name: str) -> Tensor:
        """The statistic behind one of the sums."""
        base, total = self._with_sinks()
        above = total.masked_fill(total == 0, 1).log()
        above = above if self.sinks is None else above + (base - self.base)  # lse - self.base
        return ROW_SUMS[name].finished(self.sums[name], self.total, above, self.weight())

    def _with_sinks(self) -> tuple[Tensor, Tensor]:
        """A base and Σ exp(s - base) over the keys and the sink."""
        if self.sinks is None:
            return self.base, self.total
        base = torch.maximum(self.base.masked_fill(self.total == 0, -torch.inf), self.sinks)
        base = base.masked_fill(
            base == -torch.inf, 0
        )  # no key seen, and a sink of -inf counts for nothing
        above = self.sinks - base
        above = above.masked_fill((base == torch.inf) & (self.sinks == base), 0)  # not inf - inf
        return base, self.total * _scale(self, base) + torch.exp(above)


def merge(*parts: Partial) -> Partial:
    """Attention over the keys of all parts together. The order matters to rounding only.

    The parts hold the same queries over different keys. Sinks join once, at the end: all parts
    that have sinks must have the same.

    >>> import torch, headwise as hw
    >>> q, k, v = torch.randn(3, 1, 2, 6, 8, dtype=torch.float64).unbind(0)
    >>> left = hw.partial(q, k[:, :, :2], v[:, :, :2])
    >>> right = hw.partial(q, k[:, :, 2:], v[:, :, 2:], first_key=2)
    >>> torch.allclose(hw.merge(left, right).finish(), hw.attention(q, k, v))
    True
    """
    if not parts or not all(isinstance(part, Partial) for part in parts):
        kinds = ", ".join(type(part).__name__ for part in parts)
        raise ValueError(f"hw.merge({kinds}): give it parts made by hw.partial(q, k, v, ...)")
    return reduce(_merge, parts)


def _merge(a: Partial, b: Partial) -> Partial:
    if a.values.shape != b.values.shape:  # broadcasting would count some rows twice
        raise ValueError(
            f"hw.merge joins parts of the same queries; these have values of shape "
            f"{tuple(a.values.shape)} and {tuple(b.values.shape)}"
        )
    # The higher base serves both; the base of a row that saw no key does not count.
    base = torch.maximum(
        a.base.masked_fill(a.total == 0, -torch.inf), b.base.masked_fill(b.total == 0, -torch.inf)
    )
    base = base.masked_fill(base == -torch.inf, 0)
    scale_a, scale_b = _scale(a, base), _scale(b, base)
    step_a, step_b = a.base - base, b.base - base
    sums = {
        name: ROW_SUMS[name].rebased(x, a.total, step_a, scale_a)
        + ROW_SUMS[name].rebased(b.sums[name], b.total, step_b, scale_b)
        for name, x in a.sums.items()
        if name in b.sums
    }
    moments = None
    if a.moments is not None and b.moments is not None:
        moments = join_moments(a.moments, b.moments)
    return Partial(
        base,
        torch.maximum(a.maximum, b.maximum),
        a.total * scale_a + b.total * scale_b,
        a.values * scale_a[..., None] + b.values * scale_b[..., None],
        sums,
        moments,
        _sinks(a.sinks, b.sinks),
        a.dtype,
    )


def _sinks(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """The sinks of both parts, which must be the same."""
    if a is None or b is None or a is b:
        return b if a is None else a
    unknown = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    if not unknown and not torch.equal(a, b):
        raise ValueError(
            "hw.merge joins parts of the same attention, and these have different sinks; give "
            "the same sinks to every part, or to one part only"
        )
    return a


def _scale(part: Partial, base: Tensor) -> Tensor:
    """exp(part.base - base), 0 for rows that saw no key."""
    return torch.exp((part.base - base).masked_fill(part.total == 0, -torch.inf))


def join_moments(a: Moments, b: Moments) -> Moments:
    """Chan's formula: the moments of both together, without cancellation."""
    count = a.keys + b.keys
    share = b.keys / count.clamp_min(1)
    gap = b.mean - a.mean
    spread = a.spread + b.spread + gap.square() * a.keys * share
    return Moments(count, a.mean + gap * share, spread)
