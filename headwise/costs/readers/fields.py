"""Fields of a configuration: looked up by their several names, checked, and never guessed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headwise.costs.layers import Activation
from headwise.messages import Sentence, say

ACTIVATION_NAMES: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "quick_gelu": "gelu",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "relu2": "relu2",
    "tanh": "tanh",
}

WIDTH = ("hidden_size", "n_embd", "d_model", "dim")
HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
KEY_HEADS = ("num_key_value_heads", "num_kv_heads")
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
HIDDEN = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "hidden_dim", "d_ff")
ACTIVATION = ("hidden_act", "hidden_activation", "activation_function", "activation")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")

DEPTHS = (*LAYERS, "encoder_layers", "decoder_layers", "num_decoder_layers", "layers")
MOST_LAYERS = 1_000
"""Layers are described one by one, by transformers too."""

LARGEST = (1 << 63) - 1
"""The largest size of a tensor."""


class Fields:
    """A configuration's fields; what is missing is named, in one error, with its other names.

    They are `complete` if transformers' class has filled in what a file leaves out.
    """

    def __init__(self, given: Mapping[str, Any], complete: bool = True) -> None:
        self.given, self.complete = given, complete
        self.kind = str(given.get("model_type", "?"))

    def get(self, *names: str) -> Any:
        """The first of these fields that is there and not None; else None."""
        for name in names:
            if self.given.get(name) is not None:
                return self.given[name]
        return None

    def chosen(self, *names: str) -> Any:
        """The same for a field whose default differs between architectures: it must be known."""
        if not self.complete and not any(name in self.given for name in names):
            raise ValueError(
                say(
                    "the configuration of {kind!r} has no field {name!r}, whose default only "
                    "transformers knows; add it, or pip install headwise[transformers]",
                    kind=self.kind,
                    name=names[0],
                )
            )
        return self.get(*names)

    def need(self, *names: str) -> Any:
        """The first of these fields that is there; ValueError that names it if none is."""
        found = self.get(*names)
        if found is None:
            others = Sentence("")
            if names[1:]:
                others = say(" (or {names})", names=", ".join(names[1:]))
            raise ValueError(
                say(
                    "the configuration of {kind!r} has no field {name!r}{others}; its cost can't "
                    "be counted without it",
                    kind=self.kind,
                    name=names[0],
                    others=others,
                )
            )
        return found

    def needs(self, *fields: tuple[str, ...]) -> None:
        """Raise ValueError that names every field that is missing."""
        missing = [names[0] for names in fields if self.get(*names) is None]
        if missing:
            raise ValueError(
                say(
                    "the configuration of {kind!r} has no {missing}; its cost can't be counted "
                    "without them",
                    kind=self.kind,
                    missing=", ".join(missing),
                )
            )

    def size(self, *names: str) -> int:
        """A positive integer."""
        value = self.need(*names)
        if type(value) is not int or value < 1:
            raise ValueError(
                say(
                    "{kind!r} has {name}={value!r}; it must be a positive integer",
                    kind=self.kind,
                    name=names[0],
                    value=value,
                )
            )
        if value > LARGEST:
            raise ValueError(
                say("{kind!r} has {name}={value}; sizes up to {most:,} are counted",
                    kind=self.kind, name=names[0], value=str(value)[:40], most=LARGEST)
            )  # fmt: skip
        return value

    def rate(self, *names: str) -> float:
        """A dropout rate, 0 if there is none."""
        value = self.get(*names) or 0.0
        if not isinstance(value, int | float) or not 0 <= value < 1:
            raise ValueError(
                say(
                    "{kind!r} has {name}={value!r}; it must be from 0 to below 1",
                    kind=self.kind,
                    name=names[0],
                    value=value,
                )
            )
        return float(value)

    def flag(self, name: str | bool) -> bool:
        """A constant, or the field of this name, False if its class has none."""
        return name if isinstance(name, bool) else bool(self.chosen(name))

    def activation(self, *names: str) -> Activation:
        """An activation function by its name."""
        name = self.need(*(names or ACTIVATION))
        if name not in ACTIVATION_NAMES:
            raise ValueError(
                say(
                    "{kind!r} has the activation {name!r}, which is unknown; known are {there}",
                    kind=self.kind,
                    name=name,
                    there=", ".join(ACTIVATION_NAMES),
                )
            )
        return ACTIVATION_NAMES[name]

    def head_dim(self, width: int, heads: int) -> int:
        """The width of a head: its field, or width / heads if that divides."""
        names = ("head_dim", "d_kv", "attention_head_dim")
        if self.get(*names) is not None:
            return self.size(*names)
        if width % heads:
            raise self.contradiction(
                say(
                    "{name}={width} does not divide into {heads} heads, and there is no head_dim",
                    name=WIDTH[0],
                    width=width,
                    heads=heads,
                )
            )
        return width // heads

    def key_heads(self, heads: int) -> int:
        """Key heads, as many as query heads if the field is empty; they must divide them."""
        if self.chosen(*KEY_HEADS) is None:
            return heads
        found = self.size(*KEY_HEADS)
        if heads % found:
            raise self.contradiction(
                say("{heads} heads can't share {found} key heads", heads=heads, found=found)
            )
        return found

    def kinds(self, layers: int) -> tuple[str, ...]:
        """The kind of each layer's attention, as `layer_types` lists them."""
        listed = self.get("layer_types")
        if listed is None:
            return ()
        if len(listed) != layers:
            raise self.contradiction(
                say("{count} layer_types for {layers} layers", count=len(listed), layers=layers)
            )
        return tuple(listed)

    def numbers(self, name: str, layers: int) -> set[int]:
        """The numbers of some layers; none if there is no such field."""
        found = set(self.get(name) or ())
        wrong = [x for x in found if type(x) is not int or not 0 <= x < layers]
        if wrong:
            raise self.contradiction(
                say("{name} has {wrong!r}, and there are {layers} layers", name=name,
                    wrong=wrong[0], layers=layers)
            )  # fmt: skip
        return found

    def contradiction(self, what: Sentence) -> ValueError:
        """The error of fields that exclude each other."""
        return ValueError(say("{kind!r} contradicts itself: {what}", kind=self.kind, what=what))


def check_depth(given: Mapping[str, Any]) -> None:
    """Raise ValueError for more layers than can be described one by one."""
    for name in DEPTHS:
        layers = given.get(name)
        if isinstance(layers, int) and layers > MOST_LAYERS:
            raise ValueError(
                say("{kind!r} has {layers:,} layers; at most {most:,} are counted",
                    kind=str(given.get("model_type", "?")), layers=layers, most=MOST_LAYERS)
            )  # fmt: skip


def unknown_head(fields: Fields, head: str, known: str) -> ValueError:
    """The error of a class whose end is not known."""
    return ValueError(
        say("the head {head!r} of {kind!r} is unknown; known are {known}", head=head,
            kind=fields.kind, known=known)
    )  # fmt: skip
