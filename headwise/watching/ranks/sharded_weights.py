"""The weights of queries and keys where parameters are DTensors: by FSDP or tensor parallelism."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from headwise.distributed.sharded_tensors import held_range
from headwise.watching.head_weights import (
    QueryKeyWeights,
    is_sharded,
    query_key_weights,
    replaced_parameters,
)


@dataclass(frozen=True, eq=False)
class OutputFactors:
    """Factors of the outputs of DTensor parameters: ones, to be multiplied head by head.

    A parameter is scaled where its parts are, and no part moves. One that several layers have has
    one tensor of factors.
    """

    _parameters: dict[int, tuple[Any, Tensor]] = field(default_factory=dict)  # with their factors

    def by_head(self, module: nn.Module, name: str, heads: int) -> QueryKeyWeights | None:
        """Views of the factors of all heads of a layer, as those of plain weights would be.

        None if its parameters are plain tensors; ValueError if it is not known which they are.
        """
        sharded = False

        def factors(owner: nn.Module, parameter: nn.Parameter) -> Tensor | None:
            nonlocal sharded
            if not is_sharded(parameter):
                return None
            sharded = True
            if id(parameter) in self._parameters:
                return self._parameters[id(parameter)][1]
            shape = [1] * parameter.ndim
            columns = type(owner).__name__ == "Conv1D" and parameter.ndim == 2  # GPT-2's
            shape[int(columns)] = parameter.shape[int(columns)]
            local = parameter.to_local()  # type: ignore[attr-defined]
            ones = torch.ones(shape, dtype=local.dtype, device=local.device)
            self._parameters[id(parameter)] = parameter, ones
            return ones

        with replaced_parameters(module, factors):
            found = query_key_weights(module, name, heads)
        return found if sharded else None

    def apply(self) -> None:
        """Multiply the parameters by their factors."""
        for parameter, ones in self._parameters.values():
            outputs = max(range(ones.ndim), key=lambda axis: ones.shape[axis])
            part = _part(parameter, outputs)
            local = parameter.to_local()
            assert local.shape[outputs] == len(part), (parameter.placements, local.shape)
            local.mul_(ones.narrow(outputs, part.start, len(part)))


def _part(parameter: Any, axis: int) -> range:
    """The part of an axis that this rank holds of a DTensor.

    FSDP cuts what tensor parallelism has cut before, though its dimension of the mesh comes first.
    """
    cuts = [d for d, p in enumerate(parameter.placements) if getattr(p, "dim", None) == axis]
    late = [d for d in cuts if hasattr(parameter.placements[d], "split_factor")]
    order = [d for d in cuts if d not in late] + late
    return held_range(parameter.shape[axis], parameter.device_mesh, order)


def whole_weights(module: nn.Module, name: str, heads: int) -> QueryKeyWeights:
    """The weights of a layer's heads; DTensors are gathered, so every rank must ask."""

    def gathered(_: nn.Module, parameter: nn.Parameter) -> Tensor | None:
        return parameter.full_tensor() if is_sharded(parameter) else None  # type: ignore[attr-defined]

    with torch.no_grad(), replaced_parameters(module, gathered):
        return query_key_weights(module, name, heads)


def reshard(model: nn.Module) -> None:
    """Let FSDP put away what it has gathered of a model: changes of that would be lost."""
    for module in model.modules():
        put_away: Any = getattr(module, "reshard", None)
        if type(module).__name__.startswith("FSDP") and put_away is not None:
            put_away()
