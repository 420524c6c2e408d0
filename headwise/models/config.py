"""The base of all model configurations, which can be written to JSON and read back."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Self

from headwise import nn
from headwise.checks import CheckedFields, check_kind
from headwise.score import Dot

# Descriptions that may be part of a configuration, by the name under which JSON knows them.
_DESCRIPTIONS: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        *(nn.LayerNorm, nn.RMSNorm, nn.ReLU, nn.GELU, nn.SwiGLU, nn.PreNorm, nn.PostNorm),
        *(nn.Rotary, nn.ALiBi, nn.RelativeBuckets, nn.Learned, nn.Sinusoidal),
        *(nn.LinearScaling, nn.DynamicNTK, nn.YaRN, nn.Llama3Scaling),
        *(nn.Separate, nn.Shared, nn.Unprojected),
        *(Dot, nn.Additive, nn.General, nn.Cosine, nn.Bahdanau),
    )
}


@dataclass(frozen=True)
class Config(CheckedFields):
    """A model's configuration: frozen, comparable, and convertible to and from JSON."""

    def to_dict(self) -> dict[str, Any]:
        """The configuration as plain dictionaries, numbers and strings, ready for JSON.

        >>> from headwise.models import GPTConfig
        >>> config = GPTConfig(vocabulary=256)
        >>> GPTConfig.from_dict(config.to_dict()) == config
        True
        """
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """The configuration that `to_dict` wrote; ValueError if a field is unknown."""
        check_kind("data", data, dict, "a dictionary from to_dict()")
        built: Self = _built(cls, data)
        return built


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        inner = {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
        return {"type": type(value).__name__, **inner}
    return list(map(_plain, value)) if isinstance(value, list | tuple) else value


def _described(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_described, value))
    if not isinstance(value, dict):
        return value
    name = value.get("type")
    if name not in _DESCRIPTIONS:
        raise ValueError(
            f"unknown type {name!r} in a configuration; use one of {', '.join(_DESCRIPTIONS)}"
        )
    return _built(_DESCRIPTIONS[name], {key: x for key, x in value.items() if key != "type"})


def _built(kind: type[Any], data: dict[str, Any]) -> Any:
    known = {field.name for field in fields(kind)}
    unknown = sorted(map(str, set(data) - known))
    if unknown:
        raise ValueError(
            f"{kind.__name__} has no field {', '.join(unknown)}; it has {', '.join(sorted(known))}"
        )
    return kind(**{key: _described(value) for key, value in data.items()})
