"""The layers on a CPU compared with PyTorch's: python -m bench.modules"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import headwise as hw
from bench import described
from bench.pairs import Figure, at_least, at_most, ratio, report
from headwise.models import GPT, GPTConfig

D, HEADS = 512, 8


def main() -> None:
    described(__doc__).parse_args()
    torch.manual_seed(0)
    figures: list[Figure] = []
    for group in (training, training_causally, looking, decoding):
        found = group()
        figures += found
        said = ", ".join(f"{figure.value:.2f}" for figure in found)
        print(f"{group.__name__}: {said}", flush=True)
    print()
    report(figures, "modules.json")


def training() -> list[Figure]:
    """Forward and backward against nn.MultiheadAttention without weights: the same computation."""
    return [beside_torch(512, batch=4, pairs=60), beside_torch(2048, batch=1, pairs=40)]


def beside_torch(n: int, batch: int, pairs: int) -> Figure:
    theirs, ours, x = layers(batch, n)
    found = ratio(
        learning(ours, lambda: ours(x)),
        learning(theirs, lambda: theirs(x, x, x, need_weights=False)[0]),
        pairs,
    )
    name = f"MultiHeadAttention, forward and backward, n {n}, against torch's without weights"
    return at_most(name, found, 1.05, detail=f"batch {batch}, d 512, 8 heads")


def training_causally() -> list[Figure]:
    n = 2048
    theirs, ours, x = layers(1, n)
    ours.mask = hw.mask.causal()
    mask = nn.Transformer.generate_square_subsequent_mask(n)

    def attend() -> Tensor:
        return theirs(x, x, x, need_weights=False, attn_mask=mask, is_causal=True)[0]

    found = ratio(learning(ours, lambda: ours(x)), learning(theirs, attend), 40)
    name = f"MultiHeadAttention, forward and backward, n {n}, causal, against torch's"
    return [at_most(name, found, 1.05, detail="batch 1, d 512, 8 heads")]


def looking() -> list[Figure]:
    """Every statistic of every head for sampled rows, against torch's default: mean weights."""
    theirs, ours, x = layers(1, 2048)
    trained = ratio(
        learning(theirs, lambda: theirs(x, x, x)[0]),
        learning(ours, lambda: ours.observe(x, rows=64)[0]),
        40,
    )
    with torch.no_grad():
        few = ratio(lambda: theirs(x, x, x), lambda: ours.observe(x, rows=64), 40)
        many = ratio(lambda: theirs(x, x, x), lambda: ours.observe(x, rows=256), 40)
    name = "torch's default (mean weights), n 2048, against observe"
    return [
        at_least(f"{name}(rows=64)", trained, 1.4, detail="forward and backward"),
        at_least(f"{name}(rows=64), forward", few, 1.4, detail="no gradients"),
        at_least(f"{name}(rows=256), forward", many, 1.4, detail="no gradients"),
    ]


def decoding() -> list[Figure]:
    """256 tokens after a prompt of 1024, with a cache and recomputing everything."""
    model = GPT(GPTConfig(vocabulary=1024, context=2048, d_model=256, layers=2, heads=4)).eval()
    prompt = torch.randint(1024, (1, 1024))
    return [saved(model, prompt, cache) for cache in (hw.nn.GrowingCache(), hw.nn.FixedCache(1280))]


def saved(model: GPT, prompt: Tensor, cache: hw.nn.Cache) -> Figure:
    found = ratio(
        lambda: model.generate(prompt, 256, cache=None),
        lambda: model.generate(prompt, 256, cache=cache),
        3,
    )
    name = f"256 tokens after 1024, no cache against {type(cache).__name__}"
    return at_least(name, found, 10, detail="GPT, 2 layers, d 256; 3 pairs")


def layers(batch: int, n: int) -> tuple[nn.MultiheadAttention, hw.nn.MultiHeadAttention, Tensor]:
    theirs = nn.MultiheadAttention(D, HEADS, batch_first=True)
    ours = hw.nn.MultiHeadAttention(D, HEADS)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours, torch.randn(batch, n, D, requires_grad=True)


def learning(module: nn.Module, forward: Callable[[], Tensor]) -> Callable[[], None]:
    """A forward pass and the gradients of every parameter and of the input."""

    def work() -> None:
        module.zero_grad(set_to_none=True)
        forward().square().mean().backward()

    return work


if __name__ == "__main__":
    main()
