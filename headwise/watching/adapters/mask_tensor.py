"""What stands for a mask tensor of transformers: a tensor without storage, or no tensor at all.

Eager models take one of headwise's masks as a `MaskTensor`, compiled ones as an `UnwrittenMask`;
both are written out only where a model does something else with its mask than attend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from headwise.core.intervals import Mask
from headwise.core.mask_reading import traced_mask
from headwise.core.patterns import Between, Dense, Lengths
from headwise.core.place import Place
from headwise.watching.adapters.traced_masks import padded_mask
from headwise.watching.adapters.traced_rules import TracedRule

_SIZES = frozenset((Tensor.size, Tensor.dim, Tensor.numel, Tensor.ndimension, Tensor.__len__))
_SAME = frozenset((Tensor.contiguous, Tensor.detach))
_PARTS = frozenset(
    (Tensor.__getitem__, Tensor.expand, Tensor.repeat, Tensor.narrow, Tensor.clone, torch.clone)
)


class MaskTensor(Tensor):
    """One of our masks given as the tensor of eager attention: (B, 1, N, M) without storage.

    The mask function returns it and `attend` takes it; any other operation gets the mask written
    out as eager attention adds it to its scores, so a model computes the same with it: 0 where a
    key is seen, else the lowest number.

    >>> import headwise as hw
    >>> given = MaskTensor(hw.mask.causal(), (2, 1, 3, 3), torch.device("cpu"))
    >>> given.shape, given.dtype, given.contiguous() is given
    (torch.Size([2, 1, 3, 3]), torch.float32, True)
    >>> given[0, 0, 1] == 0
    tensor([ True,  True, False])
    """

    mask: Mask

    @staticmethod
    def __new__(
        cls,
        mask: Mask,
        shape: tuple[int, ...],
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> MaskTensor:
        made: MaskTensor = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made.mask = mask
        return made

    def __init__(
        self,
        mask: Mask,
        shape: tuple[int, ...],
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()

    def seen(self) -> Tensor:
        """The keys that are seen, (B, 1, N, M) bool."""
        batch, heads, queries, keys = self.shape
        place = Place(batch, heads, queries, keys, offset=keys - queries, device=self.device)
        return self.mask.to_dense(place).expand(self.shape)

    def written_out(self) -> Tensor:
        """The mask as numbers to add to scores, (B, 1, N, M)."""
        zeros = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        return zeros.masked_fill(~self.seen(), torch.finfo(self.dtype).min)

    def moved(self, *given: Any, **options: Any) -> Tensor:
        """The result of `to`: the same mask on another device, or of another floating dtype."""
        like = torch.empty(0, dtype=self.dtype, device=self.device).to(*given, **options)
        if like.is_floating_point():
            return MaskTensor(self.mask, tuple(self.shape), like.device, like.dtype)
        return self.written_out().to(*given, **options)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _SAME:
            return args[0]
        if func is Tensor.to:
            return args[0].moved(*args[1:], **(kwargs or {}))
        if func in _SIZES or getattr(func, "__name__", "") == "__get__":  # .shape, .device, ...
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        out = func(*_written_out(args), **_written_out(kwargs or {}))
        if func in _PARTS and out.ndim == 4:
            return MaskTensor(Dense(out == 0), tuple(out.shape), out.device, out.dtype)
        return out

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*_written_out(args), **_written_out(kwargs or {}))


def _written_out(given: Any) -> Any:
    """Arguments with every MaskTensor written out."""
    return tree_map(lambda x: x.written_out() if isinstance(x, MaskTensor) else x, given)


class UnwrittenMask:
    """What stands for a mask tensor (B, 1, N, M) while a model is compiled.

    Compiled code can't make a tensor without storage, so this is not a tensor. The attention
    function takes it; whatever else a model does with its mask gets the numbers of a `MaskTensor`.
    """

    ndim = 4

    def __init__(
        self,
        rule: TracedRule,
        stands: int | Tensor,
        shape: tuple[int, int, int, int],
        padding: Tensor | None,
        write: Callable[[], Any],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.rule, self.stands, self.shape, self.padding = rule, stands, shape, padding
        self.write, self.device, self.dtype = write, device, dtype
        self.mask: Mask | None = None
        if padding is None and not isinstance(stands, Tensor):
            queries, keys = shape[2:]
            self.mask = Lengths(keys) if rule.shows_all else rule.mask(stands, queries, keys)
        self.exact = self.mask is not None  # it also says where queries stand, and what is padding
        self.order: Tensor | None = None
        self.places: Tensor | None = None
        if self.mask is None:
            self._make_bounds()

    def _make_bounds(self) -> None:
        keys = self.shape[3]
        rows = torch.arange(self.shape[2], device=self.device) + self.stands
        first, last = self.rule.bounds(rows, keys)
        if self.padding is not None:
            # Behind each other, the tokens that are not padding are intervals again.
            before = self.padding.cumsum(-1)  # (B, M)
            number = torch.arange(keys, device=self.device)
            self.places = (
                torch.where(self.padding, before, before[:, -1:] + number - before + 1) - 1
            )
            self.order = torch.empty_like(self.places).scatter(
                1, self.places, number.expand_as(self.places)
            )
            before = torch.nn.functional.pad(before, (1, 0))
            first, last = (before.gather(1, x.expand(len(before), -1)) for x in (first, last))
        self.mask = Between(first[:, None].int(), last[:, None].int())

    def packed(self, x: Tensor) -> Tensor:
        """Keys or values (B, H, M, D) in the order of the mask's intervals: padding comes last."""
        if self.order is None or self.places is None:
            return x
        reordered: Tensor = _Reordered.apply(x, self.order, self.places)  # type: ignore[no-untyped-call]
        return reordered

    def of_positions(self) -> Mask | None:
        """The mask of keys in their own order, which also says where queries stand."""
        if self.exact:
            return self.mask
        seen: Tensor = self.write()
        if self.padding is None or isinstance(self.stands, Tensor) or self.rule.groups is not None:
            return traced_mask(seen, self.shape[2])[0]
        return padded_mask(seen, self.padding, self.rule.shows_all)

    def written_out(self, dtype: torch.dtype | None = None) -> Tensor:
        """The mask as numbers to add to scores, (B, 1, N, M)."""
        seen, dtype = self.write(), dtype or self.dtype
        return torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)

    def dim(self) -> int:
        """As of a tensor."""
        return 4

    def size(self, axis: int | None = None) -> Any:
        """As of a tensor."""
        return self.shape if axis is None else self.shape[axis]

    def to(self, *given: Any, **options: Any) -> Any:
        """Itself, or numbers of another dtype; the model runs on one device."""
        dtypes = [x for x in (*given, *options.values()) if isinstance(x, torch.dtype)]
        if dtypes and dtypes[0].is_floating_point:
            return self.written_out(dtypes[0])
        return self.written_out().to(*given, **options) if dtypes else self

    def contiguous(self) -> UnwrittenMask:
        """Itself: nothing is stored."""
        return self

    def __getitem__(self, index: Any) -> Tensor:
        return self.written_out()[index]

    def __add__(self, scores: Tensor) -> Tensor:
        return self.written_out(scores.dtype) + scores

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        written = [x.written_out() if isinstance(x, cls) else x for x in args]
        return func(*written, **(kwargs or {}))


class _Reordered(torch.autograd.Function):
    """Rows of x (B, H, M, D) in another order (B, M), of which `places` is the inverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return _reordered(x, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return _reordered(grad, places), None, None


def _reordered(x: Tensor, order: Tensor) -> Tensor:
    return x.gather(2, order[:, None, :, None].expand_as(x))
