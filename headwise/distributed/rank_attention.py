"""Attention over a sequence that is split between ranks: each computes its own rows, exactly."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from headwise.api import OPTIONS
from headwise.bias import ALiBi, Bias, RelativeBuckets
from headwise.core.intervals import Mask
from headwise.core.observation import (
    Observation,
    check_sink_keys,
    check_statistics,
    sample_rows,
    with_max_logit,
)
from headwise.core.place import four
from headwise.core.problem import Problem, check_mask, pose
from headwise.core.spans import NEEDED, PREFIX, Span, Spans, check_spans, span_weights
from headwise.core.statistics import complete, named, wanted
from headwise.core.sums import Sums
from headwise.distributed.geometry import described, described_layout, geometry
from headwise.distributed.head_attention import attend_by_heads
from headwise.distributed.header import Header, agree, telling
from headwise.distributed.key_blocks import (
    SINGLES,
    KeyBlocks,
    Learnable,
    RunGradients,
)
from headwise.distributed.key_exchange import KeyExchange, RangeExchange, RingExchange
from headwise.distributed.layouts import Layout
from headwise.distributed.movement import CallWidths, check_move, choose_move
from headwise.distributed.shards import check_layout
from headwise.distributed.transport import RankGroup
from headwise.dropout import Dropout
from headwise.engines.plan import choose, choose_partial
from headwise.handover import sharded
from headwise.score import Score


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: DeviceMesh,
    layout: Layout | None = None,
    move: str = "auto",
    score: Score | None = None,
    mask: Mask | None = None,
    bias: Bias | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float | Dropout = 0.0,
    engine: str = "auto",
) -> Tensor:
    """`hw.attention` of a sequence that is split between the ranks of a mesh.

    q (B, Hq, N, D), k (B, Hkv, M, D), v (B, Hkv, M, Dv) are this rank's part of the sequence, and
    the result (B, Hq, N, Dv) is that of its rows, the same as in one process. Every rank of the
    one-dimensional mesh must make the call.

    - layout: the positions that each rank holds: `contiguous()`, `head_tail()`, `balanced(mask)`
    - move: how keys reach the rows that see them: "ranges" moves only those, "ring" passes all of
      them around in little memory, "gather" sends all at once, "ulysses" exchanges positions for
      heads and back; "auto" chooses
    - mask, `hw.ALiBi`, `hw.RelativeBuckets`: as for the whole sequence
    - a bias tensor: this rank's rows, all keys: broadcasts to (B, Hq, N, keys of all ranks)
    - dropout without a seed takes the one that the first rank draws

    q, k and v may be DTensors whose axis 2 is sharded over `mesh`, and other axes over other
    dimensions of theirs; then masks and options are those of the whole call, and so is the result.

    Gradients of k and v come from the rows of every rank. Those of sinks, slopes, tables and
    weights are this rank's share: sum them over ranks, as for every replicated parameter.
    """
    options = (score, mask, bias, softcap, sinks, dropout, engine)
    over_ranks = sharded(q, k, v)
    if over_ranks is not None:
        named = dict(zip((*OPTIONS, "engine"), options, strict=True))
        return over_ranks.attention(q, k, v, mesh=mesh, layout=layout, move=move, **named)
    out, _ = _call("attention", (q, k, v), mesh, layout, move, options, (), 1)
    return out


def observe(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: DeviceMesh,
    layout: Layout | None = None,
    move: str = "auto",
    score: Score | None = None,
    mask: Mask | None = None,
    bias: Bias | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float | Dropout = 0.0,
    engine: str = "auto",
    stats: Iterable[str] | None = None,
    rows: int | Tensor | None = None,
    sink_keys: int = 1,
    spans: Spans | None = None,
) -> tuple[Tensor, Observation]:
    """Return the output of `attention` and the statistics of this rank's rows, (B, Hq, N) each.

    `rows` samples this rank's rows, as `hw.observe` does. `spans` are ranges of the whole
    sequence's keys; each is one more exchange of those keys.
    """
    options = (score, mask, bias, softcap, sinks, dropout, engine)
    over_ranks = sharded(q, k, v)
    if over_ranks is not None:
        named = dict(zip((*OPTIONS, "engine"), options, strict=True))
        return over_ranks.observe(
            q, k, v, mesh=mesh, layout=layout, move=move, **named, stats=stats, rows=rows,
            sink_keys=sink_keys, spans=spans,
        )  # fmt: skip
    names: tuple[str, ...] = ()
    marked: dict[str, Span] = {}
    sampled, failure = None, None
    try:
        names = check_statistics(stats)
        marked = check_spans(spans, len(q))
        sink_keys = check_sink_keys(sink_keys)
        sampled = sample_rows(rows, q.shape[-2], q.device)
    except Exception as error:  # the others wait: they hear of it first
        failure = error
    found = with_max_logit((*names, *NEEDED) if marked else names)
    out, values = _call(
        "observe", (q, k, v), mesh, layout, move, options, found, sink_keys, failure
    )
    part = q.detach(), k.detach(), v.detach()[..., :0]

    def over(keys: Mask) -> list[Tensor]:
        options = (score, keys, bias, softcap, None, 0.0, engine)
        _, seen = _call("observe", part, mesh, layout, move, options, NEEDED, 1)
        return [seen[name] for name in NEEDED]

    with torch.no_grad():
        values |= span_weights(marked, mask, values, over)
    if sampled is not None:
        values = {name: x.index_select(2, sampled) for name, x in values.items()}
    highest = values["max_logit"]
    kept = (*names, *(PREFIX + name for name in marked))
    return out, Observation({name: values[name] for name in kept}, highest, sampled)


@dataclass(frozen=True, eq=False)
class RankCall:
    """One call on this rank, agreed with the others."""

    ranks: RankGroup
    exchange: KeyExchange
    blocks: KeyBlocks


def _call(
    kind: str,
    tensors: tuple[Tensor, Tensor, Tensor],
    mesh: DeviceMesh,
    layout: Layout | None,
    move: str,
    options: tuple[Any, ...],
    names: tuple[str, ...],
    sink_keys: int,
    failure: Exception | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Agree on a call, make it, and return out and the named statistics."""
    ranks = RankGroup.of(mesh)
    _, mask, bias, *_, engine = options
    problem, header = None, Header(kind)
    if failure is None:
        try:
            layout = check_layout(layout)
            check_move(move)
            problem = _posed(kind, tensors, options)
            if move == "ulysses":  # any engine serves, on every rank, also one without heads
                choose(problem, engine, bool(names))
            else:
                engine = choose_partial(problem, engine).name
            header = _header(kind, problem, tensors, layout, move, options, engine, names)
        except Exception as error:  # the others wait: they hear of it first
            failure = error
    every = agree(ranks, header, failure)
    assert problem is not None and layout is not None
    lengths = tuple(own[0] for own in every), tuple(own[1] for own in every)
    problem, dropout = _same_seed(problem, options[5], every[0][2])
    place = problem.place
    found = geometry(mask, place.batch, place.heads, *lengths, layout)
    if isinstance(bias, Tensor) and four(bias).shape[3] not in (1, found.whole.keys):
        raise ValueError(
            f"bias has shape {tuple(bias.shape)}; its last axis is 1 or the {found.whole.keys} "
            f"keys of all ranks together\n  in hw.distributed.{kind} on {ranks.count} ranks"
        )
    widths = CallWidths.of(*tensors)
    chosen, _ = choose_move(found, move, widths, problem.q.dtype, isinstance(bias, Tensor))
    if chosen == "ulysses":
        options = (*options[:5], dropout, options[6])
        named = dict(zip((*OPTIONS, "engine"), options, strict=True))
        q, k, v = (x.to(problem.v.dtype) for x in tensors)  # as autocast asks
        return attend_by_heads(ranks, found, (q, k, v), named, names, sink_keys)
    found = found.everything() if chosen == "gather" else found
    exchange = (RingExchange if chosen == "ring" else RangeExchange)(ranks, found)
    singles = tuple(name for name in SINGLES if name in names)
    sink_keys = min(sink_keys, max(1, found.whole.keys))
    blocks = KeyBlocks(problem, found, ranks.own, engine, wanted(names), singles, sink_keys)
    terms = problem.terms()
    given = (problem.q, problem.k, problem.v, terms.additive)
    rest = (None if not isinstance(bias, Tensor) else four(bias), terms.slopes, terms.relative)
    *sums, weights = _Attend.apply(  # type: ignore[no-untyped-call]
        RankCall(ranks, exchange, blocks), *given, *rest, problem.sinks
    )
    return sums[0], _statistics(problem, Sums(*sums), weights, singles, names)


