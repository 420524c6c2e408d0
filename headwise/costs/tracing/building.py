"""Models on the meta device: of a configuration, or like a model that is there."""

from __future__ import annotations

import copy
import sys
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from headwise.costs.tracing import kernels
from headwise.messages import say

LAYERDROP = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")


def build(config: Any) -> nn.Module:
    """The model that transformers makes of a configuration, without its numbers."""
    kind = model_class(config)
    own = copy.deepcopy(config)
    own._attn_implementation = "eager"  # building is not to depend on the kernels that are there
    try:
        with torch.device("meta"):
            model: Any = kind(own)
        model.tie_weights()
    except Exception as error:  # each class has checks of its own
        raise refusal(config.model_type, error) from None
    return traceable(model)


def refusal(kind: str, error: Exception) -> ValueError:
    """The error for a configuration that no model can be built of."""
    message = " ".join(str(error).split())[:300]
    return ValueError(
        say("transformers can't build this configuration of {kind!r}: {message}", kind=kind,
            message=message or type(error).__name__)
    )  # fmt: skip


def on_meta(model: nn.Module) -> nn.Module:
    """A copy of a model without its numbers and its hooks."""
    memo: dict[int, Any] = {}
    for weight in model.parameters():
        empty = torch.empty_like(weight, device="meta", requires_grad=False)
        memo[id(weight)] = nn.Parameter(empty, weight.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    made = copy.deepcopy(model, memo)
    for module in made.modules():
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"):
            getattr(module, name).clear()
    return traceable(made)


def traceable(model: nn.Module) -> nn.Module:
    """Let the functions of this package stand in for a model's attention, masks and experts."""
    if "transformers" in sys.modules:
        kernels.register()
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            config._attn_implementation = kernels.NAME
        if hasattr(config, "_experts_implementation"):
            config._experts_implementation = kernels.NAME
        for holder in (module, config):
            for name in LAYERDROP:  # whether a layer is passed over is a matter of chance
                if isinstance(getattr(holder, name, None), float):
                    setattr(holder, name, 0.0)
    return model


def model_class(config: Any) -> type[nn.Module]:
    """The class of a configuration: the first of its `architectures`, or the usual one.

    The usual one is the language model of a decoder and of an encoder with a decoder, else the bare
    model.
    """
    transformers: Any = import_module("transformers")
    listed = getattr(config, "architectures", None)
    if listed:
        return _named(transformers, config, listed)
    kind = type(config)
    decodes = getattr(config, "is_decoder", False)
    order = ["MODEL_FOR_CAUSAL_LM_MAPPING", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING"]
    if getattr(config, "is_encoder_decoder", False):
        order = ["MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING"]
    elif not decodes and _of(transformers, "MODEL_FOR_MASKED_LM_MAPPING", kind) is not None:
        order = []
    for name in (*order, "MODEL_MAPPING"):
        found = _of(transformers, name, kind)
        if found is not None:
            return found
    raise ValueError(
        say("transformers {version} has no model for {kind!r}", version=transformers.__version__,
            kind=config.model_type)
    )  # fmt: skip


def _of(transformers: Any, mapping: str, kind: type) -> type[nn.Module] | None:
    try:
        found = getattr(transformers, mapping).get(kind, None)
    except Exception:  # a model that needs a package that is not there
        return None
    if isinstance(found, tuple):
        found = found[0]
    return found if isinstance(found, type) else None


def _named(transformers: Any, config: Any, listed: Any) -> type[nn.Module]:
    if not isinstance(listed, list | tuple) or not isinstance(listed[0], str):
        raise ValueError(
            say("architectures={listed!r} must be a list of class names", listed=listed)
        )
    found = getattr(transformers, listed[0], None)
    if not isinstance(found, type) or not issubclass(found, nn.Module):
        raise ValueError(
            say("transformers has no class {name!r} of model_type={kind!r}", name=listed[0],
                kind=config.model_type)
        )  # fmt: skip
    wanted = getattr(found, "config_class", None)
    if wanted is not None and not isinstance(config, wanted):
        raise ValueError(
            say(
                "architectures={name!r} is not a class of model_type={kind!r}, and its cost is "
                "not known",
                name=listed[0],
                kind=config.model_type,
            )
        )
    return found


def without_numbers(given: Any) -> Any:
    """A tensor on the meta device, or anything else as it is."""
    if not isinstance(given, Tensor):
        return given
    return torch.empty_like(given, device="meta", requires_grad=given.requires_grad)


def weights_of(model: nn.Module) -> list[Tensor]:
    """Parameters and buffers."""
    return [*model.parameters(), *model.buffers()]
