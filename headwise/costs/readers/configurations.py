"""Configurations of transformers' models: as an object, a dictionary, a file or a name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from headwise.costs.layers import Architecture, LayerStack, LinearLayer, Step
from headwise.costs.readers.decoders import read_decoder
from headwise.costs.readers.encoders import Head, read_bert, read_t5, read_vit, read_whisper
from headwise.costs.readers.families import FAMILIES
from headwise.costs.readers.fields import Fields, unknown_head
from headwise.hub import unreachable
from headwise.messages import Sentence, say

OTHERS: dict[str, tuple[Callable[[Fields, Head], tuple[LayerStack, ...]], Head]] = {
    "bert": (read_bert, "Model"),
    "roberta": (read_bert, "Model"),
    "xlm-roberta": (read_bert, "Model"),
    "distilbert": (read_bert, "Model"),
    "vit": (read_vit, "Model"),
    "t5": (read_t5, "ForConditionalGeneration"),
    "mt5": (read_t5, "ForConditionalGeneration"),
    "whisper": (read_whisper, "ForConditionalGeneration"),
}
"""Readers of models that are not decoders, and the head that a config without one has."""

KNOWN = (*FAMILIES, *OTHERS)
LANGUAGE_HEADS = ("ForCausalLM", "LMHeadModel")


def read_fields(given: Mapping[str, Any]) -> Architecture:
    """The architecture of a configuration's fields, by its `model_type` and `architectures`."""
    if given.get("model_type") is None:
        raise ValueError(
            say(
                "the configuration has no field 'model_type', which says which architecture it "
                "is; known are {known}",
                known=", ".join(sorted(KNOWN)),
            )
        )
    completed = _complete(given)
    return _read(Fields(completed or given, completed is not None))


def _read(fields: Fields) -> Architecture:
    kind = fields.kind
    _check_contents(fields)
    name = _class_name(fields)
    if kind in OTHERS:
        reader, usual = OTHERS[kind]
        head = usual if name is None else _head(fields, name)
        return Architecture(name or kind, reader(fields, head))
    if kind not in FAMILIES:
        raise ValueError(_unknown(fields))
    stack = read_decoder(fields, FAMILIES[kind])
    head = LANGUAGE_HEADS[0] if name is None else _head(fields, name)
    after = (*stack.after, *_language_head(fields, head, stack.width))
    return Architecture(name or kind, (replace(stack, after=after),))


def _class_name(fields: Fields) -> str | None:
    """The first of `architectures`, if there are any."""
    listed = fields.get("architectures")
    if not listed:
        return None
    if not isinstance(listed, list | tuple) or not isinstance(listed[0], str):
        raise ValueError(
            say("architectures={listed!r} must be a list of class names", listed=listed)
        )
    return listed[0]


def _head(fields: Fields, name: str) -> Head:
    """The end of a class's name: LlamaForCausalLM → ForCausalLM, BertModel → Model.

    ValueError if its beginning is not the architecture's.
    """
    places = (name.find(mark, 1) for mark in ("For", "LMHead", "EncoderModel", "Model"))
    place = next((place for place in places if place > 0), None)
    if place is None:
        raise ValueError(
            say("architectures={name!r} names no head: it ends in neither Model nor For…",
                name=name)
        )  # fmt: skip
    letters = fields.kind.removesuffix("_text").replace("_", "").replace("-", "").lower()
    if name[:place].lower() not in (letters, f"{letters}text"):
        raise ValueError(
            say(
                "architectures={name!r} is not a class of model_type={kind!r}, and its cost is "
                "not known",
                name=name,
                kind=fields.kind,
            )
        )
    return name[place:]


def _language_head(fields: Fields, head: Head, width: int) -> tuple[Step, ...]:
    family = FAMILIES[fields.kind]
    if head == "Model":
        return ()
    if head in LANGUAGE_HEADS:
        tied, vocabulary = fields.flag("tie_word_embeddings"), fields.size("vocab_size")
        return (LinearLayer("head", width, vocabulary, family.head_bias, tied, split="columns"),)
    if head == "ForSequenceClassification":
        labels = fields.get("num_labels") or len(fields.get("id2label") or {}) or 2
        return (LinearLayer("score", width, labels, False),)
    known = ("Model", *LANGUAGE_HEADS, "ForSequenceClassification")
    raise unknown_head(fields, head, ", ".join(known))


def _unknown(fields: Fields) -> Sentence:
    """An error for an architecture without a reader, with what it would take to count it."""
    wanted = ("hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size")
    missing = [name for name in (*wanted, "vocab_size") if fields.get(name) is None]
    parts = [name for name in ("text_config", "vision_config", "decoder") if fields.get(name)]
    note = Sentence("")
    if parts:
        note = say("; it is made of several models: give one of them, such as config.{part}",
                   part=parts[0])  # fmt: skip
    elif missing:
        note = say("; of a plain decoder's fields it lacks {missing}", missing=", ".join(missing))
    return say(
        "the architecture {kind!r} is unknown, and its parts are not guessed{note}. Known are "
        "{known}",
        kind=fields.kind,
        note=note,
        known=", ".join(sorted(KNOWN)),
    )


def _check_contents(fields: Fields) -> None:
    """Refuse options that change the architecture and are not read."""
    for name, wrong in (("add_cross_attention", True), ("qk_layernorm", True)):
        if fields.get(name) == wrong and not (name == "qk_layernorm" and fields.kind == "phi"):
            raise ValueError(
                say("{kind!r} with {name}={value} is not supported", kind=fields.kind, name=name,
                    value=wrong)
            )  # fmt: skip


def _complete(given: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The fields with the defaults of transformers' config class; None if they are not known.

    A config.json leaves out what its class has by default.
    """
    kind = given.get("model_type")
    if kind not in KNOWN:
        return None
    try:
        from transformers import AutoConfig
    except ImportError:
        return None
    fields = {name: value for name, value in given.items() if name != "model_type"}
    try:
        config = AutoConfig.for_model(kind, **fields)
    except Exception as error:  # each class has checks of its own
        message = " ".join(str(error).split())
        raise ValueError(
            say("transformers refuses this configuration of {kind!r}: {message}", kind=kind,
                message=message)
        ) from None  # fmt: skip
    return {**_fields(config), "architectures": given.get("architectures")}


def is_configuration(what: object) -> bool:
    """True for a config object of transformers."""
    return callable(getattr(what, "to_dict", None)) and hasattr(what, "model_type")


def read_configuration(config: Any, name: str | None = None) -> Architecture:
    """The architecture of a config object; `name` is the class of its model, if there is one."""
    fields = _fields(config)
    if name is not None:
        fields["architectures"] = [name]
    return _read(Fields(fields))


def _fields(config: Any) -> dict[str, Any]:
    """All fields of a config object."""
    fields = {**config.to_dict(), "model_type": config.model_type}
    fields.setdefault("num_labels", getattr(config, "num_labels", None))
    return fields


def read_transformers_model(model: nn.Module) -> Architecture:
    """The architecture of a transformers model, also of a class derived from one."""
    kinds = [kind for kind in type(model).__mro__ if kind.__module__.startswith("transformers.")]
    return read_configuration(model.config, (kinds or [type(model)])[0].__name__)


def read_name(name: str) -> Architecture:
    """The architecture of a config.json, a folder with one, or a model's name.

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
