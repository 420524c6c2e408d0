"""An attention that a model wrote out, read where its weights meet their values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from headwise.core.mask_reading import HIDDEN
from headwise.nn.call import Call
from headwise.watching.adapters.written.logits_call import (
    from_logits,
    head_axes,
    head_count,
    heads_lead,
    split_heads,
)
from headwise.watching.adapters.written.product_axes import Equation, Product
from headwise.watching.adapters.written.softmax_results import Function, Weights
from headwise.watching.adapters.written.softmax_rows import RowProduct, SoftmaxRows

PLACED = ("sink_mass", "self_mass", "previous_mass", "distance")
"""The statistics that need the positions of keys."""


@dataclass(frozen=True, eq=False)
class WindowedCall:
    """The rows of a softmax as those of heads (B, H, N), with K slots each."""

    rows: SoftmaxRows
    batch: int  # the axes of the softmax's rows
    heads: tuple[int, ...]
    others: tuple[int, ...]
    keyed: bool  # the keys differ along one of the others
    folded: int  # heads that the axis of the batch holds, if no axis is theirs alone

    @classmethod
    def of(
        cls, rows: SoftmaxRows, modules: Sequence[nn.Module], given: Sequence[int]
    ) -> WindowedCall:
        """Tell its axes apart by its products and what modules state; ValueError if it can't.

        `given` are the sizes of the model's input.
        """
        axes, sizes = range(rows.logits.ndim - 1), rows.logits.shape[:-1]
        asking, keyed = set(axes), set()
        for product in rows.products:
            found = [product.along(x) for x in rows.coordinates(product)]
            pairs = [list(zip(along, product.asking, strict=True)) for along in found]
            asking &= {n for n in axes if (True, True) in pairs[n]}
            keyed |= {n for n in axes if (True, False) in pairs[n]}
        queries = asking or {n for n in axes if sizes[n] == 1}
        if not queries or len(axes) < 2:
            raise ValueError(f"its weights {(*sizes, rows.logits.shape[-1])} have no axis of rows")
        batch, *free = (n for n in axes if n != max(queries))
        heads = tuple(head_axes(sizes, free, modules))
        others = tuple(n for n in axes if n != batch and n not in heads)
        folded = 1 if free else head_count(modules, rows.logits.shape, given)
        return cls(rows, batch, heads, others, any(n in keyed for n in others), folded)

    def arranged(self, x: Tensor) -> Tensor:
        """(rows ..., ...) of the softmax as (B, H, N, ...)."""
        sizes = self.rows.logits.shape[:-1]
        heads = self.folded * prod(sizes[n] for n in self.heads)
        rows = prod(sizes[n] for n in self.others)
        x = x.permute(self.batch, *self.heads, *self.others, *range(len(sizes), x.ndim))
        return x.reshape(-1, heads, rows, *x.shape[len(sizes) :])

    def head(self, product: RowProduct) -> Tensor:
        """The head of each row of a product (R, ...)."""
        if self.heads:
            return self.number(self.heads, product)
        return self.number([self.batch], product) % self.folded

    def number(self, axes: Sequence[int], product: RowProduct) -> Tensor:
        """The number of each row of a product (R, ...) along some axes of the softmax's rows."""
        found, number = self.rows.coordinates(product), torch.zeros_like(product.row)
        for axis in axes:
            number = number * self.rows.logits.shape[axis] + found[axis]
        return number

    def call(self) -> Call:
        """The call over slots; its values are left out, as its output is known."""
        logits = self.arranged(self.rows.shown)
        return from_logits(logits, logits.new_empty(*logits.shape[:2], logits.shape[-1], 0))

    def known(self, sink_keys: int) -> tuple[bool, Mapping[str, Tensor]]:
        """True if a slot is not the same key for all rows, and what the call doesn't show.

        These are statistics (B, H, N); those that need positions are NaN if they are not known. A
        single window is one if its keys slide, or are put together from several places.
        """
        assert self.rows.out is not None
        blind = self.arranged(self.rows.shown.amax(-1) <= HIDDEN)
        norm = torch.linalg.vector_norm(self.arranged(self.rows.out), dim=-1)
        placed = self._placed(sink_keys) if len(self.rows.products) == 1 else {}
        one = len(self.others) > 1 and (bool(placed) or len(self.rows.products) > 1)
        windowed, unknown = self.keyed or one, torch.full_like(norm, torch.nan)
        known = {x: placed.get(x, unknown) for x in PLACED} if windowed else {}
        known["output_norm"] = norm
        return windowed, {x: value.masked_fill(blind, 0) for x, value in known.items()}

    def _placed(self, sink_keys: int) -> Mapping[str, Tensor]:
        """The statistics that need positions, if the keys slide along the sequence as rows do."""
        (product,) = self.rows.products
        place = self.number(self.others, product)
        moving = [n for n, differs in enumerate(product.along(place)) if differs]
        asking = [n for n in moving if product.asking[n]]
        chunks = [n for n in moving if not product.asking[n]]
        if len(asking) != 1 or len(chunks) > 1:
            return {}
        rows = place.shape[asking[0]]
        start = sum((product.index(n) * rows for n in chunks), torch.zeros_like(place))
        if bool(((place != start + product.index(asking[0])) & (product.row >= 0)).any()):
            return {}
        slot = first_slot(product.chunked(asking[0], chunks), rows)
        if slot is None:
            return {}
        slots = torch.arange(product.weights.shape[-1], device=start.device)
        placed = position_statistics(
            product.weights, place[..., None], start[..., None] + slots - slot, sink_keys
        )
        return {name: self.arranged(self.rows.spread(product, x)) for name, x in placed.items()}


