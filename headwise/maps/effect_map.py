"""The effect of every edge of attention, from one backward pass: a matrix that is never stored.

Removing key j from row i and renormalising changes the row's output by exactly p/(1 - p) · (out -
v_j), and so, to first order, whatever was differentiated by grad · that.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.core.arguments import is_integer
from headwise.core.problem import Problem, restate, without_dropout
from headwise.maps.attention_map import AttentionMap
from headwise.maps.backends import backend_for
from headwise.maps.effect_totals import EffectTotals, PeakSums, Sums, Whole
from headwise.maps.lazy_map import LIMIT, LazyMap, check_rows, refuse_vmap
from headwise.maps.pooling import Cells, Gather, Reduction
from headwise.maps.region import Box, Region
from headwise.maps.row_totals import LazyTotals


class SpanSums(NamedTuple):
    """Two sums over the keys of a span, (B, Hq, N) each; those of disjoint spans add up."""

    numerator: Tensor  # Σ p · grad · (out - v)
    mass: Tensor  # Σ p


class SpanEffect(SpanSums):
    """The sums of a span, and in `effect` numerator / (1 - mass), exact also where mass is near 1.

    A row that sees the span alone loses its whole output, so its effect is -grad · out.
    """

    effect: Tensor

    @staticmethod
    def of(effect: Tensor, mass: Tensor) -> SpanEffect:
        """The effect of removing keys with this mass."""
        made = SpanEffect(effect * (1 - mass), mass)
        made.effect = effect
        return made


class EffectMap(LazyMap):
    """The effect of every edge, of query rows (B, Hq, N) and keys (M), made by `hw.effect_map`.

    An edge's effect is p/(1 - p) · grad · (out - v_j): what the scalar whose gradient was given
    gains, to first order, if the row no longer sees the key and its other weights are renormalised.
    Of a loss, edges that helped have positive effects. Hidden edges have none, and a row that sees
    one key loses its whole output, -grad · out. Numbers are float32, or float64 for float64 inputs.

    >>> import torch, headwise as hw
    >>> q, k, v = (torch.randn(1, 8, 500, 16, requires_grad=True) for _ in range(3))
    >>> out = hw.attention(q, k, v, mask=hw.mask.causal())
    >>> grad, = torch.autograd.grad(out.square().sum(), out)
    >>> emap = hw.effect_map(q, k, v, grad, mask=hw.mask.causal())
    >>> emap
    <EffectMap 1 × 8 × 500 × 500>
    >>> emap[0, 3, 200:210, :100].shape
    torch.Size([10, 100])
    """

    _numbers = "effects"

    def __init__(
        self, problem: Problem, grad: Tensor, out: Tensor | None = None, lse: Tensor | None = None
    ) -> None:
        problem = without_dropout(problem)
        refuse_vmap(problem, "effect_map")
        q, k, v = problem.q.detach(), problem.k.detach(), problem.v.detach()
        call, rows = restate("effect_map", q, k, v, grad=grad), tuple(q.shape[:3])
        check_rows("grad", grad, (*rows, v.shape[-1]), call)
        if out is not None:
            check_rows("out", out, (*rows, v.shape[-1]), call)
        if lse is not None:
            check_rows("lse", lse, rows, call)
        with torch.no_grad():
            grad = grad.detach().to(q.device)
            if grad.dtype != v.dtype:
                grad = grad.to(torch.promote_types(v.dtype, torch.float32))
            region = Region(q, k, v, problem.terms(), grad=grad)
            if lse is not None:
                product = None if out is None else grad_out(grad, out, region.wide)
                region = replace(region, whole=Whole(lse.detach(), product))
        self._hold(region, LazyTotals.of(region))

    def at(self, rows: Tensor) -> EffectMap:
        """The map of some query rows only, by their numbers (n,): (B, Hq, n, M).

        >>> import torch, headwise as hw
        >>> x = torch.randn(1, 2, 100, 8)
        >>> hw.effect_map(x, x, x, x).at(torch.tensor([3, 50]))
        <EffectMap 1 × 2 × 2 × 100>
        """
        region = self.region.at(rows)
        return self._with(region, self._totals.of_rows(region, rows))

    def totals(self) -> EffectTotals:
        """The totals of every row, (B, Hq, N) each, such as grad · out.

        >>> import torch, headwise as hw
        >>> x = torch.ones(1, 1, 3, 4)
        >>> hw.effect_map(x, x, x, x).totals().product
        tensor([[[4., 4., 4.]]])
        """
        region = self.region
        with torch.no_grad(), torch.autocast(region.q.device.type, enabled=False):
            found = self._totals.at(region.box)
        assert isinstance(found, EffectTotals)
        return found

    def weights(self) -> AttentionMap:
        """The weights of the same edges.

        >>> import torch, headwise as hw
        >>> x = torch.zeros(1, 1, 3, 4)
        >>> hw.effect_map(x, x, x, x, mask=hw.mask.causal()).weights()[0, 0, 2]
        tensor([0.3333, 0.3333, 0.3333])
        """
        region = replace(self.region, grad=None, whole=None)
        lse = None if self._region.whole is None else self.lse
        return AttentionMap.of(region, lse)

    def pool(self, size: int = 256, how: Gather = "sum") -> Tensor:
        """The whole map in at most size × size cells, (B, Hq, min(size, N), min(size, M)).

        Cells are those of `AttentionMap.pool`. A cell is the sum of its effects, or with how="max"
        the effect of the largest magnitude, with its sign.

        >>> import torch, headwise as hw
        >>> q, v = torch.zeros(1, 1, 4, 8), torch.eye(4)[None, None]
        >>> hw.effect_map(q, q, v, torch.ones(1, 1, 4, 4)).pool(2, how="max").shape
        torch.Size([1, 1, 2, 2])
        """
        return self._evenly(size, how, self._reduction(how, f".pool({size!r}, how={how!r})"))

    def tile(self, level: int, x: int, y: int, how: Gather = "sum") -> Tensor:
        """One tile of a zoomable picture of one head, with the cells of `AttentionMap.tile`.

        >>> import torch, headwise as hw
        >>> x = torch.randn(1, 1, 1000, 16)
        >>> hw.effect_map(x, x, x, x).head(0, 0).tile(0, 0, 0).shape
        torch.Size([250, 250])
        """
        reduction = self._reduction(how, f".tile({level!r}, {x!r}, {y!r}, how={how!r})")
        return self._tile(level, x, y, how, reduction)

    def received(self) -> Tensor:
        """The sum of the effects of each key's edges, (B, Hq, M).

        >>> import torch, headwise as hw
        >>> q, v = torch.zeros(1, 1, 2, 4), torch.tensor([[[[1.0], [3.0]]]])
        >>> hw.effect_map(q, q, v, torch.ones(1, 1, 2, 1)).received()
        tensor([[[ 2., -2.]]])
        """
        return self._received(self._region.box)

    def top(self, k: int) -> tuple[Tensor, Tensor]:
        """The k effects of the largest magnitude of each row, and their keys, (B, Hq, N, k) each.

        If a row sees fewer than k keys, the rest has effect 0 and key -1.

        >>> import torch, headwise as hw
        >>> q, v = torch.zeros(1, 1, 1, 4), torch.tensor([[[[1.0], [3.0], [8.0]]]])
        >>> k = q.expand(1, 1, 3, 4)
        >>> hw.effect_map(q, k, v, torch.ones(1, 1, 1, 1)).top(2)
        (tensor([[[[-2.0000,  1.5000]]]]), tensor([[[[2, 0]]]]))
        """
        return self._top_checked(k)

    def largest(self, count: int) -> tuple[Tensor, Tensor]:
        """The effects of the largest magnitude of the whole map, in order, and where they are.

        Effects (n,) and places (n, 4): batch entry, head, row, key. n is `count`, or fewer if there
        are not as many edges that have an effect.

        >>> import torch, headwise as hw
        >>> q, v = torch.zeros(1, 1, 2, 4), torch.tensor([[[[1.0], [3.0]]]])
        >>> hw.effect_map(q, q, v, torch.tensor([[[[1.0], [2.0]]]])).largest(1)
        (tensor([2.]), tensor([[0, 0, 1, 0]]))
        """
        if not is_integer(count) or count < 1:
            raise self._error("count must be an integer, at least 1", f".largest({count!r})")
        # The largest edges are in the rows whose largest edge is largest.
        _, places = largest_of(self.row_largest().flatten(), count)
        rows = _unraveled(places, self.shape[:3])
        effects, where = [], []
        for b, h in rows[:, :2].unique(dim=0).tolist():
            own = rows[(rows[:, 0] == b) & (rows[:, 1] == h)]
            for some in own.split(max(1, LIMIT // max(1, self.shape[3]))):
                found, at = self._largest_of_rows(some, count)
                effects.append(found)
                where.append(at)
        if not effects:
            return self._region.q.new_zeros(0, dtype=self.dtype), rows.new_zeros(0, 4)
        found, at = largest_of(torch.cat(effects), count)
        return found, torch.cat(where)[at]

    def _largest_of_rows(self, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The same of some rows of one head, (n, 3) places."""
        b, h, _ = rows[0].tolist()
        numbers = self.head(b, h).at(rows[:, 2])[0, 0]
        found, at = largest_of(numbers.flatten(), count)
        keys = self.shape[3]
        return found, torch.cat([rows[at // keys], (at % keys)[:, None]], -1)

    def row_largest(self) -> Tensor:
        """The effect of the largest magnitude of each row, (B, Hq, N).

        >>> import torch, headwise as hw
        >>> q, v = torch.zeros(1, 1, 2, 4), torch.tensor([[[[1.0], [3.0]]]])
        >>> hw.effect_map(q, q, v, torch.ones(1, 1, 2, 1)).row_largest()
        tensor([[[1., 1.]]])
        """
        box = self._region.box
        if not all(box.shape):
            return self._region.q.new_zeros(self.shape[:3], dtype=self.dtype)
        rows, keys = self.shape[2:]
        return self._pool(box, Cells.every(rows, 1), Cells.every(keys, keys), "furthest")[..., 0]

    def span(self, first: int, last: int) -> SpanEffect:
        """The effect of removing all keys first <= j < last from a row at once.

        With p summed over those keys, it is (Σ p · grad · (out - v)) / (1 - Σ p). The result is the
        pair (numerator, mass), (B, Hq, N) each, of which the pairs of disjoint spans add up; its
        `effect` is the quotient.

        >>> import torch, headwise as hw
        >>> q, v = torch.zeros(1, 1, 1, 4), torch.tensor([[[[1.0], [3.0], [8.0]]]])
        >>> k = q.expand(1, 1, 3, 4)
        >>> found = hw.effect_map(q, k, v, torch.ones(1, 1, 1, 1)).span(0, 2)
        >>> found.effect, found.mass
        (tensor([[[4.]]]), tensor([[[0.6667]]]))
        """
        keys = self.shape[3]
        if not (is_integer(first) and is_integer(last)) or not 0 <= first <= last <= keys:
            raise self._error(
                f"it needs 0 <= first <= last <= {keys}", f".span({first!r}, {last!r})"
            )
        with torch.no_grad(), torch.autocast(self.region.q.device.type, enabled=False):
            parts = [
                self._span(box, first, last) for box in self.region.box.aligned(self.region.group)
            ]
        effect, mass = (torch.cat(found, 1) for found in zip(*parts, strict=True))
        return SpanEffect.of(effect, mass)

    def _span(self, box: Box, first: int, last: int) -> tuple[Tensor, Tensor]:
        """The effect and the mass of a span, which is treated as one key among the others."""
        region = self.region.cut(box)
        before, inside, after = (
            _sums(region, range(*keys))
            for keys in ((0, first), (first, last), (last, len(box.keys)))
        )
        lse = inside.base + inside.total.log()
        one = PeakSums(lse, inside.mean(), before.join(after))
        found = one.totals(region.terms.sinks, region.whole)
        mass = torch.exp((lse - found.weights.lse).nan_to_num(nan=-torch.inf))
        return found.peak_effect, mass.clamp_max_(1)

    def _reduction(self, how: str, call: str) -> Reduction:
        if how not in ("sum", "max"):
            raise self._error("how must be 'sum' or 'max'", call)
        return "sum" if how == "sum" else "furthest"


def grad_out(grad: Tensor, out: Tensor, wide: torch.dtype) -> Tensor:
    """grad · out of each row, (B, Hq, N)."""
    return (grad.detach().to(out.device, wide) * out.detach().to(wide)).sum(-1)


def largest_of(effects: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` effects of the largest magnitude that are not 0, in order, and their places."""
    at = effects.abs().topk(min(count, effects.numel())).indices
    found = effects[at]
    return found[found != 0], at[found != 0]


def _unraveled(places: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Flat places as one index per axis, (n, axes)."""
    return torch.stack(torch.unravel_index(places, shape), -1)


def _sums(region: Region, keys: range) -> Sums:
    """The sums over some of a region's keys, without sinks."""
    part = region.cut(region.box._replace(keys=keys))
    part = replace(part, whole=None, terms=part.terms._replace(sinks=None))
    found = backend_for(part).row_totals(part)
    assert isinstance(found, EffectTotals)
    none = found.base == -torch.inf
    total = torch.exp(found.log_total).masked_fill(none, 0)
    return Sums(found.base, total, total * found.product)
