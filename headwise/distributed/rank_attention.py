"""Attention over a sequence that is split between ranks: each computes its own rows, exactly."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from headwise.bias import Bias
from headwise.core.intervals import Mask
from headwise.core.observation import Asked, Observation, sample_rows
from headwise.core.options import Options
from headwise.core.place import as_four_axes
from headwise.core.problem import Problem
from headwise.core.row_sums import RowResults
from headwise.core.spans import NEEDED, SPAN_PREFIX, Spans, check_spans, span_weights
from headwise.core.statistics import FEW_KEYS, complete, named, wanted
from headwise.distributed.call_header import call_header, checked_part
from headwise.distributed.descriptions import Values
from headwise.distributed.geometry import geometry
from headwise.distributed.head_attention import attend_by_heads
from headwise.distributed.head_options import learned_tensors
from headwise.distributed.header import Header, agree, failing_together
from headwise.distributed.key_blocks import KeyBlocks, Learnable, RunGradients
from headwise.distributed.key_exchange import KeyExchange, RangeExchange, RingExchange
from headwise.distributed.layouts import Layout
from headwise.distributed.movement import CallWidths, check_move, choose_move
from headwise.distributed.shards import check_layout
from headwise.distributed.transport import RankGroup
from headwise.dropout import Dropout
from headwise.engines.gradients import RowGradients, without_gradients
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
    options = Options(score, mask, bias, softcap, sinks, dropout, engine)
    over_ranks = sharded(q, k, v)
    if over_ranks is not None:
        return over_ranks.attention(q, k, v, options, mesh=mesh, layout=layout, move=move)
    out, _ = _call("attention", (q, k, v), mesh, layout, move, options, Asked())
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
    options = Options(score, mask, bias, softcap, sinks, dropout, engine)
    over_ranks = sharded(q, k, v)
    if over_ranks is not None:
        return over_ranks.observe(
            q, k, v, options, mesh=mesh, layout=layout, move=move, stats=stats, rows=rows,
            sink_keys=sink_keys, spans=spans,
        )  # fmt: skip
    asked, sampled, failure = Asked(), None, None
    try:
        asked = Asked.of(stats, sink_keys, check_spans(spans, len(q)))
        sampled = sample_rows(rows, q.shape[-2], q.device)
    except Exception as error:  # the others wait: they hear of it first
        failure = error
    out, values = _call("observe", (q, k, v), mesh, layout, move, options, asked, failure)
    part = q.detach(), k.detach(), v.detach()[..., :0]
    needed = Asked(NEEDED, NEEDED)

    def over(keys: Mask) -> list[Tensor]:
        plain = options._replace(mask=keys, sinks=None, dropout=0.0)
        _, seen = _call("observe", part, mesh, layout, move, plain, needed)
        return [seen[name] for name in NEEDED]

    with torch.no_grad():
        values |= span_weights(asked.spans, mask, values, over)
    if sampled is not None:
        values = {name: x.index_select(2, sampled) for name, x in values.items()}
    highest = values["max_logit"]
    kept = (*asked.stats, *(SPAN_PREFIX + name for name in asked.spans))
    return out, Observation({name: values[name] for name in kept}, highest, sampled)


@dataclass(frozen=True, eq=False)
class RankCall:
    """One call on this rank, agreed with the others."""

    ranks: RankGroup
    exchange: KeyExchange
    blocks: KeyBlocks
    values: Mapping[str, Values]  # of learned options, which all ranks should have


def _call(
    kind: str,
    tensors: tuple[Tensor, Tensor, Tensor],
    mesh: DeviceMesh,
    layout: Layout | None,
    move: str,
    options: Options,
    asked: Asked,
    failure: Exception | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Agree on a call, make it, and return out and the statistics."""
    ranks = RankGroup.of(mesh)
    mask, bias, names = options.mask, options.bias, asked.computed
    problem, header, values = None, Header(kind), {}
    if failure is None:
        try:
            layout = check_layout(layout)
            check_move(move)
            problem = checked_part(kind, tensors, options)
            options = options._replace(engine=_engine(problem, move, options.engine, names))
            header = call_header(kind, problem, tensors, layout, move, options, asked)
            values = {name: Values(x) for name, x in learned_tensors(options).items()}
        except Exception as error:  # the others wait: they hear of it first
            failure = error
    every = agree(ranks, header, failure)
    assert problem is not None and layout is not None
    lengths = tuple(own[0] for own in every), tuple(own[1] for own in every)
    problem, dropout = _same_seed(problem, options.dropout, every[0][2])
    place = problem.place
    found = geometry(mask, place.batch, place.heads, *lengths, layout)
    if isinstance(bias, Tensor) and as_four_axes(bias).shape[3] not in (1, found.whole.keys):
        raise ValueError(
            f"bias has shape {tuple(bias.shape)}; its last axis is 1 or the {found.whole.keys} "
            f"keys of all ranks together\n  in hw.distributed.{kind} on {ranks.count} ranks"
        )
    widths = CallWidths.of(*tensors)
    chosen, _ = choose_move(found, move, widths, problem.q.dtype, isinstance(bias, Tensor))
    if chosen == "ulysses":
        options = options._replace(dropout=dropout)
        q, k, v = (x.to(problem.v.dtype) for x in tensors)  # as autocast asks
        return attend_by_heads(ranks, found, (q, k, v), options, names, asked.sink_keys, values)
    found = found.everything() if chosen == "gather" else found
    exchange = (RingExchange if chosen == "ring" else RangeExchange)(ranks, found)
    singles = tuple(name for name in FEW_KEYS if name in names)
    sink_keys = min(asked.sink_keys, max(1, found.whole.keys))
    blocks = KeyBlocks(problem, found, ranks.own, options.engine, wanted(names), singles, sink_keys)
    terms = problem.terms()
    given = (problem.q, problem.k, problem.v, terms.additive)
    rest = (
        None if not isinstance(bias, Tensor) else as_four_axes(bias),
        terms.slopes,
        terms.relative,
    )
    *sums, weights = _Attend.apply(  # type: ignore[no-untyped-call]
        RankCall(ranks, exchange, blocks, values), *given, *rest, problem.sinks
    )
    return sums[0], _statistics(problem, RowResults(*sums), weights, singles, names)


