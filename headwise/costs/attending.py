"""The steps of an attention layer on a tape: projections, positions, the call, the cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction

import torch

from headwise import mask as masks
from headwise.core.intervals import Mask
from headwise.core.patterns import Causal
from headwise.core.place import Place
from headwise.core.problem import Problem
from headwise.costs.formula import Formula, formula, size
from headwise.costs.kernel import AttentionShape, Kernel, MatmulShape
from headwise.costs.layers import AttentionLayer, Latent, NormLayer
from headwise.costs.tape import Flow, Tape
from headwise.costs.visible import Pairs, closed_form, count_pairs
from headwise.costs.workload import Workload
from headwise.engines.sdpa import SMALL


@dataclass(frozen=True)
class Tokens:
    """The tokens of one rank: b sequences of s queries, which see t keys."""

    batch: int
    queries: int  # of this rank
    keys: int
    all_queries: int  # of all ranks of context parallelism
    remembered: bool = False  # keys and values of a context were made in an earlier call

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

    @property
    def cached(self) -> bool:
        """True if some of the keys are in a cache."""
        return self.keys > self.all_queries and not self.remembered


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
        h, a, d = size("h", layer.width), size("a", layer.heads), size("d", layer.head_dim)
        g = a if layer.kv_heads == layer.heads else size("g", layer.kv_heads)
        v = d if layer.value_dim == layer.head_dim else size("v", layer.value_dim)

        def joined(heads: Formula, width: Formula) -> Formula:
            both = heads * width
            return h if both.value == h.value else both

        wide = h if layer.whole_heads else joined(a, d)
        return cls(h, a, g, d, v, wide, joined(g, d), joined(g, v), joined(a, v))


def attend(
    tape: Tape, x: Flow, layer: AttentionLayer, tokens: Tokens, context: Flow | None
) -> Flow:
    """Run an attention layer; `context` is the other sequence of a cross-attention."""
    with tape.part("projections"):
        if layer.positions:
            tape.weight("positions", size("m", layer.positions), x.width)
            tape.keep("indices of positions", tokens.s, 8)
            x = tape.add(x, Flow(x.rows, x.width), "add positions")
        call = (_latent if layer.latent else _projected)(tape, x, layer, tokens, context)
    q, k, v, gate, shape = call
    mask = own_mask(layer, tokens) if context is None else None
    wanted = tape.work.mask if context is None else None
    if wanted is not None:
        mask = wanted if mask is None else mask & wanted
    with tape.part("attention"):
        out = _call(tape, layer, (q, k, v), mask, tokens, shape)
    with tape.part("output"):
        return _output(tape, layer, out, gate, tokens, shape)


def own_mask(layer: AttentionLayer, tokens: Tokens) -> Mask | None:
    """The mask that a layer applies by itself, for these tokens."""
    parts: list[Mask] = []
    if layer.causal:
        parts.append(masks.causal())
    if layer.window is not None:
        right = 0 if layer.causal else layer.window - 1
        parts.append(masks.window(layer.window - 1, right))
    if layer.chunk is not None:
        row = torch.arange(tokens.all_queries) + tokens.keys - tokens.all_queries
        first = row // layer.chunk * layer.chunk
        parts.append(masks.between(first, first + layer.chunk))
    if layer.mask is not None:
        parts.append(layer.mask)
    whole: Mask | None = None
    for part in parts:
        whole = part if whole is None else whole & part
    return whole


def _projected(
    tape: Tape, x: Flow, layer: AttentionLayer, tokens: Tokens, context: Flow | None
) -> tuple[Flow, Flow, Flow, Flow | None, AttentionLayer]:
    """Queries, keys, values and a gate of a layer without latents."""
    n = Letters.of(layer)
    source = x if context is None else context
    remembered = context is not None and tokens.remembered
    q = gate = None
    if layer.projections in ("separate", "packed", "shared"):
        q = tape.linear(x, n.queries, "query", layer.query_bias)
        if layer.gate:
            gate = tape.linear(x, n.queries, "gate", layer.query_bias)
    elif layer.projections == "none":
        q = x
    else:
        q = Flow(formula(1), formula(1))  # scores of zero: one number for all
    with tape.idle(remembered):
        k, v = _keys_and_values(tape, layer, n, q, source, context is not None)
    for _ in range(layer.added_keys):
        tape.weight("added key", n.keys)
        tape.weight("added value", n.values)
    q, k = _compared(tape, q, k, layer, n, tokens, context)
    return q, k, v, gate, layer


def _keys_and_values(
    tape: Tape, layer: AttentionLayer, n: Letters, q: Flow, source: Flow, cross: bool
) -> tuple[Flow, Flow]:
    """Keys and values, unless another layer makes them."""
    if layer.reuses:
        return Flow(source.rows, n.keys), Flow(source.rows, n.values)
    if layer.projections in ("separate", "packed"):
        k = tape.linear(source, n.keys, "key", layer.key_bias)
    elif layer.projections == "shared" and cross:
        k = tape.linear(source, n.keys, "key", layer.key_bias, weight=False)
    else:
        k = source if cross else q
    if layer.unprojected_values:
        return k, source
    if layer.context is not None and layer.context[1] != layer.context[0]:
        source = Flow(source.rows, size("u", layer.context[1]))  # values have their own
    return k, tape.linear(source, n.values, "value", layer.value_bias)


def _compared(
    tape: Tape,
    q: Flow,
    k: Flow,
    layer: AttentionLayer,
    n: Letters,
    tokens: Tokens,
    context: Flow | None,
) -> tuple[Flow, Flow]:
    """Norm, score and rotation of queries and keys."""
    if layer.qk_norm is not None:
        q = _head_norm(tape, q, layer.qk_norm, layer, n, n.a, "query norm")
        if not layer.reuses:
            k = _head_norm(tape, k, layer.qk_norm, layer, n, n.g, "key norm")
    if layer.rotary:
        half = Fraction(1, 2) * size("r", layer.rotary)
        tape.keep("cosine and sine", 2 * tokens.s * half, 4)
        if context is not None:
            tape.keep("cosine and sine of the context", 2 * tokens.t * half, 4)
        tape.elementwise("rotary", q.size + k.size, 1, 1)
        q = Flow(q.rows, q.width, heads_apart=True)
        k = k if layer.reuses else Flow(k.rows, k.width, heads_apart=True)
    if layer.score_params:
        tape.weight("score", size("params", layer.score_params))
    if layer.score == "general":
        tape.keep("queries of the score", q.size)
        count = 2 * q.size * n.d
        tape.flops("score", count)
        tape.matmul("score", q.rows.value, layer.head_dim, layer.head_dim, True, layer.heads,
                    layer.heads)  # fmt: skip
        q = Flow(q.rows, q.width, heads_apart=True)
    if layer.score == "cosine":
        q, k = (_unit(tape, each, n, name) for each, name in ((q, "queries"), (k, "keys")))
        tape.save(q, "queries of length one")
        q = Flow(q.rows, q.width, heads_apart=q.heads_apart)
    return q, k


def _head_norm(
    tape: Tape,
    x: Flow,
    norm: NormLayer,
    layer: AttentionLayer,
    n: Letters,
    heads: Formula,
    label: str,
) -> Flow:
    if layer.norm_all_heads:
        return tape.norm(x, norm, label, x.width, x.rows)
    return tape.norm(x, norm, label, n.d, x.rows * heads)


def _unit(tape: Tape, x: Flow, n: Letters, label: str) -> Flow:
    """Vectors divided by their lengths, in float32."""
    vectors = x.rows * (x.width if n.d.value == 1 else _vectors(x, n))
    if tape.element < 4:
        tape.keep(f"{label} in float32", x.size, 4)
    else:
        tape.save(x, label)
    tape.keep(f"lengths of {label}", 2 * vectors, tape.work.wide)
    tape.elementwise(f"length of {label}", x.size, 1, 1)
    return Flow(x.rows, x.width, heads_apart=x.heads_apart)


def _vectors(x: Flow, n: Letters) -> Formula:
    """Heads of x."""
    return n.a if x.width.value == (n.a * n.d).value else n.g


def _latent(
    tape: Tape, x: Flow, layer: AttentionLayer, tokens: Tokens, context: Flow | None
) -> tuple[Flow, Flow, Flow, Flow | None, AttentionLayer]:
    """Queries, keys and values of latent attention; absorbed if the latents are in a cache."""
    latent = layer.latent
    assert latent is not None
    a, r = size("a", layer.heads), size("r", latent.rank)
    nope, rope, v = size("n", latent.nope), size("p", latent.rope), size("v", layer.value_dim)
    bias = layer.query_bias
    if latent.query_rank is None:
        q = tape.linear(x, a * (nope + rope), "query")
    else:
        rank = size("q", latent.query_rank)
        low = tape.linear(x, rank, "query down", bias)
        norm = NormLayer(latent.query_rank, "rms")
        low = tape.norm(low, norm, "query latent norm", rank, low.rows)
        q = tape.linear(low, a * (nope + rope), "query up")
    both = tape.linear(x, r + rope, "key and value down", bias)
    lows = Flow(both.rows, r)
    lows = tape.norm(lows, NormLayer(latent.rank, "rms"), "latent norm", r, both.rows)
    tape.elementwise("rotary", x.rows * (a * rope + rope), 1, 1)
    if not tokens.cached:
        both = tape.linear(lows, a * (nope + v), "key and value up")
        k = Flow(x.rows, a * (nope + rope), heads_apart=True)
        return Flow(x.rows, q.width, heads_apart=True), k, Flow(x.rows, a * v), None, layer
    tape.weight("key and value up", a * (nope + v), r)
    tape.flops("absorbed key", 2 * x.rows * a * nope * r)
    tape.matmul("absorbed key", x.rows.value, latent.rank, latent.nope, True, layer.heads,
                layer.heads)  # fmt: skip
    absorbed = replace(layer, kv_heads=1, head_dim=latent.rank + latent.rope, value_dim=latent.rank)
    q = Flow(x.rows, a * (r + rope), heads_apart=True)
    shared = Flow(tokens.b * tokens.t, r + rope)
    return q, shared, shared, None, absorbed


def _call(
    tape: Tape,
    layer: AttentionLayer,
    flows: tuple[Flow, Flow, Flow],
    mask: Mask | None,
    tokens: Tokens,
    shape: AttentionLayer,
) -> Flow:
    """The call of attention itself."""
    n, work = Letters.of(shape), tape.work
    q, k, v = flows
    if layer.bias_params:
        tape.weight("position bias", size("params", layer.bias_params))
    if layer.sinks:
        tape.weight("sinks", n.a)
    extra_keys = layer.added_keys
    place = Place(tokens.batch, layer.heads, tokens.queries, tokens.keys + extra_keys,
                  offset=tokens.keys - tokens.all_queries)  # fmt: skip
    pairs = _pairs(mask, place, tokens, work)
    _pair_flops(tape, n, shape, mask, pairs, tokens, extra_keys)
    out = Flow(tokens.rows, n.out if not layer.latent else n.a * n.v)
    made = AttentionShape(
        tokens.batch, layer.heads, shape.kv_heads, tokens.queries, place.keys, shape.head_dim,
        shape.value_dim, pairs.visible, pairs.executed, mask, bool(layer.softcap),
        layer.score == "additive",
    )  # fmt: skip
    cache(tape, layer, tokens)
    if work.recompute == "attention":
        with tape.recomputed(q, k, v):
            _kernels(tape, layer, flows, out, mask, place, made)
        return Flow(out.rows, out.width)
    return _kernels(tape, layer, flows, out, mask, place, made)


def _kernels(
    tape: Tape,
    layer: AttentionLayer,
    flows: tuple[Flow, Flow, Flow],
    out: Flow,
    mask: Mask | None,
    place: Place,
    made: AttentionShape,
) -> Flow:
    if tape.work.fused:
        return _fused(tape, layer, flows, out, mask, place, made)
    return _eager(tape, layer, flows, out, made)


def _fused(
    tape: Tape,
    layer: AttentionLayer,
    flows: tuple[Flow, Flow, Flow],
    out: Flow,
    mask: Mask | None,
    place: Place,
    made: AttentionShape,
) -> Flow:
    """One kernel, which saves its inputs, its output and the lse of every row."""
    q, k, v = flows
    for flow, label in ((q, "queries"), (k, "keys"), (v, "values")):
        tape.save(flow, label)
    rows = size("b", made.batch) * size("a", made.heads) * size("s", made.queries)
    tape.keep("lse", rows, tape.work.wide if tape.work.element == 8 else 4)
    tape.save(out, "attention output")
    by_torch = torch_serves(layer, mask, place, tape.work)
    extra = _terms(tape, layer, mask, place, by_torch)
    tape.attention(made, "attention", extra)
    if layer.plain_out or (by_torch and not q.heads_apart and not layer.whole_heads):
        return out
    tape.elementwise("join heads", out.size, 1, 1)
    return Flow(out.rows, out.width)


def torch_serves(layer: AttentionLayer, mask: Mask | None, place: Place, work: Workload) -> bool:
    """True if PyTorch's own fused kernel computes the call, as `hw.explain` would choose."""
    plain = layer.score in ("dot", "general", "cosine") and layer.bias_kind == "none"
    if not plain or layer.softcap or layer.sinks or layer.dropout:
        return False
    if work.device == "cpu" and layer.head_dim != layer.value_dim:
        return False
    if mask is None or (isinstance(mask, Causal) and mask.is_lower_triangle(place)):
        return True
    if work.device == "cuda":
        return False
    few = place.batch * place.queries * place.keys <= SMALL
    return mask.pieces == 0 or mask.rows_alike or few


