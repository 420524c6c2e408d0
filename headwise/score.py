"""Scores: the function of a query and a key that gives a logit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.core.arguments import is_number, is_scalar

__all__ = ["Additive", "Cosine", "Dot", "General"]


@dataclass(frozen=True)
class Dot:
    """scale · q·k; the scale is 1/√d unless given."""

    scale: float | None = None

    def __post_init__(self) -> None:
        scale: object = self.scale
        if isinstance(scale, Tensor) and scale.requires_grad:
            raise ValueError(
                "hw.Dot's scale is a number, and this tensor requires a gradient; use "
                "hw.attention(q * scale, k, v, score=hw.Dot(1.0))"
            )
        if scale is not None and not is_scalar(scale):
            raise ValueError(f"hw.Dot({scale!r}): the scale must be a number, or None for 1/√d")


@dataclass(frozen=True, eq=False)
class Additive:
    """Σ_d w_d tanh(q_d + k_d), Bahdanau's score; weight is (D,) or (Hq, D)."""

    weight: Tensor

    def __post_init__(self) -> None:
        _check_weight(self, "(D,) or (Hq, D)")


@dataclass(frozen=True, eq=False)
class General:
    """(q W)·k, Luong's bilinear score; weight is (Dq, Dk) or (Hq, Dq, Dk)."""

    weight: Tensor

    def __post_init__(self) -> None:
        _check_weight(self, "(Dq, Dk) or (Hq, Dq, Dk)")


@dataclass(frozen=True, eq=False)
class Cosine:
    """temperature · cos(q, k); temperature is a number, a scalar tensor or (Hq,)."""

    temperature: float | Tensor = 1.0

    def __post_init__(self) -> None:
        given: object = self.temperature
        if not is_number(given) and not isinstance(given, Tensor):
            raise ValueError(f"hw.Cosine({given!r}): the temperature must be a number or a tensor")


Score = Dot | Additive | General | Cosine


@dataclass(frozen=True)
class Scored:
    """A score in the form engines take: a scaled dot product, or additive with weight (Hq, D)."""

    q: Tensor
    k: Tensor
    scale: float = 1.0
    additive: Tensor | None = None


def rewrite(score: Score, q: Tensor, k: Tensor) -> Scored:
    """Rewrite a score in the form engines take. q (B, Hq, N, Dq), k (B, Hkv, M, Dk)."""
    heads, width = q.shape[1], q.shape[-1]
    if isinstance(score, General):
        weight = score.weight
        fits = weight.ndim in (2, 3) and weight.shape[-2:] == (width, k.shape[-1])
        if not fits or (weight.ndim == 3 and weight.shape[0] != heads):
            raise ValueError(
                f"hw.General's weight has shape {tuple(weight.shape)}; this call needs "
                f"({width}, {k.shape[-1]}) or ({heads}, {width}, {k.shape[-1]})"
            )
        # one sum over batch and rows per head's gradient: parts of it may overflow the dtype
        into = "de" if weight.ndim == 2 else "hde"
        return Scored(torch.einsum(f"bhnd,{into}->bhne", q, weight.to(q)), k)
    if width != k.shape[-1]:
        raise ValueError(
            f"queries have width {width} and keys {k.shape[-1]}; use score=hw.General(weight)"
        )
    if isinstance(score, Dot):
        return Scored(q, k, width**-0.5 if score.scale is None else float(score.scale))
    if isinstance(score, Additive):
        weight = score.weight
        shape = tuple(weight.shape)
        if shape != (width,) and shape != (heads, width):  # not `in`: compilers compare symbols
            raise ValueError(
                f"hw.Additive's weight has shape {tuple(weight.shape)}; this call needs "
                f"({width},) or ({heads}, {width})"
            )
        return Scored(q, k, additive=weight.to(q.device).expand(heads, width))
    if isinstance(score, Cosine):
        q, k = _unit(q), _unit(k)
        if not isinstance(score.temperature, Tensor):
            return Scored(q, k, float(score.temperature))
        temperature = score.temperature
        shape = tuple(temperature.shape)
        if shape != () and shape != (1,) and shape != (heads,):
            raise ValueError(
                f"hw.Cosine's temperature has shape {tuple(temperature.shape)}; this call needs "
                f"a scalar or ({heads},)"
            )
        return Scored(q * temperature.reshape(-1, 1, 1).to(q), k)
    raise ValueError(f"score={score!r} is not one of hw.Dot, hw.Additive, hw.General, hw.Cosine")


def _check_weight(score: Additive | General, shape: str) -> None:
    weight: object = score.weight
    if not isinstance(weight, Tensor):
        name = type(score).__name__
        raise ValueError(f"hw.{name} takes a tensor {shape}, not {type(weight).__name__}")


def _unit(x: Tensor) -> Tensor:
    wide = x if x.dtype.itemsize >= 4 else x.float()
    return F.normalize(wide, dim=-1).to(x.dtype)
