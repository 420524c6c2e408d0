"""What a model of transformers is given, as tensors without numbers, and the cache it returns."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwise.costs.formula import Formula, formula
from headwise.costs.tape import Tape
from headwise.costs.tracing.layers import LayerList
from headwise.costs.tracing.naming import SizeNames, checked
from headwise.costs.tracing.recorder import storage_id
from headwise.costs.workload import Workload
from headwise.messages import say

TEXT = ("input_ids",)


@dataclass(frozen=True)
class Extras:
    """What a model is given beside its main input."""

    cache: bool = True  # it makes a cache
    mask: bool = False  # every token is real
    image: bool = False


EXTRAS = (Extras(), Extras(mask=True), Extras(cache=False, mask=True), Extras(False, True, True))
"""What is tried, one after another, until a model runs."""


def inputs_of(
    model: nn.Module,
    batch: int,
    tokens: int,
    keys: int,
    *,
    context: int | None,
    dtype: torch.dtype,
    extras: Extras,
) -> dict[str, Any]:
    """Arguments of a forward of so many sequences and tokens; ValueError if they can't be told."""
    config: Any = model.config
    name = main_name(model)
    parameters = inspect.signature(type(model).forward).parameters
    pair = is_pair(model)
    length = (context or tokens) if pair else tokens
    given: dict[str, Any] = {name: _main(config, name, batch, length, dtype)}
    if pair:
        given["decoder_input_ids"] = ids(batch, tokens)
    if extras.mask and name in TEXT and "attention_mask" in parameters:
        given["attention_mask"] = ids(batch, length if pair else keys)
    if extras.image and name in TEXT and "pixel_values" in parameters:
        given["pixel_values"] = _main(config, "pixel_values", batch, tokens, dtype)
    return given


def is_pair(model: nn.Module) -> bool:
    """True for an encoder with a decoder, each with a sequence of its own."""
    parameters = inspect.signature(type(model).forward).parameters
    both = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    return both and "decoder_input_ids" in parameters


def main_name(model: nn.Module) -> str:
    """The argument that a model is about."""
    return str(getattr(model, "main_input_name", "input_ids"))


def ids(batch: int, tokens: int) -> Tensor:
    """Numbers of tokens, (batch, tokens)."""
    return torch.empty(batch, tokens, dtype=torch.int64, device="meta")


def _main(config: Any, name: str, batch: int, tokens: int, dtype: torch.dtype) -> Tensor:
    if name in TEXT:
        return ids(batch, tokens)
    vision = getattr(config, "vision_config", config)
    if name == "pixel_values":
        size, channels = getattr(vision, "image_size", None), getattr(vision, "num_channels", 3)
        sides = (size, size) if isinstance(size, int) else size
        if isinstance(sides, dict):
            sides = (sides.get("height"), sides.get("width"))
        if sides and all(isinstance(side, int) for side in sides) and len(sides) == 2:
            return torch.empty(batch, channels, *sides, dtype=dtype, device="meta")
    if name == "input_features" and hasattr(config, "max_source_positions"):
        frames = 2 * config.max_source_positions
        return torch.empty(batch, config.num_mel_bins, frames, dtype=dtype, device="meta")
    raise ValueError(
        say("the shape of its {name} is not told by its configuration; give tensors as inputs=",
            name=name)
    )  # fmt: skip


def own_length(model: nn.Module) -> bool:
    """True if a model always reads as much, such as an image."""
    return main_name(model) not in TEXT


def longest(model: nn.Module) -> int | None:
    """The most tokens that a table of positions beside that of tokens has rows for, if any."""
    tokens = getattr(model, "get_input_embeddings", lambda: None)
    try:
        table = tokens()
    except NotImplementedError:
        return None
    paths = {id(module): path for path, module in model.named_modules()}
    around = paths.get(id(table), "").rpartition(".")[0]
    found = []
    for path, module in model.named_modules():
        name = path.rpartition(".")[2].lower()
        beside = path.startswith(f"{around}." if around else "") and isinstance(
            module, nn.Embedding
        )
        if beside and "rel" not in path.lower() and (name == "wpe" or "pos" in name):
            behind = 0 if module.padding_idx is None else module.padding_idx + 1
            found.append(module.num_embeddings - behind - int(getattr(module, "offset", 0)))
    return min(found, default=None)


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
                shared = storage_id(pair[0]) == storage_id(pair[1])  # one vector serves as both
                width = 0 if shared else pair[1].shape[3]
                size = stored(names, tape.work, pair[0].shape, width, pair[0].shape[2])
                found["keys and values", size] += 1
                if layout.page is not None:
                    table = pair[0].shape[0] * layout.table(pair[0].shape[2])
                    found["page table", formula(table)] += 1
            for name, x in other_tensors(half[number]):
                if name in GROWING:
                    found[name.replace("_", " "), formula(x.numel() * x.element_size())] += 1
                else:
                    kept += x.numel() * x.element_size()
    for (label, size), times in found.items():
        tape.cached(label, size, times)
    if kept:
        tape.state("state", formula(kept))


def stored(
    names: SizeNames, work: Workload, shape: torch.Size, value_width: int, length: int
) -> Formula:
    """The bytes of keys (B, G, T, D) and their values in a cache of so many tokens.

    Without a width of values, one vector serves as both.
    """
    layout, tokens = work.cache, names.tokens
    entries, heads, width = shape[0], shape[1], shape[3]
    vectors = layout.vector(width) + (layout.vector(value_width) if value_width else 0)
    count = int(entries * layout.room(length) * heads * vectors)
    if layout.room(length) != tokens.keys or layout.scale_bits:
        return formula(count)
    h = names.widths.get("h")
    whole = names.width(heads * width) if heads * width == h else (
        names.width(heads) * names.width(width))  # fmt: skip
    if value_width not in (0, width):
        whole = names.width(heads) * (names.width(width) + names.width(value_width))
    copies = 2 if value_width == width else 1
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


def other_tensors(layer: Any) -> Iterator[tuple[str, Tensor]]:
    """What a layer of a cache keeps beside keys and values, by name, without its counters."""
    for name, found in vars(layer).items():
        if name in ("keys", "values") and keys_and_values(layer) is not None:
            continue
        for x in found.values() if isinstance(found, dict) else [found]:
            if isinstance(x, Tensor) and x.is_floating_point():
                yield name, x