def first_slot(values: Tensor, rows: int) -> int | None:
    """The slot of the first chunk that holds the first key of the sequence; None if not known.

    `values` (L, C, K, D) are those of C chunks of so many rows each. The keys slide along a
    sequence if a chunk's values are those of the chunk before it, from its `rows`-th on. Slots that
    were padded before and after the sequence hold one number each, which a key's values do not.

    >>> x = torch.nn.functional.pad(torch.randn(1, 6, 4), (0, 0, 2, 2))  # six keys
    >>> first_slot(torch.stack([x[:, 0:6], x[:, 2:8], x[:, 4:10]], 1), rows=2)
    2
    """
    chunks, keys = values.shape[1:3]
    if keys <= rows or not torch.equal(values[:, :-1, rows:], values[:, 1:, : keys - rows]):
        return None
    line = torch.cat((values[:, :, :rows].flatten(1, 2), values[:, -1, rows:]), 1)  # (L, slots, D)
    padded = line.amax((0, 2)) == line.amin((0, 2))
    before = int(padded.long().cumprod(0).sum())
    after = padded[before + chunks * rows :]
    fits = before + chunks * rows <= padded.shape[0] and bool(after.all())
    return before if fits and bool((~padded).any()) else None


def position_statistics(
    p: Tensor, place: Tensor, keys: Tensor, sink_keys: int
) -> dict[str, Tensor]:
    """The statistics of weights p (..., K) that need positions: of rows (..., 1), of keys (..., K).

    >>> p = torch.tensor([[0.5, 0.3, 0.2]])
    >>> place, keys = torch.tensor([[1]]), torch.tensor([[-1, 0, 1]])
    >>> {name: round(float(x), 3) for name, x in position_statistics(p, place, keys, 1).items()}
    {'sink_mass': 0.3, 'self_mass': 0.2, 'previous_mass': 0.3, 'distance': 1.3}
    """
    return {
        "sink_mass": (p * ((keys >= 0) & (keys < sink_keys))).sum(-1),
        "self_mass": (p * (keys == place)).sum(-1),
        "previous_mass": (p * (keys == place - 1)).sum(-1),
        "distance": (p * (place - keys)).sum(-1),
    }


Added = tuple[float | Tensor, float]
"""out = the first + the second · product."""


class UnreadableError(ValueError):
    """Attention that was found in a module and can't be read."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(reason)
        self.name = name


@dataclass(frozen=True)
class WrittenAttention:
    """An attention that was written out: the module's name, and the call.

    The call is None if only a part of its weights has met values yet.
    """

    name: str
    call: Call | None

    def without(self, out: Tensor, head: int) -> Tensor:
        """The product's result without what one head gave."""
        raise NotImplementedError


@dataclass(frozen=True)
class WholeProduct(WrittenAttention):
    """Weights (B, H, N, M), in any order of axes, that were multiplied with values at once."""

    call: Call
    product: Product
    exact: bool  # no weight was dropped
    added: Added = (0.0, 1.0)

    def heads_first(self, out: Tensor) -> Tensor:
        """The output as (B, H, N, D)."""
        rest, factor = self.added
        return self.product.heads_first((out - rest) / factor, self.call.q.shape[1])

    def gradient(self, grad: Tensor) -> Tensor:
        """The gradient of the output (B, H, N, D), from that of what was computed."""
        return self.product.heads_first(grad * self.added[1], self.call.q.shape[1])

    def without(self, out: Tensor, head: int) -> Tensor:
        rest, factor = self.added
        heads = self.heads_first(out).clone()
        heads[:, head] = 0
        return rest + factor * self.product.to_own_layout(heads)


