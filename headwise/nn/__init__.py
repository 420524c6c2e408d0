"""Layers made of attention: `MultiHeadAttention`, its parts, its caches and its rivals."""

from headwise.nn.block import Block
from headwise.nn.caches import Cache, FixedCache, GrowingCache, Memory, SlidingCache
from headwise.nn.feed_forward import GELU, FeedForward, ReLU, SwiGLU
from headwise.nn.multi_head import MultiHeadAttention
from headwise.nn.norms import LayerNorm, Norm, RMSNorm
from headwise.nn.positions import ALiBi, Learned, Position, RelativeBuckets, Rotary, Sinusoidal
from headwise.nn.projections import Projections, Separate, Shared, Unprojected
from headwise.nn.residual import Arrangement, PostNorm, PreNorm, Residual
from headwise.nn.scalings import DynamicNTK, Linear, Llama3, Scaling, YaRN
from headwise.nn.scores import Additive, Cosine, General, LearnedScore

__all__ = [
    "GELU",
    "ALiBi",
    "Additive",
    "Arrangement",
    "Block",
    "Cache",
    "Cosine",
    "DynamicNTK",
    "FeedForward",
    "FixedCache",
    "General",
    "GrowingCache",
    "LayerNorm",
    "Learned",
    "LearnedScore",
    "Linear",
    "Llama3",
    "Memory",
    "MultiHeadAttention",
    "Norm",
    "Position",
    "PostNorm",
    "PreNorm",
    "Projections",
    "RMSNorm",
    "ReLU",
    "RelativeBuckets",
    "Residual",
    "Rotary",
    "Scaling",
    "Separate",
    "Shared",
    "Sinusoidal",
    "SlidingCache",
    "SwiGLU",
    "Unprojected",
    "YaRN",
]
