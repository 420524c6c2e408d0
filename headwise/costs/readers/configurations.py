"""Configurations of transformers: as an object, a dictionary, a file or a name; their models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headwise.costs.readers.depth import check_depth
from headwise.costs.tracing import building
from headwise.costs.tracing.traced_model import TracedModel
from headwise.hub import unreachable
from headwise.messages import say


def read_fields(given: Mapping[str, Any]) -> TracedModel:
    """The model of a configuration's fields, by its `model_type` and `architectures`."""
    kind = given.get("model_type")
    if kind is None:
        raise ValueError(
            say("the configuration has no field 'model_type', which says which architecture it is")
        )
    check_depth(given)
    try:
        from transformers import AutoConfig
    except ImportError:
        raise ValueError(
            say("counting a configuration of {kind!r} builds its model, which needs transformers: "
                "pip install headwise[transformers]", kind=kind)
        ) from None  # fmt: skip
    fields = {name: value for name, value in given.items() if name != "model_type"}
    try:
        config = AutoConfig.for_model(kind, **fields)
    except Exception as error:  # each class has checks of its own
        message = " ".join(str(error).split())[:300]
        raise ValueError(
            say("transformers refuses this configuration of {kind!r}: {message}", kind=kind,
                message=message)
        ) from None  # fmt: skip
    return read_configuration(config)


def is_configuration(what: object) -> bool:
    """True for a config object of transformers."""
    return callable(getattr(what, "to_dict", None)) and hasattr(what, "model_type")


def read_configuration(config: Any) -> TracedModel:
    """The model that transformers builds of a config object."""
    check_depth({**config.to_dict(), "model_type": config.model_type})
    model = building.build(config)
    named = getattr(config, "architectures", None)
    return TracedModel(named[0] if named else config.model_type, model)


def read_name(name: str) -> TracedModel:
    """The model of a config.json, of a folder with one, or of a name.

    A name is looked up in the local cache of the hub, then on the hub.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return read_fields(_from_file(path))
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
        from transformers import AutoConfig
    except ImportError:
        raise ValueError(
            say(
                "{name!r} is not a file, and finding a model by its name needs transformers: "
                "pip install headwise[transformers]",
                name=name,
            )
        ) from None
    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        raise ValueError(
            say("{name!r} is neither a config.json nor a model's name", name=name)
        ) from None
    if isinstance(found, str):
        return read_fields(_from_file(Path(found)))
    reason = unreachable()
    if reason:
        raise ValueError(
            say(
                "{name!r} is neither a config.json nor in the local cache, and the hub can't be "
                "asked for it ({reason})",
                name=name,
                reason=reason,
            )
        )
    try:
        return read_configuration(AutoConfig.from_pretrained(name, trust_remote_code=False))
    except OSError as error:
        raise ValueError(
            say("{name!r} is not on the hub: {reason}", name=name,
                reason=str(error).splitlines()[0])
        ) from None  # fmt: skip


def _from_file(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(say("{path} is not JSON: {reason}", path=path, reason=error)) from None
    if not isinstance(fields, dict):
        raise ValueError(
            say("{path} holds no configuration, but a {kind}", path=path,
                kind=type(fields).__name__)
        )  # fmt: skip
    return fields
