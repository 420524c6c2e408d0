"""Letters for the sizes of traced tensors, so that counts are explained as papers write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headwise.costs.formula import Formula, formula, size
from headwise.costs.workload import Tokens

LETTERS = {
    "h": ("hidden_size", "n_embd", "d_model", "dim"),
    "f": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff"),
    "V": ("vocab_size",),
    "E": ("num_local_experts", "num_experts", "n_routed_experts"),
    "a": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "g": ("num_key_value_heads", "num_kv_heads"),
    "d": ("head_dim", "d_kv", "attention_head_dim"),
}
"""Fields of configurations, by the letters of papers."""

MULTIPLES = range(2, 9)  # of the width: 3h for joined projections, 4h for a hidden layer


@dataclass(frozen=True)
class SizeNames:
    """Letters by value: a size that is no letter's stays a number, so every formula is exact."""

    tokens: Tokens
    widths: Mapping[str, int] = field(default_factory=dict)  # the most usual letter first

    def width(self, value: int) -> Formula:
        """A side of a weight, or the last axis of an activation.

        >>> names = SizeNames(Tokens(2, 8, 8, 8), {"h": 64, "f": 96})
        >>> str(names.width(96)), str(names.width(192)), str(names.width(5))
        ('f', '3h', '5')
        """
        if value > 1:
            for letter, known in self.widths.items():
                if value == known:
                    return size(letter, known)
            h = self.widths.get("h", 1)
            for times in MULTIPLES:
                if h > 1 and value == times * h:
                    return times * size("h", h)
        return formula(value)

    def rows(self, value: int) -> Formula:
        """An axis of sequences, tokens, or both together."""
        tokens = self.tokens
        known = ((tokens.rows, tokens.rows), (tokens.s, tokens.s), (tokens.b, tokens.b))
        for written, _ in known:
            if value == written.value and (value > 1 or written is tokens.rows):
                return written
        keys = tokens.b * tokens.t
        if value == keys.value:
            return keys
        return tokens.t if value == tokens.keys else self.width(value)

    def weight(self, shape: Sequence[int]) -> list[Formula]:
        """The sides of a weight."""
        return [self.width(side) for side in shape]

    def tensor(self, shape: Sequence[int]) -> Formula:
        """The numbers of an activation whose first axes are sequences and tokens."""
        if not shape:
            return formula(1)
        if len(shape) == 1:
            return self.rows(shape[0])
        whole = self.tokens.b if shape[0] == self.tokens.batch else self.rows(shape[0])
        heads, wide = self.widths.get("a"), self.widths.get("h")
        if len(shape) == 4 and shape[1] == heads and heads * shape[3] == wide:
            return whole * self._middle(shape[2]) * size("h", heads * shape[3])
        *middle, last = shape[1:]
        for side in middle:
            whole = whole * self._middle(side)
        pairs = len(shape) == 4 and middle[1] == self.tokens.queries
        lse = len(shape) == 3 and last == self.tokens.queries and middle[0] == heads
        return whole * (self._middle(last) if pairs or lse else self.width(last))

    def _middle(self, side: int) -> Formula:
        if side > 1 and side == self.tokens.queries:
            return self.tokens.s
        if side > 1 and side == self.tokens.keys:
            return self.tokens.t
        return self.width(side)


def checked(written: Formula, value: int) -> Formula:
    """A formula if it gives this value, else the value."""
    return written if written.value == value else formula(value)


def text_config(config: Any) -> Any:
    """The configuration of the language model inside a configuration."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def widths_of(config: Any) -> dict[str, int]:
    """The widths that have letters, no two of them equal."""
    found: dict[str, int] = {}
    for letter, fields in LETTERS.items():
        values = (field_of(text_config(config), name) for name in fields)
        value = next((each for each in values if each is not None), None)
        if value is not None and value > 1 and value not in found.values():
            found[letter] = value
    return found


def field_of(config: Any, name: str) -> int | None:
    """A field that is a whole number."""
    try:
        value = getattr(config, name, None)
    except Exception:  # some have a value for each layer, and refuse to name one
        return None
    return value if type(value) is int else None
