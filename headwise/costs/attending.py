"""Attention on a tape: its mask, its pairs, its kernels, and the tensors that they save."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from headwise import mask as masks
from headwise.core.intervals import Mask
from headwise.core.patterns import Causal
from headwise.core.place import Place
from headwise.core.problem import Problem
from headwise.costs.formula import Formula, formula, size
from headwise.costs.kernel import AttentionShape, Kernel, MatmulShape
from headwise.costs.layers import AttentionLayer
from headwise.costs.letters import Letters, Tokens
from headwise.costs.projecting import Projected, project, project_out
from headwise.costs.tape import Flow, Tape
from headwise.costs.visible import Pairs, closed_form, count_pairs
from headwise.costs.workload import CacheLayout, Workload
from headwise.engines.sdpa import SMALL
from headwise.messages import Sentence, say


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """A call of attention: what it is given, and what it makes."""

    layer: AttentionLayer
    given: Projected
    out: Flow
    mask: Mask | None
    place: Place
    shape: AttentionShape


def attend(
    tape: Tape, x: Flow, layer: AttentionLayer, tokens: Tokens, context: Flow | None
) -> Flow:
    """Run an attention layer; `context` is the other sequence of a cross-attention."""
    with tape.part("projections"):
        given = project(tape, x, layer, tokens, context)
    mask = None
    if context is None:
        mask, narrower = own_mask(layer, tokens), tape.work.mask
        if narrower is not None:
            mask = narrower if mask is None else mask & narrower
    with tape.part("scores and values"):
        out = _call(tape, layer, given, mask, tokens)
    with tape.part("output"):
        return project_out(tape, layer, out)


def own_mask(layer: AttentionLayer, tokens: Tokens) -> Mask | None:
    """The mask that a layer applies by itself, for these tokens."""
    parts: list[Mask] = []
    if layer.causal:
        parts.append(masks.causal())
    if layer.window is not None:
        right = 0 if layer.causal else layer.window - 1
        parts.append(masks.window(layer.window - 1, right))
    if layer.mask is not None:
        parts.append(layer.mask)
    whole: Mask | None = None
    for part in parts:
        whole = part if whole is None else whole & part
    return whole


def _call(
    tape: Tape, layer: AttentionLayer, given: Projected, mask: Mask | None, tokens: Tokens
) -> Flow:
    """The call of attention itself."""
    met, work = given.layer, tape.work
    n = Letters.of(met)
    if layer.bias_params:
        tape.weight("position bias", formula(layer.bias_params))
    if layer.sinks:
        tape.weight("sinks", n.a)
    keys = tokens.keys + layer.added_keys
    offset = tokens.keys - tokens.all_queries
    place = Place(tokens.batch, layer.heads, tokens.queries, keys, offset=offset)
    pairs = pairs_of_a_rank(mask, place, tokens, work)
    count_pair_flops(tape, n, tokens.batch * layer.heads, mask, pairs, tokens,
                     layer.score == "additive", layer.added_keys)  # fmt: skip
    count_cache(tape, layer, tokens)
    shape = AttentionShape(
        tokens.batch, layer.heads, met.kv_heads, tokens.queries, keys, met.head_dim,
        met.value_dim, pairs.visible, pairs.executed, mask, layer.softcap,
        layer.score == "additive",
    )  # fmt: skip
    out = Flow(tokens.rows, n.out)
    call = AttentionCall(layer, given, out, mask, place, shape)
    per_token = None
    if tokens.cached:  # the kernel reads the cache as it is stored
        per_token = token_bytes(layer, work.cache).value
    read = None if per_token is None else pairs.touched * per_token
    run = _fused if work.fused else _eager
    if work.recompute != "attention":
        return run(tape, call, read)
    with tape.recomputed(given.q, given.k, given.v):
        run(tape, call, read)
    return Flow(out.rows, out.width)


def _fused(tape: Tape, call: AttentionCall, read: int | None) -> Flow:
    """One kernel, which saves its inputs, its output and the lse of every row.

    headwise's own kernels also save each row's largest logit, so that weights stay exact; those for
    GPUs keep the logarithm of its sum apart from it.
    """
    layer, given, made = call.layer, call.given, call.shape
    for flow, label in ((given.q, "queries"), (given.k, "keys"), (given.v, "values")):
        tape.save(flow, label)
    rows = size("b", made.batch) * size("a", made.heads) * size("s", made.queries)
    tape.keep("lse", rows, tape.work.wide)
    tape.save(call.out, "attention output")
    by_torch = torch_serves(layer, call.mask, call.place, tape.work)
    if not by_torch:
        tape.keep("largest logits", rows, tape.work.wide)
        if tape.work.device == "cuda":
            tape.keep("logarithms of sums", rows, tape.work.wide)
    extra = _terms(tape, call, by_torch)
    tape.attention(made, "attention", extra, read)
    kept_together = by_torch and not given.q.heads_apart and not layer.whole_heads
    if layer.plain_out or kept_together:
        return call.out
    tape.elementwise("join heads", call.out.size, 1, 1)
    return Flow(call.out.rows, call.out.width)


def torch_serves(layer: AttentionLayer, mask: Mask | None, place: Place, work: Workload) -> bool:
    """True if PyTorch's own fused kernel computes the call, as `hw.explain` would choose."""
    plain = layer.score in ("dot", "general", "cosine") and layer.bias_kind == "none"
    if not plain or layer.softcap or layer.sinks or (layer.dropout and layer.headwise):
        return False  # headwise's dropout is another one
    if work.device == "cpu" and layer.head_dim != layer.value_dim:
        return False
    if mask is None or (isinstance(mask, Causal) and mask.is_lower_triangle(place)):
        return True
    if work.device == "cuda":
        return False
    few = place.batch * place.queries * place.keys <= SMALL
    return mask.pieces == 0 or mask.rows_alike or few


