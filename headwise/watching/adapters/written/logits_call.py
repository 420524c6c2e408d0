"""Attention whose logits are all that is known: a call with the logits as its bias."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import Tensor, nn

from headwise.core.mask_reading import HIDDEN, read_mask, without_hidden
from headwise.core.options import Options
from headwise.core.patterns import Between, Dense
from headwise.nn.call import Call
from headwise.score import Dot
from headwise.watching.adapters.scaled_dot_product import lengths_differ
from headwise.watching.adapters.written.product_axes import Product

FURTHER = 1e3
"""A logit that lies this far below the largest of its row has the weight 0, and was hidden."""

_HEADS = (
    *("num_heads", "num_attention_heads", "num_attn_heads", "n_heads", "n_head", "heads"),
    *("nheads", "nhead", "h"),
)


def from_logits(logits: Tensor, v: Tensor) -> Call:
    """Attention with these logits (B, H, N, M) and values (B|1, H|1, M, D).

    The logits are the call's bias; its queries and keys are zeros.
    """
    batch, heads, queries, keys = logits.shape
    largest = logits.amax(-1, keepdim=True)
    hidden = (logits <= HIDDEN) | (logits < largest - FURTHER)
    seen, bias = without_hidden(logits, ~hidden)  # NaN hides nothing
    nothing = logits.new_zeros(batch, heads, max(queries, keys), 1)
    return Call(
        nothing[:, :, :queries],
        nothing[:, :, :keys],
        v.expand(batch, heads, *v.shape[2:]).to(logits.dtype),
        Options(Dot(1.0), None if seen is None else read_mask(seen), bias),
    )


def looks_across(call: Call) -> bool:
    """True if all queries see the same keys, and there are not as many keys as queries."""
    if not lengths_differ(call.q, call.k):
        return False
    if isinstance(call.mask, Between):
        bounds = (call.mask.first, call.mask.last)
        return all(bool((x == x[..., :1]).all()) for x in bounds)
    if isinstance(call.mask, Dense):
        return bool((call.mask.seen == call.mask.seen[..., :1, :]).all())
    return call.mask is None


def split_heads(
    logits: Tensor, v: Tensor, product: Product, modules: Sequence[nn.Module], sizes: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """(B · H, N, M) and (B · H|1, M, D) as (B, H, N, M) and (B, H, M, D), by what modules state."""
    if logits.ndim == 4:
        return logits, v
    heads = 1 if "b" not in product.weights else head_count(modules, logits.shape, sizes)
    v = v.expand(logits.shape[0], -1, -1)
    return logits.unflatten(0, (-1, heads)), v.unflatten(0, (-1, heads))


def heads_lead(
    product: Product, logits: Tensor, modules: Sequence[nn.Module], sizes: Sequence[int]
) -> bool:
    """True if logits read as (B, H, N, M) are (H, B, N, M), by what modules or the input state.

    If there are as many heads as sequences it can't be told.
    """
    size = dict(zip(product.weights, logits.shape, strict=True))
    if "h" not in size or size["b"] == size["h"]:
        return False
    batch, heads, queries = size["b"], size["h"], size["q"]
    stated, given = _stated(modules), tuple(sizes[:2])
    if (batch in stated) != (heads in stated):
        return batch in stated and given not in ((batch, queries), (queries, batch))
    return given in ((heads, queries), (queries, heads))


def head_axes(
    sizes: Sequence[int], axes: Sequence[int], modules: Sequence[nn.Module]
) -> Sequence[int]:
    """The axes among these, side by side, that are heads by what modules state; else ValueError.

    >>> module = nn.Module()
    >>> module.num_heads = 6
    >>> head_axes((1, 5, 6, 8), (1, 2), [module]), head_axes((1, 2, 3, 8), (1, 2), [module])
    ([2], [1, 2])
    """
    wide = [n for n in axes if sizes[n] > 1]
    runs = [wide[i:j] for i in range(len(wide)) for j in range(i + 1, len(wide) + 1)]
    for heads in _stated(modules):
        found = [run for run in runs if prod(sizes[n] for n in run) == heads]
        if heads == 1 or len(found) == 1:
            return found[0] if found else []
    if len(axes) < 2:
        return wide
    raise ValueError(
        f"nothing tells which of the axes {tuple(wide)} of its rows {tuple(sizes)} are heads (give "
        "the module an attribute num_heads)"
    )


def _stated(modules: Sequence[nn.Module]) -> list[int]:
    """The numbers of heads that modules state, by any of the usual names."""
    found = (getattr(module, name, None) for module in modules for name in _HEADS)
    return [heads for heads in found if isinstance(heads, int) and heads > 0]


def head_count(modules: Sequence[nn.Module], shape: Sequence[int], sizes: Sequence[int]) -> int:
    """The number of heads in tensors of shape (B · H, N, ...); ValueError if nothing states it."""
    entries = shape[0]
    for heads in _stated(modules):
        if entries % heads == 0:
            return heads
    if tuple(sizes[:1]) == (entries,) or tuple(sizes[:2]) == (shape[1], entries):
        return 1  # (B, N, ...) or (N, B, ...)
    raise ValueError(
        f"nothing states how many heads its tensors {tuple(shape)} have (give the module an "
        "attribute num_heads)"
    )
