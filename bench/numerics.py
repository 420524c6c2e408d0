"""The errors of attention, and the calls that agree to the bit: python -m bench.numerics

Errors are against the reference in float64 on the same inputs, rounded to the dtype first: the
largest error of any entry over the largest entry of the truth. `PyTorch` is a plain call of
F.scaled_dot_product_attention. The output is the tables of docs/numerics.md.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from pathlib import Path

# Some virtual machines advertise AMX but crash in a bfloat16 matrix product.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import torch
import torch.nn.functional as F
from torch import Tensor

import headwise as hw
from bench import described

RESULTS = Path(__file__).parent / "results" / "numerics.json"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OBSERVING = ("reference", "streaming")
ENGINES = ("PyTorch", "sdpa", "streaming", "reference")
INPUTS = {  # queries, keys, deviation of q and of k
    "random": (512, 512, 1.0),
    "large logits": (512, 512, 60.0),  # a deviation of 3600
    "long": (128, 16384, 1.0),
}
LENGTHS = (
    40,
    300,
    1100,
)  # of calls that are compared bit by bit: a few blocks, or many
SEEN = (("lse", ("lse",)), ("entropy", ("entropy",)))
Three = tuple[Tensor, Tensor, Tensor]


def main() -> None:
    described(__doc__).parse_args()
    torch.manual_seed(0)
    errors = [row for name in INPUTS for dtype in DTYPES for row in measured(name, dtype)]
    same = [row for dtype in DTYPES for row in repeated(dtype)]
    print(f"{machine()}\n")
    for what in ("out", "gradients", "lse", "entropy"):
        print(table(f"Error of {what}", [row for row in errors if row["of"] == what]))
    print(invariance(same))
    RESULTS.parent.mkdir(exist_ok=True)
    record = {"machine": machine(), "errors": errors, "same": same}
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")


def machine() -> str:
    """A description of this machine."""
    isa = torch.backends.cpu.get_cpu_capability().replace("AVX512", "AVX-512")
    version = ".".join(torch.__version__.split("+")[0].split(".")[:2])
    threads = torch.get_num_threads()
    return f"{threads}-core {platform.machine().replace('_', '-')} ({isa}) CPU, torch {version}"


def problem(name: str, dtype: torch.dtype) -> Three:
    """q, k and v of two heads of width 64, rounded to the dtype."""
    queries, keys, size = INPUTS[name]
    numbers = torch.Generator().manual_seed(1)

    def normal(n: int, times: float) -> Tensor:
        return (times * torch.randn(1, 2, n, 64, generator=numbers)).to(dtype)

    return normal(queries, size), normal(keys, size), normal(keys, 1.0)


def run(engine: str, q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
    if engine == "PyTorch":
        return F.scaled_dot_product_attention(q, k, v)
    return hw.attention(q, k, v, engine=engine, **options)


def with_gradients(engine: str, tensors: Three) -> dict[str, Tensor]:
    """The output, and the gradients of q, k and v for a given gradient of the output."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out = run(engine, *leaves)
    numbers = torch.Generator().manual_seed(2)
    grad = torch.randn(out.shape, generator=numbers).bfloat16().half()  # exact in every dtype
    out.backward(grad.to(out.dtype))
    return {"out": out.detach(), **{n: x.grad for n, x in zip("qkv", leaves, strict=True)}}


def measured(name: str, dtype: torch.dtype) -> list[dict[str, object]]:
    """The errors of one input in one dtype, one row per computed quantity."""
    tensors = problem(name, dtype)
    wide = tuple(x.double() for x in tensors)
    truth = with_gradients("reference", wide)
    found = {engine: with_gradients(engine, tensors) for engine in ENGINES}
    _, exact = hw.observe(*wide, engine="reference", stats=("lse", "entropy"))
    truth |= exact.values
    for engine in OBSERVING:
        found[engine] |= hw.observe(*tensors, engine=engine, stats=("lse", "entropy"))[1].values
    rows = []
    for what, parts in (("out", ("out",)), ("gradients", tuple("qkv")), *SEEN):
        row: dict[str, object] = {"of": what, "input": name, "dtype": str(dtype)[6:]}
        for engine in ENGINES:
            if parts[0] in found[engine]:
                row[engine] = max(error(found[engine][part], truth[part]) for part in parts)
        rows.append(row)
    return rows


def error(found: Tensor, truth: Tensor) -> float:
    """The largest error of any entry, relative to the largest entry."""
    return float((found.double() - truth).abs().max() / truth.abs().max())


SAMENESS: dict[str, Callable[[str, Three], bool]] = {}


