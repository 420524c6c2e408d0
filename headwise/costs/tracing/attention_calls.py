"""A call of attention while a model is traced: the kernel that serves it, and what that saves."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.bias import RelativeBuckets, parts_of
from headwise.core.intervals import Mask
from headwise.core.patterns import Causal
from headwise.core.place import Place
from headwise.core.problem import Problem
from headwise.costs.formula import formula, size
from headwise.costs.kernel import AttentionShape
from headwise.costs.pairs import pairs_of_a_rank
from headwise.costs.tally import recomputed_kernel
from headwise.costs.tracing.inputs import stored
from headwise.costs.tracing.recorder import Recorder
from headwise.costs.visible import window_width
from headwise.costs.workload import Workload
from headwise.engines.sdpa import SMALL
from headwise.messages import say
from headwise.score import Dot, Score, rewrite


def headwise_attention(
    recorder: Recorder, q: Tensor, k: Tensor, v: Tensor, *, score: Score | None = None,
    mask: Mask | None = None,
    bias: Any = None, softcap: float | None = None, sinks: Tensor | None = None,
    dropout: Any = 0.0, engine: str = "auto",
) -> Tensor:  # fmt: skip
    """`hw.attention` by the kernel that serves the call, or step by step."""
    scored, found = rewrite(Dot() if score is None else score, q, k), recorder.narrowed(mask)
    distances, added = parts_of(bias)
    if recorder.attending is not None and recorder.attending.caches:
        count_kept(recorder, k, v, mask)
    given = scored.q, scored.k, v
    if not recorder.work.fused:
        if scored.additive is not None:
            raise ValueError(say("additive scores are one kernel; leave out fused=False"))
        again_later = recorder.work.recompute == "attention"
        with recorder.recomputed(given) if again_later else nullcontext():
            return in_steps(recorder, *given, found, softcap, dropout)
    place = replace(recorder.place(q.shape[1], q.shape[2], k.shape[2]), batch=q.shape[0])
    dropped = bool(getattr(dropout, "rate", dropout))
    plain = not (scored.additive is not None or distances is not None or softcap or dropped
                 or sinks is not None or (added is not None and added.requires_grad))  # fmt: skip
    by_torch = plain and torch_serves(found, place, recorder.work, k.shape[3] == v.shape[3])
    extra = keep_terms(recorder, found, place, distances, dropped, by_torch)
    return fused(recorder, *given, found, added, sinks, softcap=bool(softcap), extra=extra,
                 additive=scored.additive is not None, beside=by_torch)  # fmt: skip


def torch_serves(mask: Mask | None, place: Place, work: Workload, alike: bool) -> bool:
    """True if PyTorch's own fused kernel computes a plain call, as `hw.explain` would choose."""
    if work.device == "cpu" and not alike:
        return False
    if mask is None or (isinstance(mask, Causal) and mask.is_lower_triangle(place)):
        return True
    if work.device == "cuda":
        return False
    few = place.batch * place.queries * place.keys <= SMALL
    return mask.pieces == 0 or mask.rows_alike or few


def keep_terms(
    recorder: Recorder, mask: Mask | None, place: Place, distances: Any, dropped: bool,
    by_torch: bool,
) -> int:  # fmt: skip
    """Save what a kernel reads beside its tensors, and keeps per row; returns the bytes it reads.

    headwise's own kernels also save each row's largest logit, so that weights stay exact; those for
    GPUs keep the logarithm of its sum apart from it.
    """
    work = recorder.work
    if by_torch:
        if mask is None or (isinstance(mask, Causal) and mask.is_lower_triangle(place)):
            return 0
        pairs = mask.to_dense(place).shape[:3].numel() * place.keys
        recorder.keep("mask", formula(pairs * work.element))
        return pairs * work.element
    rows = size("b", place.batch) * size("a", place.heads) * size("s", place.queries)
    recorder.keep("largest logits", rows * work.wide)
    if work.device == "cuda":
        recorder.keep("logarithms of sums", rows * work.wide)
    q = torch.empty(place.batch, place.heads, place.queries, 1, device="meta")
    with recorder.muted():
        problem = Problem(q, q, q, place, 1.0, mask=mask)
        band, rest = problem.band() if work.device == "cuda" else (None, mask)
        bounds = None if rest is None else problem.intervals(rest)
        dense, position = problem.dense(), None if band is not None else problem.position()
    reads: dict[str, int] = {}
    if position is not None:
        reads["positions"] = 4 * position.numel()
    if bounds is not None:
        reads["intervals"] = 4 * bounds.numel()
    if dense is not None:
        reads["mask"] = dense.numel()
    if dropped:
        reads["seed"] = 8
    if isinstance(distances, RelativeBuckets):
        count = 2 * distances.max_distance + 1
        reads["buckets of distances"] = 8 * count
        reads["bias of distances"] = count * place.heads * work.element
    for label, count in reads.items():
        recorder.keep(label, formula(count))
    return sum(reads.values())


