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
    tokens; numbers up to `hidden` hide a key. Compiled code can't branch on the contents of a
    tensor, and a learned mask needs its gradient: these stay as they are.

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
    compiling = torch.compiler.is_compiling()
    shown: Tensor | None = None
    added: Tensor | None = None
    for given in (attn_mask, key_padding_mask):
        if given is None:
            continue
        seen: Tensor | None = None
        bias: Tensor | None = given
        if given.dtype == torch.bool:
            seen, bias = ~given, None
        elif not compiling and not given.requires_grad:
            seen, bias = split_mask(given, hidden)
        if seen is not None:
            shown = seen if shown is None else shown & seen
        if bias is not None:
            added = bias if added is None else added + bias
    if shown is None:
        return None, added
    return Dense(shown) if compiling else read_mask(shown, stands=same_sequence), added