def _terms(tape: Tape, call: AttentionCall, by_torch: bool) -> int:
    """Save the masks, positions and biases that a kernel reads; returns their bytes."""
    layer, mask, place, device = call.layer, call.mask, call.place, tape.work.device
    if by_torch:
        if mask is None or (isinstance(mask, Causal) and mask.is_lower_triangle(place)):
            return 0
        rows = mask.to_dense(place).shape[:3].numel()
        tape.keep("mask", formula(rows * place.keys))
        return rows * place.keys * tape.element
    q = torch.empty(place.batch, place.heads, place.queries, 1, device="meta")
    problem = Problem(q, q, q, place, 1.0, mask=mask)
    band, rest = problem.band() if device == "cuda" else (None, mask)
    described: list[tuple[str, int, int]] = []
    if band is None:
        described.append(("positions", problem.position().numel(), 4))
    bounds = None if rest is None else problem.intervals(rest)
    if bounds is not None:
        described.append(("intervals", bounds.numel(), 4))
    dense = problem.dense()
    if dense is not None:
        described.append(("mask", dense.numel(), 1))
    if layer.dropout and layer.headwise:
        described.append(("seed", 1, 8))
    if layer.bias_kind == "buckets":
        distances = 2 * layer.bias_length + 1
        described.append(("buckets of distances", distances, 8))
        described.append(("bias of distances", distances * place.heads, tape.element))
    if layer.bias_kind == "table":
        rows = place.heads * place.queries
        described.append(("places of the table", place.queries, 8))
        described.append(("rows of the table", rows * layer.bias_length, tape.element))
    for label, count, each in described:
        tape.keep(label, formula(count), each)
    return sum(count * each for _, count, each in described)


