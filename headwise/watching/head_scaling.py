"""Scaling the logits of heads by the weights of their queries and keys, which may be tied.

One matrix may make queries and keys, several layers may have the same weights, and a weight may
make something else too: each is scaled once, by what all who use it agree to, or refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import torch
from torch import Tensor, nn

from headwise.watching.head_weights import QueryKeyWeights

Address = tuple[int, int]


@dataclass(frozen=True, eq=False)
class ScaledLayer:
    """The weights of a layer's queries and keys, and the heads that this process has of them."""

    module: nn.Module
    weights: QueryKeyWeights
    own: slice  # of all heads of the layer
    heads: int  # all of them

    def part(self, factor: Tensor) -> Tensor:
        """The factors (heads,) of the heads that its weights make: DTensors make all of them."""
        return factor if len(self.weights.queries[0]) == len(factor) else factor[self.own]

    @cached_property
    def queries(self) -> set[Address]:
        """The addresses of its queries' weights."""
        return set(map(_address, self.weights.queries))

    @cached_property
    def keys(self) -> set[Address]:
        """The addresses of its keys' weights: those of the queries' if they make both."""
        return set(map(_address, self.weights.keys)) or self.queries

    @property
    def groups(self) -> int:
        """The number of key heads."""
        return len((self.weights.keys or self.weights.queries)[0])

    @property
    def tied(self) -> bool:
        """True if queries and keys have weights in common."""
        return bool(self.queries & self.keys)

    @property
    def alone(self) -> bool:
        """True if every head has keys of its own."""
        return self.groups == len(self.weights.queries[0])


