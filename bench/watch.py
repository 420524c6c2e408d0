"""The cost of watching a training step on a CPU, and of eager attention: python -m bench.watch"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from bench import described
from bench.pairs import Figure, at_least, at_most, median_seconds, ratio, report
from headwise.models import GPT, GPTConfig
from headwise.nn import SwiGLU

VOCABULARY = 4096
# The built-in GPT: 6 layers of 8 heads.
CONFIG = GPTConfig(
    vocabulary=VOCABULARY, context=4096, d_model=256, layers=6, heads=8, feed_forward=SwiGLU(640)
)


def main() -> None:
    described(__doc__).parse_args()
    torch.manual_seed(0)
    figures: list[Figure] = []
    for group in (sampled, every_row, skipped, recorded, against_eager):
        found = group()
        figures += found
        said = ", ".join(f"{figure.value:.3f}" for figure in found)
        print(f"{group.__name__}: {said}", flush=True)
    print()
    report(figures, "watch.json")


def sampled() -> list[Figure]:
    """Watch 64 rows of each pass, at every step."""
    name = "training step watched, rows=64 every step, against unwatched"
    return [
        at_most(
            f"{name}, n {n}", watched_ratio(batch, n, pairs, rows=64), 1.03, detail=shape(batch)
        )
        for batch, n, pairs in ((4, 512, 20), (1, 2048, 12))
    ]


def every_row() -> list[Figure]:
    """Watch all statistics of all rows, at every step."""
    name = "training step watched, every row of every step, against unwatched"
    sizes = ((4, 512, 12), (1, 2048, 8))
    found = [(batch, n, watched_ratio(batch, n, pairs)) for batch, n, pairs in sizes]
    return [at_most(f"{name}, n {n}", x, 1.25, detail=shape(batch)) for batch, n, x in found]


def skipped() -> list[Figure]:
    """A step that is passed over: nothing is in the model, and one call follows the optimiser's."""
    model = GPT(replace(CONFIG, layers=8))
    optimizer = torch.optim.SGD(model.parameters(), 0.0)  # without gradients it does nothing else
    many = 1000

    def steps() -> None:
        for _ in range(many):
            optimizer.step()

    alone = median_seconds(steps, 20)
    watch = hw.watch(model, rows=64, every=10**9).attach()
    model(torch.randint(VOCABULARY, (1, 8)))
    optimizer.step()  # the only step that is looked at
    added = (median_seconds(steps, 20) - alone) / many * 1e6
    watch.detach()
    assert watch.steps > many
    return [at_most("what a skipped step adds, 8 layers", added, 50, "µs")]


def recorded() -> list[Figure]:
    """Watch one step in ten with all alarms, as `headwise train --watch 10` does."""
    models = [GPT(CONFIG) for _ in range(2)]
    tokens = torch.randint(VOCABULARY, (4, 513))
    watch = hw.watch(models[0], rows=64, every=10, alarms=True).attach()
    ours, peer = training(models[0], tokens), training(models[1], tokens)

    def ten_watched() -> None:
        for _ in range(10):
            ours()
            watch.step()

    def ten() -> None:
        for _ in range(10):
            peer()

    found = ratio(ten_watched, ten, 3)
    watch.detach()
    name = "ten training steps, one watched with alarms, against unwatched, n 512"
    return [at_most(name, found, 1.02, detail=shape(4))]


def against_eager() -> list[Figure]:
    """The usual way: a transformers model of the same shape that returns its attentions."""
    import transformers

    n = 2048
    config: Any = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_layer=6, n_head=8, n_embd=256, n_positions=n, resid_pdrop=0.0,
        attn_pdrop=0.0, embd_pdrop=0.0, attn_implementation="eager", bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    eager = transformers.GPT2LMHeadModel(config)
    fused = copy.deepcopy(eager)
    fused.set_attn_implementation("sdpa")
    own = GPT(CONFIG)
    tokens = torch.randint(VOCABULARY, (1, n + 1))
    figures = []
    for label, model in (("built-in GPT", own), ("the same GPT-2", fused)):
        watch = hw.watch(model, maps=False).attach()
        step = training(model, tokens)
        found = ratio(training(eager, tokens, output_attentions=True), _stepped(step, watch), 4)
        watch.detach()
        name = f"GPT-2, eager, output_attentions, against {label} watched in every row, n {n}"
        figures.append(at_least(f"{name}, training", found, 5))
    with torch.no_grad():
        for label, model in (("built-in GPT", own), ("the same GPT-2", fused)):
            watch = hw.watch(model, maps=False).attach()
            ids = tokens[:, :-1]
            found = ratio(
                lambda: eager(ids, output_attentions=True),  # noqa: B023
                _stepped(lambda: model(ids), watch),  # noqa: B023
                6,
            )
            watch.detach()
            name = f"GPT-2, eager, output_attentions, against {label} watched in every row, n {n}"
            figures.append(at_least(f"{name}, forward", found, 5))
    return figures


def watched_ratio(batch: int, n: int, pairs: int, rows: int | None = None) -> float:
    """The time of a watched training step relative to an unwatched one of an equal model."""
    watched = GPT(CONFIG)
    plain = copy.deepcopy(watched)
    tokens = torch.randint(VOCABULARY, (batch, n + 1))
    watch = hw.watch(watched, rows=rows).attach()
    found = ratio(_stepped(training(watched, tokens), watch), training(plain, tokens), pairs)
    watch.detach()
    return found


def training(model: nn.Module, tokens: Tensor, **options: Any) -> Callable[[], None]:
    """One step: forward, backward, clipping, AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

    def step() -> None:
        said = model(tokens[:, :-1], **options)
        logits = said if isinstance(said, Tensor) else said.logits
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _stepped(work: Callable[[], object], watch: hw.Watch) -> Callable[[], None]:
    def step() -> None:
        work()
        watch.step()

    return step


def shape(batch: int) -> str:
    return f"batch {batch}, 6 layers, 8 heads, d 256"


if __name__ == "__main__":
    main()
