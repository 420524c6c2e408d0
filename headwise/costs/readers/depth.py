"""A limit on layers, which are described or built one by one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headwise.messages import say

DEPTHS = (
    "num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers",
    "num_decoder_layers", "layers",
)  # fmt: skip
MOST_LAYERS = 1_000


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
