"""Fields of a configuration: looked up by their several names, checked, and never guessed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headwise.costs.layers import Activation

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


class Fields:
    """A configuration's fields; what is missing is named, in one error, with its other names."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given = given
        self.kind = str(given.get("model_type", "?"))

    def get(self, *names: str) -> Any:
        """The first of these fields that is there and not None; else None."""
        for name in names:
            if self.given.get(name) is not None:
                return self.given[name]
        return None

    def need(self, *names: str) -> Any:
        """The first of these fields that is there; ValueError that names it if none is."""
        found = self.get(*names)
        if found is None:
            others = f" (or {', '.join(names[1:])})" if names[1:] else ""
            raise ValueError(
                f"the configuration of {self.kind!r} has no field {names[0]!r}{others}; its cost "
                "can't be counted without it"
            )
        return found

    def needs(self, *fields: tuple[str, ...]) -> None:
        """Raise ValueError that names every field that is missing."""
        missing = [names[0] for names in fields if self.get(*names) is None]
        if missing:
            raise ValueError(
                f"the configuration of {self.kind!r} has no {', '.join(missing)}; its cost can't "
                "be counted without them"
            )

    def size(self, *names: str) -> int:
        """A positive integer."""
        value = self.need(*names)
        if type(value) is not int or value < 1:
            raise ValueError(
                f"{self.kind!r} has {names[0]}={value!r}; it must be a positive integer"
            )
        return value

    def rate(self, *names: str) -> float:
        """A dropout rate, 0 if there is none."""
        return float(self.get(*names) or 0.0)

    def flag(self, name: str | bool) -> bool:
        """A constant, or the field of this name, False if it is not there."""
        return name if isinstance(name, bool) else bool(self.get(name))

    def activation(self, *names: str) -> Activation:
        """An activation function by its name."""
        name = self.need(*(names or ACTIVATION))
        if name not in ACTIVATION_NAMES:
            raise ValueError(
                f"{self.kind!r} has the activation {name!r}, which is unknown; known are "
                f"{', '.join(ACTIVATION_NAMES)}"
            )
        return ACTIVATION_NAMES[name]

    def head_dim(self, width: int, heads: int) -> int:
        """The width of a head: its field, or width / heads if that divides."""
        given = self.get("head_dim", "d_kv", "attention_head_dim")
        if given is not None:
            return int(given)
        if width % heads:
            raise ValueError(
                f"{self.kind!r} contradicts itself: {WIDTH[0]}={width} does not divide into "
                f"{heads} heads, and there is no head_dim"
            )
        return width // heads

    def key_heads(self, heads: int) -> int:
        """Key heads, as many as query heads if there is no field; they must divide them."""
        found = self.get(*KEY_HEADS) or heads
        if heads % found:
            raise ValueError(
                f"{self.kind!r} contradicts itself: {heads} heads can't share {found} key heads"
            )
        return int(found)

    def kinds(self, layers: int) -> tuple[str, ...]:
        """The kind of each layer's attention, as `layer_types` lists them."""
        listed = self.get("layer_types")
        if listed is None:
            return ()
        if len(listed) != layers:
            raise ValueError(
                f"{self.kind!r} contradicts itself: {len(listed)} layer_types for {layers} layers"
            )
        return tuple(listed)
