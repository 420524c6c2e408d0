"""Effects of edges on this machine's GPU: the largest edges of a head, and a watched backward.

    python -m bench.gpu_effects [--shapes]

The 100 largest edges of one head of 100,000 tokens, with the memory they take at half and at the
whole length; and the time of forward and backward of a GPT with and without a watch, alone and with
all rows of all heads pooled. `--shapes` times the kernels with other tiles, too. Results go to
bench/results/gpu_effects.json, or to $OUT, after every measurement.
"""

from __future__ import annotations

import argparse
import json
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch

import headwise as hw
from bench.pairs import shortest
from bench.warmed import results_file, warm

ROUNDS = 5
LARGEST = [(n, d) for d in (64, 128) for n in (50_000, 100_000)]
WATCHED = [(4096, 4, 4), (16384, 1, 2), (32768, 1, 2)]  # tokens, batch, layers
SHAPES = [  # rows, keys, warps, stages
    (128, 64, 8, 2), (128, 128, 8, 2), (128, 32, 8, 2), (128, 64, 4, 2), (128, 64, 8, 3),
    (64, 64, 4, 2), (64, 128, 4, 2),
]  # fmt: skip
PARTS = ["largest 64", "largest 128", "watched"]


def main() -> None:
    """Print the figures and write them."""
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shape)
    parser.add_argument("--shapes", action="store_true", help="compare tiles of the kernels")
    parser.add_argument(
        "--warm", metavar="PART", help="compile a part's kernels, or `all`, and end"
    )
    parser.add_argument("--warmed", action="store_true", help="the kernels are compiled already")
    given = parser.parse_args()
    tried = [f"shape {i}" for i in range(len(SHAPES) if given.shapes else 0)]
    if not given.warmed and given.warm in (None, "all"):
        warm("bench.gpu_effects", [*PARTS, *tried])
    if given.warm == "all":
        return
    if given.warm:
        _part(given.warm)()
        return
    found: dict[str, Any] = {"device": torch.cuda.get_device_name()}
    for name, row in _measured(len(tried)):
        found.setdefault(name, []).append(row)
        print(name, "  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        results_file("gpu_effects.json").write_text(json.dumps(found, indent=1) + "\n")


def _measured(shapes: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each figure; one that fails says why, and the others follow."""
    runs: list[tuple[str, Callable[[], dict[str, Any]]]] = []
    runs += [("largest", lambda n=n, d=d: largest(n, d)) for n, d in LARGEST]  # type: ignore[misc]
    runs += [("watched", lambda x=x: watched(*x)) for x in WATCHED]  # type: ignore[misc]
    runs += [("shapes", lambda i=i: kernels(16384, SHAPES[i])) for i in range(shapes)]  # type: ignore[misc]
    for name, run in runs:
        try:
            yield name, run()
        except Exception as error:
            traceback.print_exc()
            yield name, {"why": f"{type(error).__name__}: {error}"[:200]}
        torch.cuda.empty_cache()


def _part(name: str) -> Callable[[], object]:
    kind, _, number = name.partition(" ")
    if kind == "largest":
        return lambda: largest(4096, int(number), rounds=1)
    if kind == "shape":
        return lambda: kernels(4096, SHAPES[int(number)], rounds=1)
    return lambda: watched(4096, 1, 1, rounds=1)


def largest(n: int, width: int, rounds: int = ROUNDS) -> dict[str, Any]:
    """The 100 largest edges of a causal head in bf16, totals included."""
    q, k, v, grad = (
        torch.randn(1, 1, n, width, device="cuda", dtype=torch.bfloat16) for _ in range(4)
    )
    found: list[hw.EffectMap] = []

    def run() -> object:
        found[:] = [hw.effect_map(q, k, v, grad, mask=hw.mask.causal())]
        return found[0].largest(100)

    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    beyond = (torch.cuda.max_memory_allocated() - before) / 2**20
    runs = {"ms": run, "row_largest ms": lambda: found[0].row_largest()}
    ms = {name: round(x, 2) for name, x in shortest(runs, rounds).items()}
    return {"n": n, "d": width, **ms, "MiB": round(beyond, 1)}


def watched(n: int, batch: int, layers: int, rounds: int = ROUNDS) -> dict[str, Any]:
    """Forward and backward of a GPT: blind, watched, with effects, and with every head pooled."""
    torch.manual_seed(0)
    config = hw.models.GPTConfig(vocabulary=1024, context=n, d_model=2048, layers=layers, heads=16)
    model = hw.models.GPT(config).to("cuda", torch.bfloat16)
    ids = torch.randint(0, 1024, (batch, n), device="cuda")

    def step() -> None:
        model.zero_grad(set_to_none=True)
        hw.watching.sequence_loss(model(ids), ids).backward()

    def looking(pooled: bool, **options: Any) -> Callable[[], object]:
        def run() -> object:
            with hw.watch(model, maps=False, **options) as seen:
                step()
            if not pooled:
                return None
            places = ((layer, entry) for layer in range(layers) for entry in range(batch))
            return [seen.effects(layer, batch=entry).pool(256) for layer, entry in places]

        return run

    few = {"stats": ("lse",), "rows": 64}  # the cost of statistics is another question
    runs = {
        "blind": step,
        "watched": looking(False, **few),
        "with effects": looking(False, effects=True, **few),
        "pooled": looking(True, effects=True, **few),
    }
    ms = shortest(runs, rounds)
    times = {f"{name} ms": round(x, 2) for name, x in ms.items()}
    ratios = {f"{name} ×": round(x / ms["blind"], 3) for name, x in ms.items() if name != "blind"}
    return {"n": n, "batch": batch, "layers": layers, **times, **ratios}


def kernels(n: int, tile: tuple[int, int, int, int], rounds: int = ROUNDS) -> dict[str, Any]:
    """The kernels of 16 heads of width 128 with these tiles, in milliseconds."""
    from headwise.engines.triton.host.cards import card
    from headwise.engines.triton.host.tile_shapes import Shape, shape, use

    for kernel in ("effects", "peaks"):
        use(kernel, 128, 2, card(torch.device("cuda")), Shape(*tile))
    given = (torch.randn(1, 16, n, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    q, k, v, grad = given
    emap = hw.effect_map(q, k, v, grad, mask=hw.mask.causal())
    runs: dict[str, Callable[[], object]] = {
        "forward": lambda: hw.attention(q, k, v, mask=hw.mask.causal()),
        "totals": lambda: hw.effect_map(q, k, v, grad, mask=hw.mask.causal()).totals(),
        "pool": lambda: emap.pool(256),
        "row_largest": lambda: emap.row_largest(),
    }
    ms = {f"{name} ms": round(x, 2) for name, x in shortest(runs, rounds).items()}
    found = shape("effects", 128, 2, card(torch.device("cuda")))  # what there was room for
    return {"tile": list(tile), "ran": [found.rows, found.keys, found.warps, found.stages], **ms}


if __name__ == "__main__":
    main()
