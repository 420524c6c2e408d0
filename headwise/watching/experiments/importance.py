"""The importance of a head: how the loss changes without it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from headwise.watching.adapters.module_forwards import find_module
from headwise.watching.recorder.call_recorder import CallRecorder
from headwise.watching.recorder.layer import WatchedLayer
from headwise.watching.table import Table, Value

Measure = Callable[[], float | Tensor]
Head = tuple[str, int]


def importance(model: nn.Module, recorder: CallRecorder, measure: Measure) -> Table:
    """One row per head: the measure without its output, and by how much that is larger.

    The model runs once more for every head that is watched. A module that runs at several depths is
    switched off at all of them at once: its heads have one row each, under the first depth's name.
    """
    layers: dict[str, WatchedLayer] = {}
    for layer in recorder.registry.layers.values():
        layers.setdefault(layer.module, layer)
    if not layers:
        raise ValueError("no layer was seen yet: run the model once, then ask for importance")
    active, recorder.active = recorder.active, False
    try:
        with torch.no_grad():
            whole = float(measure())
            without: dict[Head, float] = {}
            for name, head in _with_progress(_wanted(layers, recorder.options.heads)):
                own = head - layers[name].first_head
                if not 0 <= own < layers[name].heads:
                    measure()  # while the rank that has this head switches it off
                    continue
                with _off(model, recorder, name, own):
                    without[name, own] = float(measure())
    finally:
        recorder.active = active
    rows: list[dict[str, Value]] = [
        layers[name].place(head) | {"without": value, "importance": value - whole}
        for (name, head), value in without.items()
    ]
    return Table(rows)


def _wanted(layers: Mapping[str, WatchedLayer], numbers: Sequence[int] | None) -> list[Head]:
    return [
        (name, head)
        for name, layer in layers.items()
        for head in range(layer.total)
        if numbers is None or head in numbers
    ]


@contextmanager
def _off(model: nn.Module, recorder: CallRecorder, name: str, head: int) -> Iterator[None]:
    """Switch off the output of a head for a while."""
    module = find_module(model, name)
    if isinstance(module, nn.MultiheadAttention):
        # Its last projection runs inside PyTorch: the head's part of that weight becomes 0.
        weight = module.out_proj.weight
        part = weight[:, head * module.head_dim : (head + 1) * module.head_dim]
        before = part.clone()
        try:
            part.zero_()
            yield
        finally:
            part.copy_(before)
        return
    recorder.interventions.silenced = {name: head}
    try:
        yield
    finally:
        recorder.interventions.silenced = {}


def _with_progress(heads: list[Head]) -> Iterator[Head]:
    """The heads, with a progress bar if this is a terminal."""
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
