"""Attention layers: `MultiHeadAttention`, its parts, its caches, and its alternatives."""

from headwise.nn.additive import AdditiveAttention, Bahdanau
from headwise.nn.block import Arrangement, Block, PostNorm, PreNorm, Residual
from headwise.nn.caches.cache import Cache, GrowingCache, Memory
from headwise.nn.caches.fixed_cache import FixedCache, SlidingCache
from headwise.nn.caches.packed_cache import Int8Cache, Packed
from headwise.nn.caches.paged_cache import PagedCache, PagePool
from headwise.nn.call import Call
from headwise.nn.feed_forward import GELU, FeedForward, ReLU, SwiGLU
from headwise.nn.fixed_weights import FixedAttention
from headwise.nn.layer_options import Projections, Separate, Shared, Unprojected
from headwise.nn.learned_scores import Additive, Cosine, General, LearnedScore
from headwise.nn.multi_head import MultiHeadAttention
from headwise.nn.norms import LayerNorm, Norm, RMSNorm
from headwise.nn.positions import ALiBi, Learned, Position, RelativeBuckets, Sinusoidal
from headwise.nn.rotary import Rotary
from headwise.nn.rotary_scaling import DynamicNTK, LinearScaling, Llama3Scaling, Scaling, YaRN
from headwise.nn.swap import TorchCall, restore_attention, swap_attention

__all__ = [
    "GELU",
    "ALiBi",
    "Additive",
    "AdditiveAttention",
    "Arrangement",
    "Bahdanau",
    "Block",
    "Cache",
    "Call",
    "Cosine",
    "DynamicNTK",
    "FeedForward",
    "FixedAttention",
    "FixedCache",
    "General",
    "GrowingCache",
    "Int8Cache",
    "LayerNorm",
    "Learned",
    "LearnedScore",
    "LinearScaling",
    "Llama3Scaling",
    "Memory",
    "MultiHeadAttention",
    "Norm",
    "Packed",
    "PagePool",
    "PagedCache",
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
    "TorchCall",
    "Unprojected",
    "YaRN",
    "restore_attention",
    "swap_attention",
]
