"""A call of F.scaled_dot_product_attention, in our words."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.core.place import four
from headwise.mask import Mask, causal
from headwise.nn.call import Call
from headwise.score import Dot
from headwise.watching.adapters.mask_intervals import Memory, read, split
from headwise.watching.layer import Kind


def scaled_dot_product(
    memory: Memory,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Call, Kind | None]:
    """A call of F.scaled_dot_product_attention in our words; dropout does not change statistics.

    "cross" where queries of another number than the keys' look at them all alike.
    """
    q, k, v = (_with_heads(x.detach()) for x in (query, key, value))
    mask: Mask | None = None
    bias: Tensor | None = None
    if is_causal:
        mask = causal(offset=0)  # PyTorch aligns it at the start, also where N ≠ M
    elif attn_mask is not None:
        mask, bias = read_mask(memory, attn_mask, query)
    alike = not is_causal and (attn_mask is None or attn_mask.shape[-2:-1] == (1,))
    kind: Kind | None = "cross" if alike and are_apart(q, k) else None
    return Call(q, k, v, Dot(scale), mask, bias, None, None, 0.0, "auto"), kind


def are_apart(q: Tensor, k: Tensor) -> bool:
    """Whether queries (B, H, N, D) are not as many as keys; one alone may be the next token."""
    return q.shape[2] > 1 and q.shape[2] != k.shape[2]


def read_mask(memory: Memory, given: Tensor, query: Tensor) -> tuple[Mask | None, Tensor | None]:
    """A mask tensor, True = may attend or added to the logits, as mask and bias."""

    def made() -> tuple[Mask | None, Tensor | None]:
        fitting = _fitting(given.detach(), query)
        seen, bias = (fitting, None) if given.dtype == torch.bool else split(fitting)
        return None if seen is None else read(seen), bias

    return memory.recall(made, given, query.ndim)


def _with_heads(x: Tensor) -> Tensor:
    """(..., H, N, D) with one batch axis; (B, N, D) is one head."""
    if x.ndim == 3:
        return x[:, None]
    return x if x.ndim == 4 else x.reshape(-1, *x.shape[-3:])


def _fitting(mask: Tensor, query: Tensor) -> Tensor:
    """A mask for queries of three, four or more axes, with the axes of four."""
    if query.ndim == 3 and mask.ndim == 3:
        return mask[:, None]
    if query.ndim > 4 and mask.ndim > 4:
        mask = mask.expand(*query.shape[:-3], *mask.shape[-3:])
        return mask.reshape(-1, *mask.shape[-3:])
    return four(mask)


def kind_of(name: str) -> Kind:
    """Whether a module's name says that it looks at another sequence."""
    last = name.lower().rsplit(".", 1)[-1]
    across = ("cross" in last, "encoder_attn" in last, "encdec" in last, "multihead_attn" in last)
    return "cross" if any(across) else "self"
