"""Models whose sequences are split between ranks: their attention looks across all of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.conv import _ConvNd

from headwise import api
from headwise.distributed.layouts import Layout
from headwise.distributed.mesh_calls import MeshCalls
from headwise.distributed.movement import check_move
from headwise.distributed.shards import check_layout
from headwise.distributed.transformers_inputs import placed
from headwise.distributed.transport import check_mesh

MIXING = (nn.RNNBase, nn.RNNCellBase, _ConvNd, nn.MultiheadAttention)
"""Modules that mix positions by themselves, and would do so within each rank only."""


def context_parallel(
    model: nn.Module, mesh: DeviceMesh, *, layout: Layout | None = None, move: str = "auto"
) -> Callable[[], None]:
    """Split the sequences of a model over a mesh; returns a function that undoes it.

    From now on the model takes this rank's part of its inputs, from `shard`, and returns this
    rank's part of its outputs. Its attention sees the whole sequence, with the model's own masks,
    sinks, caps and biases. It must be headwise's: `hw.nn`, `hw.models`, or a model of transformers
    with attn_implementation="headwise". Everything else in it must work on each position by itself.

    Masks and lengths given to `hw.nn` and `hw.models` are those of the whole sequence. A model of
    transformers takes this rank's part of `attention_mask` (B, N), of `position_ids` and of
    `labels`. Labels are shifted as in one process, and the loss is this rank's share of it: the sum
    over ranks is the loss of one process. A cache is refused.
    """
    calls = MeshCalls(check_mesh(mesh), check_layout(layout), move)
    check_move(move)
    for_transformers = _check_model(model)
    entered: list[AbstractContextManager[None]] = []

    # Hooks, not another forward: what replaces the forward, such as a watch, still does.
    def enter(module: nn.Module, given: Any, options: Any) -> tuple[Any, Any]:
        own = calls
        if for_transformers:
            own, options = placed(module, calls, given, options)
            given = ()
        entered.append(api.splitting(own))
        entered[-1].__enter__()
        return given, options

    def leave(*_: object) -> None:
        if entered:  # not if `enter` itself has failed
            entered.pop().__exit__(None, None, None)

    hooks = (
        model.register_forward_pre_hook(enter, with_kwargs=True),
        model.register_forward_hook(leave, always_call=True),
    )

    def undo() -> None:
        for hook in hooks:
            hook.remove()

    return undo


def _check_model(model: nn.Module) -> bool:
    """True for a model of transformers; ValueError if positions meet outside of our attention."""
    kind = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if kind not in (None, "headwise"):
        raise ValueError(
            f"this {type(model).__name__} has attn_implementation={kind!r}, which would attend "
            "within each rank only; import headwise.transformers and load the model with "
            'attn_implementation="headwise"'
        )
    for name, module in model.named_modules():
        if isinstance(module, MIXING):
            raise ValueError(
                f"{name} of this {type(model).__name__} is a {type(module).__name__}, which would "
                "mix the positions of each rank only; context_parallel takes models whose "
                "positions meet in headwise's attention and nowhere else"
            )
    return kind is not None
