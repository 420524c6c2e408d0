"""Rules for masks in compiled code, read from what they compute for each key and the one before.

A rule of transformers, (batch, head, query, key) -> bool, closes over windows and tensors, and
compiled code can't look into a function. So it is called for neighbouring tokens, and the graph of
that call says what the rule is made of: nothing is assumed, and no other pair is computed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from headwise.core.intervals import Mask
from headwise.core.patterns import Causal, Documents, Window
from headwise.watching.adapters.traced_graph import constant, counts_by_one, name_of, nodes

_QUERY, _KEY = "headwise_query", "headwise_key"  # keys of the nodes that number a rule's pairs
_COMPARED = {"le": (0, False), "lt": (1, False), "ge": (0, True), "gt": (1, True)}
_GROUPING = ("getitem", "floordiv", "sub")


@dataclass(frozen=True)
class TracedRule:
    """The keys that a rule shows: query i sees keys [i + low, i + high) of its own group."""

    low: int | None
    high: int | None
    groups: Tensor | None  # (B|1, M): numbers that grow from each group to the next; None: one

    @property
    def shows_all(self) -> bool:
        """True if it hides nothing."""
        return self.low is None and self.high is None and self.groups is None

    def mask(self, offset: int, queries: int, keys: int) -> Mask | None:
        """The mask of keys where query i stands at key i + offset; None if that needs bounds."""
        low, high = self.low, self.high
        if low is None:
            band: Mask | None = Causal(offset) if high == 1 else None
        else:
            band = Window(-low, keys if high is None else high - 1, offset)
        if self.groups is None or band is None or offset or queries != keys:
            return band if self.groups is None else None
        return band & Documents(self.groups)

    def bounds(self, rows: Tensor, keys: int) -> tuple[Tensor, Tensor]:
        """The first key that rows see (N,) and the one past the last, (B|1, N) each."""
        first = torch.zeros_like(rows) if self.low is None else rows + self.low
        last = torch.full_like(rows, keys) if self.high is None else rows + self.high
        if self.groups is not None:
            groups = self.groups.contiguous()
            own = groups[:, rows.clamp(0, keys - 1)].contiguous()
            first = first.maximum(torch.searchsorted(groups, own))
            last = last.minimum(torch.searchsorted(groups, own, right=True))
        return torch.atleast_2d(first.clamp(0, keys)), torch.atleast_2d(last.clamp(0, keys))


def read_rule(
    rule: Callable[..., Tensor], batch: int, first_key: int, keys: int, device: Any
) -> TracedRule | None:
    """Read what a rule shows of these keys; None if it is not made of what is known here."""
    entry = torch.arange(batch, device=device)[:, None]
    query = torch.arange(first_key, first_key + keys, device=device)
    key = query - 1
    _mark_pairs()
    apart = ~rule(entry, entry, query, key)
    found = _read_parts()
    if not found:
        return None
    low, high, grouped = found.split()
    return TracedRule(
        None if low == "None" else int(low),
        None if high == "None" else int(high),
        torch.atleast_2d(apart).cumsum(-1) if grouped == "True" else None,
    )


@constant
def _mark_pairs() -> bool:
    """Mark the last node, which is a key's number, and the query's that it was made of."""
    key = next(nodes())
    key.meta[_KEY] = key.args[0].meta[_QUERY] = True
    return True


@constant
def _read_parts() -> str:
    """The parts of the rule whose result was inverted last, "low high grouped"; "" if unknown."""
    bounds = _Bounds()
    known = bounds.take(next(nodes()).args[0])
    return str(bounds) if known and bounds.tells_groups() else ""


class _Bounds:
    """The parts of a rule, all of which hold."""

    def __init__(self) -> None:
        self.low: int | None = None
        self.high: int | None = None
        self.grouped = False

    def __str__(self) -> str:
        return f"{self.low} {self.high} {self.grouped}"

    def tells_groups(self) -> bool:
        """False if a neighbour may be hidden for another reason than its group."""
        near = (self.low is None or self.low < 0) and (self.high is None or self.high >= 0)
        return near or not self.grouped

    def take(self, node: Any) -> bool:
        """Add what a node says; False if it is not known here."""
        name = _named(node)
        if name == "and":
            return all([self.take(part) for part in node.args])
        if name == "to":
            return self.take(node.args[0])
        if name in _COMPARED:
            strict, turned = _COMPARED[name]
            small, large = reversed(node.args) if turned else node.args
            return self._ordered(small, large, strict)
        if name == "eq":
            return self._grouped(*node.args)
        return name == "new_ones"  # with which transformers begins a conjunction

    def _ordered(self, small: Any, large: Any, strict: int) -> bool:
        """small <= large, or small < large."""
        (a, below), (b, above) = _numbered(small), _numbered(large)
        step = above - below - strict
        if (a, b) == (_KEY, _QUERY):
            return self._cut(None, step + 1)
        if (a, b) == (_QUERY, _KEY):
            return self._cut(-step, None)
        if (a, b) == ("distance", "number"):
            return self._cut(-step, step + 1)
        return (a, b) == ("number", _QUERY) and step >= 0  # no position is below 0

    def _cut(self, low: int | None, high: int | None) -> bool:
        """Hide the keys outside of [i + low, i + high) from query i."""
        if low is not None:
            self.low = low if self.low is None else max(self.low, low)
        if high is not None:
            self.high = high if self.high is None else min(self.high, high)
        return True

    def _grouped(self, one: Any, other: Any) -> bool:
        """Both are of one group: the same number, which never falls from a token to the next."""
        if not _alike(one, other) or not _rises(one):
            return False
        single = _named(one) == "getitem" and counts_by_one(_positions(one.args[0]))
        self.grouped = self.grouped or not single
        return True


def _named(node: Any) -> str:
    """The name of a node's function, the same whether it is an operator or a tensor's method."""
    return name_of(node).strip("_")


def _numbered(node: Any) -> tuple[str, int]:
    """What a node numbers, and how much is added to it."""
    if isinstance(node, int) and not isinstance(node, bool):
        return "number", node
    if not isinstance(node, Node):
        return "", 0
    for kind in (_QUERY, _KEY):
        if kind in node.meta:
            return kind, 0
    name = _named(node)
    if name == "abs":
        inner: Any = node.args[0]
        pair = [_numbered(x) for x in inner.args] if _named(inner) == "sub" else []
        return ("distance", 0) if sorted(pair) == [(_KEY, 0), (_QUERY, 0)] else ("", 0)
    if name in ("add", "sub") and isinstance(node.args[1], int):
        kind, shift = _numbered(node.args[0])
        return kind, getattr(operator, name)(shift, node.args[1])
    return "", 0


def _alike(one: Any, other: Any) -> bool:
    """True if one is computed of queries as the other is of keys."""
    if not isinstance(one, Node) or not isinstance(other, Node):
        if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
            return all(_alike(x, y) for x, y in zip(one, other, strict=True))
        return type(one) is type(other) and one == other
    kinds = {_numbered(one), _numbered(other)}
    if kinds == {(_QUERY, 0), (_KEY, 0)}:
        return True
    if one is other:
        return True
    same = one.target is other.target and _named(one) in _GROUPING
    return same and one.kwargs == other.kwargs and _alike(one.args, other.args)


def _rises(node: Any) -> bool:
    """True if a number never falls from a token to the next.

    It is that of a packed sequence, a running count; or of a chunk, (token - start) // size.
    """
    name = _named(node)
    if name == "getitem":
        counted, place = node.args
        of_token = isinstance(place, tuple) and len(place) == 2 and _is_token(place[1])
        return of_token and not _is_token(place[0]) and _is_count(counted)
    if name != "floordiv":
        return False
    token, size = node.args
    start: Any = token.args[1] if _named(token) == "sub" else None
    fixed = _named(start) == "getitem" and not any(map(_is_token, start.args))
    return fixed and _is_token(token.args[0]) and isinstance(size, int) and size > 0


def _is_token(node: Any) -> bool:
    return _numbered(node) in ((_QUERY, 0), (_KEY, 0))


def _is_count(node: Any) -> bool:
    """True for the running count of booleans (B, N)."""
    if _named(node) != "cumsum" or node.args[1:] != (-1,):
        return False
    value = node.args[0].meta.get("example_value")
    return isinstance(value, Tensor) and value.dtype == torch.bool


def _positions(count: Any) -> Any:
    """The position ids whose jumps are counted, as transformers tells packed sequences apart."""
    jumps = count.args[0]
    if _named(jumps) != "ne" or jumps.args[1] != 1 or _named(jumps.args[0]) != "diff":
        return None
    return jumps.args[0].args[0]
