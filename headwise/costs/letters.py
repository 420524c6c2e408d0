"""Sizes in the letters of the papers: tokens of a call, widths of an attention layer."""

from __future__ import annotations

from dataclasses import dataclass

from headwise.costs.formula import Formula, size
from headwise.costs.layers import AttentionLayer


@dataclass(frozen=True)
class Tokens:
    """The tokens of one rank: b sequences of s queries, which see t keys."""

    batch: int
    queries: int  # of this rank
    keys: int
    all_queries: int  # of all ranks of context parallelism
    cached: bool = False  # some keys, or all of a context's, were made in earlier calls

    @property
    def b(self) -> Formula:
        """The batch, as a letter."""
        return size("b", self.batch)

    @property
    def s(self) -> Formula:
        """The queries, as a letter."""
        return size("s", self.queries)

    @property
    def t(self) -> Formula:
        """The keys: a letter of their own if they are not the queries."""
        return self.s if self.keys == self.queries else size("t", self.keys)

    @property
    def rows(self) -> Formula:
        """All queries of the batch."""
        return self.b * self.s


@dataclass(frozen=True)
class Letters:
    """The widths of an attention layer as formulas, in the letters of the papers."""

    h: Formula
    a: Formula
    g: Formula
    d: Formula
    v: Formula
    queries: Formula  # a·d, or h where that is the same
    keys: Formula
    values: Formula
    out: Formula  # of all heads

    @classmethod
    def of(cls, layer: AttentionLayer) -> Letters:
        """The letters of a layer's widths."""
        return cls.sized(
            layer.width, layer.heads, layer.kv_heads, layer.head_dim, layer.value_dim,
            layer.whole_heads,
        )  # fmt: skip

    @classmethod
    def sized(
        cls, width: int, heads: int, kv_heads: int, head_dim: int, value_dim: int,
        whole_heads: bool = False,
    ) -> Letters:  # fmt: skip
        """The letters of these widths."""
        h, a, d = size("h", width), size("a", heads), size("d", head_dim)
        g = a if kv_heads == heads else size("g", kv_heads)
        v = d if value_dim == head_dim else size("v", value_dim)

        def joined(heads: Formula, width: Formula) -> Formula:
            both = heads * width
            return h if both.value == h.value else both

        wide = h if whole_heads else joined(a, d)
        return cls(h, a, g, d, v, wide, joined(g, d), joined(g, v), joined(a, v))
