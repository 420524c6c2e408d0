"""The attention matrix that is never stored: any part of it is computed on demand."""

from headwise.maps.attention_map import TILE, AttentionMap
from headwise.maps.pooling import Cells, How

__all__ = ["TILE", "AttentionMap", "Cells", "How"]
