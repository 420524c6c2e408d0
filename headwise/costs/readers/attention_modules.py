"""Attention modules of headwise and of PyTorch, read into attention layers."""

from __future__ import annotations

from torch import nn

from headwise.core.intervals import Mask
from headwise.core.patterns import Causal
from headwise.costs.layers import Activation, AttentionLayer, FeedForwardLayer, NormLayer
from headwise.costs.visible import window_width
from headwise.dropout import Dropout
from headwise.nn.additive import AdditiveAttention
from headwise.nn.feed_forward import GatedFeedForward
from headwise.nn.fixed_weights import FixedAttention
from headwise.nn.layer_options import Separate, Shared
from headwise.nn.learned_scores import LearnedAdditive, LearnedCosine, LearnedGeneral
from headwise.nn.multi_head import MultiHeadAttention
from headwise.nn.positions import ALiBiPosition, BucketPosition, LearnedPosition
from headwise.nn.rotary import RotaryPosition
from headwise.score import Cosine, Dot, General, Score

ACTIVATIONS: dict[type[nn.Module], Activation] = {
    nn.ReLU: "relu",
    nn.GELU: "gelu",
    nn.SiLU: "silu",
    nn.Tanh: "tanh",
    nn.Sigmoid: "sigmoid",
}


def read_norm(module: nn.Module) -> NormLayer:
    """The norm that a module is; ValueError if it is another."""
    if isinstance(module, nn.LayerNorm):
        bias = module.elementwise_affine and module.bias is not None
        return NormLayer(module.normalized_shape[-1], "layer", bias, module.elementwise_affine)
    if isinstance(module, nn.RMSNorm):
        return NormLayer(module.normalized_shape[-1], "rms", False, module.elementwise_affine)
    raise ValueError(f"{type(module).__name__} is not a norm that can be read")


def read_feed_forward(module: nn.Module) -> FeedForwardLayer:
    """The feed-forward layer that `hw.nn.GELU(…).build` and its like make."""
    if isinstance(module, GatedFeedForward):
        width, hidden = module.gate.in_features, module.gate.out_features
        return FeedForwardLayer(width, hidden, "silu", True, module.gate.bias is not None)
    if isinstance(module, nn.Sequential) and len(module) == 3:
        up, middle, down = module
        if isinstance(up, nn.Linear) and isinstance(down, nn.Linear):
            kind = ACTIVATIONS.get(type(middle))
            fits = up.out_features == down.in_features and up.in_features == down.out_features
            if kind is not None and fits and (up.bias is None) == (down.bias is None):
                bias = up.bias is not None
                return FeedForwardLayer(up.in_features, up.out_features, kind, bias=bias)
    raise ValueError(
        f"{type(module).__name__} is not a feed-forward layer that can be read; use "
        "hw.nn.ReLU(width).build(d_model), hw.nn.GELU(…) or hw.nn.SwiGLU(…)"
    )


def read_attention(module: nn.Module, cross: bool = False) -> AttentionLayer:
    """The layer that an attention module is; `cross` if it attends to another sequence."""
    if isinstance(module, MultiHeadAttention):
        return _multi_head(module, cross)
    if isinstance(module, nn.MultiheadAttention):
        return _torch_multi_head(module, cross)
    if isinstance(module, FixedAttention):
        return _fixed(module)
    if isinstance(module, AdditiveAttention):
        return _bahdanau(module)
    raise ValueError(
        f"{type(module).__name__} is not an attention module that can be read; these can: "
        "hw.nn.MultiHeadAttention, FixedAttention, AdditiveAttention and nn.MultiheadAttention"
    )


ATTENTION = (MultiHeadAttention, FixedAttention, AdditiveAttention, nn.MultiheadAttention)


