"""The parts of a traced model by the paths of its modules, and the parameters that they hold."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from torch import nn

from headwise.costs.tally import CountedPart
from headwise.costs.tape import Tape
from headwise.costs.tracing.naming import SizeNames, field_of, text_config
from headwise.costs.tracing.recorder import storage_id

ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


class PartTree:
    """Parts by the path of their module, made when they are first needed."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        weights: Mapping[str, list[tuple[str, nn.Parameter]]],
        root: CountedPart,
    ) -> None:
        self.modules, self.weights, self.parts = modules, weights, {"": root}

    def at(self, path: str) -> CountedPart:
        """The part of a module."""
        if path not in self.parts:
            made = self.parts[path] = CountedPart(path.rpartition(".")[2], 1)
            above = path.rpartition(".")[0]
            if isinstance(self.modules.get(above), nn.ModuleList):
                made.name = f"{above.rpartition('.')[2]}.{made.name}"
                above = above.rpartition(".")[0]
            self.at(above).children.append(made)
        return self.parts[path]

    def above(self, part: CountedPart) -> CountedPart:
        """The part around a part."""
        return next(each for each in self.parts.values() if any(x is part for x in each.children))

    def name_lists(self) -> None:
        """Call the only kind of a list's layers by the name of the list."""
        lists: dict[str, list[CountedPart]] = {}
        for path, part in self.parts.items():
            above = path.rpartition(".")[0]
            if isinstance(self.modules.get(above), nn.ModuleList):
                lists.setdefault(above, []).append(part)
        for path, parts in lists.items():
            if len(parts) == 1:
                parts[0].name = path.rpartition(".")[2]

    def count_weights(
        self,
        tape: Tape,
        names: SizeNames,
        repeats: set[str],
        used: Mapping[int, Fraction],
        config: Any,
    ) -> None:
        """Count parameters where they are first held; those of repeated layers with the first."""
        held: set[int] = set()
        usual = share_of_experts(config)
        for path, weights in self.weights.items():
            repeated = _inside(path, repeats)
            for name, weight in weights:
                if id(weight) in held:
                    continue
                held.add(id(weight))
                if repeated:
                    continue
                share = usual if ".experts" in path and "shared" not in path else Fraction(1)
                with tape.inside(self.at(path)):
                    tape.weight(name, *names.weight(weight.shape), used=used.get(id(weight), share))

    def idle(self, touched: set[int], repeats: set[str]) -> list[str]:
        """Outermost modules, all of whose parameters no operation has read."""
        held, read = set[str](), set[str]()
        for path, weights in self.weights.items():
            if _inside(path, repeats):
                continue
            around = {path[:n] for n in range(len(path) + 1) if path[n : n + 1] in ("", ".")}
            held |= around
            if any(storage_id(weight) in touched for _, weight in weights):
                read |= around
        still = held - read - {""}
        return [
            path for path in self.modules if path in still and path.rpartition(".")[0] not in still
        ]


def share_of_experts(config: Any) -> Fraction:
    """The share of the experts that a token uses, as the configuration has it."""
    text = text_config(config)

    def first(names: tuple[str, ...]) -> int:
        return next((found for name in names if (found := field_of(text, name))), 0)

    active, experts = first(ACTIVE), first(EXPERTS)
    return Fraction(min(active, experts), experts) if active and experts else Fraction(1)


def _inside(path: str, repeats: set[str]) -> bool:
    """True for a repeated layer and everything in it."""
    while path and path not in repeats:
        path = path.rpartition(".")[0]
    return bool(path)
