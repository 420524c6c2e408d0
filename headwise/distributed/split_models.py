"""Models whose sequences are split between ranks: their attention looks across all of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.conv import _ConvNd

from headwise import handover
from headwise.core.observation import Observation
from headwise.core.options import Options
from headwise.distributed.header import Header, agree
from headwise.distributed.layouts import Layout
from headwise.distributed.movement import check_move
from headwise.distributed.ranges import positions
from headwise.distributed.rank_attention import attention, observe
from headwise.distributed.shards import check_layout, shard, unshard
from headwise.distributed.split_indexer import index_loss
from headwise.distributed.split_maps import attention_map, effect_map
from headwise.distributed.transport import RankGroup, check_mesh
from headwise.maps.attention_map import AttentionMap
from headwise.maps.effect_map import EffectMap


@dataclass(frozen=True, eq=False)
class MeshCalls:
    """Calls of `hw.attention` and `hw.observe` on a mesh.

    `tokens` (B, N) bool is False where the whole sequence is padding, and `padded_rows` is True
    where this rank's part is.
    """

    mesh: DeviceMesh
    layout: Layout
    move: str
    tokens: Tensor | None = None
    padded_rows: Tensor | None = None

    def attention(self, q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
        """`hw.distributed.attention` on the mesh."""
        given = options.keywords()
        return attention(q, k, v, mesh=self.mesh, layout=self.layout, move=self.move, **given)

    def observe(
        self, q: Tensor, k: Tensor, v: Tensor, options: Options, **asked: Any
    ) -> tuple[Tensor, Observation]:
        """`hw.distributed.observe` on the mesh."""
        given = options.keywords() | asked
        return observe(q, k, v, mesh=self.mesh, layout=self.layout, move=self.move, **given)

    def attention_map(
        self, q: Tensor, k: Tensor, options: Options, lse: Tensor | None
    ) -> AttentionMap:
        """`hw.distributed.attention_map` on the mesh."""
        given = options.of_weights()
        return attention_map(q, k, mesh=self.mesh, layout=self.layout, lse=lse, **given)

    def effect_map(
        self, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, options: Options
    ) -> EffectMap:
        """`hw.effect_map` of the whole sequence, whose parts every rank gives to all."""
        given = options.of_weights()
        return effect_map(q, k, v, grad, mesh=self.mesh, layout=self.layout, **given)

    def index_loss(
        self,
        q: Tensor,
        k: Tensor,
        index_q: Tensor,
        index_k: Tensor,
        index_weights: Tensor,
        options: Options,
        selected: Tensor | None,
    ) -> Tensor:
        """`hw.distributed.index_loss` on the mesh."""
        given = options.of_weights() | {"selected": selected}
        return index_loss(
            q, k, index_q, index_k, index_weights, mesh=self.mesh, layout=self.layout, **given
        )

    def every(
        self, number: int, same: Mapping[str, str] | None = None, failure: Exception | None = None
    ) -> list[int]:
        """The number that each rank of the mesh gives; `same` must be the same on all of them."""
        header = Header("positions", same or {}, (number,))
        return [own[0] for own in agree(RankGroup(self.mesh), header, failure)]

    def positions(self, lengths: list[int]) -> Tensor:
        """This rank's positions, if the ranks hold parts of these lengths."""
        return positions(self.layout.of_lengths(lengths)[self.mesh.get_local_rank()])


IGNORED = -100
"""The label of a token that has no loss."""


SHARED = ("attention_mask", "position_ids", "labels", "shift_labels", "num_items_in_batch")
"""Inputs that all ranks have, or none: ranks exchange them or what they stand for."""

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
        entered.append(handover.splitting(own))
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


def placed(
    model: nn.Module, calls: MeshCalls, positional: tuple[Any, ...], options: dict[str, Any]
) -> tuple[MeshCalls, dict[str, Any]]:
    """The options of a forward that takes this rank's part, and the calls that know its padding.

    `attention_mask`, `position_ids` and `labels` are this rank's part, as `input_ids` are.
    """
    takes = inspect.signature(model.forward).parameters
    options = dict(zip(takes, positional, strict=False)) | options
    tokens, failure = torch.empty(0, 0), None
    try:
        tokens = _checked(model, options)
    except Exception as error:  # the others wait: they hear of it first
        failure = error
    given = {name: "None" if options.get(name) is None else "given" for name in SHARED}
    lengths = calls.every(tokens.shape[1], given, failure)
    mask = options.get("attention_mask")
    if mask is not None:
        whole = unshard(mask.bool(), calls.mesh, dim=1, layout=calls.layout)
        if not bool(whole.all()):
            calls = replace(calls, tokens=whole, padded_rows=~mask.bool())
    # Without padding, or transformers takes a jump of the positions for a new document.
    options["attention_mask"] = torch.ones(
        tokens.shape[:2], dtype=torch.int64, device=tokens.device
    )
    if "use_cache" in takes:
        options["use_cache"] = False
    if options.get("position_ids") is None:
        positions = calls.positions(lengths)
        options["position_ids"] = positions.to(tokens.device)[None]
    if options.get("labels") is not None:
        options |= _shifted(calls, options)
    return calls, options


def _checked(model: nn.Module, options: dict[str, Any]) -> Tensor:
    """The tokens or embeddings of a forward; ValueError for options that parts can't have."""
    name = type(model).__name__
    config: Any = model.config
    if options.get("past_key_values") is not None:
        raise ValueError(
            f"{name} with context_parallel takes no past_key_values: a cache would hold this "
            "rank's part alone; undo context_parallel to generate"
        )
    if not _is_zero(options.get("logits_to_keep", 0)):
        raise ValueError(
            f"{name} with context_parallel takes no logits_to_keep: the last tokens of this rank's "
            "part are not those of the sequence"
        )
    if options.get("labels") is not None:
        if getattr(model, "loss_type", None) != "ForCausalLM":
            raise ValueError(
                f"{name} with context_parallel takes labels for the next token only, as models for "
                "causal language modelling do; compute the loss from the outputs"
            )
        routed = options.get("output_router_logits")
        if getattr(config, "output_router_logits", False) if routed is None else routed:
            raise ValueError(
                f"{name} with context_parallel has no loss of its router, which would need the "
                "tokens of all ranks; use output_router_logits=False"
            )
    tokens = options.get("input_ids")
    tokens = options.get("inputs_embeds") if tokens is None else tokens
    if not isinstance(tokens, Tensor):
        raise ValueError(f"{name} with context_parallel takes input_ids or inputs_embeds")
    mask = options.get("attention_mask")
    if mask is not None and mask.shape != tokens.shape[:2]:
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}; with context_parallel it is this "
            f"rank's part {tuple(tokens.shape[:2])}, 0 where a token is padding"
        )
    return tokens


def _shifted(calls: MeshCalls, options: dict[str, Any]) -> dict[str, Any]:
    """The labels of the next tokens, which may be another rank's, and how many there are in all."""
    whole = unshard(options["labels"], calls.mesh, dim=1, layout=calls.layout)
    following = F.pad(whole, (0, 1), value=IGNORED)[:, 1:]
    found: dict[str, Any] = {}
    if options.get("shift_labels") is None:
        own = shard(following, calls.mesh, dim=1, layout=calls.layout)
        found["shift_labels"] = own.contiguous()
    if options.get("num_items_in_batch") is None:
        found["num_items_in_batch"] = (following != IGNORED).sum()
    return found


def _is_zero(given: object) -> bool:
    return given is None or (isinstance(given, int) and given == 0)
