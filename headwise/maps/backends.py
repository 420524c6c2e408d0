"""The two ways to compute an attention map: fused on a GPU, and block by block anywhere."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from headwise.core.row_sums import RowTotals
from headwise.engines import failures
from headwise.engines.failures import KernelError, family
from headwise.engines.triton.engine import TRITON
from headwise.engines.triton.limits import WIDEST, fits_grid
from headwise.maps import blockwise, coverage
from headwise.maps.blockwise import Totals
from headwise.maps.pooling import Cells, Reduction
from headwise.maps.region import Region


class Backend(Protocol):
    """The functions that a map is computed by: the modules `fused` and `blockwise`.

    The numbers of a region are weights or effects, and its totals are of the same kind.
    """

    def row_totals(self, region: Region) -> Totals:
        """The totals that every row's numbers need, over all keys of the region."""

    def fill(self, region: Region, totals: Totals) -> Tensor:
        """Every number, (B, Hq, N, M)."""

    def pool(
        self, region: Region, totals: Totals, rows: Cells, keys: Cells, how: Reduction
    ) -> Tensor:
        """One number for each cell, (B, Hq, row cells, key cells)."""

    def received(self, region: Region, totals: Totals) -> Tensor:
        """The sum of each key's numbers over the rows, (B, Hq, M)."""

    def top(self, region: Region, totals: Totals, count: int) -> tuple[Tensor, Tensor]:
        """The largest numbers of each row and their keys, (B, Hq, N, count) each; -1 for none.

        Effects are ranked by magnitude.
        """


class Coverage(Protocol):
    """The functions about a row's largest weights: the modules `fused` and `coverage`."""

    def kept(self, region: Region, totals: RowTotals, counts: list[int]) -> Tensor:
        """The weight of each row's largest keys, for each count, (B, Hq, N, counts)."""

    def needed(self, region: Region, totals: RowTotals, share: float) -> Tensor:
        """The number of largest weights that hold a share of each row's sum, int64 (B, Hq, N)."""


class FusedOrBlockwise:
    """The fused kernels; for maps like one whose kernel failed, the functions of `plain`."""

    def __init__(self, plain: ModuleType) -> None:
        self.plain = plain

    def __getattr__(self, name: str) -> Callable[..., Any]:
        from headwise.maps import fused  # it imports Triton, which is optional

        def work(region: Region, *given: Any) -> Any:
            calls = family(TRITON.name, "maps", region.q, region.k, False)
            if failures.reason(calls) is None:
                try:
                    return getattr(fused, name)(region, *given)
                except KernelError as failure:
                    failures.record(calls, failure)
            return getattr(self.plain, name)(region, *given)

        return work


def backend_for(region: Region) -> Backend:
    """The fused kernels if they can compute this region, else the blockwise functions."""
    if not _fused(region):
        return cast(Backend, blockwise)
    return cast(Backend, FusedOrBlockwise(blockwise))


def coverage_for(region: Region) -> Coverage:
    """The same for the functions about a row's largest weights."""
    if not _fused(region):
        return cast(Coverage, coverage)
    return cast(Coverage, FusedOrBlockwise(coverage))


def _fused(region: Region) -> bool:
    """True if the fused kernels can compute this region here."""
    q, terms = region.q, region.terms
    fits = q.dtype != torch.float64 and 0 < q.shape[-1] <= WIDEST and terms.additive is None
    fits = fits and (region.grad is None or _fits_values(region))
    return fits and fits_grid(q.shape) and TRITON.absent(q.device) is None


def _fits_values(region: Region) -> bool:
    """True if the kernels can multiply gradients and values."""
    grad = region.grad
    narrow = grad is None or grad.dtype != torch.float64
    return narrow and 0 < region.v.shape[-1] <= WIDEST
