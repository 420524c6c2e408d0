"""The bytes of a layer's cached keys and values."""

from __future__ import annotations

from headwise.costs.formula import Formula, size
from headwise.costs.layers import AttentionLayer
from headwise.costs.letters import Tokens
from headwise.costs.tape import Tape
from headwise.costs.workload import CacheLayout


def count_cache(tape: Tape, layer: AttentionLayer, tokens: Tokens) -> None:
    """Count the cached keys and values of a layer, if it is one that decodes."""
    if not layer.caches:
        return
    layout, ranks = tape.work.cache, tape.work.ranks
    length = tokens.keys if layer.window is None else min(tokens.keys, layer.window)
    length = -(-length // ranks.cp)
    room = layout.room(length)
    t = tokens.t if room == tokens.keys else size("w" if room == layer.window else "n", room)
    tape.cached("keys and values", tokens.b * t * token_bytes(layer, layout))
    if layout.page is not None:
        tape.cached("page table", tokens.b * layout.table(length))


def token_bytes(layer: AttentionLayer, layout: CacheLayout) -> Formula:
    """The bytes that a layer caches per token."""
    g = size("a" if layer.kv_heads == layer.heads else "g", layer.kv_heads)
    d, v = size("d", layer.head_dim), size("v", layer.value_dim)
    if layout.scale_bits:
        return g * (layout.vector(layer.head_dim) + layout.vector(layer.value_dim))
    if layer.value_dim != layer.head_dim:
        return g * (d + v) * layout.vector(1)
    whole = layer.kv_heads * layer.head_dim == layer.width
    return 2 * layout.vector(1) * (size("h", layer.width) if whole else g * d)
