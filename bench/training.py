"""A training step of the built-in GPT: its speed, its utilisation, and the share of attention.

    python -m bench.training                  # the small preset on a GPU, a small model on a CPU
    python -m bench.training --json --rounds 5

The step is timed with `hw.attention` and with `F.scaled_dot_product_attention` in its place,
alternating in one process: same model, same tokens, same optimiser.

Model FLOPs utilisation = FLOPs per token · tokens per second / peak, with 6 P + 6 L T d per token:
every parameter of a matrix product (P; the tied embedding once, as the output layer) takes part in
one multiplication and addition forward and two backward; attention's two products over T/2 visible
keys on average, of width d in L layers, likewise. Recomputation does not count. The peak is the
datasheet's dense bf16 rate, 989 TFLOP/s for an H100 or H200.
"""

import argparse
import json
import statistics
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.pairs import seconds
from headwise.apps.train.presets import preset
from headwise.apps.train.trainer import autocast
from headwise.costs import DEVICES
from headwise.models import GPT, GPTConfig
from headwise.nn import MultiHeadAttention, SwiGLU

PEAK = DEVICES["h200"].peak("bf16")
SMALL = GPTConfig(
    vocabulary=1000, context=256, d_model=128, layers=2, heads=4, feed_forward=SwiGLU(256)
)


def plain(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
    """The call of a model without headwise; the built-in GPT uses no other options."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def flops_per_token(model: GPT) -> int:
    config = model.config
    parameters = sum(each.numel() for each in model.parameters() if each.ndim >= 2)
    return 6 * parameters + 6 * config.layers * config.context * config.d_model


def make_step(model: nn.Module, tokens: Tensor, device: torch.device) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")

    def step() -> None:
        with autocast(device):
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def measure(
    rounds: int, repeat: int, batch: int | None, compiled: bool, engine: str
) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    setup = preset("language", "small")
    config, size = (setup.model, setup.batch) if device.type == "cuda" else (SMALL, 4)
    assert isinstance(config, GPTConfig)
    config = replace(config, end=None)
    size = batch or size
    tokens = torch.randint(config.vocabulary, (size, config.context + 1), device=device)
    ways: dict[str, Any] = {
        "headwise": nullcontext,
        "F.scaled_dot_product_attention": lambda: mock.patch("headwise.nn.call.attention", plain),
    }
    steps: dict[str, Any] = {}
    for way, patch in ways.items():
        torch.manual_seed(0)
        model = GPT(config).to(device)
        for module in model.modules():
            if isinstance(module, MultiHeadAttention):
                module.engine = engine
        call = torch.compile(model) if compiled else model
        steps[way] = make_step(call, tokens, device)
        with patch():
            for _ in range(3):
                steps[way]()
    found: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, patch in ways.items():
            with patch():
                found[way].append(statistics.median(seconds(steps[way]) for _ in range(repeat)))
    flops, count = flops_per_token(model), size * config.context
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "compiled": compiled,
        "engine": engine,
        "parameters": sum(each.numel() for each in model.parameters()),
        "tokens_a_step": count,
        "flops_a_token": flops,
        "peak": PEAK if device.type == "cuda" else None,
        "ways": {
            way: {
                "step_ms": 1000 * statistics.median(times),
                "rounds_ms": [1000 * each for each in times],
                "tokens_per_second": count / statistics.median(times),
                "mfu": flops * count / statistics.median(times) / PEAK
                if device.type == "cuda"
                else None,
            }
            for way, times in found.items()
        },
        "ratio": statistics.median(found["headwise"])
        / statistics.median(found["F.scaled_dot_product_attention"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender")
    parser.add_argument("--repeat", type=int, default=5, help="steps per turn")
    parser.add_argument("--batch", type=int, help="sequences per step")
    parser.add_argument("--compile", action="store_true", help="compile the model")
    parser.add_argument("--engine", default="auto", help="the engine of hw.attention")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    found = measure(options.rounds, options.repeat, options.batch, options.compile, options.engine)
    if options.json:
        print(json.dumps(found, indent=2))
        return
    print(f"{found['device']}, torch {found['torch']}: {found['parameters']:,} parameters")
    for way, figures in found["ways"].items():
        used = "" if figures["mfu"] is None else f"  {figures['mfu']:.1%} of the peak"
        speed = f"{figures['tokens_per_second']:>12,.0f} tokens/s"
        print(f"{way:>32}  {figures['step_ms']:8.2f} ms  {speed}{used}")
    print(f"headwise takes {found['ratio']:.3f} times as long")


if __name__ == "__main__":
    main()
