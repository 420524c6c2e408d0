"""Calls of a model that are handed to all ranks of a mesh, and what they share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from headwise.core.observation import Observation
from headwise.core.options import Options
from headwise.distributed.header import Header, agree
from headwise.distributed.layouts import Layout
from headwise.distributed.ranges import numbers
from headwise.distributed.rank_attention import attention, observe
from headwise.distributed.split_indexer import index_loss
from headwise.distributed.split_maps import attention_map, effect_map
from headwise.distributed.transport import RankGroup
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
        return numbers(self.layout.of_lengths(lengths)[self.mesh.get_local_rank()])
