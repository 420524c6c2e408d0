"""The model that transformers builds from a configuration, as a check of what was read from it.

A model on the meta device has no storage and takes a fraction of a second to build.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from importlib import import_module
from typing import Any

import torch
from torch import nn

from headwise.costs.layers import Architecture
from headwise.costs.walk import count
from headwise.costs.workload import Workload
from headwise.messages import Sentence, say


def counted_params(architecture: Architecture) -> int:
    """The parameters of an architecture."""
    own = architecture.stacks[-1].tokens  # an image has a length of its own
    return count(architecture, Workload(queries=None if own else 1)).params


def held_params(model: nn.Module) -> int:
    """The parameters that a model holds; tied ones count once."""
    return sum(weight.numel() for weight in model.parameters())


def built_params(config: Any, name: str | None, head: str) -> int | None:
    """The parameters of the model that transformers builds; None if it has no such class.

    The class is `name` or, if that is None, the one of the architecture with this head.
    """
    kind = model_class(config, name, head)
    if kind is None:
        return None
    own = deepcopy(config)
    own._attn_implementation = "eager"  # building is not to depend on the kernels that are there
    try:
        with torch.device("meta"):
            model = kind(own)
        model.tie_weights()
    except Exception as error:  # each class has checks of its own
        message = " ".join(str(error).split())[:300]
        raise ValueError(
            say("transformers can't build this configuration of {kind!r}: {message}",
                kind=config.model_type, message=message or type(error).__name__)
        ) from None  # fmt: skip
    return held_params(model)


def model_class(config: Any, name: str | None, head: str) -> Callable[[Any], Any] | None:
    """The class of transformers that is built; None if there is none."""
    try:
        transformers: Any = import_module("transformers")
    except ImportError:
        return None
    if name is None and head == "ForCausalLM":
        found = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
        return found if isinstance(found, type) else None
    if name is None:
        base = transformers.MODEL_MAPPING.get(type(config), None)
        if not isinstance(base, type):
            return None
        name = base.__name__.removesuffix("Model") + head
    found = getattr(transformers, name, None)
    return found if isinstance(found, type) else None


def check_built(
    config: Any, name: str | None, head: str, read: Callable[[Any], Architecture]
) -> Architecture:
    """The architecture that `read` finds in a config, if transformers builds as many parameters.

    ValueError otherwise, which names the fields whose default would make them equal.
    """
    architecture = read(config)
    held = built_params(config, name, head)
    counted = counted_params(architecture)
    if held in (None, counted):
        return architecture
    raise ValueError(_difference(config, counted, held or 0, blamed(config, name, head, read)))


def blamed(
    config: Any, name: str | None, head: str, read: Callable[[Any], Architecture]
) -> dict[str, Any]:
    """The fields that are not read, with their defaults: at these, both counts agree."""
    usual = type(config)().to_dict()
    found = {}
    for field, value in config.to_dict().items():
        if field not in usual or usual[field] == value:
            continue
        changed = deepcopy(config)
        try:
            setattr(changed, field, usual[field])
            if counted_params(read(changed)) == built_params(changed, name, head):
                found[field] = usual[field]
        except (ValueError, TypeError, AttributeError):
            continue  # it fits no longer with the other fields
    return found


def _difference(config: Any, counted: int, held: int, fields: dict[str, Any]) -> Sentence:
    if not fields:
        return say(
            "transformers builds {held:,} parameters from this configuration of {kind!r}, and "
            "{counted:,} are counted: one of its fields is not read, so its cost is not known",
            held=held,
            counted=counted,
            kind=config.model_type,
        )
    given = ", ".join(f"{name}={getattr(config, name, None)!r}" for name in fields)
    usual = ", ".join(f"{name}={value!r}" for name, value in fields.items())
    return say(
        "{kind!r} with {given} is not counted: transformers builds {held:,} parameters from it, "
        "and {counted:,} are counted. A configuration with {usual} is",
        kind=config.model_type,
        given=given,
        held=held,
        counted=counted,
        usual=usual,
    )