@dataclass(frozen=True)
class PartProduct(WrittenAttention):
    """A product of some of the weights, or of rows that have keys of their own."""

    windows: WindowedCall
    added: Added = (0.0, 1.0)

    def without(self, out: Tensor, head: int) -> Tensor:
        rest, _ = self.added
        product = self.windows.rows.products[-1]
        kept = (self.windows.head(product) != head).to(out.dtype)
        return rest + product.scaled(out - rest, kept)


@dataclass(frozen=True)
class Operation:
    """A function that was called, its arguments, and the modules that ran, the outermost first.

    `sizes` are those of the model's input, (B, N, ...) or (N, B, ...).
    """

    function: Function
    out: Any
    given: tuple[Any, ...]
    options: Mapping[str, Any]
    modules: Mapping[str, nn.Module]
    sizes: tuple[int, ...]

    def axis(self, default: int | None = None) -> Any:
        """The axis that the function works on; a tuple of one is that one."""
        axis = self.given[1] if len(self.given) > 1 else self.options.get("dim", default)
        return axis[0] if isinstance(axis, list | tuple) and len(axis) == 1 else axis


@dataclass(frozen=True)
class ValueProduct:
    """Weights p that met values, in a product of this equation; None if that is not known."""

    known: Weights
    p: Tensor | None
    values: Tensor
    equation: Equation | None
    op: Operation
    added: Added = (0.0, 1.0)

    def read(self) -> WrittenAttention | None:
        """The attention; None if the weights only route or gate the values.

        UnreadableError if it can't be read.
        """
        origin, whole = self.known.origin, self.known.logits is not None
        if whole and (self.equation is None or not self.equation.attends(self.known.axis)):
            origin.routed = True
            return None
        reason = "its weights were changed"
        try:
            found = self._at_once() or self._in_parts()
            if found is not None:
                origin.used = found.call is not None
                return found
        except ValueError as error:
            reason = str(error)
        origin.used = True
        raise UnreadableError(
            self.name,
            f"it writes its attention out in a way that can't be read: {reason}; weights "
            f"{origin.shape}, values {tuple(self.values.shape)}; headwise reads (B, H, N, M) "
            "weights and (B, H, M, D) values, in any order of axes, and windows of them",
        )

    @property
    def name(self) -> str:
        """The innermost module that ran at the softmax and at the product."""
        first, second = self.known.origin.names, tuple(self.op.modules)
        shared = [x for x, y in zip(first, second, strict=False) if x == y]
        return shared[-1] if shared else second[-1]

    @property
    def head_owners(self) -> list[nn.Module]:
        """The modules that may state a number of heads."""
        modules = self.op.modules
        return [modules[self.name], [*modules.values()][-1], self.known.origin.modules[-1]]

    def _at_once(self) -> WholeProduct | None:
        """Whole rows (B, H, N, M) times values (B, H, M, D), in any order of axes."""
        if self.equation is None or self.known.logits is None:
            return None
        product, logits = self.equation.product(self.known.axis), self.known.logits
        if product is None:
            return None
        if heads_lead(product, logits, self.head_owners[:1], self.op.sizes):
            product = product.swapped()
        made = product.arranged(logits, self.values)
        if made is None:
            return None
        call = from_logits(*split_heads(*made, product, self.head_owners, self.op.sizes))
        return WholeProduct(self.name, call, product, not self.known.dropped, self.added)

    def _in_parts(self) -> PartProduct | None:
        """Some of the weights, or rows that have keys of their own."""
        rows, moves = self.known.rows, self.known.moves
        if self.equation is None or moves is None or self.p is None:
            return None
        out = (self.op.out.detach() - self.added[0]) / self.added[1]
        p = self.known.without_dropout(self.p.detach())
        rows.add_product(p, moves, self.values, self.equation, out)
        windows = WindowedCall.of(rows, self.head_owners, self.op.sizes)
        self.known.origin.missing = rows.missing
        call = None if rows.missing else windows.call()
        return PartProduct(self.name, call, windows, self.added)
