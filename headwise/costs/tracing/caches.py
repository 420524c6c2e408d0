"""The caches that models return: their keys and values, their states, and how they grow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from headwise.costs.formula import Formula, formula
from headwise.costs.tape import Tape
from headwise.costs.tracing.layers import LayerList
from headwise.costs.tracing.naming import SizeNames, checked

NAMES = ("past_key_values", "cache_params")
HALVES = ("self_attention_cache", "cross_attention_cache")


def cache_of(out: Any) -> tuple[str, Any] | None:
    """The cache among a model's outputs, and its name; None if it keeps none."""
    for name in NAMES:
        found = getattr(out, name, None)
        if found is not None:
            return name, found
    return None


def count_cache(tape: Tape, names: SizeNames, cache: Any, ran: LayerList) -> None:
    """Count what every layer keeps, in the layout that was asked for; of equal ones the first."""
    repeated: set[int] = set()
    for kind in ran.kinds.values():
        if kind.cached and kind.index is not None and kind.call.parent is None:
            with tape.inside(kind.call.part):
                _count(tape, names, cache, {kind.index})
            repeated |= set(kind.members)
    count = max((len(half) for half in halves(cache)), default=0)
    _count(tape, names, cache, set(range(count)) - repeated)


def _count(tape: Tape, names: SizeNames, cache: Any, numbers: set[int]) -> None:
    """Count some layers; outside of any part those that are alike together."""
    layout, found = tape.work.cache, Counter[tuple[str, Formula]]()
    kept = 0
    for half in halves(cache):
        for number in numbers & set(range(len(half))):
            pair = keys_and_values(half[number])
            if pair is not None:
                found["keys and values", stored(names, tape, *pair)] += 1
                if layout.page is not None:
                    table = pair[0].shape[0] * layout.table(pair[0].shape[2])
                    found["page table", formula(table)] += 1
            kept += sum(x.numel() * x.element_size() for x in states(half[number]))
    for (label, size), times in found.items():
        tape.cached(label, size, times)
    if kept:
        tape.state("state", formula(kept))


def stored(names: SizeNames, tape: Tape, keys: Tensor, values: Tensor) -> Formula:
    """The bytes of a layer's keys and values (B, G, T, D)."""
    layout, tokens = tape.work.cache, names.tokens
    entries, heads, length, width = keys.shape
    vectors = layout.vector(width) + layout.vector(values.shape[3])
    count = int(entries * layout.room(length) * heads * vectors)
    if layout.room(length) != tokens.keys or layout.scale_bits:
        return formula(count)
    h = names.widths.get("h")
    whole = names.width(heads * width) if heads * width == h else (
        names.width(heads) * names.width(width))  # fmt: skip
    alike = values.shape[3] == width
    each = layout.vector(1)
    if not alike:
        whole = names.width(heads) * (names.width(width) + names.width(values.shape[3]))
    return checked(tokens.b * tokens.t * whole * ((2 if alike else 1) * each), count)


def halves(cache: Any) -> Iterator[list[Any]]:
    """The layers of a cache, of a decoder's self-attention and of its cross-attention apart."""
    for name in HALVES:
        if hasattr(cache, name):
            yield from halves(getattr(cache, name))
    layers = getattr(cache, "layers", None)
    if isinstance(layers, list):
        yield layers


def keys_and_values(layer: Any) -> tuple[Tensor, Tensor] | None:
    """The keys and values of a layer, (B, G, T, D); None if it has none."""
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if isinstance(keys, Tensor) and isinstance(values, Tensor) and keys.ndim == 4:
        return keys, values
    return None


def states(layer: Any) -> Iterator[Tensor]:
    """States of recurrences and convolutions in a layer of a cache."""
    for name in ("conv_states", "recurrent_states"):
        found = getattr(layer, name, None)
        for x in found.values() if isinstance(found, dict) else [found]:
            if isinstance(x, Tensor):
                yield x


def extend(cache: Any, tokens: int) -> None:
    """Let every layer of a cache take so many more tokens, as its own class does."""
    for layer in next(halves(cache), []) if tokens > 0 else ():
        pair = keys_and_values(layer)
        if pair is not None:
            layer.update(*(x.new_empty(*x.shape[:2], tokens, x.shape[3]) for x in pair))