def _same_seed(
    problem: Problem, dropout: float | Dropout, drawn: int
) -> tuple[Problem, float | Dropout]:
    """The problem and the option with the first rank's seed."""
    if not problem.dropout:
        return problem, 0.0
    first = dropout.first if isinstance(dropout, Dropout) else (0, 0)
    agreed = Dropout(problem.dropout, drawn, first)
    return replace(problem, seed=agreed.seed_on(problem.q.device)), agreed


def _posed(kind: str, tensors: tuple[Any, Any, Any], options: tuple[Any, ...]) -> Problem:
    """The checked problem of this rank's part, without its mask and a tensor bias."""
    score, mask, bias, softcap, sinks, dropout, _ = options
    if any(not isinstance(x, Tensor) or x.ndim != 4 for x in tensors):
        raise ValueError(
            f"hw.distributed.{kind} takes q, k and v with the axes (batch, heads, length, width)"
        )
    check_mask(mask)
    rows = bias if isinstance(bias, Tensor) else None
    problem = pose(
        f"distributed.{kind}", *tensors, score=score, bias=None if rows is not None else bias,
        softcap=softcap, sinks=sinks, dropout=dropout,
    )  # fmt: skip
    if rows is not None:
        shape, wanted = (1,) * (4 - rows.ndim) + tuple(rows.shape), tensors[0].shape[:3]
        fits = all(n in (1, want) for n, want in zip(shape, wanted, strict=False))
        if rows.ndim > 4 or not fits or not rows.is_floating_point():
            raise ValueError(
                f"bias is {rows.dtype} {tuple(rows.shape)}; give floating-point numbers of this "
                f"rank's rows over all keys, broadcast to {(*wanted, 'keys of all ranks')}"
            )
    return problem


