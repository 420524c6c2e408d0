"""The masks of nn.MultiheadAttention as ours: intervals of keys where they are intervals."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.core.intervals import Mask
from headwise.core.mask_reading import read_mask, split_mask
from headwise.core.patterns import Causal, Dense


def read_torch_masks(
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    heads: int,
    *,
    is_causal: bool = False,
    need_weights: bool = False,
    same_sequence: bool = True,
    hidden: float = -torch.inf,
) -> tuple[Mask | None, Tensor | None]:
    """Read attn_mask (N, M) or (B · H, N, M) and key_padding_mask (B, M) as mask and bias.

    In both True means hidden, and numbers are added to the logits. `is_causal` is a hint that
    nn.MultiheadAttention takes at its word, in place of attn_mask, only if there is no padding and
    no weights are wanted; so it is here. `same_sequence` says that queries and keys are the same
    tokens; numbers up to `hidden` hide a key. Masks whose contents can't be read, as in compiled
    code, and learned masks, which need their gradient, stay as they are.

    >>> future = torch.ones(3, 3, dtype=torch.bool).triu(1)
    >>> read_torch_masks(future, None, heads=8)
    (causal(offset=0), None)
    >>> read_torch_masks(None, torch.tensor([[False, False, True]]), heads=8)[0].pieces
    1
    """
    if is_causal and key_padding_mask is None and not need_weights:
        return Causal(0), None
    if attn_mask is not None and attn_mask.ndim == 3:
        attn_mask = attn_mask.unflatten(0, (-1, heads))
    if key_padding_mask is not None:
        key_padding_mask = key_padding_mask.reshape(-1, 1, 1, key_padding_mask.shape[-1])
    shown: Tensor | None = None
    added: Tensor | None = None
    for given in (attn_mask, key_padding_mask):
        if given is None:
            continue
        seen: Tensor | None = None
        bias: Tensor | None = given
        if given.dtype == torch.bool:
            seen, bias = ~given, None
        elif _readable(given) and not given.requires_grad:
            seen, bias = split_mask(given, hidden)
        if seen is not None:
            shown = seen if shown is None else shown & seen
        if bias is not None:
            added = bias if added is None else added + bias
    if shown is None:
        return None, added
    if not _readable(shown):
        return Dense(shown), added
    return read_mask(shown, stands=same_sequence), added


def _readable(mask: Tensor) -> bool:
    """False if a mask has no contents (yet): in compiled code, a CUDA graph, on the meta device."""
    if torch.compiler.is_compiling() or mask.is_meta:
        return False
    return not (mask.is_cuda and torch.cuda.is_current_stream_capturing())
