"""Compiled, unwatched models of transformers: training steps with our attention and with theirs.

    python -m bench.compiled_models [--device cpu] [--only Llama] [--tiny]

Each model is compiled whole, with attn_implementation="headwise" and with "sdpa" ("eager" where a
model has no sdpa). The steps alternate, and a figure is the median ratio of their times: below 1,
headwise is faster. On a CPU only the time of this process counts. Inputs are plain, padded on the
left, or packed. With all models the figures are kept in bench/results.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bench import described
from bench.pairs import Figure, at_most, report, say_figures, synchronize

LARGE = {
    "hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8, "head_dim": 128,
    "num_key_value_heads": 4, "intermediate_size": 2816, "vocab_size": 32000,
}  # fmt: skip
SMALL = {
    "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 64,
    "num_key_value_heads": 2, "intermediate_size": 256, "vocab_size": 500,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("sdpa", {}),
    "Mistral": ("sdpa", {"sliding_window": 256}),
    "Gemma3Text": ("sdpa", {"sliding_window": 256}),
    "GptOss": ("eager", {
        "sliding_window": 128, "num_local_experts": 4, "experts_implementation": "batched_mm"}),
}  # fmt: skip
CASES = ("plain", "padded", "packed")
MOST = {"plain": 0.75, "padded": 1.0, "packed": 1.0}  # with a window too, at most 1


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--tiny", action="store_true", help="small sizes, to test the benchmark")
    given = parser.parse_args()
    batch, length = (4, 4096) if given.device == "cuda" else (1, 48 if given.tiny else 2048)
    rounds = 2 if given.tiny else 7
    figures: list[Figure] = []
    for name in given.only:
        for case in CASES:
            found = compared(name, case, given.device, batch, length, rounds)
            most = MOST[case] if name == "Llama" else 1.0
            figures.append(at_most(f"{name}, {case}, to {MODELS[name][0]}", found, most))
            print(f"{name}, {case}: {found:.2f}", flush=True)
    if given.tiny or len(given.only) < len(MODELS):
        say_figures(figures)
    else:
        report(figures, f"compiled_models_{given.device}.json")


def compared(name: str, case: str, device: str, batch: int, length: int, rounds: int) -> float:
    """The time of a step with headwise's attention, divided by that of the other."""
    torch._dynamo.reset()
    steps = [
        training_step(model, inputs(case, batch, length, device)) for model in models(name, device)
    ]
    ratios = []
    for _ in range(rounds):
        other, own = (seconds(step, device) for step in steps)
        ratios.append(own / other)
    return statistics.median(ratios)


def models(name: str, device: str) -> tuple[nn.Module, nn.Module]:
    """A model with another attention, and the same with headwise's."""
    import transformers

    import headwise.transformers  # noqa: F401 (registers attn_implementation="headwise")

    implementation, more = MODELS[name]
    sizes = (LARGE if device == "cuda" else SMALL) | more
    config = getattr(transformers, f"{name}Config")(
        **sizes, pad_token_id=0, use_cache=False, attn_implementation=implementation
    )
    causal = "Gemma3" if name == "Gemma3Text" else name
    torch.manual_seed(0)
    other = getattr(transformers, f"{causal}ForCausalLM")(config)
    other.to(device=device, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    own = copy.deepcopy(other)
    own.set_attn_implementation("headwise")
    return other, own


def inputs(case: str, batch: int, length: int, device: str) -> dict[str, Tensor]:
    """Token ids, with padding on the left or with positions that start again."""
    ids = torch.randint(1, 99, (batch, length), device=device)
    if case == "padded":
        shown = torch.ones_like(ids)
        shown[0, : length // 4] = 0
        return {"input_ids": ids, "attention_mask": shown}
    if case == "packed":
        ids = ids.reshape(1, -1)
        parts = [length // 3, length // 4, ids.shape[1] - length // 3 - length // 4]
        places = torch.cat([torch.arange(part, device=device) for part in parts])
        return {"input_ids": ids, "position_ids": places[None]}
    return {"input_ids": ids}


def training_step(model: nn.Module, given: dict[str, Tensor]) -> Callable[[], None]:
    """A forward and a backward of a compiled model, which has run once."""
    compiled: Any = torch.compile(model, fullgraph=True, dynamic=False)

    def step() -> None:
        compiled(**given).logits.float().square().mean().backward()
        model.zero_grad(set_to_none=True)

    step()
    step()
    return step


def seconds(step: Callable[[], None], device: str) -> float:
    """The time of a step: on a CPU, only that of this process."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    synchronize()
    start = clock()
    step()
    synchronize()
    return clock() - start


if __name__ == "__main__":
    main()
