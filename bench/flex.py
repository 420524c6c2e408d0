"""FlexAttention beside headwise for every kind of mask, on one GPU: `python -m bench.flex`.

Forward passes, with and without statistics, and forward and backward together, in bfloat16. Flex is
compiled with each of its backends that is installed, and the fastest counts; ours is what
`hw.attention` and `hw.observe` choose by themselves. Every figure is the median of rounds in which
the contenders alternate. PyTorch compiles each mask anew, so processes beside each other fill its
cache first.

The results go to bench/results/flex.json, or into the folder `OUT`; `--page` writes their table
into docs/gpu.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import headwise as hw
from bench import between_marks, described
from bench.gpu_timing import Run, interleaved
from bench.pairs import RESULTS, Figure, at_least, machine, say_figures, shortest

PAGE = Path(__file__).parents[1] / "docs" / "gpu.md"
FIVE = ("lse", "entropy", "max_logit", "top_prob", "sink_mass")
OURS = ("headwise", "entropy", "five")
LONG = 16384
BACKENDS: dict[str, dict[str, Any]] = {"triton": {}, "flash": {"BACKEND": "FLASH"}}
LEAST = {"sinks and window": 1.4}  # times Flex's speed; 1 elsewhere
Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """A mask as both take it, and the shape that it is measured at."""

    n: int  # queries and keys
    mask: hw.mask.Mask | None
    rule: Rule | None = None  # of FlexAttention, (batch, head, query, key) -> seen
    batch: int = 1
    heads: int = 16
    key_heads: int = 4
    width: int = 128
    value_width: int = 128
    score: Rule | None = None  # of FlexAttention: score_mod
    more: dict[str, Any] | None = None  # further keywords of hw.attention
    each: bool = False  # the rule differs between batch entries


def cases(device: str = "cpu", n: int = LONG) -> dict[str, Case]:
    """The kinds of masks, at this length or a part of it."""
    causal, part = hw.mask.causal(), n // 4
    ids = torch.arange(n, device=device) // 2048
    short = torch.arange(part, device=device) // 700
    lengths = torch.tensor([part, part * 3 // 4, part // 2, part // 6], device=device)
    slopes = torch.tensor([2 ** (-(h + 1) / 2) for h in range(16)], device=device)
    return {
        "full": Case(n, None),
        "causal": Case(n, causal, lambda b, h, i, j: j <= i),
        "causal, d 64": Case(n, causal, lambda b, h, i, j: j <= i, width=64, value_width=64),
        "window": Case(
            n, causal & hw.mask.window(1023), lambda b, h, i, j: (j <= i) & (i - j < 1024)
        ),
        "sinks and window": Case(
            n, causal & (hw.mask.window(1023) | hw.mask.prefix(4)),
            lambda b, h, i, j: (j <= i) & ((i - j < 1024) | (j < 4)),
        ),
        "prefix": Case(
            n, causal | hw.mask.prefix(n // 8), lambda b, h, i, j: (j <= i) | (j < n // 8)
        ),
        "documents of 2048": Case(
            n, causal & hw.mask.documents(ids), lambda b, h, i, j: (j <= i) & (ids[i] == ids[j])
        ),
        "documents of 700": Case(
            part, causal & hw.mask.documents(short),
            lambda b, h, i, j: (j <= i) & (short[i] == short[j]), batch=4,
        ),
        "padding": Case(
            part, causal & hw.mask.lengths(lengths),
            lambda b, h, i, j: (j <= i) & (j < lengths[b]), batch=4, each=True,
        ),
        "latent heads": Case(
            n // 2, causal, lambda b, h, i, j: j <= i, key_heads=16, width=192
        ),
        "cap": Case(
            n, causal, lambda b, h, i, j: j <= i,
            score=lambda s, b, h, i, j: 30.0 * torch.tanh(s / 30.0), more={"softcap": 30.0},
        ),
        "alibi": Case(
            n, causal, lambda b, h, i, j: j <= i,
            score=lambda s, b, h, i, j: s - slopes[h] * (i - j), more={"bias": hw.ALiBi(slopes)},
        ),
    }  # fmt: skip


def tensors(case: Case, device: str) -> list[Tensor]:
    """q, k, v, and the gradient of the output."""
    n = case.n
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shapes = (
        (case.batch, case.heads, n, case.width),
        (case.batch, case.key_heads, n, case.width),
        (case.batch, case.key_heads, n, case.value_width),
        (case.batch, case.heads, n, case.value_width),
    )
    given = [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]
    return [*(x.requires_grad_(device != "cpu") for x in given[:3]), given[3]]


def contenders(case: Case, given: list[Tensor]) -> tuple[dict[str, Run], dict[str, Run]]:
    """The forward passes, and the forward and backward passes."""
    q, k, v, grad = given
    more = {"mask": case.mask} | (case.more or {})
    ours = partial(hw.attention, q, k, v, **more)
    forward: dict[str, Run] = {
        "headwise": ours,
        "entropy": partial(hw.observe, q, k, v, stats=("entropy",), **more),
        "five": partial(hw.observe, q, k, v, stats=FIVE, **more),
    }
    both: dict[str, Run] = {
        "headwise": lambda: torch.autograd.grad(ours(), given[:3], grad),
        "five": lambda: torch.autograd.grad(
            hw.observe(q, k, v, stats=FIVE, **more)[0], given[:3], grad
        ),
    }
    for name, flex in flexible(case, given).items():
        forward[name] = flex
        both[name] = lambda flex=flex: torch.autograd.grad(flex(), given[:3], grad)
    return forward, both


def flexible(case: Case, given: list[Tensor]) -> dict[str, Callable[[], Tensor]]:
    """Compiled FlexAttention with each of its backends."""
    q, k, v, _ = given
    blocks = None
    if case.rule is not None:
        batch = case.batch if case.each else None
        blocks = create_block_mask(case.rule, batch, None, case.n, case.n, device=str(q.device))
    flex, made = torch.compile(flex_attention, dynamic=False), {}
    for name, options in BACKENDS.items():
        made[f"flex, {name}"] = partial(
            flex, q, k, v, score_mod=case.score, block_mask=blocks,
            enable_gqa=case.heads != case.key_heads, kernel_options=options or None,
        )  # fmt: skip
    return made


def measured(name: str, device: str, tiny: bool, rounds: int) -> dict[str, Any]:
    """Milliseconds of every contender, and which engine of ours ran."""
    torch._dynamo.reset()
    case = cases(device, 1024 if tiny else LONG)[name]
    given = tensors(case, device)
    forward, both = contenders(case, given)
    if device == "cpu":  # where Flex has no backward
        with torch.no_grad():
            return {"forward": shortest({x: forward[x] for x in (*OURS, "flex, triton")}, rounds)}
    with torch.no_grad():
        found: dict[str, Any] = {"forward": interleaved(forward, rounds)}
    found["both"] = interleaved(both, rounds)
    plan = hw.explain(*given[:3], mask=case.mask, **(case.more or {}))
    return found | {"engine": plan.engine, "backward": plan.backward}


def figures(results: dict[str, Any]) -> list[Figure]:
    """How many times faster than Flex's fastest backend headwise is."""
    found = []
    for name, row in results.get("cases", {}).items():
        for way, said in (("forward", "forward"), ("both", "forward and backward")):
            ms = row.get(way, {})
            peers = {x: t for x, t in ms.items() if x.startswith("flex")}
            if peers and "headwise" in ms:
                best = min(peers, key=lambda x: peers[x])
                least = LEAST.get(name, 1.0)
                figure = peers[best] / ms["headwise"]
                found.append(at_least(f"{name}, {said}, to Flex", figure, least, detail=best))
    return found


