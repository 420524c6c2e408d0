"""Rules for masks, (batch, head, query, key) -> bool, as transformers and FlexAttention have them.

Known rules become intervals without looking at a single pair. All others are asked about a few
rows at a time, and become intervals if that is what they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headwise import mask as masks
from headwise.core.intervals import Mask
from headwise.core.mask_reading import interval_mask, row_bounds

PAIRS = 1 << 24  # looked at in one go
Rule = Callable[..., Tensor]


@dataclass(frozen=True)
class Grid:
    """The queries and keys a rule is about, numbered as the rule numbers them."""

    batch: int
    queries: Tensor  # (N,)
    first_key: int
    keys: int


@dataclass(frozen=True)
class KeyBounds:
    """The keys a rule shows: first <= key < last, (B|1, 1, N|1), and where sequences begin."""

    first: Tensor
    last: Tensor
    begins: Tensor

    def __and__(self, other: KeyBounds) -> KeyBounds:
        return KeyBounds(
            torch.maximum(self.first, other.first),
            torch.minimum(self.last, other.last),
            torch.maximum(self.begins, other.begins),
        )


def to_mask(rule: Rule, padding: Tensor | None, grid: Grid, tile: Callable[..., Tensor]) -> Mask:
    """Make a mask over the grid's keys of a rule and padding (B, tokens) bool.

    `tile(rows)` gives (B, H, rows, M) bool; it is called if the rule is not known.
    """
    shown = known(rule, grid)
    stands = int(grid.queries[0]) - grid.first_key
    begins: Tensor | None = None
    if padding is not None:
        real = _padding(grid, padding)
        shown = None if shown is None or real is None else shown & real
        begins = padding.view(torch.uint8).argmax(-1).int()[:, None, None] - grid.first_key
    queries = len(grid.queries)
    if shown is None:
        return _by_tiles(tile, grid.batch, queries, grid.keys, stands, begins)
    return bounded_mask(shown, grid) or masks.lengths(grid.keys)


def bounded_mask(shown: KeyBounds, grid: Grid) -> Mask | None:
    """The mask of these bounds; None if they show everything."""
    bounds = (shown.first - grid.first_key, shown.last - grid.first_key)
    first, last = (x.clamp(0, grid.keys).int() for x in bounds)
    begins = (shown.begins - grid.first_key).int()
    if not bool(first.any() | (last < grid.keys).any() | begins.any()):
        return None
    wide = torch.broadcast_shapes(first.shape, last.shape, (1, 1, len(grid.queries)))
    stands = int(grid.queries[0]) - grid.first_key
    return interval_mask(first.expand(wide), last.expand(wide), stands, begins)


def by_rows(
    rule: Rule,
    sizes: tuple[int, int, int, int],
    device: torch.device,
    stands: bool | int,
    begins: Tensor | None,
) -> Mask:
    """Make a mask of any rule that takes tensors of numbers; sizes: batch, heads, queries, keys."""
    batch, heads, queries, keys = (torch.arange(size, device=device) for size in sizes)

    def tile(rows: slice) -> Tensor:
        grid = torch.broadcast_tensors(
            batch[:, None, None, None],
            heads[:, None, None],
            queries[rows, None],
            keys,
        )
        return rule(*grid).expand(sizes[0], sizes[1], -1, sizes[3])

    return _by_tiles(tile, sizes[0] * sizes[1], sizes[2], sizes[3], stands, begins)


def _by_tiles(
    tile: Callable[[slice], Tensor],
    entries: int,
    queries: int,
    keys: int,
    stands: bool | int,
    begins: Tensor | None,
) -> Mask:
    step = max(1, PAIRS // max(1, entries * keys))
    parts: list[slice] = [slice(row, min(row + step, queries)) for row in range(0, queries, step)]
    bounds = []
    for rows in parts:
        found = row_bounds(tile(rows))
        if found is None:
            return masks.dense(torch.cat([tile(rows) for rows in parts], -2))
        bounds.append(found)
    first, last = (torch.cat(side, -1) for side in zip(*bounds, strict=True))
    return interval_mask(first, last, stands, begins)


def known(rule: Rule, grid: Grid) -> KeyBounds | None:
    """The keys that a rule of transformers' masking_utils shows; None if it is not known here.

    Tensors without numbers, of a model that is only counted, tell nothing: it is one sequence.
    """
    if getattr(rule, "__module__", None) != "transformers.masking_utils":
        return None
    name, inner = rule.__qualname__.split(".")[0], _closure(rule)
    if name == "and_masks":
        return _all_of(inner["mask_functions"], grid)
    reader = _KNOWN.get(name)
    return None if reader is None else reader(grid, **inner)


def _all_of(rules: tuple[Rule, ...], grid: Grid) -> KeyBounds | None:
    found = _bidirectional(grid)
    for rule in rules:
        shown = known(rule, grid)
        if shown is None:
            return None
        found = found & shown
    return found


def _closure(rule: Any) -> dict[str, Any]:
    cells = rule.__closure__ or ()
    names = rule.__code__.co_freevars
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


def _bidirectional(grid: Grid) -> KeyBounds:
    first = grid.queries.new_tensor(grid.first_key)[None, None, None]
    return KeyBounds(first, first + grid.keys, torch.zeros_like(first))


def _causal(grid: Grid) -> KeyBounds:
    everything = _bidirectional(grid)
    return KeyBounds(everything.first, grid.queries[None, None] + 1, everything.begins)


def _window(grid: Grid, sliding_window: int) -> KeyBounds:
    if sliding_window < 0:
        raise ValueError(f"sliding_window={sliding_window} must be a positive integer")
    everything = _bidirectional(grid)
    first = grid.queries[None, None] - sliding_window + 1
    return KeyBounds(first, everything.last, everything.begins)


def _window_both_ways(grid: Grid, sliding_window: int) -> KeyBounds:
    own = grid.queries[None, None]
    return KeyBounds(own - sliding_window, own + sliding_window + 1, _bidirectional(grid).begins)


def _chunked(grid: Grid, chunk_size: int, left_padding: Tensor) -> KeyBounds:
    if left_padding.is_meta:
        left_padding = torch.zeros(1, dtype=torch.int64)
    start = left_padding.to(grid.queries.device).reshape(-1, 1, 1)
    first = (grid.queries - start).div(chunk_size, rounding_mode="floor") * chunk_size + start
    return KeyBounds(first, first + chunk_size, _bidirectional(grid).begins)


def _packed(grid: Grid, packed_sequence_mask: Tensor) -> KeyBounds:
    """One number per token, (B, tokens), that grows from each sequence to the next."""
    if packed_sequence_mask.is_meta:
        return _bidirectional(grid)
    ids = packed_sequence_mask.to(grid.queries.device).contiguous()
    own = ids[:, grid.queries].contiguous()
    first = torch.searchsorted(ids, own)[:, None]
    last = torch.searchsorted(ids, own, right=True)[:, None]
    return KeyBounds(first, last, first)


def _padding(grid: Grid, padding_mask: Tensor) -> KeyBounds | None:
    """Tokens that are not padding, (B, tokens) bool; None if they are not one stretch."""
    if padding_mask.is_meta:
        return _bidirectional(grid)
    real = padding_mask.to(grid.queries.device, torch.bool)[:, : grid.first_key + grid.keys]
    bounds = row_bounds(real[:, None, None].contiguous())
    if bounds is None:
        return None
    first, last = (x.to(grid.queries.dtype) for x in bounds)
    return KeyBounds(first, last, first)


_KNOWN: dict[str, Callable[..., KeyBounds | None]] = {
    "causal_mask_function": _causal,
    "bidirectional_mask_function": _bidirectional,
    "sliding_window_overlay": _window,
    "sliding_window_bidirectional_overlay": _window_both_ways,
    "chunked_overlay": _chunked,
    "packed_sequence_mask_function": _packed,
    "padding_mask_function": _padding,
}