def _multi_head(module: MultiHeadAttention, cross: bool) -> AttentionLayer:
    widths, position = module.widths, module.position
    causal, window, mask = _split_mask(module.mask)
    kind, length, params = "none", 0, 0
    if isinstance(position, ALiBiPosition):
        kind, params = "alibi", _learned(position)
    if isinstance(position, BucketPosition):
        kind, length = "buckets", position.described.max_distance
        params = _learned(position)
    separate = isinstance(module.projections, Separate)
    shared = isinstance(module.projections, Shared)
    bias = module.value.bias is not None
    dropout = module.dropout.rate if isinstance(module.dropout, Dropout) else module.dropout
    score, score_params = _score(module.score)
    return AttentionLayer(
        widths.d_model,
        widths.heads,
        widths.kv_heads,
        widths.head_dim,
        widths.value_dim,
        causal=causal,
        window=window,
        mask=mask,
        query_bias=bias,
        key_bias=bias,
        value_bias=bias,
        out_bias=module.out.bias is not None,
        projections="separate" if separate else "shared" if shared else "none",
        whole_heads=not separate and not shared and widths.head_dim == widths.d_model,
        context=widths.context if cross else None,
        qk_norm=None if module.query_norm is None else read_norm(module.query_norm),
        rotary=position.width if isinstance(position, RotaryPosition) else 0,
        positions=_rows(position),
        score=score,  # type: ignore[arg-type]
        score_params=score_params,
        softcap=bool(module.softcap),
        sinks=module.sinks is not None,
        bias_kind=kind,  # type: ignore[arg-type]
        bias_params=params,
        bias_length=length,
        dropout=float(dropout),
        headwise=True,
    )


def _rows(position: nn.Module | None) -> int:
    return position.table.num_embeddings if isinstance(position, LearnedPosition) else 0


def _score(score: nn.Module | Score) -> tuple[str, int]:
    """The kind of a score, and how many parameters it learns."""
    if isinstance(score, nn.Module):
        kinds = {LearnedAdditive: "additive", LearnedGeneral: "general", LearnedCosine: "cosine"}
        return kinds[type(score)], _learned(score)
    if isinstance(score, Dot):
        return "dot", 0
    return ("general" if isinstance(score, General) else "cosine"
            if isinstance(score, Cosine) else "additive"), 0  # fmt: skip


def _learned(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _split_mask(mask: Mask | None) -> tuple[bool, int | None, Mask | None]:
    """A causal mask and its window by their sizes, so that equal layers are equal."""
    if mask is None:
        return False, None, None
    if type(mask) is Causal and mask.offset is None:
        return True, None, None
    window = window_width(mask)
    return (True, window, None) if window is not None else (False, None, mask)


def _torch_multi_head(module: nn.MultiheadAttention, cross: bool) -> AttentionLayer:
    width, heads = module.embed_dim, module.num_heads
    bias = module.in_proj_bias is not None
    return AttentionLayer(
        width,
        heads,
        heads,
        width // heads,
        width // heads,
        query_bias=bias,
        key_bias=bias,
        value_bias=bias,
        out_bias=bias,
        context=(module.kdim, module.vdim) if cross else None,
        added_keys=int(module.bias_k is not None),
        dropout=module.dropout,
    )


def _fixed(module: FixedAttention) -> AttentionLayer:
    causal, window, mask = _split_mask(module.mask)
    bias, width = module.value.bias is not None, module.d_model
    return AttentionLayer(
        width,
        module.heads,
        module.heads,
        1,
        width // module.heads,
        causal=causal,
        window=window,
        mask=mask,
        value_bias=bias,
        out_bias=bias,
        projections="values",
        score="fixed",
        bias_kind="table",
        bias_params=module.logits.numel(),
        bias_length=module.length,
        headwise=True,
    )


def _bahdanau(module: AdditiveAttention) -> AttentionLayer:
    width, key_dim = module.query.out_features, module.key.in_features
    return AttentionLayer(
        module.query.in_features,
        1,
        1,
        width,
        key_dim,
        query_bias=False,
        key_bias=False,
        context=(key_dim, key_dim),
        score="additive",
        score_params=width,
        unprojected_values=True,
        plain_out=True,
        headwise=True,
    )