def _terms(
    tape: Tape, layer: AttentionLayer, mask: Mask | None, place: Place, by_torch: bool
) -> int:
    """Save the masks, positions and biases that a kernel reads; returns their bytes."""
    work = tape.work
    triangle = isinstance(mask, Causal) and mask.is_lower_triangle(place)
    if by_torch:
        if mask is None or triangle:
            return 0
        seen = mask.to_dense(place)
        tape.keep("mask", formula(seen.shape[0] * seen.shape[1] * seen.shape[2] * place.keys))
        return int(seen.numel()) * work.element
    q = torch.empty(place.batch, place.heads, place.queries, 1, device="meta")
    problem = Problem(q, q, q, place, 1.0, mask=mask)
    band, rest = problem.band() if work.device == "cuda" else (None, mask)
    found = 0
    if band is None:
        tape.keep("positions", formula(problem.position().numel()), 4)
        found += 4 * problem.position().numel()
    bounds = None if rest is None else problem.intervals(rest)
    if bounds is not None:
        tape.keep("intervals", formula(bounds.numel()), 4)
        found += 4 * int(bounds.numel())
    dense = problem.dense()
    if dense is not None:
        tape.keep("mask", formula(dense.numel()), 1)
        found += int(dense.numel())
    if layer.dropout:
        tape.keep("seed", formula(8), 1)
    if layer.bias_kind == "buckets":
        distances = formula(2 * layer.bias_length + 1)
        tape.keep("buckets of distances", distances, 8)
        tape.keep("bias of distances", distances * size("a", place.heads))
    if layer.bias_kind == "table":
        table = size("a", place.heads) * size("s", place.queries) * size("m", layer.bias_length)
        tape.keep("places of the table", size("s", place.queries), 8)
        tape.keep("rows of the table", table)
        found += table.value * work.element
    return found


