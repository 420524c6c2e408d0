"""The terms that are added to a score: bias tensor, ALiBi slopes, relative table."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from headwise.core.problem import Terms


def added(
    terms: Terms, bias: Tensor | None, heads: Tensor, i: Tensor, j: Tensor, dtype: torch.dtype
) -> Iterator[Tensor]:
    """The terms that are added to capped logits, each of which broadcasts to the logits' shape.

    Each logit has an entry of `terms.bias`, a query head, a query's position i, a key's position j.
    """
    if bias is not None:
        yield bias.to(dtype)
    if terms.slopes is not None:
        yield -terms.slopes.to(dtype)[heads] * (i - j).abs()
    if terms.relative is not None:
        yield terms.relative.to(dtype)[heads, relative_index(terms.relative, i - j)]


def relative_index(relative: Tensor, distance: Tensor) -> Tensor:
    """The column of a table (Hq, 2R + 1) that holds the bias of each distance i - j."""
    reach = relative.shape[1] // 2
    return distance.clamp(-reach, reach).long() + reach
