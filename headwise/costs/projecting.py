"""The projections around attention on a tape: queries, keys and values, and the output."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from headwise.costs.formula import Formula, formula, size
from headwise.costs.layers import AttentionLayer, NormLayer
from headwise.costs.letters import Letters, Tokens
from headwise.costs.tape import Flow, Tape


@dataclass(frozen=True, eq=False)
class Projected:
    """Queries, keys and values, and the widths with which they meet."""

    q: Flow
    k: Flow
    v: Flow
    layer: AttentionLayer  # of absorbed latents, other widths than the layer has
    gate: Flow | None = None


def project(
    tape: Tape, x: Flow, layer: AttentionLayer, tokens: Tokens, context: Flow | None
) -> Projected:
    """Queries of x, and keys and values of x or of a context."""
    if layer.positions:
        tape.weight("positions", size("m", layer.positions), x.width)
        tape.keep("indices of positions", tokens.s, 8)
        x = tape.add(x, Flow(x.rows, x.width), "add positions")
    if layer.latent is not None:
        return project_latent(tape, x, layer, tokens)
    return project_plain(tape, x, layer, tokens, context)


def project_plain(
    tape: Tape, x: Flow, layer: AttentionLayer, tokens: Tokens, context: Flow | None
) -> Projected:
    """Queries, keys, values and a gate of a layer without latents."""
    n = Letters.of(layer)
    source = x if context is None else context
    gate = None
    if layer.projections in ("separate", "shared"):
        q = tape.linear(x, n.queries, "query", layer.query_bias)
        if layer.gate:
            gate = tape.linear(x, n.queries, "gate", layer.query_bias)
    elif layer.projections == "none":
        q = x
    else:
        q = Flow(formula(1), formula(1))  # scores of zero: one number for all
    with tape.idle(context is not None and tokens.cached):
        k, v = _keys_and_values(tape, layer, n, q, source, context is not None)
    for _ in range(layer.added_keys):
        tape.weight("added key", n.keys)
        tape.weight("added value", n.values)
    q, k = _compared(tape, q, k, layer, n, tokens, context)
    return Projected(q, k, v, layer, gate)


def _keys_and_values(
    tape: Tape, layer: AttentionLayer, n: Letters, q: Flow, source: Flow, cross: bool
) -> tuple[Flow, Flow]:
    """Keys and values, unless another layer makes them."""
    if layer.reuses:
        return Flow(source.rows, n.keys), Flow(source.rows, n.values)
    if layer.projections == "separate":
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
        turned = n.d if layer.rotary == layer.head_dim else size("y", layer.rotary)
        half = Fraction(1, 2) * turned
        tape.keep("cosine and sine", 2 * tokens.s * half, 4)
        if context is not None:
            tape.keep("cosine and sine of the context", 2 * tokens.t * half, 4)
        tape.elementwise("rotary", q.size + k.size, 1, 1)
        q = Flow(q.rows, q.width, heads_apart=True)
        k = k if layer.reuses else Flow(k.rows, k.width, heads_apart=True)
    if layer.score_params:
        tape.weight("score", formula(layer.score_params))
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
        tape.norm(x, norm, label, x.width, x.rows)
    elif layer.norm_each_head:
        tape.norm(x, norm, label, x.width, x.rows * heads)
    else:
        tape.norm(x, norm, label, n.d, x.rows * heads)
    return Flow(x.rows, x.width, heads_apart=True)


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


def project_latent(tape: Tape, x: Flow, layer: AttentionLayer, tokens: Tokens) -> Projected:
    """Queries, keys and values of latent attention; absorbed if the latents are in a cache."""
    latent = layer.latent
    assert latent is not None
    a, r = size("a", layer.heads), size("r", latent.rank)
    nope, rope, v = size("dₙ", latent.nope), size("dᵣ", latent.rope), size("v", layer.value_dim)
    bias = layer.query_bias
    if latent.query_rank is None:
        q = tape.linear(x, a * (nope + rope), "query")
    else:
        rank = size("r′", latent.query_rank)
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
        q = Flow(x.rows, q.width, heads_apart=True)
        return Projected(q, k, Flow(x.rows, a * v), layer)
    tape.weight("key and value up", a * (nope + v), r)
    tape.flops("absorbed key", 2 * x.rows * a * nope * r)
    tape.matmul("absorbed key", x.rows.value, latent.rank, latent.nope, True, layer.heads,
                layer.heads)  # fmt: skip
    absorbed = replace(layer, kv_heads=1, head_dim=latent.rank + latent.rope, value_dim=latent.rank)
    q = Flow(x.rows, a * (r + rope), heads_apart=True)
    shared = Flow(tokens.b * tokens.t, r + rope)
    return Projected(q, shared, shared, absorbed)


def project_out(
    tape: Tape, layer: AttentionLayer, out: Flow, gate: Flow | None, tokens: Tokens
) -> Flow:
    """The gate and the output projection."""
    latent = layer.latent
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
    return tape.linear(out, size("h", layer.width), "out", layer.out_bias)
