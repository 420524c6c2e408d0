"""Runs the layers of a list: each kind once, the others as repetitions of it.

A layer is of a kind by its structure (classes, numbers and flags, shapes of parameters) and by what
it is called with. A repeated call returns new tensors of the same shapes, saves what the first call
saved, and gives the cache of its layer the same state.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from headwise.costs.tally import CountedPart, recomputed_kernel, tree
from headwise.costs.tracing.recorder import Home, LayerCall, Recorder, storage_id

INDEX = {"layer_idx", "layer_id", "layer_index", "layer_number", "idx", "block_idx", "index"}
"""Names of a layer's own number, which does not change what it computes."""

WITHOUT = {*nn.Module().__dict__, "forward", "config"} - {"training"}
"""Attributes of a layer that its structure has by other means, or that are the model's."""

CACHES = ("DynamicCache", "EncoderDecoderCache")
"""Caches whose layers are apart from each other."""

Structure = tuple[Any, ...]


@dataclass(eq=False)
class Kind:
    """What the first layer of a kind did."""

    call: LayerCall
    index: int | None
    spec: Any
    outputs: list[Any]
    sources: dict[int, int]  # storages of its arguments, by their place among them
    saved_arguments: set[int]
    saved_outputs: set[int]
    cached: bool  # one of its arguments is a cache
    members: list[int] = field(default_factory=list)  # numbers of its layers
    closed: bool = False  # it ran more than once, and no other layer is taken for it


class RunsAgainError(Exception):
    """A layer that stands for others ran once more, so what it did can't be multiplied."""


class LayerList:
    """The layers that ran, by kind."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.kinds: dict[Any, Kind] = {}
        self.repeats: set[str] = set()  # paths of layers that stand for an earlier one
        self.ran: dict[str, Kind] = {}

    def run(
        self,
        path: str,
        module: nn.Module,
        structure: Structure,
        part: Callable[[], CountedPart],
        forward: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> Any:
        """The output of a layer: of its own forward, or like that of an equal one."""
        leaves, _ = tree_flatten((args, kwargs))
        key: Structure = (path.rpartition(".")[0], structure, described(leaves, self.recorder))
        known = self.kinds.get(key)
        if known is not None and known.closed:
            key, known = (*key, path), None
        if known is not None and known.call.parent is self._parent():
            self.repeats.add(path)
            self.ran[path] = known
            return self._repeat(known, module, leaves)
        out = self._first(key, path, module, part(), forward, args, kwargs, leaves)
        self.ran[path] = self.kinds[key]
        return out

    def run_again(self, path: str) -> None:
        """A layer that ran runs once more, which is counted into its part."""
        known = self.ran[path]
        if known.call.part.copies > 1:
            raise RunsAgainError
        known.closed = True

    def _parent(self) -> LayerCall | None:
        calls = self.recorder.calls
        return calls[-1] if calls else None

    def _first(
        self,
        key: Any,
        path: str,
        module: nn.Module,
        part: CountedPart,
        forward: Callable[..., Any],
        args: Any,
        kwargs: Any,
        leaves: list[Any],
    ) -> Any:
        recorder = self.recorder
        call = LayerCall(part, self._parent(), path)
        whole = recorder.tape.root  # a layer may run modules that lie elsewhere
        ran = {id(node): len(node.forward) for node in tree(whole)}
        outermost = call.parent is None
        if outermost and recorder.work.recompute == "layers":
            for leaf in leaves:
                if isinstance(leaf, Tensor) and leaf.is_floating_point():
                    recorder.pack(leaf)
                    call.asked.add(storage_id(leaf))
        recorder.calls.append(call)
        with recorder.tape.inside(part):
            out = forward(*args, **kwargs)
        recorder.calls.pop()
        if outermost and recorder.work.recompute == "layers":
            for node in tree(whole):
                node.backward += [
                    recomputed_kernel(x) for x in node.forward[ran.get(id(node), 0) :]
                ]
        outputs, spec = tree_flatten(out)
        sources = {
            storage_id(leaf): place
            for place, leaf in reversed(list(enumerate(leaves)))
            if isinstance(leaf, Tensor)
        }
        self.kinds[key] = Kind(
            call,
            number_of(module),
            spec,
            outputs,
            sources,
            {place for known, place in sources.items() if known in call.asked},
            {storage_id(x) for x in outputs if isinstance(x, Tensor)} & call.asked,
            any(hasattr(leaf, "get_seq_length") for leaf in leaves),
            [number for number in (number_of(module),) if number is not None],
            call.strays,
        )
        return out

    def _repeat(self, kind: Kind, module: nn.Module, leaves: list[Any]) -> Any:
        recorder = self.recorder
        kind.call.part.copies += 1
        for place in kind.saved_arguments:
            recorder.pack(leaves[place])
        fresh: dict[int, Tensor] = {}
        made = [self._like(kind, each, leaves, fresh) for each in kind.outputs]
        index = number_of(module)
        if kind.index is not None and index is not None:
            kind.members.append(index)
            for leaf in leaves:
                copy_state(leaf, kind.index, index)
        return tree_unflatten(made, kind.spec)

    def _like(self, kind: Kind, one: Any, leaves: list[Any], fresh: dict[int, Tensor]) -> Any:
        """An output like one of the first layer's: an argument, or a new tensor."""
        if not isinstance(one, Tensor):
            return one
        known = storage_id(one)
        if known in kind.sources:
            given = leaves[kind.sources[known]]
            return given if given.shape == one.shape else given.expand(one.shape)
        if known not in fresh:
            recorder = self.recorder
            with recorder.muted():
                anchor = torch.empty((), device="meta", requires_grad=one.requires_grad)
                fresh[known] = Fresh.apply(anchor, one)  # type: ignore[no-untyped-call]
            new = storage_id(fresh[known])
            recorder.homes[new] = Home(kind.call.part, LayerCall(kind.call.part, kind.call.parent))
            recorder.kept.append(fresh[known].untyped_storage())
            if known in kind.saved_outputs:
                recorder.saved.add(new)
        return fresh[known]


