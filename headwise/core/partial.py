"""Attention over some of the keys, as a value that merges with attention over the rest.

A `Partial` holds sums over the keys seen so far, all scaled by exp(-base), where base is at or near
the largest logit. `merge` joins two of them and is associative, so blocks, splits of a cache,
chunks of a prompt and ranks of a ring are all the same operation.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from headwise.core.sums import Sums

Moments = tuple[Tensor, Tensor, Tensor]  # count, mean and Σ (s - mean)² of a row's visible logits


@dataclass(frozen=True, eq=False)
class Partial:
    """Attention of some rows over some keys, before the division. Rows (...) have any shape.

    The sums after `values` are None if they were not asked for.
    """

    base: Tensor  # (...): finite; the sums are scaled by exp(-base)
    maximum: Tensor  # (...): the largest logit; -inf where no key was seen
    total: Tensor  # (...): Σ exp(s - base)
    values: Tensor  # (..., Dv): Σ exp(s - base) v
    shifted: Tensor | None = None  # (...): Σ exp(s - base) (s - base), for the entropy
    reach: Tensor | None = None  # (...): Σ exp(s - base) (i - j), for the distance
    count: Tensor | None = None  # (...): the number of keys seen, for the two below
    mean: Tensor | None = None  # (...): mean of s over them
    spread: Tensor | None = None  # (...): Σ (s - mean)² over them
    sinks: Tensor | None = None  # broadcasts to (...): join once, at the end
    dtype: torch.dtype | None = None  # of the output; None for that of the sums

    @staticmethod
    def from_sums(sums: Sums, sinks: Tensor | None, dtype: torch.dtype) -> Partial:
        """The sums of a finished pass, with log_total; gradients flow through out, lse and entropy.

        Sums that the pass was not asked for are None.
        """
        unseen = sums.lse == -torch.inf
        maximum = sums.max_logit.detach()
        base = maximum.masked_fill(unseen, 0)
        # log of the total: the value of log_total, which is exact, with the gradient of lse
        gradient = (sums.lse - sums.lse.detach()).masked_fill(unseen, 0)
        above = (sums.log_total + gradient).masked_fill(unseen, -torch.inf)
        total = above.exp()
        asked = [x.ndim == total.ndim for x in (sums.entropy, sums.distance, sums.visible)]
        return Partial(
            base,
            maximum,
            total,
            sums.out * total[..., None],
            total * (above.masked_fill(unseen, 0) - sums.entropy) if asked[0] else None,
            total * sums.distance if asked[1] else None,
            sums.visible if asked[2] else None,
            sums.logit_mean if asked[2] else None,
            sums.logit_var * sums.visible if asked[2] else None,
            None if sinks is None else sinks.to(total.dtype)[:, None],
            dtype,
        )

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
        if self.shifted is None:
            raise ValueError(
                "this partial has no sums for the entropy; use one made by hw.partial(...)"
            )
        base, total = self._with_sinks()
        above = total.masked_fill(total == 0, 1).log()
        above = above if self.sinks is None else above + (base - self.base)  # lse - self.base
        weight = self.weight()
        # A sink may be so far above the logits that this is 0 · inf.
        return (weight * (self.total * above - self.shifted)).masked_fill(weight == 0, 0)

    def weight(self) -> Tensor:
        """exp(base - lse), which turns a sum over the keys into one weighted by p, (...)."""
        base, total = self._with_sinks()
        total = total.masked_fill(total == 0, 1)
        return total.reciprocal() if self.sinks is None else _scale(self, base) / total

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
    total = a.total * scale_a + b.total * scale_b
    values = a.values * scale_a[..., None] + b.values * scale_b[..., None]
    count, mean, spread = _moments(a, b)
    return Partial(
        base,
        torch.maximum(a.maximum, b.maximum),
        total,
        values,
        _shifted(a, scale_a, base) + _shifted(b, scale_b, base) if a.shifted is not None else None,
        a.reach * scale_a + b.reach * scale_b
        if a.reach is not None and b.reach is not None
        else None,
        count,
        mean,
        spread,
        _sinks(a.sinks, b.sinks),
        a.dtype,
    )


def _sinks(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """The sinks of both parts, which must be the same."""
    if a is None or b is None or a is b:
        return b if a is None else a
    if not torch.compiler.is_compiling() and not torch.equal(a, b):
        raise ValueError(
            "hw.merge joins parts of the same attention, and these have different sinks; give "
            "the same sinks to every part, or to one part only"
        )
    return a


def _scale(part: Partial, base: Tensor) -> Tensor:
    """exp(part.base - base), 0 for rows that saw no key."""
    return torch.exp((part.base - base).masked_fill(part.total == 0, -torch.inf))


def _shifted(part: Partial, scale: Tensor, base: Tensor) -> Tensor:
    """Σ exp(s - base) (s - base): the sum moved from the part's base to a new one."""
    assert part.shifted is not None
    return scale * (part.shifted + part.total * (part.base - base))


def join_moments(a: Moments, b: Moments) -> Moments:
    """Chan's formula: the moments of both together, without cancellation."""
    count = a[0] + b[0]
    share = b[0] / count.clamp_min(1)
    gap = b[1] - a[1]
    return count, a[1] + gap * share, a[2] + b[2] + gap.square() * a[0] * share


def _moments(a: Partial, b: Partial) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    if a.count is None or a.mean is None or a.spread is None:
        return None, None, None
    assert b.count is not None and b.mean is not None and b.spread is not None
    return join_moments((a.count, a.mean, a.spread), (b.count, b.mean, b.spread))
