"""Sections of `bench.gpu`: forward, backward, statistics, masks and caps, against fused kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import headwise as hw
from bench.gpu_timing import (
    TOKENS,
    Fused,
    Row,
    Run,
    backward_of,
    interleaved,
    rate,
    say,
    tensors,
)
from headwise.core.observation import STATISTICS
from headwise.core.place import Place

OURS = SDPBackend.MATH  # with it, engines differentiate by their own kernels
WITHOUT_MOMENTS = tuple(name for name in STATISTICS if not name.startswith("logit_"))


def serving(q: Tensor, k: Tensor, v: Tensor, **options: object) -> list[str]:
    """The GPU engines of headwise that can serve a call."""
    reasons = hw.explain(q, k, v, engine="triton", **options).reasons
    return [name for name in ("hopper", "triton") if reasons[name] is None]


def contenders(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> dict[str, Callable[[], Tensor]]:
    mask = hw.mask.causal() if causal else None
    own = {
        engine: lambda e=engine: hw.attention(q, k, v, mask=mask, engine=e)
        for engine in serving(q, k, v, mask=mask)
    }
    return own | {
        "cudnn": Fused(SDPBackend.CUDNN_ATTENTION, q, k, v, causal),
        "flash": Fused(SDPBackend.FLASH_ATTENTION, q, k, v, causal),
    }


def flexible(n: int, causal: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Compiled FlexAttention, which needs its mask as blocks."""
    flex = torch.compile(flex_attention, dynamic=False)
    mask = None
    if causal:
        mask = create_block_mask(lambda b, h, i, j: j <= i, None, None, n, n, device="cuda")
    return lambda q, k, v: flex(q, k, v, block_mask=mask)


def plain() -> list[Row]:
    """Forward and backward against PyTorch's kernels, FlexAttention and eager weights."""
    rows = []
    for width in (64, 128, 256):
        for n in (1024, 4096, 16384):
            for causal in (False, True):
                q, k, v = tensors(n, width, learn=True)
                runs = contenders(q, k, v, causal)
                others: dict[str, Run] = {}
                if n == TOKENS and width < 256:
                    flex = flexible(n, causal)
                    others["flex"] = lambda q=q, k=k, v=v, flex=flex: flex(q, k, v)
                if n == 1024:
                    others["eager"] = lambda q=q, k=k, v=v, c=causal: written_out(q, k, v, c)
                with torch.no_grad():
                    forward = interleaved(runs | others)
                back = {x: run for x, run in runs.items() if x in forward and x != "hopper"}
                with sdpa_kernel(OURS):
                    learnt = {x: backward_of(run, [q, k, v]) for x, run in back.items()}
                    backward = interleaved(learnt)
                rows.append(
                    say(
                        {"d": width, "n": n, "causal": causal}
                        | {x: round(rate(ms, n, causal)) for x, ms in forward.items()}
                        | {
                            f"{x} back": round(rate(t, n, causal, True))
                            for x, t in backward.items()
                        }
                    )
                )
    return rows