def _eager(
    tape: Tape,
    layer: AttentionLayer,
    flows: tuple[Flow, Flow, Flow],
    out: Flow,
    made: AttentionShape,
) -> Flow:
    """softmax(QKᵀ)V step by step: weights of every pair are made, saved and read again."""
    n = Letters.of(layer)
    e = tape.element
    every = size("b", made.batch) * size("a", made.heads) * size("s", made.queries)
    every = every * (size("s", made.keys) if made.keys == made.queries else size("t", made.keys))
    q, k, v = flows
    tape.save(q, "queries")
    repeated = layer.kv_heads != layer.heads
    for flow, label, width in ((k, "keys", n.d), (v, "values", n.v)):
        if repeated:
            rows = size("b", made.batch) * size("t", made.keys)
            tape.keep(f"{label}, repeated for every head", rows * n.a * width)
        elif flow is q:  # scaled apart from the queries
            tape.keep(label, flow.size)
        else:
            tape.save(flow, label)
    tape.keep("attention weights", every)
    if layer.softcap:
        tape.keep("tanh of the scores", every)
    if layer.dropout:
        tape.keep("mask of dropout", every, e if tape.work.device == "cpu" else 1)
        tape.keep("weights after dropout", every)
    batch = made.batch * made.heads
    visible = (made.pairs * 2 * made.head_dim, made.pairs * 2 * made.value_dim)
    for label, width, count in (
        ("scores", made.head_dim, visible[0]),
        ("weighted values", made.value_dim, visible[1]),
    ):
        _product(tape, label, made, batch, width, count)
    size_ = every.value * e
    special = made.pairs * (1 + made.softcap)
    tape.run(Kernel("softmax", "softmax", 0, size_, size_, special))
    tape.run(Kernel("softmax", "softmax", 0, 2 * size_, size_), True)
    tape.elementwise("join heads", out.size, 1, 1)
    tape.save(out, "input of output")
    return out


