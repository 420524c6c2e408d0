"""Training steps of one model, watched in several ways in turns, for `bench.watch_gpu`."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import headwise as hw
from bench.pairs import Way, alternated

FIVE = ("lse", "entropy", "max_logit", "top_prob", "sink_mass")
BESIDE: dict[str, dict[str, Any]] = {
    "rows=64, beside": {"rows": 64},
    "all rows, five statistics, beside": {"stats": FIVE},
    "all rows, every statistic, beside": {},
}
INSIDE: dict[str, dict[str, Any]] = {
    "all rows, five statistics, inside": {"stats": FIVE},
    "all rows, every statistic, inside": {},
}
UNWATCHED = "unwatched"
UNWATCHED_INSIDE = "unwatched, headwise's attention"


@dataclass(frozen=True)
class Size:
    """A Llama, its input, and how often it is timed."""

    layers: int = 8
    width: int = 1024
    heads: int = 8
    key_heads: int = 4
    head_width: int = 128
    feed_forward: int = 2816
    vocabulary: int = 32000
    batch: int = 4
    length: int = 4096
    rounds: int = 5
    steps: int = 10  # that are timed together, as in a loop that logs every ten steps


SMALL = Size(2, 64, 4, 2, 16, 128, 100, 2, 32, 3, 2)  # to test the benchmark


class WatchedLlama:
    """A Llama of transformers, with its own attention and with headwise's."""

    def __init__(self, size: Size, device: str, mode: str | None = None) -> None:
        """`mode` is one of torch.compile's; None to run it eagerly."""
        import transformers

        import headwise.transformers  # noqa: F401 (registers attn_implementation="headwise")

        config = transformers.LlamaConfig(
            hidden_size=size.width, num_hidden_layers=size.layers, head_dim=size.head_width,
            num_attention_heads=size.heads, num_key_value_heads=size.key_heads,
            intermediate_size=size.feed_forward, vocab_size=size.vocabulary,
            max_position_embeddings=size.length, attn_implementation="sdpa", use_cache=False,
        )  # fmt: skip
        torch.manual_seed(0)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        own: Any = transformers.LlamaForCausalLM(config)
        own.to(device=device, dtype=dtype)
        inside = copy.deepcopy(own)
        inside.set_attn_implementation("headwise")
        self.size, self.device, self.mode = size, device, mode
        self.own, self.inside = self._compiled(own), self._compiled(inside)
        self.ids = torch.randint(size.vocabulary, (size.batch, size.length), device=device)

    def _compiled(self, model: nn.Module) -> Any:
        if self.mode is None:
            return model
        if self.device == "cpu":
            return torch.compile(model, backend="aot_eager", dynamic=False)
        mode = None if self.mode == "default" else self.mode
        return torch.compile(model, mode=mode, dynamic=False)

    def step(self, model: Any, ids: Tensor, watch: hw.Watch | None = None) -> None:
        """Forward, backward, and the end of a watched step."""
        if self.mode == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad(set_to_none=True)
        if watch is not None:
            watch.step()

    def way(self, name: str, ids: Tensor | None = None, **more: Any) -> Way:
        """The way of a name, after one step of it; ValueError if the model can't be watched so."""
        ids = self.ids if ids is None else ids
        if name in (UNWATCHED, UNWATCHED_INSIDE):
            plain = self.own if name == UNWATCHED else self.inside
            self.step(plain, ids)
            return Way(lambda: self.step(plain, ids))
        model = self.inside if name in INSIDE else self.own
        options = (BESIDE | INSIDE)[name] | {"maps": False} | more
        watch = hw.watch(model, **options)
        with watch:
            self.step(model, ids, watch)
        return Way(lambda: self.step(model, ids, watch), lambda: attached(watch))

    def memory(self, name: str) -> int | None:
        """The bytes of the device that a watch still holds after its step; None on a CPU."""
        if self.device != "cuda":
            return None
        self.step(self.own, self.ids)
        before = held()
        with hw.watch(self.own, **BESIDE[name], maps=False) as watch:
            self.step(self.own, self.ids, watch)
            return held() - before

    def skipped(self, rounds: int = 200) -> float:
        """Microseconds that a step takes longer if a watch passes it over.

        The input is so short that the processor's work is all that there is to time. It is the
        shortest of many steps that counts: other processes only ever lengthen one.
        """
        ids = self.ids[:1, :16]
        ways = {
            UNWATCHED: self.way(UNWATCHED, ids),
            "skipped": self.way("all rows, every statistic, beside", ids, every=1_000_000),
        }
        rounds = rounds if self.size.rounds > SMALL.rounds else 2
        found = alternated(ways, rounds, of=min)
        return (found["skipped"] - found[UNWATCHED]) * 1e3


@contextmanager
def attached(watch: hw.Watch) -> Iterator[None]:
    """Attach a watch that may have been attached before."""
    watch.attach()
    try:
        yield
    finally:
        watch.detach()


def held() -> int:
    """The bytes of the GPU that are in use."""
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()