def count_kept(recorder: Recorder, k: Tensor, v: Tensor, mask: Mask | None) -> None:
    """Count what decoding keeps of the keys and values (B, G, M, D) of a call."""
    tape, names, work = recorder.tape, recorder.names, recorder.work
    if any(line.figure == "kv_cache" for line in tape.current.lines):
        return  # a recurrent decoder looks at the same memory in each of its steps
    assert recorder.attending is not None
    whole = k.shape[2] if recorder.attending.across else names.tokens.keys
    width = window_width(mask)
    length = -(-(whole if width is None else min(whole, width)) // work.ranks.cp)
    tape.cached("keys and values", stored(names, work, k.shape, v.shape[3], length))
    if work.cache.page is not None:
        tape.cached("page table", formula(k.shape[0] * work.cache.table(length)))


def in_steps(
    recorder: Recorder, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, softcap: float | None,
    dropout: Any,
) -> Tensor:  # fmt: skip
    """softmax(QKᵀ)V as PyTorch's kernel computes it in steps, with every weight in memory."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x if groups == 1 else x.repeat_interleave(groups, 1) for x in (k, v))
    with recorder.under([(mask, q.shape[2], k.shape[2])]):
        scores = (q * 1.0) @ (k * 1.0).mT  # each is scaled by the root
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        p = F.dropout(scores.softmax(-1), float(getattr(dropout, "rate", dropout)))
        out: Tensor = p @ v
    return out


def fused(
    recorder: Recorder,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    found: Mask | None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    softcap: bool = False,
    additive: bool = False,
    extra: int = 0,
    beside: bool = True,
) -> Tensor:
    """One kernel, counted under its mask.

    `extra` are the bytes that it reads beside q, k and v; `beside` is True if the heads of its
    output lie beside each other, as those of its queries.
    """
    made: Tensor = Fused.apply(recorder, q, k, v, bias, sinks, beside)  # type: ignore[no-untyped-call]
    count_attention(recorder, q, k, v, found, softcap, additive, extra)
    return made


class Fused(torch.autograd.Function):
    """A fused kernel: it saves its inputs, its output and the lse of every row."""

    @staticmethod
    def forward(
        ctx: Any, recorder: Recorder, q: Tensor, k: Tensor, v: Tensor, bias: Any, sinks: Any,
        beside: bool,
    ) -> Tensor:  # fmt: skip
        with recorder.muted():
            out = q.new_empty(*q.shape[:3], v.shape[-1])
            if beside and v.shape[-1] == q.shape[-1]:
                out = torch.empty_like(q)  # laid out as its queries
            elif beside:
                out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[-1]).transpose(1, 2)
            if recorder.work.recompute == "attention":
                ctx.save_for_backward(q, k, v)
                return out
            lse = q.new_empty(q.shape[:3], dtype=torch.float64 if recorder.work.wide == 8 else
                              torch.float32)  # fmt: skip
            others = [x for x in (bias, sinks) if isinstance(x, Tensor)]
            ctx.save_for_backward(q, k, v, out, lse, *others)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (None,) * 7


def count_attention(
    recorder: Recorder, q: Tensor, k: Tensor, v: Tensor, found: Mask | None, softcap: bool,
    additive: bool = False, extra: int = 0,
) -> None:  # fmt: skip
    """The kernels of a fused call, and the formula of its FLOPs."""
    tape, work, tokens = recorder.tape, recorder.work, recorder.names.tokens
    heads, kv_heads = q.shape[1], k.shape[1]
    place = recorder.place(heads, q.shape[2], k.shape[2])
    place = replace(place, batch=q.shape[0])
    pairs = pairs_of_a_rank(found, place, tokens, work)
    shape = AttentionShape(
        q.shape[0], heads, kv_heads, place.queries, place.keys, q.shape[3], v.shape[3],
        pairs.visible, pairs.executed, found, softcap, additive,
    )  # fmt: skip
    vectors = Fraction((k.shape[3] + v.shape[3]) * work.element)
    if tokens.cached:  # the kernel reads the cache as it is stored
        vectors = work.cache.vector(k.shape[3]) + work.cache.vector(v.shape[3])
    read = int(pairs.touched * kv_heads * vectors)
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    with tape.inside(tape.child("scores and values")):
        tape.attention(shape, "attention", extra, read, learns)
        if work.recompute == "attention" and learns:
            tape.current.backward.append(recomputed_kernel(tape.current.forward[-1]))
        recorder.flops_of_pairs(shape, pairs)
