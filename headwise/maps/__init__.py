"""Matrices that are never stored: any part of one is computed on demand."""

from headwise.maps.attention_map import AttentionMap
from headwise.maps.effect_map import EffectMap, SpanEffect
from headwise.maps.lazy_map import TILE
from headwise.maps.pooling import Cells, Gather, How

__all__ = ["TILE", "AttentionMap", "Cells", "EffectMap", "Gather", "How", "SpanEffect"]