def table(results: dict[str, Any]) -> str:
    """The results in Markdown."""
    rows = [
        "| mask | n, heads, width | forward: headwise | entropy | five | Flex | ratio "
        "| and backward: headwise | five | Flex | ratio |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    known = cases()
    for name, row in results["cases"].items():
        if "error" in row:
            rows.append(f"| {name} | {row['error'][:80]} |" + " – |" * 9)
            continue
        case = known[name]
        width = case.width if case.width == case.value_width else f"{case.width}/{case.value_width}"
        batch = f"{case.batch} × " if case.batch > 1 else ""
        cells = [name, f"{batch}{case.n}, {case.heads}/{case.key_heads}, {width}"]
        for way, names in (
            ("forward", ("headwise", "entropy", "five")),
            ("both", ("headwise", "five")),
        ):
            ms = row.get(way, {})
            flex = min((t for x, t in ms.items() if x.startswith("flex")), default=None)
            cells += [f"{ms[x]:.3f}" if x in ms else "–" for x in names]
            cells.append("–" if flex is None else f"{flex:.3f}")
            ratio = None if flex is None or "headwise" not in ms else flex / ms["headwise"]
            missed = ratio is not None and ratio < LEAST.get(name, 1.0)
            text = "–" if ratio is None else f"{ratio:.2f}"
            cells.append(f"**{text}** missed" if missed else text)
        rows.append(f"| {' | '.join(cells)} |")
    torch_, triton = results["machine"]["torch"], results.get("triton")
    about = f"Milliseconds on an {results.get('device')}, torch {torch_}, Triton {triton}."
    return "\n".join([about, "", *rows])


def warm(names: list[str], workers: int, given: list[str]) -> None:
    """Compile every case in processes beside each other; what they make is cached on disk."""

    def compile_one(name: str) -> None:
        command = [
            sys.executable,
            "-m",
            "bench.flex",
            "--only",
            name,
            "--rounds",
            "1",
            "--quiet",
            *given,
        ]
        subprocess.run(command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(compile_one, names))


def main() -> None:
    folder = Path(os.environ.get("OUT", RESULTS))
    parser = described(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="*", choices=list(cases()), default=list(cases()))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=150, help="begin no case after this")
    parser.add_argument("--workers", type=int, default=12, help="that compile first; 0: none")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to test the benchmark")
    parser.add_argument("--quiet", action="store_true", help="compile only")
    parser.add_argument("--json", type=Path, default=folder / "flex.json")
    parser.add_argument(
        "--page", action="store_true", help="write the file's table into docs/gpu.md"
    )
    given = parser.parse_args()
    kept: dict[str, Any] = json.loads(given.json.read_text("utf-8")) if given.json.exists() else {}
    if given.page:
        PAGE.write_text(between_marks(PAGE.read_text("utf-8"), "bench.flex", table(kept)), "utf-8")
        return
    from torch._functorch import config

    stop = time.monotonic() + given.seconds
    if given.device == "cuda":
        import triton

        kept |= {"device": torch.cuda.get_device_name(), "triton": triton.__version__}
    config.donated_buffer = False  # a backward is run more than once
    if given.workers and not given.quiet:
        started = time.monotonic()
        warm(given.only, given.workers, ["--device", given.device, *(["--tiny"] * given.tiny)])
        print(f"compiled in {time.monotonic() - started:.0f} s", flush=True)
    kept |= {"machine": machine(), "cases": kept.get("cases", {})}
    for name in given.only:
        if time.monotonic() > stop:
            print(f"{name}: no time left")
            continue
        try:
            kept["cases"][name] = measured(name, given.device, given.tiny, given.rounds)
        except Exception as error:  # the other cases are measured
            kept["cases"][name] = {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
        if not given.quiet:
            print(f"{name}: {json.dumps(kept['cases'][name], ensure_ascii=False)}", flush=True)
            given.json.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", "utf-8")
    if not given.quiet:
        say_figures(figures(kept))


if __name__ == "__main__":
    main()