def written_out(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Eager attention."""
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ v


def seeing() -> list[Row]:
    """The cost of statistics: an engine's plain forward against one that reports them."""
    rows = []
    kinds = {"entropy": ("entropy",), "all but moments": WITHOUT_MOMENTS, "all": STATISTICS}
    for width in (64, 128):
        for causal in (False, True):
            q, k, v = tensors(TOKENS, width)
            mask = hw.mask.causal() if causal else None
            for engine in serving(q, k, v, mask=mask):
                call = partial(partial, q=q, k=k, v=v, mask=mask, engine=engine)
                runs: dict[str, Run] = {"plain": call(hw.attention)}
                runs |= {name: call(hw.observe, stats=stats) for name, stats in kinds.items()}
                with torch.no_grad():
                    ms = interleaved(runs)
                share = {f"{x} / plain": round(ms["plain"] / t, 3) for x, t in ms.items()}
                rows.append(
                    say({"engine": engine, "d": width, "n": TOKENS, "causal": causal} | share)
                )
    return rows


def capped() -> list[Row]:
    """A softcap against compiled FlexAttention, for logits far below the cap and beyond it."""
    flex = torch.compile(flex_attention, dynamic=False)

    def cap(score: Tensor, *_: Tensor) -> Tensor:
        return 30.0 * torch.tanh(score / 30.0)

    rows = []
    for width, deviation in ((64, 1.0), (64, 30.0), (128, 1.0), (128, 30.0)):
        q, k, v = tensors(TOKENS, width, learn=True)
        q = (q * deviation).detach().requires_grad_()
        call = partial(partial, hw.attention, q, k, v, softcap=30.0)
        runs = {engine: call(engine=engine) for engine in serving(q, k, v, softcap=30.0)}
        runs["flex"] = partial(flex, q, k, v, score_mod=cap)
        with torch.no_grad():
            ms = interleaved(dict(runs))
        learnt = {x: run for x, run in runs.items() if x in ms and x != "hopper"}
        back = interleaved({x: backward_of(run, [q, k, v]) for x, run in learnt.items()})
        rows.append(
            say(
                {"d": width, "n": TOKENS, "deviation": deviation}
                | {x: round(rate(t, TOKENS, False)) for x, t in ms.items()}
                | {f"{x} back": round(rate(t, TOKENS, False, True)) for x, t in back.items()}
            )
        )
    return rows


def masked() -> list[Row]:
    """Masks that hide most pairs: the time relative to the visible share of the full time."""
    flex = torch.compile(flex_attention, dynamic=False)
    n, width = TOKENS, 128
    q, k, v = tensors(n, width)
    ids = torch.arange(n, device="cuda") // 2048
    masks = {
        "window 1024": (
            hw.mask.causal() & hw.mask.window(1023),
            lambda b, h, i, j: (j <= i) & (i - j < 1024),
        ),
        "documents of 2048": (
            hw.mask.causal() & hw.mask.documents(ids[None]),
            lambda b, h, i, j: (j <= i) & (ids[i] == ids[j]),
        ),
    }
    runs: dict[str, Run] = {  # the full call once, next to both
        f"{engine}, full": lambda e=engine: hw.attention(q, k, v, engine=e)
        for engine in serving(q, k, v)
    }
    for name, (mask, predicate) in masks.items():
        blocks = create_block_mask(predicate, None, None, n, n, device="cuda")
        runs[f"{name}: flex"] = lambda blocks=blocks: flex(q, k, v, block_mask=blocks)
        for engine in serving(q, k, v, mask=mask):
            runs[f"{name}: {engine}"] = lambda e=engine, m=mask: hw.attention(
                q, k, v, mask=m, engine=e
            )
    with torch.no_grad():
        ms = interleaved(runs)
    return [say(_beside_full(name, mask, ms, n)) for name, (mask, _) in masks.items()]


def _beside_full(name: str, mask: hw.mask.Mask, ms: dict[str, float], n: int) -> Row:
    """The time of a mask, and that time relative to its visible share of the full call."""
    first, last = mask.intervals(Place(1, 1, n, n, device=torch.device("cuda")))[0]
    visible = float((last - first.clamp_min(0)).sum() / (n * n))
    took = {x.removeprefix(f"{name}: "): t for x, t in ms.items() if x.startswith(f"{name}: ")}
    row: Row = {"mask": name, "visible": round(visible, 4)}
    for engine, t in took.items():
        row[f"{engine} ms"] = round(t, 3)
        full = ms.get(f"{engine}, full")
        if full is not None:
            row[f"{engine}, full ms"] = round(full, 3)
            row[f"{engine}, times the visible share"] = round(t / (full * visible), 2)
    return row


def eager(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Eager weights and their entropy."""
    p = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).float().softmax(-1)
    return p.to(v.dtype) @ v, torch.special.entr(p).sum(-1)


def observing() -> list[Row]:
    """Time and memory of `observe` at lengths where eager weights fit, and where they do not."""
    rows = []
    for n in (8192, 32768):
        q, k, v = tensors(n, 128, heads=16)
        runs: dict[str, Run] = {
            "every statistic": lambda q=q, k=k, v=v: hw.observe(q, k, v),
            "entropy": lambda q=q, k=k, v=v: hw.observe(q, k, v, stats=("entropy",)),
            "eager": lambda q=q, k=k, v=v: eager(q, k, v),
        }
        with torch.no_grad():
            ms = interleaved(runs, rounds=3)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            out, seen = hw.observe(q, k, v)
            kept = sum(x.nbytes for x in (out, *seen.values.values()))
            beyond = (torch.cuda.max_memory_allocated() - before - kept) / 2**20
        rows.append(
            say(
                {"n": n, "engine": hw.explain(q, k, v, observed=True).engine}
                | {"MiB beyond inputs and outputs": round(beyond, 1)}
                | {f"{x} ms": round(t, 2) for x, t in ms.items()}
            )
        )
    return rows


def precise() -> list[Row]:
    """The relative error against float64, compared with that of PyTorch's kernels."""
    rows = []
    cases = {"random": (1.0, 2048), "large logits": (8.0, 2048), "long": (1.0, 16384)}
    for name, (size, n) in cases.items():
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            q, k, v = (torch.randn(1, 2, n, 128, device="cuda", dtype=dtype) for _ in range(3))
            q = q * size
            truth = F.scaled_dot_product_attention(q.double(), k.double(), v.double())

            def error(out: Tensor, truth: Tensor = truth) -> float:
                return float((out.double() - truth).norm() / truth.norm())

            theirs = error(F.scaled_dot_product_attention(q, k, v))
            for engine in serving(q, k, v):
                own = error(hw.attention(q, k, v, engine=engine))
                rows.append(
                    say(
                        {"engine": engine, "input": name, "dtype": str(dtype)[6:]}
                        | {"headwise": own, "sdpa": theirs, "ratio": round(own / theirs, 2)}
                    )
                )
    return rows
