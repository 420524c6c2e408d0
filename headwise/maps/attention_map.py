"""The attention matrix that is never stored: any part of it is computed on demand, exactly.

A weight is exp(logit - lse), so it is enough to keep q, k and the totals of each row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.core.arguments import is_integer, is_number
from headwise.core.intervals import rows_per_key
from headwise.core.place import Place
from headwise.core.policies import Policy, TopK, check_policy
from headwise.core.problem import Problem, restate, without_dropout
from headwise.core.row_sums import RowTotals
from headwise.maps import coverage, masked_keys
from headwise.maps.backends import backend_for, coverage_for
from headwise.maps.coverage import Recall
from headwise.maps.lazy_map import LazyMap, check_rows, refuse_vmap, times
from headwise.maps.pooling import Cells, How
from headwise.maps.region import Region
from headwise.maps.row_totals import LazyTotals


def mean_received(received: Tensor, region: Region) -> Tensor:
    """Column sums (B, Hq, M) as means over the rows that see each key; 0 if none does."""
    return received / rows_that_see(region).clamp_min(1)


def rows_that_see(region: Region) -> Tensor:
    """The number of a region's rows that see each key, (B|1, Hq|1, M)."""
    _, _, rows, keys = region.box.shape
    terms = region.terms
    if terms.dense is not None:
        seen = terms.dense.expand(*terms.dense.shape[:2], rows, keys)
        return seen.sum(-2)
    if terms.intervals is None:
        return torch.full((1, 1, keys), rows, device=region.q.device)
    return rows_per_key(terms.intervals, keys)


