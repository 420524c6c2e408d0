"""The scores by which kvpress evicts keys, from eager attention, and headwise's, from fused."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from kvpress import ObservedAttentionPress, ScorerPress, SnapKVPress
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import headwise as hw

TOKENS, WINDOW, KERNEL = 256, 32, 5


@dataclass
class FusedPress(ScorerPress):
    """A press that asks headwise for the scores of the layer that has just run."""

    seen: Any = None
    recent: int | None = None
    smooth: int = 1

    def score(self, module: Any, *_: Any, **__: Any) -> Tensor:
        layer = self.seen.layer(f"model.layers.{module.layer_idx}.self_attn")
        scores: Tensor = layer.map().eviction_scores(self.recent, self.smooth)
        return scores


def kept_scores(press: ScorerPress, model: LlamaForCausalLM, ids: Tensor) -> list[Tensor]:
    """The scores that a press gives the keys of each layer."""
    found: list[Tensor] = []
    score = press.score

    def recorded(*given: Any, **options: Any) -> Tensor:
        found.append(score(*given, **options))
        return found[-1]

    press.score = recorded  # type: ignore[method-assign]
    with torch.no_grad(), press(model):
        model(ids)
    return found


def main() -> None:
    """Compare the scores of both, and what is kept of a cache."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128, num_attention_heads=8, num_key_value_heads=2, num_hidden_layers=2,
        intermediate_size=256, vocab_size=500, attn_implementation="eager",
    )  # fmt: skip
    eager = LlamaForCausalLM(config).eval()
    fused = copy.deepcopy(eager)
    fused.set_attn_implementation("sdpa")
    ids = torch.randint(500, (1, TOKENS))
    pairs = {
        "ObservedAttentionPress": (ObservedAttentionPress(0.5), {}),
        "SnapKVPress": (
            SnapKVPress(0.5, window_size=WINDOW, kernel_size=KERNEL),
            {"recent": WINDOW, "smooth": KERNEL},
        ),
    }
    for name, (press, options) in pairs.items():
        theirs = kept_scores(press, eager, ids)
        with hw.watch(fused) as seen:
            ours = kept_scores(FusedPress(0.5, seen=seen, **options), fused, ids)
        for layer, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            scored = mine.isfinite()  # the window's own keys are always kept
            apart = (mine - other)[scored].abs().max() / other[scored].abs().max()
            same = torch.equal(*(x.topk(TOKENS // 2).indices.sort().values for x in (mine, other)))
            print(f"{name}, layer {layer}: scores differ by {apart:.1e}, same keys kept: {same}")


if __name__ == "__main__":
    main()
