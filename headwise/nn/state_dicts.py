"""State dicts of other libraries' attention layers, which `load_state_dict` takes as they are.

| library | queries, keys, values | output |
|---|---|---|
| `torch.nn.MultiheadAttention` | `in_proj_weight`, or `q_proj_weight`, … | `out_proj` |
| transformers' BERT and its relatives | `self.query`, … | `output.dense` |
| transformers' GPT-2 | `c_attn`, one matrix of columns | `c_proj` |
| transformers' Llama, Qwen, Mistral, … | `q_proj`, …, `q_norm`, `k_norm` | `o_proj`, `out_proj` |

Entries that are not part of attention (BERT's `output.LayerNorm`, GPT-2's mask) are left out.
Unknown keys stay, so that PyTorch's error names them.
"""

from __future__ import annotations

from torch import Tensor

from headwise.nn.layer_options import Projections, Separate, Widths

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
_BESIDE = ("output.LayerNorm.",)  # part of the block, not of its attention
_BUFFERS = ("bias", "masked_bias")  # GPT-2's causal mask in older checkpoints


def translate(
    widths: Widths,
    projections: Projections,
    state: dict[str, Tensor],
    prefix: str,
    errors: list[str],
) -> None:
    """Rename another library's entries to ours, in place, before a layer loads them.

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
        _unpack(widths, projections, state, prefix, f"in_proj_{kind}", kind, errors)
        _unpack(widths, projections, state, prefix, f"qkv_proj.{kind}", kind, errors)
    for name in [name for name in state if name.startswith(prefix)]:
        own = name.removeprefix(prefix)
        if own.startswith(_BESIDE):
            del state[name]
        for theirs, ours in _RENAMED.items():
            if own.startswith(theirs):
                state[prefix + ours + own.removeprefix(theirs)] = state.pop(name)
                break


def _from_columns(state: dict[str, Tensor], prefix: str) -> None:
    """Transpose GPT-2's matrices, which have one column per output, and pack as PyTorch does."""
    if f"{prefix}c_attn.weight" not in state or f"{prefix}c_proj.weight" not in state:
        return
    for kind in ("weight", "bias"):
        theirs = {name: f"{prefix}{name}.{kind}" for name in ("c_attn", "c_proj", "q_attn")}
        found = {name: state.pop(key) for name, key in theirs.items() if key in state}
        transposed = {name: x.T if x.ndim == 2 else x for name, x in found.items()}
        if "q_attn" in transposed:  # cross-attention: only keys and values are packed
            state[f"{prefix}query.{kind}"] = transposed["q_attn"]
            keys, values = transposed["c_attn"].chunk(2)
            state[f"{prefix}key.{kind}"], state[f"{prefix}value.{kind}"] = keys, values
        else:
            state[f"{prefix}in_proj_{kind}"] = transposed["c_attn"]
        state[f"{prefix}out.{kind}"] = transposed["c_proj"]
    for name in _BUFFERS:
        state.pop(prefix + name, None)


def _unpack(
    widths: Widths,
    projections: Projections,
    state: dict[str, Tensor],
    prefix: str,
    packed: str,
    kind: str,
    errors: list[str],
) -> None:
    """Split a matrix whose rows make queries, keys and values, in this order, into three."""
    if prefix + packed not in state:
        return
    whole = state.pop(prefix + packed)
    shared = widths.kv_heads * widths.head_dim
    rows = [widths.heads * widths.head_dim, shared, widths.kv_heads * widths.value_dim]
    separate = isinstance(projections, Separate)
    if whole.shape[0] != sum(rows) or not separate:
        made = f"queries, keys and values of widths {' + '.join(map(str, rows))}"
        made = made if separate else f"its queries and keys by {projections}"
        errors.append(
            f"{prefix}{packed} has shape {tuple(whole.shape)}, but this attention makes {made}"
        )
        return
    for name, part in zip(_MADE, whole.split(rows), strict=True):
        state[f"{prefix}{name}.{kind}"] = part
