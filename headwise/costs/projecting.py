"""The projections around attention on a tape: queries, keys and values, and the output."""

from __future__ import annotations

from dataclasses import dataclass
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
    layer: AttentionLayer


def project(
    tape: Tape, x: Flow, layer: AttentionLayer, tokens: Tokens, context: Flow | None
) -> Projected:
    """Queries of x, and keys and values of x or of a context."""
    if layer.positions:
        tape.weight("positions", size("m", layer.positions), x.width)
        tape.keep("indices of positions", tokens.s, 8)
        x = tape.add(x, Flow(x.rows, x.width), "add positions")
    n = Letters.of(layer)
    source = x if context is None else context
    if layer.projections in ("separate", "shared"):
        q = tape.linear(x, n.queries, "query", layer.query_bias)
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
    return Projected(q, k, v, layer)


def _keys_and_values(
    tape: Tape, layer: AttentionLayer, n: Letters, q: Flow, source: Flow, cross: bool
) -> tuple[Flow, Flow]:
    """Keys and values of a source."""
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
        q = _head_norm(tape, q, layer.qk_norm, n, n.a, "query norm")
        k = _head_norm(tape, k, layer.qk_norm, n, n.g, "key norm")
    if layer.rotary:
        turned = n.d if layer.rotary == layer.head_dim else size("y", layer.rotary)
        half = Fraction(1, 2) * turned
        tape.keep("cosine and sine", 2 * tokens.s * half, 4)
        if context is not None:
            tape.keep("cosine and sine of the context", 2 * tokens.t * half, 4)
        tape.elementwise("rotary", q.size + k.size, 1, 1)
        q = Flow(q.rows, q.width, heads_apart=True)
        k = Flow(k.rows, k.width, heads_apart=True)
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
    n: Letters,
    heads: Formula,
    label: str,
) -> Flow:
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


def project_out(tape: Tape, layer: AttentionLayer, out: Flow) -> Flow:
    """The output projection."""
    if layer.plain_out:
        return out
    return tape.linear(out, size("h", layer.width), "out", layer.out_bias)