def _product(
    tape: Tape, label: str, made: AttentionShape, batch: int, width: int, visible: int
) -> None:
    """A product with the matrix of all pairs, and the two of its backward."""
    e, pairs = tape.element, batch * made.queries * made.keys
    dense = 2 * pairs * width
    moved = pairs * e, batch * (made.queries + made.keys) * width * e
    kernel = Kernel(
        label, "matmul", visible, moved[1], moved[0], flops_dense=dense, flops_executed=dense,
        shape=MatmulShape(made.queries, made.keys, width, batch),
    )  # fmt: skip
    tape.run(kernel)
    tape.run(kernel, True)
    tape.run(kernel, True)


def _pairs(mask: Mask | None, place: Place, tokens: Tokens, work: Workload) -> Pairs:
    """The pairs of the busiest rank of context parallelism."""
    if work.ranks.cp == 1:
        return count_pairs(mask, place, work.tile)
    cuts = 2 if work.layout == "head_tail" else 1
    length = tokens.queries // cuts
    counts = [
        count_pairs(
            mask,
            replace(place, queries=length, first_query=start, whole=False),
            work.tile,
        )
        for start in range(0, tokens.all_queries, length)
    ]
    if cuts == 2:
        counts = [
            Pairs(*(getattr(a, name) + getattr(b, name) for name in Pairs.__dataclass_fields__))
            for a, b in zip(counts[: work.ranks.cp], reversed(counts[work.ranks.cp :]), strict=True)
        ]
    return max(counts, key=lambda pairs: pairs.visible)