class Fresh(torch.autograd.Function):
    """A new tensor like another, through which gradients flow."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, like: Tensor) -> Tensor:
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None


def described(leaves: list[Any], recorder: Recorder) -> tuple[Any, ...]:
    """The arguments of a call, as far as a layer's work depends on them."""
    found: list[Any] = []
    aliases: dict[int, int] = {}
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            known = storage_id(leaf)
            alias = aliases.setdefault(known, len(aliases))
            mask = id(recorder.masks[known]) if known in recorder.masks else None
            found.append((leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad, alias, mask))
        elif leaf is None or isinstance(leaf, bool | int | float | str):
            found.append(leaf)
        elif callable(leaf) or (
            hasattr(leaf, "get_seq_length") and type(leaf).__name__ not in CACHES
        ):  # what it runs, or what its layers share, may be each layer's own: run them all
            found.append(object())
        else:
            found.append(type(leaf))
    return tuple(found)


def structure_of(module: nn.Module, owned: set[int]) -> Structure:
    """What makes layers equal; `owned` are the parameters that belong to earlier modules."""
    flags = tuple(
        (name, comparable(value))
        for name, value in sorted(module.__dict__.items())
        if name not in INDEX and name not in WITHOUT
    )
    parameters = tuple(
        (name, tuple(weight.shape), weight.requires_grad, id(weight) in owned)
        for name, weight in module.named_parameters(recurse=False)
    )
    children = tuple((name, structure_of(child, owned)) for name, child in module.named_children())
    return (type(module), flags, parameters, children)


def comparable(value: Any) -> Any:
    """A flag, a size, several of them or a function, so that equal ones are equal; else its class.

    >>> comparable({"stride": [2, 2]}), comparable(torch.zeros(3)) == comparable(torch.ones(3))
    ((('stride', (2, 2)),), True)
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return tuple(comparable(each) for each in value)
    if isinstance(value, dict):
        return tuple((str(name), comparable(each)) for name, each in value.items())
    if isinstance(value, Tensor):
        return tuple(value.shape)
    return getattr(value, "__qualname__", type(value))


def number_of(module: nn.Module) -> int | None:
    """A layer's number, as its parts know it."""
    for each in module.modules():
        for name in ("layer_idx", "layer_id", "layer_index"):
            found = each.__dict__.get(name)
            if isinstance(found, int):
                return found
    return None


def copy_state(cache: Any, source: int, target: int) -> None:
    """Give a layer of a cache the state of another, if this is a cache."""
    for name in ("self_attention_cache", "cross_attention_cache"):
        if hasattr(cache, name):
            copy_state(getattr(cache, name), source, target)
    if isinstance(getattr(cache, "is_updated", None), dict) and source in cache.is_updated:
        cache.is_updated[target] = cache.is_updated[source]
    layers = getattr(cache, "layers", None)
    if not isinstance(layers, list) or source >= len(layers) or source == target:
        return
    while len(layers) <= target:
        layers.append(copy.copy(layers[source]))
    state = {
        name: copy.copy(value) if isinstance(value, dict | list) else value
        for name, value in layers[source].__dict__.items()
    }
    layers[target].__dict__.update(state)
