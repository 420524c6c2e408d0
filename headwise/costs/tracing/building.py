"""Models on the meta device: of a configuration, or like a model that is there."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from headwise import models
from headwise.costs.tracing import kernels
from headwise.messages import say
from headwise.models.config import Config

DEPTHS = (
    "num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers",
    "num_decoder_layers", "layers",
)  # fmt: skip
MOST_LAYERS = 1_000
BUILT: dict[type[Config], Callable[[Any], nn.Module]] = {
    models.GPTConfig: models.GPT,
    models.FixedGPTConfig: models.FixedGPT,
    models.BertConfig: models.Bert,
    models.ViTConfig: models.ViT,
    models.TransformerConfig: models.Transformer,
    models.ConvConfig: models.Conv,
    models.LSTMConfig: models.LSTM,
}

LAYERDROP = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")


def check_depth(given: Mapping[str, Any]) -> None:
    """Raise ValueError for more layers than can be described one by one."""
    for name in DEPTHS:
        layers = given.get(name)
        if isinstance(layers, int) and layers > MOST_LAYERS:
            raise ValueError(
                say("{kind!r} has {layers:,} layers; at most {most:,} are counted",
                    kind=str(given.get("model_type", "?")), layers=layers, most=MOST_LAYERS)
            )  # fmt: skip
        if isinstance(layers, int) and layers < 0:
            raise ValueError(
                say("{kind!r} has {name}={value!r}; it must be a positive integer",
                    kind=str(given.get("model_type", "?")), name=name, value=layers)
            )  # fmt: skip


def build_own(config: Config) -> nn.Module:
    """The model of headwise that a configuration describes, without its numbers."""
    depths = {f"{place}layers" for place in ("", "encoder_", "decoder_")}
    check_depth({"model_type": type(config).__name__.removesuffix("Config"),
                 **{name: getattr(config, name, None) for name in depths}})  # fmt: skip
    try:
        with torch.device("meta"):
            return BUILT[type(config)](config)
    except (RuntimeError, OverflowError, TypeError) as error:  # torch refuses such sizes
        reason = str(error).splitlines()[0]
        raise ValueError(
            say("{config} has sizes that no tensor has: {reason}", config=repr(config)[:200],
                reason=reason)
        ) from None  # fmt: skip


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
    if sys.modules.get("transformers") is not None:
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
        return _class_listed(transformers, config, listed)
    kind = type(config)
    decodes = getattr(config, "is_decoder", False)
    order = ["MODEL_FOR_CAUSAL_LM_MAPPING", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING"]
    if getattr(config, "is_encoder_decoder", False):
        order = ["MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING"]
    elif (
        not decodes
        and _class_in_mapping(transformers, "MODEL_FOR_MASKED_LM_MAPPING", kind) is not None
    ):
        order = []
    for name in (*order, "MODEL_MAPPING"):
        found = _class_in_mapping(transformers, name, kind)
        if found is not None:
            return found
    raise ValueError(
        say("transformers {version} has no model for {kind!r}", version=transformers.__version__,
            kind=config.model_type)
    )  # fmt: skip


def _class_in_mapping(transformers: Any, mapping: str, kind: type) -> type[nn.Module] | None:
    try:
        found = getattr(transformers, mapping).get(kind, None)
    except Exception:  # a model that needs a package that is not there
        return None
    if isinstance(found, tuple):
        found = found[0]
    return found if isinstance(found, type) else None


def _class_listed(transformers: Any, config: Any, listed: Any) -> type[nn.Module]:
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
