"""The time that continuous batching takes with transformers' attention and headwise's, and watched.

    python -m bench.continuous_batching

A random Llama generates for many requests of different lengths at once, on this machine's GPU, with
CUDA graphs and without, or on its CPU. A step in which every request gets a token is timed: the
median of all of them, which leaves out those that compile or capture. Needs transformers 5.22.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median, mode
from typing import Any, NamedTuple

import torch
import transformers

import headwise as hw
import headwise.transformers
from bench import described
from headwise.devices import cpu_name

RESULTS = Path(os.environ.get("OUT") or Path(__file__).parent / "results")
CUDA = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)
REQUESTS, NEW, PAGE, LAYERS, WIDTH = (32, 64, 256, 16, 2048) if CUDA else (8, 24, 16, 8, 512)
PROMPTS = [[(i * 7 + n) % 990 + 3 for n in range(64 + 32 * i)] for i in range(REQUESTS)]
WATCHED: dict[str, dict[str, Any] | None] = {
    "": None,
    ", watched": {},
    ", watched, maps=False": {"maps": False},
    ", watched, entropy only": {"maps": False, "stats": "entropy"},
}


class Variant(NamedTuple):
    """One way to serve the requests."""

    implementation: str
    graphs: bool
    watched: str

    @property
    def name(self) -> str:
        return f"{self.implementation}{', graphs' * self.graphs}{self.watched}"


class Served(NamedTuple):
    """The tokens of all requests, the median step, and the time of the whole run."""

    tokens: list[list[int]]
    step: float
    seconds: float


def main() -> None:
    """Print a table and write it to bench/results, or to $OUT."""
    described(__doc__ or "").parse_args()
    model = built()
    graphs = (False, True) if CUDA else (False,)
    variants = [
        Variant(implementation, graph, watched)
        for graph in graphs
        for implementation in ("sdpa", "headwise")
        for watched in WATCHED
        if implementation == "headwise" or watched in ("", ", watched")
    ]
    found: dict[str, dict[str, Any]] = {}
    first: dict[tuple[str, bool], Served] = {}
    for variant in variants:
        model.set_attn_implementation(variant.implementation)
        options = WATCHED[variant.watched]
        try:
            with nullcontext() if options is None else hw.watch(model, **options) as seen:
                served = serve(model, variant.graphs)
            bare = first.setdefault((variant.implementation, variant.graphs), served)
            row: dict[str, Any] = {"step_ms": 1e3 * served.step, "seconds": served.seconds}
            row["overhead"] = served.step / bare.step - 1
            row["same_tokens"] = served.tokens == bare.tokens
            if seen is not None:
                row["rows_seen"] = int(seen.layer(0).counted()[0])
                row["requests"] = len(seen.requests) if options == {} else None
        except Exception as error:  # the others are still worth a run
            row = {"failed": f"{type(error).__name__}: {error}"[:300]}
        found[variant.name] = row
        print(f"{variant.name:48} {json.dumps(row)}", flush=True)
    where = (
        torch.cuda.get_device_name() if CUDA else f"{cpu_name()}, {torch.get_num_threads()} threads"
    )
    about = f"{REQUESTS} requests of 64 to {len(PROMPTS[-1])} tokens, {NEW} new ones each"
    print(f"\n{where}, {LAYERS} layers of width {WIDTH}: {about}")
    print(f"{'':48} {'a step':>9} {'overhead':>9} {'the run':>9}")
    for name, row in found.items():
        if "failed" in row:
            print(f"{name:48} {row['failed']}")
            continue
        step, share, seconds = row["step_ms"], row["overhead"], row["seconds"]
        print(f"{name:48} {step:6.2f} ms {share:9.1%} {seconds:7.2f} s")
    file = RESULTS / f"continuous_batching_{'gpu' if CUDA else 'cpu'}.json"
    kept = {"machine": where, "torch": torch.__version__, "requests": about, "variants": found}
    file.write_text(json.dumps(kept, indent=2) + "\n")


def built() -> Any:
    """A random Llama of about a billion parameters on a GPU, a small one elsewhere."""
    config = transformers.LlamaConfig(
        hidden_size=WIDTH,
        num_attention_heads=WIDTH // 64,
        num_key_value_heads=WIDTH // 256,
        num_hidden_layers=LAYERS,
        intermediate_size=3 * WIDTH,
        vocab_size=1000,
    )
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return transformers.LlamaForCausalLM(config).eval().to(DTYPE)


def serve(model: Any, graphs: bool) -> Served:
    """Generate for all requests."""
    settings = transformers.GenerationConfig(
        max_new_tokens=NEW, do_sample=False, eos_token_id=999, pad_token_id=0
    )
    batching = transformers.ContinuousBatchingConfig(
        num_blocks=sum(-(-(len(prompt) + NEW) // PAGE) for prompt in PROMPTS) + REQUESTS,
        page_size=PAGE,
        max_batch_tokens=1024,
        allow_block_sharing=False,
        use_cuda_graph=graphs,
        use_async_batching=False,
    )
    with timed() as steps:
        found = model.generate_batch(
            PROMPTS,
            generation_config=settings,
            continuous_batching_config=batching,
            progress_bar=False,
        )
    usual = mode(tokens for _, _, tokens in steps)  # one of each request, padded on some devices
    every = [end - begin for begin, end, tokens in steps if tokens == usual]
    tokens = [found[f"req_{n}"].generated_tokens for n in range(REQUESTS)]
    return Served(tokens, median(every), steps[-1][1] - steps[0][0])


@contextmanager
def timed() -> Iterator[list[tuple[float, float, int]]]:
    """When each step begins and ends, and how many tokens it reads."""
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor

    steps: list[tuple[float, float, int]] = []
    step = ContinuousBatchProcessor._generation_step

    def generation_step(self: Any, model: Any) -> None:
        tokens, begin = self.inputs_and_outputs.total_seqlen_q, time.perf_counter()
        step(self, model)  # which waits for the device
        steps.append((begin, time.perf_counter(), tokens))

    ContinuousBatchProcessor._generation_step = generation_step  # type: ignore[method-assign]
    try:
        yield steps
    finally:
        ContinuousBatchProcessor._generation_step = step  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
