"""Models whose sequences are split between ranks: their attention looks across all of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from headwise import api
from headwise.core.observation import Observation
from headwise.distributed.header import Header, agree
from headwise.distributed.layouts import Layout
from headwise.distributed.movement import check_move
from headwise.distributed.ranges import numbers
from headwise.distributed.rank_attention import attention, observe
from headwise.distributed.shards import check_layout
from headwise.distributed.transport import RankGroup, check_mesh


@dataclass(frozen=True, eq=False)
class MeshCalls:
    """Calls of `hw.attention` and `hw.observe` on a mesh."""

    mesh: DeviceMesh
    layout: Layout
    move: str

    def attention(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """`hw.distributed.attention` on the mesh."""
        return attention(q, k, v, mesh=self.mesh, layout=self.layout, move=self.move, **options)

    def observe(
        self, q: Tensor, k: Tensor, v: Tensor, **options: Any
    ) -> tuple[Tensor, Observation]:
        """`hw.distributed.observe` on the mesh."""
        return observe(q, k, v, mesh=self.mesh, layout=self.layout, move=self.move, **options)

    def every(self, number: int) -> list[int]:
        """The number that each rank of the mesh gives."""
        found = agree(RankGroup(self.mesh), Header("positions", own=(number,)))
        return [own[0] for own in found]

    def positions(self, lengths: list[int]) -> Tensor:
        """This rank's positions, if the ranks hold parts of these lengths."""
        return numbers(self.layout.of_lengths(lengths)[self.mesh.get_local_rank()])


def context_parallel(
    model: nn.Module, mesh: DeviceMesh, *, layout: Layout | None = None, move: str = "auto"
) -> Callable[[], None]:
    """Split the sequences of a model over a mesh; returns a function that undoes it.

    From now on the model takes this rank's part of its inputs, from `shard`, and returns this
    rank's part of its outputs. Its attention sees the whole sequence, with the model's own masks,
    sinks, caps and biases. It must be headwise's: `hw.nn`, or a model of transformers with
    attn_implementation="headwise". Everything else in it must work on each position by itself.

    A model of transformers needs `position_ids`, also from `shard`, and takes no `attention_mask`:
    put sequences of one length, or packed documents, into a batch. Labels must be shifted before
    they are cut, so compute the loss from the logits.
    """
    calls = MeshCalls(check_mesh(mesh), check_layout(layout), move)
    check_move(move)
    for_transformers = hasattr(getattr(model, "config", None), "_attn_implementation")
    if for_transformers:
        kind = model.config._attn_implementation  # type: ignore[union-attr]
        if kind != "headwise":
            raise ValueError(
                f"this {type(model).__name__} has attn_implementation={kind!r}, which would attend "
                "within each rank only; import headwise.transformers and load the model with "
                'attn_implementation="headwise"'
            )
    takes = inspect.signature(model.forward).parameters
    entered: list[AbstractContextManager[None]] = []

    # Hooks, not another forward: what replaces the forward, such as a watch, still does.
    def enter(module: nn.Module, given: Any, options: Any) -> tuple[Any, Any]:
        if for_transformers:
            options = _placed(module, given, options, takes)
        entered.append(api.splitting(calls))
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


def _placed(
    model: nn.Module, given: tuple[Any, ...], options: dict[str, Any], takes: Any
) -> dict[str, Any]:
    """The options of a transformers model: without them it would take its part for the whole."""
    name = type(model).__name__
    if options.get("position_ids") is None:
        raise ValueError(
            f"{name} with context_parallel needs position_ids, or each rank would count from 0; "
            "give hw.distributed.shard(torch.arange(length)[None], mesh, dim=1, layout=layout)"
        )
    for refused in ("attention_mask", "past_key_values", "labels"):
        if options.get(refused) is not None:
            raise ValueError(
                f"{name} with context_parallel takes no {refused}, which would be read as that of "
                "this rank's part alone"
            )
    ids = given[0] if given else options.get("input_ids", options.get("inputs_embeds"))
    if not isinstance(ids, Tensor):
        raise ValueError(f"{name} with context_parallel takes input_ids or inputs_embeds")
    # Without padding, or transformers takes a jump of the positions for a new document.
    whole = torch.ones(ids.shape[:2], dtype=torch.int64, device=ids.device)
    options = options | {"attention_mask": whole}
    return options | ({"use_cache": False} if "use_cache" in takes else {})
