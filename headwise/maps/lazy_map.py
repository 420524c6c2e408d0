"""A matrix of rows by keys that is never stored: what maps of weights and of effects share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Self

import torch
from torch import Tensor
from torch._C._functorch import TransformType

from headwise.core.arguments import is_integer
from headwise.core.problem import Problem, describe, restate
from headwise.core.versions import Versions
from headwise.maps.backends import backend_for
from headwise.maps.pooling import Cells, Reduction
from headwise.maps.region import Box, Index, Region, indexed, written
from headwise.maps.row_totals import LazyTotals

LIMIT = 1 << 26  # the most numbers that one slice may hold
TILE = 256
"""Cells along each side of a pyramid's tile."""


class LazyMap:
    """A number for every query row (B, Hq, N) and every key (M), computed when it is asked for.

    A map keeps the tensors of the call, not copies, and raises an error once they have been written
    to. The totals of a row are computed when it is first read, and kept.
    """

    __iter__ = None  # without it, a loop over a map would compute all of it
    _numbers = "numbers"
    _region: Region
    _totals: LazyTotals
    _kept: Versions

    def _hold(self, region: Region, totals: LazyTotals) -> Self:
        self._region, self._totals, self._kept = region, totals, Versions(region.tensors())
        return self

    @property
    def region(self) -> Region:
        """All that the numbers depend on besides totals; ValueError if it has been written to."""
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
        """The dtype of the numbers."""
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
        return f"<{type(self).__name__} {times(self.shape)}>"

    def __getitem__(self, index: Index | tuple[Index, ...]) -> Tensor:
        """Exact numbers: amap[b, h, i0:i1, j0:j1], each index an integer or a slice.

        >>> import torch, headwise as hw
        >>> q = torch.zeros(1, 2, 100, 16)
        >>> hw.attention_map(q, q, mask=hw.mask.causal())[0, 1, 2, :4]
        tensor([0.3333, 0.3333, 0.3333, 0.0000])
        """
        call = f"[{written(index)}]"
        return self._slice(self._parse(index, call), call)

    def to_tensor(self) -> Tensor:
        """Every number, (B, Hq, N, M); ValueError if there are more than 2²⁶.

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

    def head(self, batch: int, head: int) -> Self:
        """The map of one head, (1, 1, N, M): views of this one that share its lse.

        >>> import torch, headwise as hw
        >>> amap = hw.attention_map(*torch.randn(2, 1, 8, 100, 16).unbind(0))
        >>> amap.head(0, 3).pool(10).shape
        torch.Size([1, 1, 10, 10])
        """
        b, h, *_ = self._parse((batch, head), call := f".head({batch!r}, {head!r})")
        if not isinstance(b, int) or not isinstance(h, int):
            raise self._error("a head is two integers: the batch entry and the head", call)
        return self._narrowed(range(b, b + 1), range(h, h + 1))

    def entry(self, batch: int) -> Self:
        """The map of all heads of one batch entry, (1, Hq, N, M): views of this one.

        >>> import torch, headwise as hw
        >>> amap = hw.attention_map(*torch.randn(2, 3, 8, 100, 16).unbind(0))
        >>> amap.entry(2)
        <AttentionMap 1 × 8 × 100 × 100>
        """
        b, *_ = self._parse((batch,), call := f".entry({batch!r})")
        if not isinstance(b, int):
            raise self._error("a batch entry is an integer", call)
        return self._narrowed(range(b, b + 1), self.region.box.heads)

    def _narrowed(self, batch: range, heads: range) -> Self:
        """The map of some batch entries and heads."""
        region = self.region
        box = region.box._replace(batch=batch, heads=heads)
        return self._with(region.cut(box), self._totals.cut(box))

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

    def _tile(self, level: int, x: int, y: int, how: str, reduction: Reduction) -> Tensor:
        call = f".tile({level!r}, {x!r}, {y!r}, how={how!r})"
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
        return self._pool(box, row_cells, key_cells, reduction)[0, 0]

    def _evenly(self, size: int, how: str, reduction: Reduction) -> Tensor:
        """The whole map in at most size × size cells."""
        if not is_integer(size) or size < 1:
            raise self._error(
                "size must be an integer, at least 1", f".pool({size!r}, how={how!r})"
            )
        _, _, rows, keys = self.shape
        cells = Cells.evenly(rows, size), Cells.evenly(keys, size)
        return self._pool(self._region.box, *cells, reduction)

    def _top_checked(self, k: int) -> tuple[Tensor, Tensor]:
        if not is_integer(k) or k < 1:
            raise self._error("k must be an integer, at least 1", f".top({k!r})")
        return self._top(k)

    def _slice(self, parts: list[int | range], call: str) -> Tensor:
        box = Box(*(range(part, part + 1) if isinstance(part, int) else part for part in parts))
        size = math.prod(box.shape)
        if size > LIMIT:
            raise self._error(
                f"{times(box.shape)} = {size:,} {self._numbers}; one slice holds at most "
                f"{LIMIT:,}. Use smaller slices, or .pool(256), .received() or .top(8) "
                "for the whole map",
                call,
            )
        kept = [len(part) for part in parts if isinstance(part, range)]
        return self._fill(box).reshape(kept)

    def _fill(self, box: Box) -> Tensor:
        """The numbers of a rectangle."""
        return self._over(box, backend_for(self._region).fill)

    def _received(self, box: Box) -> Tensor:
        """The sums of a rectangle's columns, (B, Hq, keys)."""
        return self._over(box, backend_for(self._region).received)

    def _top(self, k: int) -> tuple[Tensor, Tensor]:
        region = self.region
        with torch.no_grad(), torch.autocast(region.q.device.type, enabled=False):
            return backend_for(region).top(region, self._totals.at(region.box), k)

    def _pool(self, box: Box, rows: Cells, keys: Cells, how: Reduction) -> Tensor:
        pool = backend_for(self._region).pool
        return self._over(box, lambda region, totals: pool(region, totals, rows, keys, how))

    def _over(self, box: Box, work: Callable[[Region, Any], Tensor]) -> Tensor:
        """Apply a backend's function to a rectangle of the map, (B, Hq, ...)."""
        region = self.region
        with torch.no_grad(), torch.autocast(region.q.device.type, enabled=False):
            boxes = list(box.aligned(region.group))
            parts = [work(region.cut(part), self._totals.at(part)) for part in boxes]
            return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _with(self, region: Region, totals: LazyTotals) -> Self:
        made: Self = object.__new__(type(self))
        return made._hold(region, totals)

    def _parse(self, index: Index | tuple[Index, ...], call: str) -> list[int | range]:
        try:
            return indexed(index, self.shape)
        except ValueError as error:
            reason = f"{error}; use amap[b, h, i0:i1, j0:j1] with integers and slices"
            raise self._error(reason, call) from None

    def _error(self, reason: str, call: str) -> ValueError:
        return ValueError(f"{reason}\n  in {self!r}{call}")


def refuse_vmap(problem: Problem, call: str) -> None:
    """Raise ValueError inside torch.vmap, where a map could never be read."""
    if not torch._C._are_functorch_transforms_active():
        return
    stack = torch._C._functorch.get_interpreter_stack()
    if any(transform.key() == TransformType.Vmap for transform in stack):
        raise ValueError(
            f"a map can't be made inside torch.vmap, which hides its numbers; give hw.{call} "
            "the whole batch, outside of it\n"
            f"  in {restate(call, problem.q, problem.k, problem.v)}"
        )


def check_rows(name: str, x: object, shape: tuple[int, ...], call: str) -> None:
    """Raise ValueError unless x is a real tensor (B, Hq, N, ...) of this shape."""
    dense = isinstance(x, Tensor) and x.is_floating_point() and x.layout == torch.strided
    if not isinstance(x, Tensor) or not dense or tuple(x.shape) != shape:
        what = "one number" if len(shape) == 3 else f"{shape[-1]} numbers"
        raise ValueError(
            f"{name} is {describe(x)}; give {what} per query row, {shape}\n  in {call}"
        )


def times(shape: Iterable[int]) -> str:
    """A shape as people write it."""
    return " × ".join(map(str, shape))
