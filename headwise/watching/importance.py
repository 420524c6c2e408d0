"""How much a head matters: what becomes of the loss without it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from headwise.watching.recorder import Recorder
from headwise.watching.table import Table, Value

Measure = Callable[[], float | Tensor]
Head = tuple[str, int]


def importance(model: nn.Module, recorder: Recorder, measure: Measure) -> Table:
    """A row a head: the measure without its output, and how much that is above the measure with it.

    The model runs once more for every head that is watched.
    """
    layers = list(recorder.layers.values())
    if not layers:
        raise ValueError("no layer was seen yet: run the model once, then ask for importance")
    active, recorder.active = recorder.active, False
    try:
        with torch.no_grad():
            whole = float(measure())
            without: dict[Head, float] = {}
            heads = [(layer.name, head) for layer in layers for head in range(layer.heads)]
            for name, head in _shown(heads):
                with _off(model, recorder, name.partition("#")[0], head):
                    without[name, head] = float(measure())
    finally:
        recorder.active = active
    rows: list[dict[str, Value]] = [
        layer.place(head)
        | {
            "without": without[layer.name, head],
            "importance": without[layer.name, head] - whole,
        }
        for layer in layers
        for head in range(layer.heads)
    ]
    return Table(rows)


@contextmanager
def _off(model: nn.Module, recorder: Recorder, name: str, head: int) -> Iterator[None]:
    """A head without output, for a while."""
    module = model.get_submodule(name)
    if isinstance(module, nn.MultiheadAttention):
        # Its heads meet the last projection inside PyTorch: there they are multiplied with zeros.
        weight = module.out_proj.weight
        part = weight[:, head * module.head_dim : (head + 1) * module.head_dim]
        before = part.clone()
        try:
            part.zero_()
            yield
        finally:
            part.copy_(before)
        return
    recorder.silenced = {name: head}
    try:
        yield
    finally:
        recorder.silenced = {}


def _shown(heads: list[Head]) -> Iterator[Head]:
    """The heads, with a progress bar where someone waits for it."""
    listed: Iterable[Head] = heads
    if sys.stderr.isatty():
        try:
            from rich.console import Console
            from rich.progress import track
        except ModuleNotFoundError:
            pass
        else:
            console = Console(stderr=True)
            listed = track(heads, "switching heads off", console=console, transient=True)
    yield from listed
