"""Policies of sparse attention: the keys that each row keeps, of those that its mask shows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from headwise.core.arguments import as_int, is_integer
from headwise.core.place import Place, fits

By = Literal["mean", "max", "exact"]
"""How a row ranks blocks of keys."""
Amount = int | tuple[int, ...]
"""A number, or one per head."""


@dataclass(frozen=True)
class TopK:
    """The k keys with the largest logits of each row; of equal ones the earliest.

    k is a number, or one per query head. A row that sees fewer keys keeps all of them.

    >>> import torch, headwise as hw
    >>> hw.sparse.TopK(64), hw.sparse.TopK(torch.tensor([8, 64]))
    (TopK(k=64), TopK(k=(8, 64)))
    """

    k: Amount

    def __post_init__(self) -> None:
        object.__setattr__(self, "k", _amount("TopK(k)", self.k))

    @property
    def name(self) -> str:
        """A word for tables and charts."""
        return f"top_{_said(self.k)}"

    def check(self, place: Place, key_heads: int) -> None:
        """Raise ValueError if the policy was made for another call."""
        _check_heads("TopK(k)", self.k, place.heads)


@dataclass(frozen=True)
class Window:
    """The last keys up to the row's own, `left` of them before it, and the first `sinks` keys.

    It is the call's mask & (window(left) | prefix(sinks)).

    >>> import headwise as hw
    >>> hw.sparse.Window(128, sinks=4)
    Window(left=128, sinks=4)
    """

    left: int
    sinks: int = 0

    def __post_init__(self) -> None:
        for name, given in (("left", self.left), ("sinks", self.sinks)):
            if not is_integer(given) or given < 0:
                raise ValueError(
                    f"hw.sparse.Window({name}={given!r}) must be an integer, 0 or more"
                )
            object.__setattr__(self, name, int(given))

    @property
    def name(self) -> str:
        """A word for tables and charts."""
        return f"window_{self.left}" + (f"_sinks_{self.sinks}" if self.sinks else "")

    def check(self, place: Place, key_heads: int) -> None:
        """Raise ValueError if the policy was made for another call."""


@dataclass(frozen=True)
class Blocks:
    """`count` blocks of `size` neighbouring keys per row, counted from the first key.

    - by="mean" ranks a block by the query times its mean key, as MoBA and NSA do
    - by="max" by the upper bound of its logits, from its smallest and largest keys, as Quest does
    - by="exact" by the weight that it truly has: no choice of blocks keeps more

    As in MoBA and Quest, "mean" and "max" always keep the block in which the row stands, as one of
    the `count`. They rank by the score alone, without cap and bias. A block without a key that the
    row sees is not chosen. `count` is a number, or one per query head.

    >>> import headwise as hw
    >>> hw.sparse.Blocks(64, 16, by="max")
    Blocks(size=64, count=16, by='max')
    """

    size: int
    count: Amount
    by: By = "mean"

    def __post_init__(self) -> None:
        if not is_integer(self.size) or self.size < 1:
            raise ValueError(f"hw.sparse.Blocks(size={self.size!r}) must be a positive integer")
        object.__setattr__(self, "size", int(self.size))
        object.__setattr__(self, "count", _amount("Blocks(count)", self.count))
        if self.by not in get_args(By):
            raise ValueError(f"hw.sparse.Blocks(by={self.by!r}) must be one of {get_args(By)}")

    @property
    def name(self) -> str:
        """A word for tables and charts."""
        return f"blocks_{_said(self.count)}x{self.size}_{self.by}"

    def check(self, place: Place, key_heads: int) -> None:
        """Raise ValueError if the policy was made for another call."""
        _check_heads("Blocks(count)", self.count, place.heads)


@dataclass(frozen=True, eq=False)
class Indices:
    """The keys that somebody chose for each row, (B|1, Hq|1, N, K) integers.

    Numbers that are no key's, such as -1, choose nothing; a key that is named twice counts once,
    and one that the mask hides stays hidden.

    >>> import torch, headwise as hw
    >>> hw.sparse.Indices(torch.tensor([[[[0, -1], [0, 1]]]]))
    Indices((1, 1, 2, 2))
    """

    keys: Tensor

    def __post_init__(self) -> None:
        given: object = self.keys
        whole = isinstance(given, Tensor) and not given.dtype.is_floating_point
        if not whole or self.keys.ndim != 4 or self.keys.dtype in (torch.bool, torch.complex64):
            said = tuple(given.shape) if isinstance(given, Tensor) else repr(given)
            raise ValueError(
                "hw.sparse.Indices takes an integer tensor (batch or 1, query heads or 1, queries, "
                f"keys kept), not {getattr(given, 'dtype', '')} {said}"
            )

    def __repr__(self) -> str:
        return f"Indices({tuple(self.keys.shape)})"

    @property
    def name(self) -> str:
        """A word for tables and charts."""
        return "indices"

    def check(self, place: Place, key_heads: int) -> None:
        """Raise ValueError if the policy was made for another call."""
        shape, wanted = tuple(self.keys.shape), (place.batch, place.heads, place.queries)
        if shape[2] != place.queries or not fits(shape[:3], wanted, exact=True):
            raise ValueError(
                f"hw.sparse.Indices is {shape}; this call needs (batch or 1, query heads or 1, "
                f"queries, keys kept) with {wanted}"
            )


@dataclass(frozen=True, eq=False)
class Evicted:
    """The keys of a cache that are left when all but the `budget` with the best scores are evicted.

    scores (B|1, H|1, M), H the key heads or the query heads, such as those of
    `amap.eviction_scores()`; of equal scores the earliest key stays. Keys after the M that have
    scores came later and stay. `budget` is a number, or one per head of the scores.

    >>> import torch, headwise as hw
    >>> hw.sparse.Evicted(torch.rand(1, 2, 100), budget=20)
    Evicted((1, 2, 100), budget=20)
    """

    scores: Tensor
    budget: Amount

    def __post_init__(self) -> None:
        given: object = self.scores
        if not isinstance(given, Tensor) or given.ndim != 3 or not given.is_floating_point():
            said = tuple(given.shape) if isinstance(given, Tensor) else repr(given)
            raise ValueError(
                "hw.sparse.Evicted takes scores (batch or 1, heads or 1, keys) of floating point, "
                f"not {getattr(given, 'dtype', '')} {said}; amap.eviction_scores() makes some"
            )
        object.__setattr__(self, "budget", _amount("Evicted(budget)", self.budget))

    def __repr__(self) -> str:
        return f"Evicted({tuple(self.scores.shape)}, budget={self.budget})"

    @property
    def name(self) -> str:
        """A word for tables and charts."""
        return f"evicted_{_said(self.budget)}"

    def check(self, place: Place, key_heads: int) -> None:
        """Raise ValueError if the policy was made for another call."""
        batch, heads, keys = self.scores.shape
        known = batch in (1, place.batch) and heads in (1, key_heads, place.heads)
        if not known or keys > place.keys:
            raise ValueError(
                f"hw.sparse.Evicted has scores {tuple(self.scores.shape)}; this call needs "
                f"({place.batch} or 1, {key_heads} key heads, {place.heads} query heads or 1, "
                f"at most {place.keys} keys)"
            )
        _check_heads("Evicted(budget)", self.budget, heads)

    def kept(self) -> Tensor:
        """The keys that stay, bool (B|1, H|1, M)."""
        order = self.scores.sort(dim=-1, descending=True, stable=True).indices
        budget = torch.tensor(self.budget, device=order.device).reshape(-1, 1)
        first = torch.arange(order.shape[-1], device=order.device) < budget  # (H|1, M)
        return torch.zeros_like(order, dtype=torch.bool).scatter_(-1, order, first.expand_as(order))


Policy = TopK | Window | Blocks | Indices | Evicted
"""What says which keys a row keeps: any of the five policies."""


def check_policy(policy: object, place: Place, key_heads: int) -> Policy:
    """The policy if it is one for this call; else ValueError."""
    if not isinstance(policy, Policy):
        raise ValueError(
            "a policy is one of hw.sparse.TopK(k), Window(left, sinks), Blocks(size, count), "
            f"Indices(tensor) and Evicted(scores, budget), not {policy!r}"
        )
    policy.check(place, key_heads)
    return policy


def of_heads(policy: Policy, heads: range, count: int) -> Policy:
    """The policy for these query heads of a layer that has so many, where it tells them apart.

    >>> of_heads(TopK((1, 2, 3, 4)), range(2, 4), 4)
    TopK(k=(3, 4))
    """
    if isinstance(policy, Window) or len(heads) == count:
        return policy
    if isinstance(policy, TopK):
        return TopK(_some(policy.k, heads, count))
    if isinstance(policy, Blocks):
        return replace(policy, count=_some(policy.count, heads, count))
    if isinstance(policy, Indices):
        keys = policy.keys
        return Indices(keys[:, heads.start : heads.stop]) if keys.shape[1] == count else policy
    all_heads = policy.scores.shape[1]  # the query heads, or the key heads
    if all_heads == 1 or count % all_heads:
        return policy
    group = count // all_heads
    part = range(heads.start // group, -(-heads.stop // group))
    budget = _some(policy.budget, part, all_heads)
    return Evicted(policy.scores[:, part.start : part.stop], budget)


def of_rows(policy: Policy, rows: Tensor | slice | None) -> Policy:
    """The policy for some rows of a call; None for all."""
    if rows is None or not isinstance(policy, Indices):
        return policy
    if isinstance(rows, slice):
        return Indices(policy.keys[:, :, rows])
    return Indices(policy.keys.to(rows.device).index_select(2, rows))


def _some(amount: Amount, heads: range, count: int) -> Amount:
    """The numbers of some heads, if there is one for each of so many."""
    several = isinstance(amount, tuple) and len(amount) == count
    return amount[heads.start : heads.stop] if several else amount  # type: ignore[index]


def per_head(amount: Amount, device: torch.device) -> Tensor:
    """A number as (1,), or one per head as (H,), int64."""
    return torch.tensor(amount, device=device).reshape(-1)


def _amount(call: str, given: object) -> Amount:
    """An integer of at least 1, or one per head as a tuple."""
    if isinstance(given, Tensor) and given.ndim == 1 and not given.dtype.is_floating_point:
        given = given.tolist()
    several = isinstance(given, Iterable) and not isinstance(given, str | Tensor)
    found = tuple(given) if several else (given,)  # type: ignore[arg-type]
    if not found or not all(is_integer(x) and x >= 1 for x in found):
        raise ValueError(
            f"hw.sparse.{call} takes a positive integer, or one per head, not {given!r}"
        )
    numbers = tuple(as_int(x) for x in found if is_integer(x))
    return numbers if several else numbers[0]


def _check_heads(call: str, amount: Amount, heads: int) -> None:
    if isinstance(amount, tuple) and len(amount) != heads:
        raise ValueError(
            f"hw.sparse.{call} has {len(amount)} numbers, and this call {heads} heads; give one "
            "per head, or one for all"
        )


def _said(amount: Amount) -> str:
    if isinstance(amount, int):
        return str(amount)
    low, high = min(amount), max(amount)
    return str(low) if low == high else f"{low}_to_{high}"
