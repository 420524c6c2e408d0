"""The place of a call's queries and keys in the whole sequence, and tensors cut to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Length = Callable[[], int | None]  # tokens so far, read only if needed; None if it can't be


@dataclass(frozen=True)
class Place:
    """The place of a call's queries and keys in the whole sequence.

    A mask that states no alignment has this `offset`: query i stands at key i + offset.
    """

    batch: int
    heads: int
    queries: int
    keys: int
    first_query: int = 0
    first_key: int = 0
    offset: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    whole: bool = True  # False for a part: tensors of the whole sequence may be longer

    @classmethod
    def of(cls, q: Tensor, k: Tensor) -> Place:
        """All of q (B, Hq, N, D) and all of k (B, Hkv, M, D), aligned at the end."""
        batch, heads, queries, _ = q.shape
        keys = k.shape[2]
        return cls(batch, heads, queries, keys, offset=keys - queries, device=q.device)

    def rows(self, shift: int = 0) -> Tensor:
        """The queries' numbers in the whole sequence plus `shift`, (N,)."""
        first = self.first_query + shift
        return torch.arange(first, first + self.queries, device=self.device, dtype=torch.int32)

    def columns(self) -> Tensor:
        """The keys' numbers in the whole sequence, (M,)."""
        first = self.first_key
        return torch.arange(first, first + self.keys, device=self.device, dtype=torch.int32)


def placed(tensor: Tensor, place: Place) -> Tensor:
    """The part of a whole-sequence (B, Hq, N, M) tensor that belongs to this call."""
    tensor = as_four_axes(tensor)
    if tensor.shape[-2] > 1:
        tensor = tensor[..., place.first_query : place.first_query + place.queries, :]
    if tensor.shape[-1] > 1:
        tensor = tensor[..., place.first_key : place.first_key + place.keys]
    return tensor


def check_placed(name: str, tensor: Tensor, place: Place) -> None:
    """Raise ValueError unless the tensor broadcasts to (B, Hq, N, M) of the whole sequence."""
    rows, columns = place.first_query + place.queries, place.first_key + place.keys
    wanted = (place.batch, place.heads, rows, columns)
    if tensor.ndim > 4 or not fits(tensor.shape, wanted, exact=place.whole):
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}, which does not broadcast to "
            f"(batch, query heads, queries, keys) = {wanted}"
        )


def fits(shape: Sequence[int], wanted: Sequence[int], exact: bool) -> bool:
    """True if shape broadcasts to wanted; if not exact, the sequence axes may be longer."""
    for have, want, axis in zip(
        reversed(shape), reversed(wanted), range(len(wanted)), strict=False
    ):
        longer = not exact and axis < len(wanted) - 2 and have >= want
        if have != 1 and have != want and not longer:  # not `in`: compilers compare symbols
            return False
    return len(shape) <= len(wanted)


def from_key(name: str, pairs: Tensor, first: int, keys: int) -> Tensor:
    """A tensor (..., N, M) over all pairs, for the last `keys` keys, which begin at `first`."""
    if _for_any_key(pairs):
        return pairs
    check_keys(name, pairs, first + keys)
    return pairs[..., first:]


def padded(name: str, pairs: Tensor, keys: int, length: Length) -> Tensor:
    """A tensor (..., N, M) over pairs of tokens so far, padded to `keys` keys with 0 or False."""
    missing = 0 if _for_any_key(pairs) else keys - pairs.shape[-1]
    if missing == 0:
        return pairs
    tokens = length()
    if tokens is not None:
        check_keys(name, pairs, tokens)
    if missing < 0:
        raise ValueError(f"{name} {tuple(pairs.shape)} is for more keys than the cache has, {keys}")
    return torch.nn.functional.pad(pairs, (0, missing))


def check_keys(name: str, pairs: Tensor, length: int) -> None:
    """Raise ValueError unless the last axis has one entry per token so far."""
    if pairs.shape[-1] != length:
        raise ValueError(
            f"{name} {tuple(pairs.shape)} is for {pairs.shape[-1]} keys, but with the cache there "
            f"are {length}"
        )


def _for_any_key(pairs: Tensor) -> bool:
    """True if a tensor broadcasts over keys."""
    return pairs.ndim == 0 or pairs.shape[-1] == 1


def as_four_axes(tensor: Tensor) -> Tensor:
    """The tensor with leading axes of size one, four axes in all."""
    return tensor.reshape((1,) * (4 - tensor.ndim) + tensor.shape)