def _header(
    kind: str,
    problem: Problem,
    tensors: tuple[Tensor, Tensor, Tensor],
    layout: Layout,
    move: str,
    options: tuple[Any, ...],
    engine: str,
    names: tuple[str, ...],
) -> Header:
    """The call of this rank as the others must know it."""
    score, mask, bias, _, sinks, dropout, _ = options
    q, k, v = tensors
    rows = four(bias) if isinstance(bias, Tensor) else None
    learned = getattr(score, "weight", getattr(score, "temperature", None))
    learnable = (*tensors, *([] if rows is None else [rows]))
    learns = [x.requires_grad for x in learnable] if torch.is_grad_enabled() else []
    seed = 0 if problem.seed is None else int(problem.seed.flatten()[0])
    given = dropout.seed if isinstance(dropout, Dropout) else None
    sizes = {
        "the batch": q.shape[0], "query heads": q.shape[1], "key heads": k.shape[1],
        "the width of queries": q.shape[3], "the width of keys": k.shape[3],
        "the width of values": v.shape[3],
    }  # fmt: skip
    words = {
        "dtype": str(q.dtype), "score": f"{_kind(score)} {problem.scale} {_size(learned)}",
        "mask": described(mask), "bias": _bias(bias, rows), "softcap": f"{problem.softcap}",
        "sinks": _size(sinks), "dropout": f"{problem.dropout}",
        "the seed of dropout": "drawn" if given is None else str(seed),
        "layout": described_layout(layout), "move": move, "engine": engine,
        "the tensors that require gradients": str(learns), "stats": " ".join(names),
    }  # fmt: skip
    return Header(kind, sizes, words, (q.shape[2], k.shape[2], seed))


def _bias(bias: object, rows: Tensor | None) -> str:
    """A bias in the header: a tensor by its keys, because its rows are the rank's own."""
    if rows is not None:
        return f"tensor over {'one key' if rows.shape[3] == 1 else f'{rows.shape[3]} keys'}"
    if isinstance(bias, RelativeBuckets):
        return f"RelativeBuckets {_size(bias.table)} {bias.bidirectional} {bias.max_distance}"
    return f"ALiBi {_size(bias.slopes)}" if isinstance(bias, ALiBi) else "None"


def _kind(x: object) -> str:
    return "Dot" if x is None else type(x).__name__


def _size(x: object) -> str:
    return str(tuple(x.shape)) if isinstance(x, Tensor) else str(x)


def _statistics(
    problem: Problem, sums: Sums, weights: Tensor, singles: tuple[str, ...], names: tuple[str, ...]
) -> dict[str, Tensor]:
    """The named statistics of rows that are complete."""
    if not names:
        return {}
    found = dict(zip(singles, weights.unbind(-1), strict=True))
    rest = tuple(name for name in names if name not in singles)
    known = complete(problem, sums, rest, 1)
    return named(sums, found | {name: known[name] for name in rest}, names)


class _Attend(torch.autograd.Function):
    """The rows of this rank over the keys of all; the backward moves keys and gradients again."""

    @staticmethod
    def forward(ctx: Any, call: RankCall, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
        runs = call.exchange.runs(k, v)
        with telling(call.ranks):
            try:
                sums, singles = call.blocks.forward(Learnable(q, *rest), v.shape[-1], runs)
            except Exception:
                deque(runs, 0)  # the others still need what this rank passes on
                raise
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(sums.max_logit, *sums[4:], singles)
        ctx.save_for_backward(q, k, v, *rest, *sums)
        return (*sums, singles)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_out: Any, grad_lse: Any, _: Any, grad_entropy: Any, *more: Any
    ) -> Any:
        call: RankCall = ctx.call
        q, k, v, *others = ctx.saved_tensors
        given, sums = Learnable(q, *others[:5]), Sums(*others[5:])
        grad_entropy = None if sums.entropy.ndim < 3 else grad_entropy
        learns = bool(ctx.needs_input_grad[5])
        with telling(call.ranks, "backward"):
            rows = RunGradients(call.blocks, given, sums, grad_out, grad_lse, grad_entropy, learns)
        with telling(call.ranks):
            grad_k, grad_v = call.exchange.gradients(k, v, rows.of)
        found = (rows.total.q, grad_k, grad_v, *rows.total[1:])
        inputs = (q, k, v, *given[1:])
        return None, *(
            grad.to(x.dtype) if needed and grad is not None and x is not None else None
            for grad, x, needed in zip(found, inputs, ctx.needs_input_grad[1:], strict=True)
        )
