"""Changes to the attention of a watched model: heads switched off, edges knocked out."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from headwise.core.edges import Edge, hole_of, without
from headwise.core.intervals import Mask
from headwise.core.place import Place
from headwise.nn.call import Call
from headwise.watching.recorder.layer_registry import LayerRegistry
from headwise.watching.recorder.proof import Proofs
from headwise.watching.recorder.seen_call import Kind, first_position
from headwise.watching.recorder.watch_options import matches


@dataclass
class Interventions:
    """The changes of an experiment while it runs; most of the time there are none."""

    registry: LayerRegistry
    silenced: dict[str, int] = field(default_factory=dict)  # heads that are switched off, by module
    edges: tuple[Edge, ...] = ()  # that are knocked out
    cut_edges: set[Edge] = field(default_factory=set)  # that have hidden something
    attended: dict[str, int] = field(default_factory=dict)  # modules asked about edges, in order
    proofs: Proofs = field(default_factory=lambda: Proofs(strict=True))  # of knocked-out calls
    last_cut: tuple[Mask, Mask | None] | None = None  # the last mask with edges cut, and without

    def silence(self, name: str, out: Tensor, axis: int = -3) -> Tensor:
        """The output of a module's heads, along an axis; a head that is switched off gives 0."""
        if name not in self.silenced:
            return out
        if out.ndim < 4:
            return torch.zeros_like(out)  # (B, N, D): one head
        kept = torch.ones(out.shape[axis], dtype=out.dtype, device=out.device)
        kept[self.silenced[name]] = 0
        return out * kept.reshape(-1, *[1] * (-1 - axis))

    def edges_of(self, name: str) -> tuple[Edge, ...]:
        """The edges of a module that are knocked out."""
        if not self.edges:
            return ()
        number = self.attended.setdefault(name, len(self.attended))
        if name in self.registry.shown:
            number = list(self.registry.shown).index(name)
        return tuple(edge for edge in self.edges if matches(number, name, (edge.layer,)))

    def cut(self, name: str, call: Call, kind: Kind, forgotten: int | None = None) -> Call:
        """A module's call without the edges that are knocked out."""
        edges = self.edges_of(name)
        if not edges:
            return call
        start = first_position(call) + (forgotten or 0) if kind == "self" else 0
        place = Place.of(call.q, call.k)
        share = self.registry.placed(name, place.heads, call.q.shape[3])
        holes = {edge: hole_of(edge, place, start, forgotten or 0, share) for edge in edges}
        if share is not None:  # the heads of other ranks are cut there
            own = (None, *range(share[0], share[0] + place.heads))
            self.cut_edges.update(edge for edge in edges if edge.head not in own)
        found = {edge: hole for edge, hole in holes.items() if hole is not None}
        self.cut_edges.update(found)
        if not found:
            return call
        mask = without(call.mask, list(found.values()), place)
        self.last_cut = (mask, call.mask)
        return call.changed(mask=mask)

    def refuse_edges(self, name: str, reason: str) -> None:
        """Raise ValueError if edges of a module are knocked out, which can't be done there."""
        if self.edges_of(name):
            raise ValueError(f"keys can't be hidden from heads of {name or 'the model'}: {reason}")
