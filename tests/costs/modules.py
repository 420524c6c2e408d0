"""Small modules and models of headwise, with the inputs of a call, to compare counts with."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import headwise as hw

B, S, H, A, C = 2, 16, 32, 4, 7  # batch, queries, width, heads, context
WINDOW = hw.mask.causal() & hw.mask.window(4)
SINKS = hw.mask.causal() & (hw.mask.window(4) | hw.mask.prefix(2))

ATTENTION: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "no out bias": {"out_bias": False},
    "causal": {"mask": hw.mask.causal()},
    "window": {"mask": WINDOW},
    "window and sinks": {"mask": SINKS, "softcap": 3.0},
    "lengths": {"mask": hw.mask.lengths(S) & hw.mask.causal()},
    "grouped": {"kv_heads": 2},
    "one key head": {"kv_heads": 1, "mask": hw.mask.causal()},
    "wide values": {"value_dim": 16},
    "wide heads": {"head_dim": 16},
    "softcap": {"softcap": 5.0, "mask": hw.mask.causal()},
    "sinks": {"sinks": True, "mask": hw.mask.causal()},
    "rotary": {"position": hw.nn.Rotary()},
    "half rotary": {"position": hw.nn.Rotary(width=4)},
    "alibi": {"position": hw.nn.ALiBi()},
    "learned alibi": {"position": hw.nn.ALiBi(learned=True)},
    "buckets": {"position": hw.nn.RelativeBuckets()},
    "learned positions": {"position": hw.nn.Learned(64)},
    "sinusoidal": {"position": hw.nn.Sinusoidal()},
    "rms qk-norm": {"qk_norm": hw.nn.RMSNorm(), "kv_heads": 2, "position": hw.nn.Rotary()},
    "layer qk-norm": {"qk_norm": hw.nn.LayerNorm()},
    "shared": {"projections": hw.nn.Shared()},
    "shared rotary": {"projections": hw.nn.Shared(), "position": hw.nn.Rotary()},
    "unprojected": {"projections": hw.nn.Unprojected()},
    "unprojected whole": {"projections": hw.nn.Unprojected(), "head_dim": H},
    "additive": {"score": hw.nn.Additive()},
    "general": {"score": hw.nn.General()},
    "cosine": {"score": hw.nn.Cosine(), "kv_heads": 1, "position": hw.nn.Rotary()},
    "dropout": {"dropout": 0.1},
}


@dataclass(frozen=True)
class Case:
    """A module, the inputs of a call, and the sizes by which its cost is asked for."""

    build: Callable[[], nn.Module]
    inputs: Callable[[torch.dtype], tuple[Tensor, ...]]
    sizes: dict[str, int] = field(default_factory=dict)


def numbers(*lengths: int, width: int = H) -> Callable[[torch.dtype], tuple[Tensor, ...]]:
    """Inputs (B, length, width) that require gradients, the later ones of another width."""

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        widths = [H] + [width] * (len(lengths) - 1)
        return tuple(
            torch.randn(B, n, w, dtype=dtype, requires_grad=True)
            for n, w in zip(lengths, widths, strict=True)
        )

    return make


def tokens(*lengths: int) -> Callable[[torch.dtype], tuple[Tensor, ...]]:
    return lambda dtype: tuple(torch.randint(3, 50, (B, n)) for n in lengths)


def block(norm: Any, feed_forward: Any, **options: Any) -> Callable[[], nn.Module]:
    return lambda: hw.nn.Block(
        H, hw.nn.MultiHeadAttention(H, A), feed_forward.build(H), norm=norm, **options
    )


def model(kind: Any, config: Any, *args: Any, **options: Any) -> Callable[[], nn.Module]:
    return lambda: kind(config(*args, d_model=H, **options))


M, N = hw.models, hw.nn
LAYERS = {"layers": 3, "heads": A}
LEARNED = {
    "position": N.Learned(64), "norm": N.LayerNorm(), "feed_forward": N.GELU(64), "bias": True,
    "tied": False, "dropout": 0.1, "attention_dropout": 0.1,
}  # fmt: skip
TWO = {"encoder_layers": 2, "decoder_layers": 2, "heads": A, "feed_forward": N.ReLU(64)}
PRE = {"arrangement": N.PreNorm(), "tied": False, "position": N.Learned(64)}
PLAIN = {"queries": S}
BOTH = {"queries": S, "context": C}

CASES: dict[str, Case] = {
    **{
        f"attention: {name}": Case(
            lambda options=options: N.MultiHeadAttention(H, A, **options), numbers(S), PLAIN
        )
        for name, options in ATTENTION.items()
    },
    "cross-attention": Case(
        lambda: N.MultiHeadAttention(H, A, context_dim=24), numbers(S, C, width=24), BOTH
    ),
    "rotary cross-attention": Case(
        lambda: N.MultiHeadAttention(H, A, position=N.Rotary()), numbers(S, C), BOTH
    ),
    "Bahdanau": Case(lambda: N.AdditiveAttention(H, 24, 16), numbers(S, C, width=24), BOTH),
    "fixed": Case(lambda: N.FixedAttention(H, A, 20, mask=hw.mask.causal()), numbers(S), PLAIN),
    "block": Case(block(N.LayerNorm(), N.GELU(64)), numbers(S), PLAIN),
    "post-norm block": Case(
        block(N.LayerNorm(), N.ReLU(128), arrangement=N.PostNorm(), dropout=0.1),
        numbers(S),
        PLAIN,
    ),
    "RMS block": Case(block(N.RMSNorm(), N.SwiGLU(48)), numbers(S), PLAIN),
    "feed-forward": Case(lambda: N.SwiGLU(48).build(H, bias=False), numbers(S), PLAIN),
    "GPT": Case(model(M.GPT, M.GPTConfig, 50, **LAYERS), tokens(S), PLAIN),
    "GPT, window": Case(model(M.GPT, M.GPTConfig, 50, window=4, **LAYERS), tokens(S), PLAIN),
    "GPT, learned": Case(model(M.GPT, M.GPTConfig, 50, **LAYERS, **LEARNED), tokens(S), PLAIN),
    "GPT, unprojected": Case(
        model(M.GPT, M.GPTConfig, 50, projections=N.Unprojected(), position=None, **LAYERS),
        tokens(S),
        PLAIN,
    ),
    "GPT, wide": Case(
        model(
            M.GPT,
            M.GPTConfig,
            50,
            head_dim=16,
            kv_heads=1,
            sinks=True,
            softcap=9.0,
            qk_norm=N.RMSNorm(),
            score=N.General(),
            **LAYERS,
        ),
        tokens(S),
        PLAIN,
    ),
    "FixedGPT": Case(model(M.FixedGPT, M.FixedGPTConfig, 50, 32, **LAYERS), tokens(S), PLAIN),
    "Bert": Case(model(M.Bert, M.BertConfig, 50, 64, **LAYERS), tokens(S), PLAIN),
    "ViT": Case(
        model(M.ViT, M.ViTConfig, 8, 4, **LAYERS),
        lambda dtype: (torch.randn(B, 3, 8, 8, dtype=dtype),),
    ),
    "Transformer": Case(
        lambda: M.Transformer(M.TransformerConfig(50, d_model=H, **TWO)), tokens(C, S), BOTH
    ),
    "Transformer, pre-norm": Case(
        lambda: M.Transformer(M.TransformerConfig(50, d_model=H, **TWO, **PRE)),
        tokens(C, S),
        BOTH,
    ),
    "Conv": Case(
        model(M.Conv, M.ConvConfig, 50, layers=3, growth=2, dropout=0.1), tokens(S), PLAIN
    ),
}
"""Everything whose parameters, FLOPs and saved bytes are compared with a real run."""