def smoothed(scores: Tensor, width: int) -> Tensor:
    """The mean of each score (B, H, M) and its neighbours, `width` of them; 0 beyond the ends."""
    if width == 1 or scores.numel() == 0:
        return scores
    return F.avg_pool1d(scores, width, stride=1, padding=width // 2)


def per_key_head(scores: Tensor, group: int) -> Tensor:
    """The mean over the query heads that share a key head, (B, Hkv, M)."""
    shared: Tensor = scores.unflatten(1, (-1, group)).mean(2)
    return shared


class AttentionMap(LazyMap):
    """The weights of every query row (B, Hq, N) on every key (M), made by `hw.attention_map`.

    A weight is exp(logit - lse): 0 where the mask hides the key, and with sinks a row sums to less
    than one. Weights are float32, or float64 for float64 inputs, and have no gradient. lse is
    computed when it is first needed, for the rows and heads that are read; if it was given, the
    weights are as exact as that rounded number. The map keeps q and k themselves, not copies, and
    raises an error once they have been written to.

    >>> import torch, headwise as hw
    >>> q, k = torch.randn(2, 1, 8, 5000, 16).unbind(0)
    >>> amap = hw.attention_map(q, k, mask=hw.mask.causal())
    >>> amap
    <AttentionMap 1 × 8 × 5000 × 5000>
    >>> amap[0, 3, 2000:2010, :100].shape
    torch.Size([10, 100])
    """

    _numbers = "weights"

    def __init__(self, problem: Problem, lse: Tensor | None = None) -> None:
        problem = without_dropout(problem)
        refuse_vmap(problem, "attention_map")
        q, k, v = problem.q.detach(), problem.k.detach(), problem.v.detach()
        with torch.no_grad():
            region = Region(q, k, v, problem.terms())
        if lse is not None:
            check_rows("lse", lse, tuple(q.shape[:3]), restate("attention_map", q, k, v))
        self._hold(region, LazyTotals.of(region, lse))

    @classmethod
    def of(cls, region: Region, lse: Tensor | None = None) -> AttentionMap:
        """The map of another map's `region` and `lse`, for instance read from a file."""
        return object.__new__(cls)._hold(region, LazyTotals.of(region, lse))

    def __repr__(self) -> str:
        weighted = "" if self._region.norms is None else " weighted"
        return f"<AttentionMap {times(self.shape)}{weighted}>"

    def weighted(self) -> AttentionMap:
        """The map of p · ‖v‖: each weight times the length of the value that it carries.

        >>> import torch, headwise as hw
        >>> q, v = torch.zeros(1, 1, 2, 4), torch.tensor([[[[3.0, 4.0], [0.0, 0.0]]]])
        >>> hw.attention_map(q, q, v).weighted()[0, 0]
        tensor([[2.5000, 0.0000],
                [2.5000, 0.0000]])
        """
        region = self.region
        v = region.v
        if v.shape[-1] == 0:
            raise self._error(
                "this map has no values; make it with hw.attention_map(q, k, v)", ".weighted()"
            )
        norms = torch.linalg.vector_norm(v, dim=-1, keepdim=True, dtype=self.dtype)
        return self._with(replace(region, norms=norms), self._totals)

    def pool(self, size: int = 256, how: How = "mean") -> Tensor:
        """The whole map in at most size × size cells, (B, Hq, min(size, N), min(size, M)).

        With s = min(size, N), row a of the cells holds the query rows from floor(a·N/s) up to, but
        not including, floor((a+1)·N/s), and likewise for keys. A cell is the mean of its weights,
        hidden ones counting as 0, or with how="max" the largest.

        >>> import torch, headwise as hw
        >>> q = torch.zeros(1, 1, 4, 8)
        >>> hw.attention_map(q, q, mask=hw.mask.causal()).pool(2)
        tensor([[[[0.5000, 0.0000],
                  [0.2917, 0.2083]]]])
        """
        self._check_how(how, f".pool({size!r}, how={how!r})")
        return self._evenly(size, how, how)

    def received(self) -> Tensor:
        """The weight that each key receives from all rows: the sums of the columns, (B, Hq, M).

        >>> import torch, headwise as hw
        >>> q = torch.zeros(1, 1, 2, 4)
        >>> hw.attention_map(q, q, mask=hw.mask.causal()).received()
        tensor([[[1.5000, 0.5000]]])
        """
        return self._received(self._region.box)

    def eviction_scores(self, recent: int | None = None, smooth: int = 1) -> Tensor:
        """A score for each key of a cache, (B, Hkv, M): evict the keys that have the lowest.

        It is the mean weight that a key receives from the rows that see it, over the query heads
        that share it: accumulated attention, as in H2O. With `recent`, only that many last rows
        count, their own keys score inf, and `smooth` averages over so many neighbours, as in SnapKV
        (recent=64, smooth=5).

        >>> import torch, headwise as hw
        >>> q = torch.zeros(1, 2, 4, 8)
        >>> hw.attention_map(q, q[:, :1], mask=hw.mask.causal()).eviction_scores()
        tensor([[[0.5208, 0.3611, 0.2917, 0.2500]]])
        """
        call = f".eviction_scores({recent!r}, smooth={smooth!r})"
        rows, keys = self.shape[2:]
        if recent is not None and (not is_integer(recent) or not 0 < recent <= min(rows, keys)):
            raise self._error(f"recent must be from 1 to {min(rows, keys)}, or None", call)
        if not is_integer(smooth) or smooth < 1 or smooth % 2 == 0:
            raise self._error("smooth must be an odd number", call)
        last = rows if recent is None else recent
        older = keys if recent is None else keys - recent
        box = self._region.box._replace(rows=range(rows - last, rows), keys=range(older))
        received = backend_for(self._region).received
        scores = self._over(box, lambda part, totals: mean_received(received(part, totals), part))
        scores = per_key_head(smoothed(scores, smooth), self._region.group)
        return torch.nn.functional.pad(scores, (0, keys - older), value=torch.inf)

    def mass(self, first: int, last: int) -> Tensor:
        """The weight of each row on the keys first <= j < last, (B, Hq, N).

        >>> import torch, headwise as hw
        >>> q = torch.zeros(1, 1, 4, 8)
        >>> hw.attention_map(q, q, mask=hw.mask.causal()).mass(0, 2)
        tensor([[[1.0000, 1.0000, 0.6667, 0.5000]]])
        """
        rows, keys = self.shape[2:]
        whole = is_integer(first) and is_integer(last)
        if not whole or not 0 <= first <= last <= keys:
            raise self._error(
                f"it needs 0 <= first <= last <= {keys}", f".mass({first!r}, {last!r})"
            )
        box = self._region.box._replace(keys=range(first, last))
        if first == last:
            return self._region.q.new_zeros(self.shape[:3], dtype=self.dtype)
        mean = self._pool(
            box, Cells.every(rows, 1), Cells.every(last - first, last - first), "mean"
        )
        return mean[..., 0] * (last - first)

    def top(self, k: int) -> tuple[Tensor, Tensor]:
        """The k largest weights of each row, in order, and their keys, (B, Hq, N, k) each.

        If a row sees fewer than k keys, the rest has weight 0 and key -1.

        >>> import torch, headwise as hw
        >>> q, k = torch.tensor([[[[0.0], [1.0]]]]), torch.tensor([[[[1.0], [2.0]]]])
        >>> hw.attention_map(q, k, mask=hw.mask.causal()).top(2)
        (tensor([[[[1.0000, 0.0000],
                   [0.7311, 0.2689]]]]),
         tensor([[[[ 0, -1],
                   [ 1,  0]]]]))
        """
        return self._top_checked(k)

    def kept(self, keys: int | Sequence[int] | Tensor | Policy) -> Tensor:
        """The weight of each row's largest keys, or of those that a policy keeps, (B, Hq, N).

        `keys` is how many, or a policy of `hw.sparse`; for several numbers the result is
        (B, Hq, N, numbers). A row that sees fewer keys counts all of them, and of equal weights the
        earliest keys are kept. The weight is absolute: with sinks all keys hold less than one.

        >>> import torch, headwise as hw
        >>> q = torch.zeros(1, 1, 4, 8)
        >>> amap = hw.attention_map(q, q, mask=hw.mask.causal())
        >>> amap.kept(2)
        tensor([[[1.0000, 1.0000, 0.6667, 0.5000]]])
        >>> amap.kept(hw.sparse.Window(0, sinks=1))
        tensor([[[1.0000, 1.0000, 0.6667, 0.5000]]])
        """
        call = f".kept({keys!r})"
        if isinstance(keys, Policy) and not isinstance(keys, TopK):
            return self._kept_by(keys, call)
        several = isinstance(keys, Sequence | Tensor)
        per_head = isinstance(keys, TopK) and isinstance(keys.k, tuple)
        given = keys.k if isinstance(keys, TopK) else keys
        given = given.tolist() if isinstance(given, Tensor) else given
        counts = [*given] if isinstance(given, Sequence) else [given]
        if not counts or not all(is_integer(count) and count >= 1 for count in counts):
            raise self._error(
                "it takes a number of keys, at least 1, several numbers, or a policy of hw.sparse",
                call,
            )
        if per_head:
            self._checked(keys, call)
        found = self._rows(lambda region, totals: coverage_for(region).kept(region, totals, counts))
        if per_head:
            heads = torch.arange(len(counts), device=found.device)
            return found[:, heads, :, heads].transpose(0, 1)
        return found if several else found[..., 0]

    def recall(self, policy: Policy) -> Recall:
        """The weight that a policy kept, against the best choice of as many keys in each row.

        It counts a row's visible keys that the policy keeps, `keys`; how many of them are among the
        row's `keys` largest, `found`; and the weight of both choices, `mass` and `best`: (B, Hq, N)
        each. `of_keys` and `of_mass` are the recall of the true top-k and of its weight, for
        instance of the keys that an indexer chose.

        >>> import torch, headwise as hw
        >>> q, k = torch.tensor([[[[1.0]]]]), torch.tensor([[[[1.0], [3.0], [2.0]]]])
        >>> found = hw.attention_map(q, k).recall(hw.sparse.Indices(torch.tensor([[[[0, 1]]]])))
        >>> found.keys.item(), found.of_keys.item()
        (2, 0.5)
        """
        policy = self._checked(policy, call := f".recall({policy!r})")
        region = self.region
        with torch.no_grad(), torch.autocast(region.q.device.type, enabled=False):
            try:
                found = masked_keys.recall(region, self._weights(), policy)
                return found or coverage.recall(region, self._weights(), policy)
            except ValueError as error:
                raise self._error(str(error), call) from None

    def needed(self, share: float) -> Tensor:
        """The number of keys that each row needs for this share of its weight, int64 (B, Hq, N).

        They are its largest ones; a row that sees no key needs 0. With sinks, the share is of what
        the keys hold.

        >>> import torch, headwise as hw
        >>> q = torch.zeros(1, 1, 4, 8)
        >>> hw.attention_map(q, q, mask=hw.mask.causal()).needed(0.5)
        tensor([[[1, 1, 2, 2]]])
        """
        if not is_number(share) or not 0 < share <= 1:
            raise self._error("share must be above 0 and at most 1", f".needed({share!r})")
        return self._rows(lambda region, totals: coverage_for(region).needed(region, totals, share))

    def _kept_by(self, policy: Policy, call: str) -> Tensor:
        self._checked(policy, call)

        def held(region: Region, totals: RowTotals) -> Tensor:
            found = masked_keys.kept(region, totals, policy)
            return coverage.kept_by(region, totals, policy) if found is None else found

        try:
            return self._rows(held)
        except ValueError as error:
            raise self._error(str(error), call) from None

    def _checked(self, policy: object, call: str) -> Policy:
        """The policy if it is one for this map."""
        region = self.region
        try:
            return check_policy(policy, Place.of(region.q, region.k), region.k.shape[1])
        except ValueError as error:
            raise self._error(str(error), call) from None

    def _rows(self, work: Callable[[Region, RowTotals], Tensor]) -> Tensor:
        """Apply a backend's function to all rows at once, whose policies may differ per head."""
        region = self.region
        with torch.no_grad(), torch.autocast(region.q.device.type, enabled=False):
            return work(region, self._weights())

    def _weights(self) -> RowTotals:
        totals = self._totals.at(self._region.box)
        assert isinstance(totals, RowTotals)
        return totals

    def tile(self, level: int, x: int, y: int, how: How = "mean") -> Tensor:
        """One tile of a zoomable picture of one head, at most (256, 256), rows by keys.

        A cell of level l holds 2^(levels - 1 - l) rows and as many keys: the whole map fits the one
        tile of level 0, each level doubles the resolution, and cells of the last level are single
        weights. Tile x holds 256 cells of keys from cell 256·x, tile y likewise for rows; tiles at
        the far edges, and their last cells, are smaller.

        >>> import torch, headwise as hw
        >>> amap = hw.attention_map(*torch.randn(2, 1, 1, 1000, 16).unbind(0)).head(0, 0)
        >>> amap.tile(0, 0, 0).shape, amap.tile(2, 3, 0).shape
        (torch.Size([250, 250]), torch.Size([256, 232]))
        """
        self._check_how(how, f".tile({level!r}, {x!r}, {y!r}, how={how!r})")
        return self._tile(level, x, y, how, how)

    def _check_how(self, how: str, call: str) -> None:
        if how not in ("mean", "max"):
            raise self._error("how must be 'mean' or 'max'", call)
