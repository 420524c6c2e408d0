"""The inputs that a model of transformers takes, as tensors without numbers."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

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
    taken = inspect.signature(type(model).forward).parameters
    pair = is_pair(model)
    length = (context or tokens) if pair else tokens
    given: dict[str, Any] = {name: _main(config, name, batch, length, dtype)}
    if pair:
        given["decoder_input_ids"] = ids(batch, tokens)
    if extras.mask and name in TEXT and "attention_mask" in taken:
        given["attention_mask"] = ids(batch, length if pair else keys)
    if extras.image and name in TEXT and "pixel_values" in taken:
        given["pixel_values"] = _main(config, "pixel_values", batch, tokens, dtype)
    return given


def is_pair(model: nn.Module) -> bool:
    """True for an encoder with a decoder, each with a sequence of its own."""
    taken = inspect.signature(type(model).forward).parameters
    both = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    return both and "decoder_input_ids" in taken


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
