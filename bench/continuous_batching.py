"""The time that continuous batching takes with transformers' attention and headwise's, and watched.

    python -m bench.continuous_batching

A random Llama generates for eight requests of different lengths at once, on this machine's GPU or
CPU. Every variant must give the same tokens. Figures are the shortest of several runs.
"""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers

import headwise as hw
import headwise.transformers
from bench import described
from headwise.devices import cpu_name

RESULTS = Path(__file__).parent / "results"
CUDA = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)
PROMPTS = [[(i * 7 + n) % 990 + 3 for n in range(64 + 32 * i)] for i in range(8)]
NEW, ROUNDS = 24, 4
VARIANTS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "sdpa": ("sdpa", None),
    "headwise": ("headwise", None),
    "sdpa, watched": ("sdpa", {}),
    "headwise, watched": ("headwise", {}),
    "headwise, watched, maps=False": ("headwise", {"maps": False}),
    "headwise, watched, entropy only": ("headwise", {"maps": False, "stats": "entropy"}),
}


def main() -> None:
    """Print a table and write it to bench/results."""
    described(__doc__ or "").parse_args()
    config = transformers.LlamaConfig(
        hidden_size=512,
        num_attention_heads=8,
        num_key_value_heads=2,
        num_hidden_layers=8,
        intermediate_size=1536,
        vocab_size=1000,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval().to(DEVICE, DTYPE)
    best: dict[str, float] = {}
    tokens = None
    for _ in range(ROUNDS):
        for name, (implementation, options) in VARIANTS.items():
            model.set_attn_implementation(implementation)
            with nullcontext() if options is None else hw.watch(model, **options):
                found, seconds = served(model)
            tokens = tokens or found
            if not CUDA and found != tokens:
                raise SystemExit(f"{name} gave other tokens")
            best[name] = min(best.get(name, seconds), seconds)
    where = (
        torch.cuda.get_device_name() if CUDA else f"{cpu_name()}, {torch.get_num_threads()} threads"
    )
    print(f"{where}: {len(PROMPTS)} requests of 64 to 288 tokens, {NEW} new ones each")
    for name, seconds in best.items():
        print(f"{name:34} {seconds:6.2f} s  {seconds / best['sdpa'] - 1:+.0%}")
    file = RESULTS / f"continuous_batching_{'gpu' if CUDA else 'cpu'}.json"
    file.write_text(json.dumps({"machine": where, "seconds": best}, indent=2) + "\n")


def served(model: Any) -> tuple[list[list[int]], float]:
    """The tokens of every request, and the time from the first step to the last."""
    settings = transformers.GenerationConfig(
        max_new_tokens=NEW, do_sample=False, eos_token_id=999, pad_token_id=0
    )
    batching = transformers.ContinuousBatchingConfig(
        num_blocks=256, page_size=16, max_batch_tokens=512, allow_block_sharing=False
    )
    steps: list[float] = []
    hooks = [
        model.register_forward_pre_hook(lambda *_: steps.append(time.perf_counter())),
        model.register_forward_hook(lambda *_: steps.append(time.perf_counter())),
    ]
    found = model.generate_batch(
        PROMPTS,
        generation_config=settings,
        continuous_batching_config=batching,
        progress_bar=False,
    )
    for hook in hooks:
        hook.remove()
    return [found[name].generated_tokens for name in sorted(found)], steps[-1] - steps[0]


if __name__ == "__main__":
    main()