@dataclass(frozen=True, eq=False)
class HeadScaling:
    """The layers of a model whose logits are scaled together; ValueError if they can't be.

    `queries` and `keys` give for each layer the first one that has the same weights for them.
    `kept` has the layers whose queries or keys stay as they are, because they make something else.
    """

    layers: Mapping[str, ScaledLayer]
    queries: Mapping[str, str]
    keys: Mapping[str, str]
    kept: Mapping[str, str]

    @classmethod
    def of(cls, model: nn.Module, layers: Mapping[str, ScaledLayer]) -> HeadScaling:
        """Plan the scaling of these layers, by name; ValueError names one that can't be scaled."""
        queries = _first_alike({path: layer.queries for path, layer in layers.items()})
        keys = _first_alike({path: layer.keys for path, layer in layers.items()})
        kept: dict[str, str] = {}
        found = cls(layers, queries, keys, kept)
        for path, side, name in found._used_elsewhere(model):
            if kept.setdefault(keys[path], side) != side or not found._can_keep(path, side):
                reason = f"its {side} are made by weights that are also {name}"
                raise _refusal(path, f"{reason}, which would change too")
        for one, other in found._sharing():
            found._check_pair(one, other)
        for path, layer in layers.items():
            if layer.tied and not layer.alone:
                raise _refusal(path, "one matrix makes its queries and the keys of several heads")
        return found

    def agreed(self, factors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The factors (heads,) of layers, the smallest of those that have the same weights."""
        least: dict[str, Tensor] = {}
        for path, factor in factors.items():
            before = least.get(self.queries[path], factor)
            least[self.queries[path]] = torch.minimum(factor, before)
        return {path: least[self.queries[path]] for path in factors}

    def apply(self, factors: Mapping[str, Tensor]) -> None:
        """Multiply the logits of layers by the factors on which they agreed.

        Nothing is read: a factor of 1 leaves the weights of a head as they are, to the bit. Keys
        that heads share shrink as little as one of them needs, and the queries make up the rest.
        """
        own = {path: self.layers[path].part(factor) for path, factor in factors.items()}
        of_keys: dict[str, Tensor] = {}
        for path, factor in own.items():
            least = factor.reshape(self.layers[path].groups, -1).amax(1)
            before = of_keys.get(self.keys[path], least)
            of_keys[self.keys[path]] = torch.maximum(least, before)
        done: set[Address] = set()
        for path, factor in own.items():
            layer, least = self.layers[path], of_keys[self.keys[path]]
            kept = self.kept.get(self.keys[path])
            share = least.sqrt() if kept is None else least.pow(0 if kept == "keys" else 1)
            rest = factor / share.repeat_interleave(len(factor) // layer.groups)
            _multiply(layer.weights.keys, share, done)
            _multiply(layer.weights.queries, rest, done)
            _multiply(layer.weights.turned, factor, done)

    def _used_elsewhere(self, model: nn.Module) -> Iterator[tuple[str, str, str]]:
        """Layers, "queries" or "keys", and the name of another use of a weight that makes them."""
        names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        paths: dict[int, list[str]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            paths.setdefault(id(module), []).append(name)
        ours = {
            f"{path}.{name}".removeprefix(".")
            for layer in self.layers.values()
            for path in paths.get(id(layer.module), [])
            for side in layer.weights.names
            for name, _ in _parameters(layer.module, side)
        }
        for path, layer in self.layers.items():
            for side, children in zip(("queries", "keys"), layer.weights.names, strict=True):
                for _, parameter in _parameters(layer.module, children):
                    for name in names.get(id(parameter), []):
                        if name not in ours:
                            yield path, side, name

    def _can_keep(self, path: str, side: str) -> bool:
        """True if the logits of all layers that share keys scale though one side stays the same."""
        sharing = [x for x in self.layers if self.keys[x] == self.keys[path]]
        if any(self.layers[x].tied for x in sharing):
            return False
        alike = {self.queries[x] for x in sharing}
        return side == "keys" or (len(alike) == 1 and self.layers[path].alone)

    def _sharing(self) -> Iterator[tuple[str, str]]:
        """Pairs of layers that have weights in common."""
        users: dict[Address, list[str]] = {}
        for path, layer in self.layers.items():
            for where in layer.queries | layer.keys:
                users.setdefault(where, []).append(path)
        yield from dict.fromkeys(pair for x in users.values() for pair in combinations(x, 2))

    def _check_pair(self, one: str, other: str) -> None:
        """Raise ValueError if two layers share weights in a way that no scaling does justice."""
        a, b = self.layers[one], self.layers[other]
        same_queries = self.queries[one] == self.queries[other]
        same_keys = self.keys[one] == self.keys[other]
        if same_queries and not same_keys:
            raise _refusal(one, f"its queries have the weights of {other}'s, and its keys have not")
        if same_keys and not same_queries and (a.tied or b.tied):
            raise _refusal(one, f"its keys have weights that make queries and keys in {other}")
        if not same_keys and (a.queries & b.keys or a.keys & b.queries):
            raise _refusal(one, f"weights that make its queries or keys make the others in {other}")
        sizes = [(x.groups, same_queries and len(x.weights.queries[0])) for x in (a, b)]
        if same_keys and sizes[0] != sizes[1]:
            raise _refusal(one, f"{other} splits the same weights into other heads")


def _parameters(module: nn.Module, children: Iterable[str]) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of some children of a module, or those of its own that have their names."""
    wanted = tuple(children)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name.startswith(tuple(f"{child}." for child in wanted)) or name in wanted:
            yield name, parameter


def _first_alike(where: Mapping[str, set[Address]]) -> dict[str, str]:
    """For each name, the first one that it has something in common with, be it by others."""
    found, first = {name: name for name in where}, dict[Address, str]()
    for name, addresses in where.items():
        for address in addresses:
            other, own = found[first.setdefault(address, name)], found[name]
            if other != own:
                found = {each: other if x == own else x for each, x in found.items()}
    return found


def _address(x: Tensor) -> Address:
    return x.untyped_storage().data_ptr(), int(x.storage_offset())


def _multiply(parameters: Sequence[Tensor], factor: Tensor, done: set[Address]) -> None:
    """Multiply each parameter (heads, ...) by factors (heads,), unless that was done."""
    for x in parameters:
        if _address(x) not in done:
            done.add(_address(x))
            x.mul_(factor.to(x.device, x.dtype).reshape(-1, *[1] * (x.ndim - 1)))


def _refusal(path: str, reason: str) -> ValueError:
    return ValueError(f"hw.qk_clip can't clip {path or 'the model'}: {reason}")