def sameness(words: str) -> Callable[[Callable[[str, Three], bool]], Callable[[str, Three], bool]]:
    """Describe a question about equal bits."""

    def named(ask: Callable[[str, Three], bool]) -> Callable[[str, Three], bool]:
        SAMENESS[words] = ask
        return ask

    return named


@sameness("the same call twice, forward and backward")
def twice(engine: str, tensors: Three) -> bool:
    first, second = with_gradients(engine, tensors), with_gradients(engine, tensors)
    return all(torch.equal(first[name], second[name]) for name in first)


@sameness("one thread or two, forward")
def threads(engine: str, tensors: Three) -> bool:
    before = torch.get_num_threads()
    outs = []
    for count in (1, 2):
        torch.set_num_threads(count)
        outs.append(run(engine, *tensors))
    torch.set_num_threads(before)
    return torch.equal(*outs)


@sameness("a batch entry alone or with three others")
def entry_alone(engine: str, tensors: Three) -> bool:
    q, k, v = tensors
    whole = run(engine, q, k, v)
    return all(
        torch.equal(run(engine, q[b : b + 1], k[b : b + 1], v[b : b + 1])[0], whole[b])
        for b in range(len(q))
    )


@sameness("a head alone or with seven others")
def head_alone(engine: str, tensors: Three) -> bool:
    whole = run(engine, *tensors)
    return all(
        torch.equal(run(engine, *(x[:, h : h + 1] for x in tensors))[:, 0], whole[:, h])
        for h in range(whole.shape[1])
    )


@sameness("a query alone or with the others")
def query_alone(engine: str, tensors: Three) -> bool:
    q, k, v = tensors
    whole = run(engine, q, k, v)
    return all(
        torch.equal(run(engine, q[:, :, i : i + 1], k, v)[:, :, 0], whole[:, :, i])
        for i in range(0, q.shape[2], 23)
    )


@sameness("keys padded with 100 that no query sees")
def padded(engine: str, tensors: Three) -> bool:
    q, k, v = tensors
    longer = [F.pad(x, (0, 0, 0, 100)) for x in (k, v)]
    out = run(engine, q, *longer, mask=hw.mask.lengths(k.shape[2]))
    return torch.equal(out, run(engine, q, k, v))


@sameness("with or without observation")
def observed(engine: str, tensors: Three) -> bool:
    return torch.equal(hw.observe(*tensors, engine=engine)[0], run(engine, *tensors))


def repeated(dtype: torch.dtype) -> list[dict[str, object]]:
    """The pairs of calls that agree to the bit at every length, one row per question."""
    numbers = torch.Generator().manual_seed(3)
    calls = [torch.randn(3, 4, 8, n, 64, generator=numbers).to(dtype).unbind(0) for n in LENGTHS]
    rows = []
    for words, ask in SAMENESS.items():
        row: dict[str, object] = {"question": words, "dtype": str(dtype)[6:]}
        for engine in ENGINES:
            if asked(words, engine):
                row[engine] = all(ask(engine, call) for call in calls)
        rows.append(row)
    return rows


def asked(words: str, engine: str) -> bool:
    """True if an engine can make the calls of a question."""
    if "observation" in words:
        return engine in OBSERVING
    return engine != "PyTorch" or "padded" not in words


def table(title: str, rows: list[dict[str, object]]) -> str:
    """The errors as Markdown."""
    engines = [engine for engine in ENGINES if any(engine in row for row in rows)]
    lines = [f"**{title}**\n", f"| input | dtype | {' | '.join(engines)} |"]
    lines.append("|---" * (2 + len(engines)) + "|")
    for row in rows:
        figures = [f"{row[engine]:.1e}" if engine in row else "–" for engine in engines]
        lines.append(f"| {row['input']} | {row['dtype']} | {' | '.join(figures)} |")
    return "\n".join(lines) + "\n"


def invariance(rows: list[dict[str, object]]) -> str:
    """The calls that agree to the bit, as Markdown: in every dtype, in some, or in none."""
    lines = ["**The same to the bit?**\n", f"| | {' | '.join(ENGINES)} |"]
    lines.append("|---" * (1 + len(ENGINES)) + "|")
    for words in SAMENESS:
        asked_rows = [row for row in rows if row["question"] == words]
        cells = []
        for engine in ENGINES:
            kept = [str(row["dtype"]) for row in asked_rows if row.get(engine)]
            if not any(engine in row for row in asked_rows):
                cells.append("–")
            elif len(kept) == len(DTYPES):
                cells.append("yes")
            else:
                cells.append(f"{', '.join(kept)} only" if kept else "no")
        lines.append(f"| {words} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
