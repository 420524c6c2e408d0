"""Others' names for the same matrices: `load_state_dict` reads them as they are.

| made by | queries, keys, values | output |
|---|---|---|
| `torch.nn.MultiheadAttention` | `in_proj_weight`, or `q_proj_weight`, … | `out_proj` |
| transformers' BERT and its kin | `self.query`, … | `output.dense` |
| transformers' GPT-2 | `c_attn`, one matrix of columns | `c_proj` |
| transformers' Llama, Qwen, Mistral, … | `q_proj`, …, `q_norm`, `k_norm` | `o_proj`, `out_proj` |

What a layer of theirs holds beside attention (BERT's `output.LayerNorm`, GPT-2's mask) is left to
the block around it. Keys that belong to none of them stay, so that PyTorch's error names them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from headwise.nn.multi_head import MultiHeadAttention

_MADE = ("query", "key", "value")
_RENAMED = {
    **{
        f"{letter}_proj_weight": f"{name}.weight" for letter, name in zip("qkv", _MADE, strict=True)
    },
    **{f"{letter}_proj.": f"{name}." for letter, name in zip("qkv", _MADE, strict=True)},
    **{f"{part}.{name}.": f"{name}." for part in ("self", "attention") for name in _MADE},
    "output.dense.": "out.",
    "out_proj.": "out.",
    "o_proj.": "out.",
    "q_norm.": "query_norm.",
    "k_norm.": "key_norm.",
}
_BESIDE = ("output.LayerNorm.",)  # of the block around attention
_BUFFERS = ("bias", "masked_bias")  # GPT-2's causal mask, which older checkpoints carry along


def translate(
    attn: MultiHeadAttention,
    state: dict[str, Tensor],
    prefix: str,
    metadata: dict[str, Any],
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Say a foreign state dict in our names, in place; a hook that `load_state_dict` calls first.

    >>> import torch, headwise as hw
    >>> theirs = torch.nn.MultiheadAttention(64, 8, batch_first=True)
    >>> ours, x = hw.nn.MultiHeadAttention(64, 8), torch.randn(2, 5, 64)
    >>> ours.load_state_dict(theirs.state_dict())
    <All keys matched successfully>
    >>> torch.allclose(ours(x), theirs(x, x, x)[0], atol=1e-6)
    True
    """
    _from_columns(state, prefix)
    for kind in ("weight", "bias"):
        _unpack(attn, state, prefix, f"in_proj_{kind}", kind, errors)
        _unpack(attn, state, prefix, f"qkv_proj.{kind}", kind, errors)
    for name in [name for name in state if name.startswith(prefix)]:
        own = name.removeprefix(prefix)
        if own.startswith(_BESIDE):
            del state[name]
        for theirs, ours in _RENAMED.items():
            if own.startswith(theirs):
                state[prefix + ours + own.removeprefix(theirs)] = state.pop(name)
                break


def _from_columns(state: dict[str, Tensor], prefix: str) -> None:
    """GPT-2's matrices have a column for each output: turn them, and pack as PyTorch does."""
    if f"{prefix}c_attn.weight" not in state or f"{prefix}c_proj.weight" not in state:
        return
    for kind in ("weight", "bias"):
        theirs = {name: f"{prefix}{name}.{kind}" for name in ("c_attn", "c_proj", "q_attn")}
        found = {name: state.pop(key) for name, key in theirs.items() if key in state}
        turned = {name: x.T if x.ndim == 2 else x for name, x in found.items()}
        if "q_attn" in turned:  # cross-attention: only keys and values are packed
            state[f"{prefix}query.{kind}"] = turned["q_attn"]
            keys, values = turned["c_attn"].chunk(2)
            state[f"{prefix}key.{kind}"], state[f"{prefix}value.{kind}"] = keys, values
        else:
            state[f"{prefix}in_proj_{kind}"] = turned["c_attn"]
        state[f"{prefix}out.{kind}"] = turned["c_proj"]
    for name in _BUFFERS:
        state.pop(prefix + name, None)


def _unpack(
    attn: MultiHeadAttention,
    state: dict[str, Tensor],
    prefix: str,
    packed: str,
    kind: str,
    errors: list[str],
) -> None:
    """Queries', keys' and values' rows, one below the other, as three matrices."""
    if prefix + packed not in state:
        return
    whole = state.pop(prefix + packed)
    wide, narrow = attn.heads * attn.head_dim, attn.kv_heads * attn.head_dim
    rows = [wide, narrow, attn.kv_heads * attn.value_dim]
    if whole.shape[0] != sum(rows) or attn.key is None:
        made = f"queries, keys and values {' + '.join(map(str, rows))} wide"
        made = made if attn.key is not None else f"its queries and keys by {attn.projections}"
        errors.append(
            f"{prefix}{packed} has shape {tuple(whole.shape)}, and this attention makes {made}"
        )
        return
    for name, part in zip(_MADE, whole.split(rows), strict=True):
        state[f"{prefix}{name}.{kind}"] = part
