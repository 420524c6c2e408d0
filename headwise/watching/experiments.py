"""Experiments on a model's attention while a block runs: weights are changed, or heads are off.

`steer` multiplies weights by factors, `knock_out` and `sparsify` hide keys, and `importance`
switches heads off one by one, to see what the loss needs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headwise.core.arguments import is_integer
from headwise.core.edges import Edges, check_edges, check_steers
from headwise.core.policies import Policy
from headwise.watching.adapters.attachment import attach, detach
from headwise.watching.adapters.module_forwards import find_module, named_modules
from headwise.watching.adapters.patching import uncompiled
from headwise.watching.recorder.call_recorder import CallRecorder
from headwise.watching.recorder.interventions import RUNNING, Experiment, Sparse
from headwise.watching.recorder.layer import WatchedLayer
from headwise.watching.recorder.watch_options import WatchOptions
from headwise.watching.table import Table, Value
from headwise.watching.training_steps import placed_heads


@contextmanager
def steer(model: nn.Module, edges: Edges) -> Iterator[None]:
    """Multiply chosen weights of any model by factors, before they are normalised, while a block
    runs.

    `edges` are tuples (layer, head, keys, factor) or (layer, head, keys, factor, queries). Layers
    and heads are those of `hw.watch`, and a head of None means every head. Keys and queries are
    positions: a number, (first, last), a range or a slice; keys may be the name of a span of the
    watch, `hw.watch(model, spans=...)`. A factor is a number from 0 on, where 0 hides the keys and
    1 changes nothing, or a tensor that broadcasts to (heads, keys), which may learn.

    It is exact: the logarithm of the factor is added to the logit, after the cap, by a fused
    engine, in memory linear in the length. A compiled model runs as it would without
    torch.compile. Gradients flow if backward runs inside the block. Blocks may be nested, in
    watches too, and factors multiply. ValueError where attention can't be changed, and at the end
    of the block if an edge was in no call.

    >>> import headwise as hw
    >>> gpt = hw.load("gpt")
    >>> ids = gpt.encode("to be or not to be")
    >>> with hw.steer(gpt.model, [(5, 1, (0, 3), 4.0)]):  # head 5.1 looks at "to " four times more
    ...     steered = gpt.model(ids)
    >>> bool((steered - gpt.model(ids)).abs().max() > 0)
    True
    """
    steers = check_steers(edges)
    with changing("steer", model, "was about", steers=steers):
        yield


@contextmanager
def knock_out(model: nn.Module, edges: Edges) -> Iterator[None]:
    """Hide chosen keys from chosen heads of any model while the block runs.

    `edges` are tuples (layer, head, keys) or (layer, head, keys, queries); see `hw.Edge`. It is
    `hw.steer` with the factor 0: their layers are computed by headwise, on a fused engine, and a
    row without keys gives 0. A watched model has `seen.knock_out(edges)` too.

    >>> import headwise as hw
    >>> gpt = hw.load("gpt")
    >>> ids = gpt.encode("to be or not to be")
    >>> with hw.knock_out(gpt.model, [(5, 1, 0)]):  # layer 5, head 1 does not see the first token
    ...     without = gpt.model(ids)
    >>> bool((without - gpt.model(ids)).abs().max() > 0)
    True
    """
    steers = check_edges(edges)
    with changing("knock_out", model, "hid", steers=steers):
        yield


@contextmanager
def changing(call: str, model: nn.Module, verb: str, **changes: Any) -> Iterator[None]:
    """Change the attention of a model while the block runs, whoever watches it."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"hw.{call} takes a torch.nn.Module, not {type(model).__name__}")
    model = getattr(model, "_orig_mod", model)  # in what torch.compile returns
    names = {module: name for name, module in named_modules(model)}
    experiment = Experiment(model, names, **changes)
    recorder = CallRecorder(WatchOptions(stats=(), maps=False), active=False, aside=True)
    recorder.registry.placed = partial(placed_heads, model)

    def enter(_: nn.Module, given: tuple[Any, ...], options: dict[str, Any]) -> None:
        recorder.passes.begin(given, options)
        experiment.ran = True

    fast = torch.backends.mha.get_fastpath_enabled()
    undo = attach(model, recorder, enter)
    torch.backends.mha.set_fastpath_enabled(False)  # it does not call its attention
    RUNNING.append(experiment)
    try:
        with uncompiled():
            yield
        experiment.check(verb)
    finally:
        RUNNING.remove(experiment)
        torch.backends.mha.set_fastpath_enabled(fast)
        detach(undo)


