"""Named spans of keys, such as a system prompt or an image, and the weight that rows put on them.

A span's weight is attention over the span alone, compared with attention over all keys: with the
largest logit m and its weight t of both, Σ p over the span is exp(m_span - m) · t / t_span. So any
engine computes it, in float32 at least, in a call that reads the span's keys and no values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from headwise.core.arguments import INTEGER_DTYPES, as_int, is_integer
from headwise.core.intervals import FURTHEST, Mask
from headwise.core.patterns import Between, Stretch

Span = tuple[int | Tensor, int | Tensor]
Spans = Mapping[str, Span]

SPAN_PREFIX = "span_"
"""The weight on the span "image" is the statistic span_image."""

NEEDED = ("max_logit", "top_prob")
"""The statistics of two calls that tell the weight of one within the other."""


def check_spans(
    spans: object, batch: int | None = None, keys: int | None = None
) -> dict[str, Span]:
    """The spans by name, with whole numbers as ints; ValueError if one is not a range of keys.

    A tensor on a GPU is not read, because that would wait: keys that do not exist get no weight.
    """
    if spans is None:
        return {}
    if not isinstance(spans, Mapping):
        raise ValueError(
            f"spans={spans!r} must map names to ranges of keys, such as {{'image': (4, 580)}}"
        )
    return {name: _checked(name, span, batch, keys) for name, span in spans.items()}


def _checked(name: object, span: object, batch: int | None, keys: int | None) -> Span:
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name):
        raise ValueError(
            f"a span is called {name!r}; a name is letters, digits, _, . or -, because the table "
            "has a column span_<name>_mean"
        )
    if not isinstance(span, tuple | list) or len(span) != 2:
        raise ValueError(
            f"the span {name!r} is {span!r}; give the first key and the one after the last"
        )
    first, last = (_bound(name, bound, batch) for bound in span)
    known = [x for x in (first, last) if not isinstance(x, Tensor) or _readable(x)]
    least, most = 0, FURTHEST if keys is None else keys
    outside = any(_any(x < least) or _any(x > most) for x in known)
    if outside or (len(known) == 2 and _any(first > last)):
        there = "" if keys is None else f" <= {keys}, the number of keys"
        raise ValueError(
            f"the span {name!r} is {_shown(first)} to {_shown(last)}; it needs "
            f"0 <= first <= last{there}"
        )
    return first, last


def _bound(name: str, bound: object, batch: int | None) -> int | Tensor:
    if isinstance(bound, Tensor) and bound.ndim == 1 and bound.dtype in INTEGER_DTYPES:
        if batch is not None and len(bound) != batch:
            raise ValueError(
                f"the span {name!r} has {len(bound)} bounds, and the batch has {batch} entries"
            )
        return bound
    if not is_integer(bound):
        shape = (
            f"a {bound.dtype} tensor {tuple(bound.shape)}"
            if isinstance(bound, Tensor)
            else repr(bound)
        )
        raise ValueError(
            f"the span {name!r} has the bound {shape}; give an int, or an integer tensor with one "
            "number per batch entry"
        )
    return as_int(bound)


def within(spans: Spans, keys: int, forgotten: int = 0) -> dict[str, Span]:
    """The parts of the spans that a call with so many keys holds; `forgotten` ones came before.

    >>> within({"a": (2, 9), "b": (0, 3)}, keys=5, forgotten=3)
    {'a': (0, 5), 'b': (0, 0)}
    """

    def cut(bound: int | Tensor) -> int | Tensor:
        bound = bound - forgotten
        return bound.clamp(0, keys) if isinstance(bound, Tensor) else max(0, min(bound, keys))

    return {name: (cut(first), cut(last)) for name, (first, last) in spans.items()}


def plain(spans: Spans) -> dict[str, list[int | list[int]]]:
    """The spans as lists of numbers, for JSON."""
    return {
        name: [x.tolist() if isinstance(x, Tensor) else x for x in span]
        for name, span in spans.items()
    }


def shown(span: Span, device: torch.device) -> Mask:
    """The mask that shows the keys of a span to every row."""
    first, last = span
    if not isinstance(first, Tensor) and not isinstance(last, Tensor):
        return Stretch(first, last)

    def bound(x: int | Tensor) -> Tensor:
        if isinstance(x, Tensor):
            return x.to(device).reshape(-1, 1, 1)
        return torch.full((), x, dtype=torch.int32, device=device)

    return Between(bound(first), bound(last))


def span_weights(
    spans: Spans,
    mask: Mask | None,
    known: Mapping[str, Tensor],
    observe: Callable[[Mask], Sequence[Tensor]],
) -> dict[str, Tensor]:
    """The weight on each span, by the name of its statistic.

    `known` has the `NEEDED` statistics of a call with this mask, and `observe` those of the keys
    that another mask shows.
    """
    found = {}
    for name, span in spans.items():
        keys = shown(span, known[NEEDED[0]].device)
        part = observe(keys if mask is None else mask & keys)
        found[SPAN_PREFIX + name] = share([known[each] for each in NEEDED], part)
    return found


def share(whole: Sequence[Tensor], part: Sequence[Tensor]) -> Tensor:
    """The weight of a part of the keys, (B, Hq, N), from the `NEEDED` statistics of both calls.

    The part's call has no sinks. A row that sees no key of the part has weight 0 there.
    """
    (highest, top), (part_highest, part_top) = whole, part
    ratio = top / part_top * torch.exp((part_highest - highest).clamp_max(0))
    return ratio.masked_fill(part_highest == -torch.inf, 0).clamp_max(1)


def _readable(x: Tensor) -> bool:
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def _any(found: bool | Tensor) -> bool:
    return bool(found.any()) if isinstance(found, Tensor) else found


def _shown(bound: int | Tensor) -> str:
    return str(bound.tolist() if isinstance(bound, Tensor) and _readable(bound) else bound)
