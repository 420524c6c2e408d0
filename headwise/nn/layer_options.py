"""The options a multi-head layer is built with: its widths, its projections, and their checks.

A wrong option is refused when the layer is built, not at its first call.
"""

from __future__ import annotations

from dataclasses import dataclass

from headwise.checks import (
    check_flag,
    check_kind,
    check_positive,
    check_rate,
    check_sizes,
)
from headwise.core.problem import check_mask
from headwise.dropout import Dropout
from headwise.engines.plan import check_engine
from headwise.nn.learned_scores import LearnedScore
from headwise.nn.norms import Norm
from headwise.nn.positions import Position
from headwise.score import Score


@dataclass(frozen=True)
class Separate:
    """Q = X W_q and K = X W_k, as in the formula. With values and output: 4d² parameters."""


@dataclass(frozen=True)
class Shared:
    """Q = K = X W: one matrix for both, so scores are symmetric. 3d² parameters."""


@dataclass(frozen=True)
class Unprojected:
    """Q = K = X: each head compares its slice of the input unchanged. 2d² parameters."""


Projections = Separate | Shared | Unprojected
"""The projections of queries, keys and values."""


@dataclass(frozen=True)
class Widths:
    """Every width of a multi-head layer; `of` fills in the defaults.

    >>> Widths.of(512, 8, kv_heads=2).head_dim
    64
    """

    d_model: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    context: tuple[int, int]  # of the inputs that keys and values are made from

    @classmethod
    def of(
        cls,
        d_model: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        context_dim: int | tuple[int, int] | None = None,
    ) -> Widths:
        """Widths from the layer's arguments; ValueError if they do not divide."""
        optional = {"kv_heads": kv_heads, "head_dim": head_dim, "value_dim": value_dim}
        given = {name: size for name, size in optional.items() if size is not None}
        check_sizes(d_model=d_model, heads=heads, **given)
        if head_dim is None:
            if d_model % heads:
                raise ValueError(
                    f"d_model={d_model} does not divide into {heads} heads; choose heads that "
                    "divide it, or set the width of a head with head_dim="
                )
            head_dim = d_model // heads
        kv_heads = heads if kv_heads is None else kv_heads
        if heads % kv_heads:
            raise ValueError(
                f"{heads} heads can't share {kv_heads} key and value heads evenly; kv_heads must "
                "divide heads"
            )
        if context_dim is None:
            context_dim = d_model
        pair = context_dim if isinstance(context_dim, tuple | list) else (context_dim,) * 2
        if len(pair) != 2:
            raise ValueError(
                f"context_dim={context_dim!r} must be one width, or a pair for keys and values"
            )
        for width in pair:
            check_sizes(context_dim=width)
        wide = head_dim if value_dim is None else value_dim
        return cls(d_model, heads, kv_heads, head_dim, wide, (pair[0], pair[1]))

    def check(self, projections: Projections) -> None:
        """Raise ValueError if queries and keys of these widths can't be made in this way."""
        check_kind("projections", projections, Projections, "hw.nn.Separate() or hw.nn.Shared()")
        if isinstance(projections, Separate):
            return
        if self.kv_heads != self.heads or self.context[0] != self.d_model:
            raise ValueError(
                f"{projections} makes queries and keys alike, so it needs kv_heads = heads and a "
                f"context as wide as the input; here kv_heads={self.kv_heads}, heads={self.heads}, "
                f"context_dim={self.context[0]}, d_model={self.d_model}"
            )
        sliced = self.heads * self.head_dim == self.d_model
        if isinstance(projections, Unprojected) and not sliced and self.head_dim != self.d_model:
            raise ValueError(
                "Unprojected() gives each head a slice of the input, head_dim = d_model / heads, "
                f"or all of it, head_dim = d_model; head_dim={self.head_dim} is neither"
            )


def check_options(
    score: object,
    position: object,
    qk_norm: object,
    mask: object,
    softcap: object,
    sinks: object,
    dropout: object,
    engine: object,
) -> None:
    """Raise ValueError for an option that no layer can be built with."""
    check_kind("score", score, Score | LearnedScore, "hw.Dot() or hw.nn.Additive()")
    check_kind("position", position, Position | None, "hw.nn.Rotary(), hw.nn.ALiBi() or None")
    check_kind("qk_norm", qk_norm, Norm | None, "hw.nn.RMSNorm(), hw.nn.LayerNorm() or None")
    check_flag("sinks", sinks)
    check_mask(mask)
    if softcap is not None:
        check_positive("softcap", softcap)
    if not isinstance(dropout, Dropout):
        check_rate("dropout", dropout)
    check_engine(engine)
