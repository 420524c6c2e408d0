"""A mask of ours in the dress of the tensor that transformers expects: of its shape, and empty."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from headwise.core.intervals import Mask
from headwise.core.place import Place

_SIZES = frozenset((Tensor.size, Tensor.dim, Tensor.numel, Tensor.ndimension, Tensor.__len__))
_SAME = frozenset((Tensor.contiguous, Tensor.detach))


class MaskTensor(Tensor):
    """(B, 1, N, M) bool without storage, that is handed on from the mask function to attention.

    Whatever else is done with it is done with the mask written out, so nothing is lost.

    >>> import headwise as hw
    >>> given = MaskTensor(hw.mask.causal(), (2, 1, 3, 3), torch.device("cpu"))
    >>> given.shape, given.contiguous() is given
    (torch.Size([2, 1, 3, 3]), True)
    >>> given[0, 0, 1]
    tensor([ True,  True, False])
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

    def moved(self, *given: Any, **options: Any) -> Tensor:
        """What `to` makes of it: on another device the same mask, of another dtype a tensor."""
        like = torch.empty(0, dtype=torch.bool, device=self.device).to(*given, **options)
        if like.dtype == torch.bool:
            return MaskTensor(self.mask, tuple(self.shape), like.device)
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
        return func(*_written_out(args), **_written_out(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*_written_out(args), **_written_out(kwargs or {}))


def _written_out(given: Any) -> Any:
    """Arguments without masks of ours among them."""
    return tree_map(lambda x: x.written_out() if isinstance(x, MaskTensor) else x, given)
