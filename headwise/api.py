"""The four functions most people need: attention, observe, attention_map, explain; and partial."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Never, TypeVar

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic

from headwise.bias import Bias
from headwise.core.arguments import refuse_keywords
from headwise.core.intervals import Mask
from headwise.core.observation import Asked, Observation, SampledRows
from headwise.core.options import PLAIN, Options
from headwise.core.partial import Partial
from headwise.core.problem import Problem, pose, restate
from headwise.core.row_sums import EVERYTHING, WIDE
from headwise.core.spans import NEEDED, SPAN_PREFIX, Span, Spans, check_spans, span_weights
from headwise.dropout import Dropout, draw_seed
from headwise.engines import calls
from headwise.engines.contract import Engine, Results, compute
from headwise.engines.failures import KernelError, record, replanned
from headwise.engines.plan import Plan, choose, choose_partial, family
from headwise.engines.plan import plan as _plan
from headwise.handover import sharded, split_calls, taken_over
from headwise.maps.attention_map import AttentionMap
from headwise.maps.effect_map import EffectMap
from headwise.score import Score

Found = TypeVar("Found")


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    score: Score | None = None,
    mask: Mask | None = None,
    bias: Bias | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float | Dropout = 0.0,
    engine: str = "auto",
    **unknown: Never,
) -> Tensor:
    """softmax(cap(score(q, k)) + bias) v over the keys that the mask shows, on the fastest engine.

    q (B, Hq, N, D), k (B, Hkv, M, D), v (B, Hkv, M, Dv) -> (B, Hq, N, Dv); Hkv divides Hq.
    Without a batch, (H, N, D) works too. A row that sees no key gives 0.

    - score: `hw.Dot()`, which is q·k/√D, or `hw.Additive`, `hw.General`, `hw.Cosine`
    - mask: the keys that each query may see, from `hw.mask`; None shows all of them
    - bias: added to the logits: a tensor that broadcasts to (B, Hq, N, M), `hw.ALiBi` or
      `hw.RelativeBuckets`; -inf hides a key
    - softcap: c makes each logit c · tanh(logit / c) before the bias
    - sinks: (Hq,) logits that take weight but have no value, so rows sum to less than one
    - dropout: the rate at which weights are dropped; `hw.Dropout(rate, seed)` is repeatable
    - engine: "auto", or the name of an engine; `hw.explain` tells which can serve a call

    >>> import torch, headwise as hw
    >>> q, k, v = torch.randn(3, 2, 8, 5, 16).unbind(0)
    >>> hw.attention(q, k, v, mask=hw.mask.causal()).shape
    torch.Size([2, 8, 5, 16])
    """
    if unknown:
        refuse_keywords("attention", unknown)
    options = Options(score, mask, bias, softcap, sinks, dropout, engine)
    if has_torch_function_variadic(q, k, v):  # a mode, such as a watch, handles the call
        return handle_torch_function(attention, (q, k, v), q, k, v, **options.keywords())
    if (elsewhere := taken_over(q, k, v)) is not None:
        return elsewhere.attention(q, k, v, options)
    (out,) = _serve("attention", _batched("attention", q, k, v), options)
    return out if q.ndim == 4 else out[0]


def observe(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
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
    **unknown: Never,
) -> tuple[Tensor, Observation]:
    """Return the output of `attention` and statistics of each head: entropy, largest logit, ...

    Takes the options of `attention` and those below. `hw.Observation` defines the statistics. `lse`
    and `entropy` have gradients.

    - stats: the names of the statistics; None for all of `hw.STATISTICS`
    - rows: how many query rows to sample, or a tensor of their indices; `seen.rows` has them
    - sink_keys: how many keys at the start of a sequence count for `sink_mass`
    - spans: ranges of keys by name, {"image": (first, last)}, `last` not included, ints or tensors
      (B,); `seen.spans["image"]` is the weight on them

    >>> import torch, headwise as hw
    >>> q, k, v = torch.randn(3, 2, 8, 5, 16).unbind(0)
    >>> out, seen = hw.observe(q, k, v, mask=hw.mask.causal(), stats=("entropy",))
    >>> seen.entropy.shape
    torch.Size([2, 8, 5])
    >>> out, seen = hw.observe(q * 0, k, v, mask=hw.mask.causal(), spans={"start": (0, 2)})
    >>> seen.spans["start"][0, 0]
    tensor([1.0000, 1.0000, 0.6667, 0.5000, 0.4000])
    """
    if unknown:
        refuse_keywords("observe", unknown)
    options = Options(score, mask, bias, softcap, sinks, dropout, engine)
    if (elsewhere := taken_over(q, k, v)) is not None:
        return elsewhere.observe(
            q, k, v, options, stats=stats, rows=rows, sink_keys=sink_keys, spans=spans
        )
    four = _batched("observe", q, k, v)
    asked, some = _asked(four, stats, sink_keys, spans), _sampled_rows(four, rows)
    if some is None:
        out, *values = _serve("observe", four, options, asked.computed, asked.sink_keys)
    else:
        options = options._replace(dropout=_with_seed(dropout, q.device))
        (out,) = _serve("observe", four, options)
        _, *values = _serve("observe", four, options, asked.computed, asked.sink_keys, some)
    seen = _observation(four, options, asked, some, values, batched=q.ndim == 4)
    return out if q.ndim == 4 else out[0], seen


def statistics(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options = PLAIN,
    *,
    stats: Iterable[str] | None = None,
    rows: int | Tensor | None = None,
    sink_keys: int = 1,
    spans: Spans | None = None,
) -> Observation:
    """Return only the statistics of `observe`, without gradients, for an output from elsewhere.

    With `rows`, only those rows are computed. Any engine may serve, and dropout changes nothing.

    >>> import torch, headwise as hw
    >>> from headwise.api import statistics
    >>> q, k, v = torch.randn(3, 2, 8, 500, 16).unbind(0)
    >>> statistics(q, k, v, Options(mask=hw.mask.causal()), rows=64).entropy.shape
    torch.Size([2, 8, 64])
    """
    options = Options(*options[:5])  # of the weights before dropout
    if (split := split_calls()) is not None:
        with torch.no_grad():
            return split.observe(
                q, k, v, options, stats=stats, rows=rows, sink_keys=sink_keys, spans=spans
            )[1]
    four = _batched("observe", q, k, v)
    asked = _asked(four, stats, sink_keys, spans)
    with torch.no_grad():
        some = _sampled_rows(four, rows)
        _, *values = _serve("observe", four, options, asked.computed, asked.sink_keys, some)
    return _observation(four, options, asked, some, values, batched=q.ndim == 4)


def _asked(
    tensors: tuple[Tensor, Tensor, Tensor],
    stats: Iterable[str] | None,
    sink_keys: int,
    spans: Spans | None,
) -> Asked:
    """Return what a user asks to observe; ValueError if that does not exist."""
    entries, keys = len(tensors[0]), tensors[1].shape[2]

    def checked() -> Asked:
        return Asked.of(stats, sink_keys, check_spans(spans, entries, keys), keys)

    return _restating("observe", tensors, checked)


def _sampled_rows(
    tensors: tuple[Tensor, Tensor, Tensor], rows: int | Tensor | None
) -> SampledRows | None:
    """Return the rows to observe; None for all."""
    q, _, _ = tensors
    return _restating("observe", tensors, SampledRows.of, rows, q.shape[2], q.device)


def _observation(
    tensors: tuple[Tensor, Tensor, Tensor],
    options: Options,
    asked: Asked,
    rows: SampledRows | None,
    found: list[Tensor],
    batched: bool,
) -> Observation:
    """Return the requested values, with max_logit, which tells the rows that see a key."""
    values = dict(zip(asked.computed, found, strict=True))
    values |= _span_weights(tensors, options, rows, asked.spans, values)
    highest = values["max_logit"]
    if not batched:
        values = {name: value[0] for name, value in values.items()}
    if len(values) > len(asked.stats):
        kept = (*asked.stats, *(name for name in values if name.startswith(SPAN_PREFIX)))
        values = {name: value for name, value in values.items() if name in kept}
    return Observation(values, highest, None if rows is None else rows.numbers)


def _span_weights(
    tensors: tuple[Tensor, Tensor, Tensor],
    options: Options,
    rows: SampledRows | None,
    spans: Mapping[str, Span],
    known: dict[str, Tensor],
) -> dict[str, Tensor]:
    """Return the weights on spans of keys, (B, Hq, N) each, given the statistics of all keys."""
    q, k, v = (x.detach() for x in tensors)

    def over(keys: Mask) -> list[Tensor]:
        some = options._replace(mask=keys, sinks=None, dropout=0.0)
        return list(_serve("observe", (q, k, v[..., :0]), some, NEEDED, rows=rows)[1:])

    with torch.no_grad():
        return span_weights(spans, options.mask, known, over)


def _serve(
    call: str,
    tensors: tuple[Tensor, Tensor, Tensor],
    options: Options,
    names: tuple[str, ...] = (),
    sink_keys: int = 1,
    rows: SampledRows | None = None,
) -> Results:
    """Return out and the named statistics: by the prepared call of this description, or a new one.

    The path of every call: describe it and look it up; if it is new, check it, choose an engine,
    let the engine prepare it, and run it. With `rows`, the results are of these rows.
    """
    sample = None if rows is None else rows.key
    key, given = calls.describe(tensors, options, names, sink_keys, sample)
    if rows is not None and rows.key is None:
        key = None
    prepared = None if key is None else calls.known(key)
    if key is not None and prepared is not None:
        try:
            return prepared(*(given if rows is None else rows.of_call(given)))
        except KernelError:
            calls.drop(key)  # the call is planned anew
    problem = pose(call, *tensors, options)
    if rows is not None:
        problem = problem.at(rows.numbers)
        given = (problem.q, *given[1:])

    def run(chosen: Engine) -> Results:
        if key is None:
            return compute(chosen, problem, names, sink_keys)
        results, prepared = chosen.first(problem, names, sink_keys, given)
        calls.keep(key, prepared)
        return results

    return _served(call, problem, options.engine, bool(names), run)


def _served(
    call: str, problem: Problem, engine: str, observed: bool, run: Callable[[Engine], Found]
) -> Found:
    """Return what `run` returns for the engine of the plan; if its kernel fails, for the next one.

    If the engine was requested by name, its failure is raised.
    """
    tensors = problem.q, problem.k, problem.v
    while True:
        chosen = _restating(call, tensors, choose, problem, engine, observed)
        if torch.compiler.is_compiling():
            return run(chosen)
        try:
            with replanned():
                return run(chosen)
        except KernelError as failure:
            record(family(chosen, problem), failure)
            if engine != "auto":
                raise


def attention_map(
    q: Tensor,
    k: Tensor,
    v: Tensor | None = None,
    *,
    score: Score | None = None,
    mask: Mask | None = None,
    bias: Bias | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    lse: Tensor | None = None,
) -> AttentionMap:
    """The attention weights as a matrix that is never stored: any part of it is exact on demand.

    The options are those of `attention`. With v, the map can weigh by the values' norms. lse
    (B, Hq, N), if known, saves a pass. Without a batch, the map has a batch of one.

    >>> import torch, headwise as hw
    >>> q, k = torch.randn(2, 1, 2, 100, 16).unbind(0)
    >>> amap = hw.attention_map(q, k, mask=hw.mask.causal())
    >>> amap[0, 1, 10:12, :11].shape
    torch.Size([2, 11])
    """
    options = Options(score, mask, bias, softcap, sinks)
    if (split := split_calls()) is not None:
        if v is not None:
            raise ValueError(
                "the map of a sequence that is split between processes knows no values; leave v out"
            )
        return split.attention_map(q, k, options, lse=lse)
    if sharded(q, k) is not None:
        raise ValueError(
            "hw.attention_map takes plain tensors; give it this rank's heads, q.to_local()\n"
            f"  in {restate('attention_map', q, k, v)}"
        )
    values = k[..., :0] if v is None and isinstance(k, Tensor) else v
    four = _batched("attention_map", q, k, values)
    problem = pose("attention_map", *four, options)
    return AttentionMap(problem, lse if lse is None or q.ndim == 4 else lse[None])


def effect_map(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    *,
    score: Score | None = None,
    mask: Mask | None = None,
    bias: Bias | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> EffectMap:
    """The effect of removing each edge, from the gradient of the output: any part of it on demand.

    grad (B, Hq, N, Dv) is the gradient of a scalar with respect to the output of
    `attention(q, k, v, ...)`, whose options are those here. An edge's effect is what the scalar
    gains, to first order, if row i no longer sees key j: p/(1 - p) · grad · (out - v_j). If k and v
    hold only some of the rows' keys, such as a chunk, out (B, Hq, N, Dv) and lse (B, Hq, N) are
    those of the whole rows; otherwise they are not needed. Without a batch, the map has a batch of
    one.

    >>> import torch, headwise as hw
    >>> q, k, v = (torch.randn(1, 2, 100, 16, requires_grad=True) for _ in range(3))
    >>> out = hw.attention(q, k, v, mask=hw.mask.causal())
    >>> out.retain_grad()
    >>> out.square().sum().backward()
    >>> emap = hw.effect_map(q, k, v, out.grad, mask=hw.mask.causal())
    >>> effects, places = emap.largest(5)
    >>> places.shape  # batch entry, head, row, key
    torch.Size([5, 4])
    """
    if split_calls() is not None or sharded(q, k, v) is not None:
        raise ValueError(
            "hw.effect_map takes plain tensors of whole rows; of a part of the keys, give out and "
            f"lse of the whole rows\n  in {restate('effect_map', q, k, v)}"
        )
    four = _batched("effect_map", q, k, v)
    problem = pose("effect_map", *four, Options(score, mask, bias, softcap, sinks))
    rows = [x[None] if isinstance(x, Tensor) and q.ndim == 3 else x for x in (grad, out, lse)]
    return EffectMap(problem, *rows)  # type: ignore[arg-type]


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    score: Score | None = None,
    mask: Mask | None = None,
    bias: Bias | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float | Dropout = 0.0,
    engine: str = "auto",
    observed: bool = False,
) -> Plan:
    """Return the plan of a call: the engine, and why not the others; `observed` for `observe`.

    >>> import torch, headwise as hw
    >>> q = torch.randn(1, 8, 5, 16)
    >>> print(hw.explain(q, q, q, softcap=30.0))
      hopper     it needs an NVIDIA Hopper GPU, such as an H100 or H200
      triton     it needs an NVIDIA GPU (or TRITON_INTERPRET=1, to test on a CPU)
      sdpa       they have no softcap
    → streaming  chosen
      reference  could, but streaming is preferred
    """
    four = _batched("explain", q, k, v)
    if not isinstance(observed, bool):
        raise ValueError(
            f"observed={observed!r} must be a bool\n  in {restate('explain', q, k, v)}"
        )
    problem = pose("explain", *four, Options(score, mask, bias, softcap, sinks, dropout))
    return _restating("explain", four, _plan, problem, engine, observed)


def partial(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    first_query: int = 0,
    first_key: int = 0,
    score: Score | None = None,
    mask: Mask | None = None,
    bias: Bias | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float | Dropout = 0.0,
) -> Partial:
    """Attention of these queries over these keys, placed in the whole sequence, ready to `merge`.

    Masks, biases and dropout refer to the whole sequence: row r is query first_query + r, column c
    is key first_key + c, and `causal()` without an offset lets query i see the keys j <= i.

    >>> import torch, headwise as hw
    >>> q, k, v = torch.randn(3, 1, 2, 6, 8, dtype=torch.float64).unbind(0)
    >>> parts = [hw.partial(q, k[:, :, c : c + 3], v[:, :, c : c + 3], first_key=c,
    ...                     mask=hw.mask.causal()) for c in (0, 3)]
    >>> torch.allclose(hw.merge(*parts).finish(), hw.attention(q, k, v, mask=hw.mask.causal()))
    True
    """
    if sharded(q, k, v) is not None:
        raise ValueError(
            "hw.partial takes plain tensors; hw.distributed.attention takes DTensors\n"
            f"  in {restate('partial', q, k, v)}"
        )
    four = _batched("partial", q, k, v)
    if q.ndim != 4:
        raise ValueError(f"hw.partial needs a batch axis\n  in {restate('partial', q, k, v)}")
    problem = pose(
        "partial", *four, Options(score, mask, bias, softcap, sinks, dropout),
        first_query=first_query, first_key=first_key, offset=0,
    )  # fmt: skip
    problem = replace(problem, sinks=None)
    rows = _restating("partial", four, choose_partial, problem).run(problem, EVERYTHING | WIDE)
    return Partial.from_results(rows, sinks, q.dtype)


def _with_seed(dropout: float | Dropout, device: torch.device) -> float | Dropout:
    """Return the dropout of two calls that drop the same weights: one with a seed."""
    if isinstance(dropout, float) and 0 < dropout < 1:
        dropout = Dropout(dropout)
    if isinstance(dropout, Dropout) and dropout.rate and dropout.seed is None:
        return replace(dropout, seed=draw_seed(device))
    return dropout


def _batched(call: str, q: object, k: object, v: object) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v with a batch axis: (H, N, D) gets a batch of one."""
    if not isinstance(q, Tensor) or not isinstance(k, Tensor) or not isinstance(v, Tensor):
        raise ValueError(f"q, k and v need to be tensors\n  in {restate(call, q, k, v)}")
    if not q.ndim == k.ndim == v.ndim or q.ndim not in (3, 4):
        raise ValueError(
            "q, k and v need the axes (batch, heads, length, width), or all three without batch\n"
            f"  in {restate(call, q, k, v)}"
        )
    return (q, k, v) if q.ndim == 4 else (q[None], k[None], v[None])


def _restating(
    call: str, tensors: tuple[Tensor, Tensor, Tensor], ask: Callable[..., Found], *given: object
) -> Found:
    """Return what `ask` returns; restate the call in its ValueError."""
    try:
        return ask(*given)
    except ValueError as error:
        raise ValueError(f"{error}\n  in {restate(call, *tensors)}") from None
