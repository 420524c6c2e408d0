"""attn_implementation="headwise" in transformers: fused attention that can be seen inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from headwise.api import attention, attention_map
from headwise.nn.call import Call
from headwise.watching.adapters.interface import Given, to_call
from headwise.watching.adapters.mask_functions import Grid, to_mask
from headwise.watching.adapters.mask_intervals import Memory
from headwise.watching.adapters.mask_tensor import MaskTensor

NAME = "headwise"
WEIGHTS = 1 << 26  # are handed out at most, where they are asked for
_memory = Memory()


def register() -> None:
    """Make "headwise" an attention implementation of transformers; `import headwise.transformers`.

    Both halves are registered: transformers hands no mask at all, not even for padding, to an
    implementation that has no mask function of the same name.

    >>> import transformers
    >>> register()
    >>> config = transformers.LlamaConfig(
    ...     hidden_size=32, num_attention_heads=4, num_hidden_layers=1, intermediate_size=64,
    ...     vocab_size=99, attn_implementation="headwise")
    >>> model = transformers.LlamaForCausalLM(config).eval()
    >>> model(torch.tensor([[1, 2, 3]])).logits.shape
    torch.Size([1, 3, 99])
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, torch.compiler.disable(mask))


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    look: Callable[[Call], Tensor] | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """An attention function of transformers: q (B, Hq, N, D), k and v of Hkv heads.

    Gives (B, N, Hq, Dv), and the weights (B, Hq, N, M) where `output_attentions` asks for them.
    `look` computes the call, where someone watches.
    """
    call = _to_call(module, query, key, value, attention_mask, options)
    call = call._replace(dropout=dropout)
    out = attention(*call[:3], **call.options()) if look is None else look(call)
    weights = _weights(call) if options.get("output_attentions") else None
    return out.transpose(1, 2).contiguous(), weights


def _to_call(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, given: Any, options: dict[str, Any]
) -> Call:
    if isinstance(given, MaskTensor):
        plain = Given("eager", module, q, k, v, None, options)
        return to_call(plain, "self", None, _memory)._replace(mask=given.mask)
    # Without a mask the module says itself whether it is causal, as with PyTorch's kernels.
    return to_call(Given("sdpa", module, q, k, v, given, options), "self", None, _memory)


def _weights(call: Call) -> Tensor:
    shape = (*call.q.shape[:3], call.k.shape[2])
    if torch.Size(shape).numel() > WEIGHTS:
        raise ValueError(
            f"output_attentions=True asks for {shape} weights a layer; headwise hands out at most "
            f"{WEIGHTS:,}. with hw.watch(model) as seen: seen.map(layer, head) has any part of them"
        )
    options = call.options()
    del options["dropout"], options["engine"]
    return attention_map(call.q, call.k, **options).to_tensor()


def mask(
    batch_size: int,
    q_length: int | None = None,
    kv_length: int = 0,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Tensor] | None = None,
    attention_mask: Tensor | None = None,
    cache_position: Tensor | None = None,
    device: torch.device | str | None = None,
    **options: Any,
) -> MaskTensor:
    """A mask function of transformers: its rule, and padding (B, tokens), as one of our masks.

    Before transformers 5.4 `cache_position` (N,) numbered the queries; since then `q_length` and
    `q_offset` do. Nothing is dropped: a rule that is not known is asked about every pair.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    rule: Any = causal_mask_function if mask_function is None else mask_function
    if cache_position is not None:
        queries = cache_position
    else:
        where = attention_mask.device if device is None and attention_mask is not None else device
        queries = torch.arange(q_length or 0, device=where) + int(q_offset)
    padding = (
        None if attention_mask is None else _long_enough(attention_mask, kv_length + kv_offset)
    )
    if padding is not None and bool(padding[:, : kv_offset + kv_length].all()):
        padding = None

    def tile(rows: slice) -> Tensor:
        place: dict[str, Any] = {"cache_position": queries[rows]}
        if cache_position is None:
            place = {"q_length": len(queries[rows]), "q_offset": int(queries[rows][0])}
        kept = {key: options[key] for key in ("use_vmap",) if key in options}
        return sdpa_mask(  # type: ignore[return-value]
            batch_size=batch_size,
            kv_length=kv_length,
            kv_offset=kv_offset,
            mask_function=rule,
            attention_mask=padding,
            allow_is_causal_skip=False,
            device=queries.device,
            **place,
            **kept,
        )

    found = to_mask(rule, padding, Grid(batch_size, queries, kv_offset, kv_length), tile)
    return MaskTensor(found, (batch_size, 1, len(queries), kv_length), queries.device)


def _long_enough(padding: Tensor, tokens: int) -> Tensor:
    """(B, tokens) bool: what a static cache has room for, and no token fills yet, is padding."""
    short = tokens - padding.shape[-1]
    padding = padding.bool()
    return torch.nn.functional.pad(padding, (0, short)) if short > 0 else padding