def _eager(tape: Tape, call: AttentionCall, read: int | None) -> Flow:
    """softmax(QKᵀ)V step by step: weights of every pair are made, saved and read again."""
    layer, given, made, out = call.layer, call.given, call.shape, call.out
    n, e = Letters.of(given.layer), tape.element
    b, s = size("b", made.batch), size("s", made.queries)
    t = s if made.keys == made.queries else size("t", made.keys)
    every = b * n.a * s * t
    tape.save(given.q, "queries")
    for flow, label, width in ((given.k, "keys", n.d), (given.v, "values", n.v)):
        if given.layer.kv_heads != layer.heads:
            tape.keep(f"{label}, repeated for every head", b * t * n.a * width)
        elif flow is given.q:  # scaled apart from the queries
            tape.keep(label, flow.size)
        else:
            tape.save(flow, label)
    tape.keep("attention weights", every)
    if layer.softcap:
        tape.keep("tanh of the scores", every)
    if layer.dropout:
        tape.keep("mask of dropout", every, e if tape.work.device == "cpu" else 1)
        tape.keep("weights after dropout", every)
    _product(tape, "scores", made, made.head_dim)
    _product(tape, "weighted values", made, made.value_dim)
    moved = every.value * e
    special = made.pairs * (1 + made.softcap)
    tape.run(Kernel("softmax", "softmax", 0, moved, moved, special))
    tape.run(Kernel("softmax", "softmax", 0, 2 * moved, moved), True)
    tape.elementwise("join heads", out.size, 1, 1)
    return out


def _product(tape: Tape, label: str, made: AttentionShape, width: int) -> None:
    """A product with the matrix of all pairs, and the two of its backward."""
    e, batch = tape.element, made.batch * made.heads
    pairs = batch * made.queries * made.keys
    vectors = batch * (made.queries + made.keys) * width
    kernel = Kernel(
        label,
        "matmul",
        2 * made.pairs * width,
        vectors * e,
        pairs * e,
        flops_dense=2 * pairs * width,
        flops_executed=2 * pairs * width,
        shape=MatmulShape(made.queries, made.keys, width, batch),
    )
    tape.run(kernel)
    tape.run(kernel, True)
    tape.run(kernel, True)


def pairs_of_a_rank(mask: Mask | None, place: Place, tokens: Tokens, work: Workload) -> Pairs:
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
            Pairs(
                a.visible + b.visible,
                a.executed + b.executed,
                a.dense + b.dense,
                max(a.touched, b.touched),
            )
            for a, b in zip(counts[: work.ranks.cp], reversed(counts[work.ranks.cp :]), strict=True)
        ]
    return max(counts, key=lambda pairs: pairs.visible)


def pairs_of_a_head(
    mask: Mask | None, visible: int, every: int, tokens: Tokens, work: Workload
) -> tuple[Formula, Sentence | None]:
    """The visible pairs of one head and sequence, of so many, and how they are counted."""
    if visible == every == tokens.queries * tokens.keys:
        return tokens.s * tokens.t, None
    count = size("P", visible)
    written = closed_form(mask, tokens.all_queries, tokens.keys)
    if written is not None and work.ranks.cp == 1:
        return count, say("P, the visible pairs of a head: {written} = {count:,}",
                          written=written, count=visible)  # fmt: skip
    return count, say("P, the visible pairs of a head under {mask}: {count:,}", mask=mask,
                      count=visible)  # fmt: skip


def count_pair_flops(
    tape: Tape,
    n: Letters,
    calls: int,
    mask: Mask | None,
    pairs: Pairs,
    tokens: Tokens,
    additive: bool = False,
    added_keys: int = 0,
) -> None:
    """Record the formula of the FLOPs between pairs of `calls` sequences times heads."""
    per_pair = (4 if additive else 2) * n.d + 2 * n.v
    note: Sentence | None
    if pairs.visible % calls:  # some sequences or heads see more than others
        note = say("P, the visible pairs of all heads and sequences under {mask}: {count:,}",
                   mask=mask, count=pairs.visible)  # fmt: skip
        tape.flops("scores and values", per_pair * size("P", pairs.visible), note)
        return
    every = tokens.queries * (tokens.keys + added_keys)
    count, note = pairs_of_a_head(mask, pairs.visible // calls, every, tokens, tape.work)
    whole = tokens.b * count * n.a * per_pair
    if (n.a * n.d).value == n.h.value and n.v == n.d and not additive:
        whole = 4 * tokens.b * count * n.h
    tape.flops("scores and values", whole, note)


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