Layers = int | str | Iterable[int | str]


@contextmanager
def sparsify(
    model: nn.Module,
    policy: Policy | Mapping[int | str, Policy],
    layers: Layers | None = None,
) -> Iterator[None]:
    """Let a model compute as if only the keys that a policy keeps were there, while a block runs.

    `policy` is one of `hw.sparse`, or one for each layer, {layer: policy}: the layers are numbers
    or names of `hw.watch` (* matches any part of a name), and those that it does not name stay as
    they are. Budgets may differ by head: `hw.sparse.TopK((8, 64, ...))`. `layers` limits a policy
    to some layers.

    The weights are renormalised over the kept keys, and learned sinks stay in the denominator. It
    is exact, in memory linear in the length, in training and while a model generates with a cache,
    and gradients flow if backward runs inside the block. It is a simulation and not faster: it
    tells what a sparse model would lose. Under `hw.steer` a policy chooses by the steered logits;
    of nested blocks, each policy chooses for itself and a row keeps what all of them keep. A watch
    records the sparse attention. ValueError where attention can't be changed; no layer stays as it
    was without being asked to.

    >>> import torch, headwise as hw
    >>> gpt = hw.load("gpt")
    >>> ids = gpt.encode("to be or not to be, that is the question")
    >>> with torch.no_grad(), hw.sparsify(gpt.model, hw.sparse.TopK(4)):
    ...     logits = gpt.model(ids)
    >>> logits.shape
    torch.Size([1, 12, 4096])
    """
    with changing("sparsify", model, "changed", sparse=_checked(policy, layers)):
        yield


def _checked(policy: object, layers: object) -> tuple[Sparse, ...]:
    """The policies of layers; ValueError for anything else."""
    if isinstance(policy, Mapping):
        if layers is not None:
            raise ValueError(
                f"hw.sparsify(layers={layers!r}): a dict of policies names its layers already"
            )
        found = [Sparse(_layer(layer), _policy(x)) for layer, x in policy.items()]
        # A number says more than a name, and a name more than a pattern.
        found.sort(key=lambda x: isinstance(x.layer, str) + ("*" in str(x.layer)))
    elif layers is None:
        found = [Sparse(None, _policy(policy))]
    else:
        many = layers if isinstance(layers, Iterable) and not isinstance(layers, str) else (layers,)
        found = [Sparse(_layer(layer), _policy(policy)) for layer in many]
    if not found:
        raise ValueError(
            f"hw.sparsify({policy!r}, layers={layers!r}) is about no layer: give a policy, a dict "
            "{layer: policy}, or numbers and names of layers"
        )
    return tuple(found)


def _layer(layer: object) -> int | str:
    if not isinstance(layer, str) and not is_integer(layer):
        raise ValueError(f"the layer {layer!r} of hw.sparsify must be a number or a name")
    return layer if isinstance(layer, str) else int(layer)


def _policy(policy: object) -> Policy:
    if not isinstance(policy, Policy):
        raise ValueError(
            "hw.sparsify takes a policy: hw.sparse.TopK(k), Window(left, sinks), "
            f"Blocks(size, count), Indices(tensor) or Evicted(scores, budget), not {policy!r}"
        )
    return policy


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