def _pair_flops(
    tape: Tape,
    n: Letters,
    layer: AttentionLayer,
    mask: Mask | None,
    pairs: Pairs,
    tokens: Tokens,
    extra: int,
) -> None:
    """Record the formula of the FLOPs between pairs."""
    calls = tokens.batch * layer.heads
    per_pair = (4 if layer.score == "additive" else 2) * n.d + 2 * n.v
    if pairs.visible == pairs.dense and not extra:
        count, note = tokens.s * tokens.t, ""
    elif pairs.visible % calls == 0:
        written = closed_form(mask, tokens.all_queries, tokens.keys)
        count = size("P", pairs.visible // calls)
        note = f"P = {written}" if written and tape.work.ranks.cp == 1 else f"P: pairs of {mask}"
    else:
        tape.flops("scores and values", per_pair * size("P", pairs.visible), f"P: all of {mask}")
        return
    whole = tokens.b * count * n.a * per_pair
    if (n.a * n.d).value == n.h.value and n.v == n.d and layer.score != "additive":
        whole = 4 * tokens.b * count * n.h
    tape.flops("scores and values", whole, note)


def cache(tape: Tape, layer: AttentionLayer, tokens: Tokens) -> None:
    """Count the cached keys and values of a layer; what another layer caches is not counted."""
    if layer.reuses or not layer.caches:
        return
    layout, ranks = tape.work.cache, tape.work.ranks
    length = tokens.keys
    for limit in (layer.window, layer.chunk):
        length = length if limit is None else min(length, limit)
    length = layout.room(-(-length // ranks.cp))
    t = tokens.t if length == tokens.keys else size("n", length)
    if layer.latent is not None:
        width = layer.latent.rank + layer.latent.rope
        vectors, label = layout.vector(width) * tokens.b * t, "latent vectors"
    else:
        g = size("a" if layer.kv_heads == layer.heads else "g", layer.kv_heads)
        vectors, label = _vectors_cached(layer, layout.vector, g) * tokens.b * t, "keys and values"
    tape.cached(label, vectors)
    if layout.page is not None:
        tape.cached("page table", tokens.b * layout.table(length))


def _vectors_cached(
    layer: AttentionLayer, vector: Callable[[int], Fraction], g: Formula
) -> Formula:
    d = size("d", layer.head_dim)
    bits = vector(layer.head_dim), vector(layer.value_dim)
    plain = bits[0] / layer.head_dim
    if bits[1] / layer.value_dim != plain or layer.value_dim != layer.head_dim:
        return g * (bits[0] + bits[1])
    both = layer.kv_heads * layer.head_dim
    wide = size("h", layer.width) if both == layer.width else g * d
    return 2 * plain * wide


def _output(
    tape: Tape,
    layer: AttentionLayer,
    out: Flow,
    gate: Flow | None,
    tokens: Tokens,
    shape: AttentionLayer,
) -> Flow:
    latent: Latent | None = layer.latent
    if latent is not None and tokens.cached:
        a, r, v = size("a", layer.heads), size("r", latent.rank), size("v", layer.value_dim)
        tape.flops("absorbed value", 2 * out.rows * a * r * v)
        tape.matmul("absorbed value", out.rows.value, layer.value_dim, latent.rank, True,
                    layer.heads, layer.heads)  # fmt: skip
        out = Flow(out.rows, a * v)
    if gate is not None:
        gate = tape.activate(gate, "sigmoid", "gate")
        out = tape.multiply(out, gate, "gated output")
    if layer.plain_out:
        return out
    width = layer.width if layer.out_width is None else layer.out_width
    n = Letters.of(layer)
    made = n.h if width == layer.width else size("o", width)
    done = tape.linear(out, made, "out", bias=False)
    if layer.out_bias:
        tape.weight("out bias", made)
    return done
