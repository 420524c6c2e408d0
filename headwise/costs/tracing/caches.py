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
from headwise.costs.tracing.recorder import storage_id

NAMES = ("past_key_values", "cache_params", "state")
GROWING = ("indexer_keys",)
"""What layers keep of each token beside keys and values; all else is a state."""

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
    lengths = [len(half) for half in halves(cache)]
    _count(tape, names, cache, set(range(max(lengths, default=0))) - repeated)
    kept = sum(x.numel() * x.element_size() for x in tensors_of(cache))
    if kept:
        tape.state("state", formula(kept))


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
            for name, x in others(half[number]):
                if name in GROWING:
                    found[name.replace("_", " "), formula(x.numel() * x.element_size())] += 1
                else:
                    kept += x.numel() * x.element_size()
    for (label, size), times in found.items():
        tape.cached(label, size, times)
    if kept:
        tape.state("state", formula(kept))


def stored(names: SizeNames, tape: Tape, keys: Tensor, values: Tensor) -> Formula:
    """The bytes of a layer's keys and values (B, G, T, D)."""
    layout, tokens = tape.work.cache, names.tokens
    entries, heads, length, width = keys.shape
    shared = storage_id(keys) == storage_id(values)  # one vector serves as both
    vectors = layout.vector(width) + (0 if shared else layout.vector(values.shape[3]))
    count = int(entries * layout.room(length) * heads * vectors)
    if layout.room(length) != tokens.keys or layout.scale_bits:
        return formula(count)
    h = names.widths.get("h")
    whole = names.width(heads * width) if heads * width == h else (
        names.width(heads) * names.width(width))  # fmt: skip
    alike = values.shape[3] == width
    if not alike:
        whole = names.width(heads) * (names.width(width) + names.width(values.shape[3]))
    copies = 2 if alike and not shared else 1
    return checked(tokens.b * tokens.t * whole * (copies * layout.vector(1)), count)


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


def tensors_of(cache: Any) -> Iterator[Tensor]:
    """Every tensor of numbers with fractions in a cache, but for those in its layers."""
    if isinstance(cache, Tensor):
        yield from (cache,) if cache.is_floating_point() else ()
    elif isinstance(cache, list | tuple | dict) or hasattr(cache, "__dict__"):
        inside = cache if isinstance(cache, list | tuple | dict) else vars(cache)
        if isinstance(inside, dict):
            inside = [each for name, each in inside.items() if name not in ("layers", *HALVES)]
        for each in inside:
            yield from tensors_of(each)


def others(layer: Any) -> Iterator[tuple[str, Tensor]]:
    """What a layer of a cache keeps beside keys and values, by name, without its counters."""
    for name, found in vars(layer).items():
        if name in ("keys", "values") and keys_and_values(layer) is not None:
            continue
        for x in found.values() if isinstance(found, dict) else [found]:
            if isinstance(x, Tensor) and x.is_floating_point():
                yield name, x
