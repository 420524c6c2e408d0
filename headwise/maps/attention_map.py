"""The attention matrix that is never stored: any part of it is computed on demand, exactly.

A weight is exp(logit - lse), so it is enough to keep q, k and the totals of each row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType

from headwise.core.arguments import is_integer
from headwise.core.problem import Problem, describe, restate, without_dropout
from headwise.core.row_totals import RowTotals
from headwise.core.versions import Versions
from headwise.maps.backends import backend_for
from headwise.maps.eviction import mean_received, per_key_head, smoothed
from headwise.maps.pooling import Cells, How
from headwise.maps.region import Box, Index, Region, indexed, written
from headwise.maps.row_totals import LazyTotals

LIMIT = 1 << 26  # the most weights that one slice may hold
TILE = 256
"""Cells along each side of a pyramid's tile."""


class AttentionMap:
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

    __iter__ = None  # without it, a loop over a map would compute all of it
    _region: Region
    _totals: LazyTotals
    _kept: Versions

    def __init__(self, problem: Problem, lse: Tensor | None = None) -> None:
        problem = without_dropout(problem)
        if torch._C._are_functorch_transforms_active():
            _refuse_vmap(problem)
        q, k, v = problem.q.detach(), problem.k.detach(), problem.v.detach()
        with torch.no_grad():
            region = Region(q, k, v, problem.terms())
        if lse is not None:
            _check_lse(lse, q, restate("attention_map", q, k, v))
        self._hold(region, LazyTotals.of(region, lse))

    @classmethod
    def of(cls, region: Region, lse: Tensor | None = None) -> AttentionMap:
        """The map of another map's `region` and `lse`, for instance read from a file."""
        return object.__new__(cls)._hold(region, LazyTotals.of(region, lse))

    def _hold(self, region: Region, totals: LazyTotals) -> AttentionMap:
        self._region, self._totals, self._kept = region, totals, Versions(region.tensors())
        return self

    @property
    def region(self) -> Region:
        """All that the weights depend on besides lse; ValueError if it has been written to."""
        name = self._kept.modified()
        if name is not None:
            raise self._error(
                f"{name}, or a tensor that shares its memory, was written to after this map was "
                f"made; make the map of {name}.clone()",
                "",
            )
        return self._region

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, Hq, N, M)."""
        return self._region.box.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self._region.wide

    @property
    def lse(self) -> Tensor:
        """The log of the sum of exponentials of each row, (B, Hq, N): -inf if it sees no key.

        >>> import torch, headwise as hw
        >>> q = torch.zeros(1, 1, 3, 4)
        >>> hw.attention_map(q, q, mask=hw.mask.causal()).lse.exp()
        tensor([[[1., 2., 3.]]])
        """
        region = self.region
        with torch.no_grad(), torch.autocast(region.q.device.type, enabled=False):
            return self._totals.at(region.box).lse

    def __repr__(self) -> str:
        weighted = "" if self._region.norms is None else " weighted"
        return f"<AttentionMap {_times(self.shape)}{weighted}>"

    def __getitem__(self, index: Index | tuple[Index, ...]) -> Tensor:
        """Exact weights: amap[b, h, i0:i1, j0:j1], each index an integer or a slice.

        >>> import torch, headwise as hw
        >>> q = torch.zeros(1, 2, 100, 16)
        >>> hw.attention_map(q, q, mask=hw.mask.causal())[0, 1, 2, :4]
        tensor([0.3333, 0.3333, 0.3333, 0.0000])
        """
        call = f"[{written(index)}]"
        return self._slice(self._parse(index, call), call)

    def to_tensor(self) -> Tensor:
        """Every weight, (B, Hq, N, M); ValueError if there are more than 2²⁶.

        >>> import torch, headwise as hw
        >>> q = torch.zeros(1, 1, 2, 4)
        >>> hw.attention_map(q, q).to_tensor()
        tensor([[[[0.5000, 0.5000],
                  [0.5000, 0.5000]]]])
        """
        return self._slice(list(self._region.box), ".to_tensor()")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """`to_tensor` as a NumPy array."""
        found = self.to_tensor().numpy(force=True)
        return found if dtype is None else found.astype(dtype, copy=False)

    def head(self, batch: int, head: int) -> AttentionMap:
        """The map of one head, (1, 1, N, M): views of this one that share its lse.

        >>> import torch, headwise as hw
        >>> amap = hw.attention_map(*torch.randn(2, 1, 8, 100, 16).unbind(0))
        >>> amap.head(0, 3).pool(10).shape
        torch.Size([1, 1, 10, 10])
        """
        b, h, *_ = self._parse((batch, head), call := f".head({batch!r}, {head!r})")
        if not isinstance(b, int) or not isinstance(h, int):
            raise self._error("a head is two integers: the batch entry and the head", call)
        region = self.region
        box = Box(range(b, b + 1), range(h, h + 1), region.box.rows, region.box.keys)
        return self._with(region.cut(box), self._totals.cut(box))

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
        self._check_how(how, call := f".pool({size!r}, how={how!r})")
        if not is_integer(size) or size < 1:
            raise self._error("size must be an integer, at least 1", call)
        _, _, rows, keys = self.shape
        return self._pool(self._region.box, Cells.evenly(rows, size), Cells.evenly(keys, size), how)

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
        if not is_integer(k) or k < 1:
            raise self._error("k must be an integer, at least 1", f".top({k!r})")
        return self._top(k)

    @property
    def levels(self) -> int:
        """The number of levels of `tile`: the first is one tile, the last has single weights."""
        tiles_per_side = -(-max(self.shape[2:]) // TILE)
        return 1 + max(0, tiles_per_side - 1).bit_length()

    def grid(self, level: int) -> tuple[int, int]:
        """The number of tiles of a level: along the keys (x) and along the rows (y).

        >>> import torch, headwise as hw
        >>> amap = hw.attention_map(*torch.randn(2, 1, 1, 1000, 16).unbind(0))
        >>> [amap.grid(level) for level in range(amap.levels)]
        [(1, 1), (2, 2), (4, 4)]
        """
        if not is_integer(level) or not 0 <= level < self.levels:
            raise self._error(f"the map has levels 0 to {self.levels - 1}", f".grid({level!r})")
        side = TILE << (self.levels - 1 - level)
        _, _, rows, keys = self.shape
        return -(-keys // side), -(-rows // side)

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
        self._check_how(how, call := f".tile({level!r}, {x!r}, {y!r}, how={how!r})")
        if self.shape[:2] != (1, 1):
            raise self._error("tiles are of one head; use .head(b, h).tile(...)", call)
        columns, lines = self.grid(level)
        whole = is_integer(x) and is_integer(y)
        if not whole or not (0 <= x < columns and 0 <= y < lines):
            raise self._error(f"level {level} has tiles x < {columns}, y < {lines}", call)
        cell = 1 << (self.levels - 1 - level)
        _, _, rows, keys = self.shape
        side = TILE * cell
        box = self._region.box._replace(
            rows=range(y * side, min(rows, (y + 1) * side)),
            keys=range(x * side, min(keys, (x + 1) * side)),
        )
        row_cells, key_cells = Cells.every(len(box.rows), cell), Cells.every(len(box.keys), cell)
        return self._pool(box, row_cells, key_cells, how)[0, 0]

    def _slice(self, parts: list[int | range], call: str) -> Tensor:
        box = Box(*(range(part, part + 1) if isinstance(part, int) else part for part in parts))
        size = math.prod(box.shape)
        if size > LIMIT:
            raise self._error(
                f"{_times(box.shape)} = {size:,} weights; one slice holds at most {LIMIT:,}. "
                "Use smaller slices, or .pool(256), .received() or .top(8) for the whole map",
                call,
            )
        kept = [len(part) for part in parts if isinstance(part, range)]
        return self._fill(box).reshape(kept)

    def _fill(self, box: Box) -> Tensor:
        """The weights of a rectangle."""
        return self._over(box, backend_for(self._region).fill)

    def _received(self, box: Box) -> Tensor:
        """The sums of a rectangle's columns, (B, Hq, keys)."""
        return self._over(box, backend_for(self._region).received)

    def _top(self, k: int) -> tuple[Tensor, Tensor]:
        region = self.region
        with torch.no_grad(), torch.autocast(region.q.device.type, enabled=False):
            return backend_for(region).top(region, self._totals.at(region.box), k)

    def _pool(self, box: Box, rows: Cells, keys: Cells, how: How) -> Tensor:
        pool = backend_for(self._region).pool
        return self._over(box, lambda region, totals: pool(region, totals, rows, keys, how))

    def _over(self, box: Box, work: Callable[[Region, RowTotals], Tensor]) -> Tensor:
        """Apply a backend's function to a rectangle of the map, (B, Hq, ...)."""
        region = self.region
        with torch.no_grad(), torch.autocast(region.q.device.type, enabled=False):
            boxes = list(box.aligned(region.group))
            parts = [work(region.cut(part), self._totals.at(part)) for part in boxes]
            return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _with(self, region: Region, totals: LazyTotals) -> AttentionMap:
        return object.__new__(AttentionMap)._hold(region, totals)

    def _parse(self, index: Index | tuple[Index, ...], call: str) -> list[int | range]:
        try:
            return indexed(index, self.shape)
        except ValueError as error:
            reason = f"{error}; use amap[b, h, i0:i1, j0:j1] with integers and slices"
            raise self._error(reason, call) from None

    def _check_how(self, how: str, call: str) -> None:
        if how not in ("mean", "max"):
            raise self._error("how must be 'mean' or 'max'", call)

    def _error(self, reason: str, call: str) -> ValueError:
        return ValueError(f"{reason}\n  in {self!r}{call}")


def _refuse_vmap(problem: Problem) -> None:
    """Raise ValueError inside torch.vmap, where a map could never be read."""
    stack = torch._C._functorch.get_interpreter_stack()
    if any(transform.key() == TransformType.Vmap for transform in stack):
        raise ValueError(
            "a map can't be made inside torch.vmap, which hides its numbers; give hw.attention_map "
            "the whole batch, outside of it\n"
            f"  in {restate('attention_map', problem.q, problem.k, problem.v)}"
        )


def _check_lse(lse: object, q: Tensor, call: str) -> None:
    """Raise ValueError unless lse is a real tensor (B, Hq, N)."""
    dense = isinstance(lse, Tensor) and lse.is_floating_point() and lse.layout == torch.strided
    if not isinstance(lse, Tensor) or not dense or lse.shape != q.shape[:3]:
        raise ValueError(
            f"lse is {describe(lse)}; give one number per query row, {tuple(q.shape[:3])}"
            f"\n  in {call}"
        )


def _times(shape: Iterable[int]) -> str:
    return " × ".join(map(str, shape))
