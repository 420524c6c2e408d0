"""One of headwise's masks given as a tensor, for models that take the mask of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from headwise.core.intervals import Mask
from headwise.core.patterns import Dense
from headwise.core.place import Place

_SIZES = frozenset((Tensor.size, Tensor.dim, Tensor.numel, Tensor.ndimension, Tensor.__len__))
_SAME = frozenset((Tensor.contiguous, Tensor.detach))
_CASTS: dict[Any, torch.dtype] = {
    Tensor.float: torch.float32,
    Tensor.double: torch.float64,
    Tensor.half: torch.float16,
    Tensor.bfloat16: torch.bfloat16,
}
_PARTS = frozenset(
    (Tensor.__getitem__, Tensor.expand, Tensor.repeat, Tensor.narrow, Tensor.clone, torch.clone)
)
_ADDS = frozenset(
    (torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__)
)


class MaskTensor(Tensor):
    """One of our masks given as a tensor: (B, 1, N, M) bool without storage.

    The mask function returns it and `attend` takes it; any other operation gets the mask written
    out, so nothing is lost. A model that adds it to its scores, or a part of it, or makes it
    numbers first, gets 0 and the lowest number, as eager attention does: adding booleans would hide
    nothing.

    >>> import headwise as hw
    >>> given = MaskTensor(hw.mask.causal(), (2, 1, 3, 3), torch.device("cpu"))
    >>> given.shape, given.contiguous() is given
    (torch.Size([2, 1, 3, 3]), True)
    >>> given[0, 0, 1]
    tensor([ True,  True, False])
    >>> (torch.zeros(3) + given)[0, 0, 1] < 0
    tensor([False, False,  True])
    """

    mask: Mask

    @staticmethod
    def __new__(cls, mask: Mask, shape: tuple[int, ...], device: torch.device) -> MaskTensor:
        made: MaskTensor = Tensor._make_wrapper_subclass(
            cls, shape, dtype=torch.bool, device=device
        )
        made.mask = mask
        return made

    def __init__(self, mask: Mask, shape: tuple[int, ...], device: torch.device) -> None:
        super().__init__()

    def written_out(self) -> Tensor:
        """The mask as booleans, (B, 1, N, M)."""
        batch, heads, queries, keys = self.shape
        place = Place(batch, heads, queries, keys, offset=keys - queries, device=self.device)
        return self.mask.to_dense(place).expand(self.shape)

    def to_add(self, dtype: torch.dtype) -> Tensor:
        """The mask as numbers to add to scores: 0 where a key is seen, else the lowest number."""
        zeros = torch.zeros(self.shape, dtype=dtype, device=self.device)
        return zeros.masked_fill(~self.written_out(), torch.finfo(dtype).min)

    def moved(self, *given: Any, **options: Any) -> Tensor:
        """The result of `to`: the same mask on another device, or numbers to add to scores."""
        like = torch.empty(0, dtype=torch.bool, device=self.device).to(*given, **options)
        if like.dtype == torch.bool:
            return MaskTensor(self.mask, tuple(self.shape), like.device)
        if like.is_floating_point():
            return self.to_add(like.dtype).to(like.device)
        return self.written_out().to(*given, **options)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _SAME:
            return args[0]
        if func is Tensor.to:
            return args[0].moved(*args[1:], **(kwargs or {}))
        if func in _CASTS:
            return args[0].to_add(_CASTS[func])
        if func in _SIZES or getattr(func, "__name__", "") == "__get__":  # .shape, .device, ...
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func in _ADDS:
            numbers = [x.dtype for x in args if isinstance(x, Tensor) and x.is_floating_point()]
            dtype = numbers[0] if numbers else torch.get_default_dtype()
            args = tuple(x.to_add(dtype) if isinstance(x, MaskTensor) else x for x in args)
        out = func(*_written_out(args), **_written_out(kwargs or {}))
        if func in _PARTS and out.ndim == 4:
            return MaskTensor(Dense(out), tuple(out.shape), out.device)
        return out

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*_written_out(args), **_written_out(kwargs or {}))


def _written_out(given: Any) -> Any:
    """Arguments with every MaskTensor written out."""
    return tree_map(lambda x: x.written_out() if isinstance(x, MaskTensor) else x, given)