def _engine(problem: Problem, move: str, engine: str, names: tuple[str, ...]) -> str:
    """The engine that computes parts of the keys; ValueError if the one that is named can't."""
    if move == "ulysses":  # any engine serves, on every rank, also one without heads
        choose(problem, engine, bool(names))
        return engine
    return choose_partial(problem, engine).name


def _same_seed(
    problem: Problem, dropout: float | Dropout, drawn: int
) -> tuple[Problem, float | Dropout]:
    """The problem and the option with the first rank's seed."""
    if not problem.dropout:
        return problem, 0.0
    first = dropout.first if isinstance(dropout, Dropout) else (0, 0)
    agreed = Dropout(problem.dropout, drawn, first)
    return replace(problem, seed=agreed.seed_on(problem.q.device)), agreed


def _statistics(
    problem: Problem,
    rows: RowResults,
    weights: Tensor,
    singles: tuple[str, ...],
    names: tuple[str, ...],
) -> dict[str, Tensor]:
    """The named statistics of rows that are complete."""
    if not names:
        return {}
    found = dict(zip(singles, weights.unbind(-1), strict=True))
    rest = tuple(name for name in names if name not in singles)
    known = complete(problem, rows, rest, 1)
    return named(rows, found | {name: known[name] for name in rest}, names)


class _Attend(torch.autograd.Function):
    """The rows of this rank over the keys of all; the backward moves keys and gradients again."""

    @staticmethod
    def forward(ctx: Any, call: RankCall, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
        runs = call.exchange.runs(k, v)
        with failing_together(call.ranks, same=call.values):
            try:
                found, singles = call.blocks.forward(Learnable(q, *rest), v.shape[-1], runs)
            except Exception:
                deque(runs, 0)  # the others still need what this rank passes on
                raise
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*without_gradients(found), singles)
        ctx.save_for_backward(q, k, v, *rest, *found)
        return (*found, singles)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        call: RankCall = ctx.call
        q, k, v, *others = ctx.saved_tensors
        given, found = Learnable(q, *others[:5]), RowResults(*others[5:])
        learns = bool(ctx.needs_input_grad[5])
        with failing_together(call.ranks, "backward"):
            rows = RunGradients(call.blocks, given, found, RowGradients.of(grads), learns)
        with failing_together(call.ranks):
            grad_k, grad_v = call.exchange.gradients(k, v, rows.add_run)
        total = (rows.total.q, grad_k, grad_v, *rows.total[1:])
        inputs = (q, k, v, *given[1:])
        return None, *(
            grad.to(x.dtype) if needed and grad is not None and x is not None else None
            for grad, x, needed in zip(total, inputs, ctx.needs_input_grad[1:], strict=True)
        )
