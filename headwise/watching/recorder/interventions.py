"""The experiments that run, by the modules they are about, and what they change in calls.

An experiment changes the attention of a model's modules, whoever watches them: whichever recorder
serves a module's call asks here whether its heads are off, its weights steered or its keys hidden.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from headwise.core.edges import Steer
from headwise.core.place import Place
from headwise.core.policies import Policy, of_heads
from headwise.core.spans import Span
from headwise.core.steering import Hole, hole_of, segments, without
from headwise.handover import sharded, split_calls
from headwise.nn.call import Call
from headwise.watching.recorder.changed_call import ChangedCall, sparsified
from headwise.watching.recorder.layer_registry import LayerRegistry
from headwise.watching.recorder.proof import Proofs
from headwise.watching.recorder.seen_call import Kind, first_position
from headwise.watching.recorder.watch_options import WatchOptions, matches


@dataclass(eq=False)
class WatchedModel:
    """A model with an attached watch: its layers and the options."""

    model: weakref.ref[nn.Module]
    options: WatchOptions
    registry: LayerRegistry


WATCHED: weakref.WeakKeyDictionary[nn.Module, WatchedModel] = weakref.WeakKeyDictionary()
"""The watch of every module of a model that is watched."""


@dataclass(frozen=True, eq=False)
class Sparse:
    """A policy of sparse attention for the layers of a number or name; None: for every layer."""

    layer: int | str | None
    policy: Policy

    def __str__(self) -> str:
        return f"{self.policy!r}" + (f" in layer {self.layer!r}" if self.layer is not None else "")


@dataclass(eq=False)
class Experiment:
    """Changes to the attention of a model while a block runs."""

    model: nn.Module
    names: dict[nn.Module, str]
    steers: tuple[Steer, ...] = ()
    sparse: tuple[Sparse, ...] = ()  # the first one that is about a layer counts
    touched: set[Steer | Sparse] = field(default_factory=set)  # that were about some call
    attended: dict[str, int] = field(default_factory=dict)  # layers that were asked about, in order
    ran: bool = False  # a pass of the model began

    def about(self, module: nn.Module) -> tuple[tuple[Steer, ...], Sparse | None]:
        """What is to be changed in a module that attends."""
        number, name = self._layer(module)
        steers = tuple(x for x in self.steers if matches(number, name, (x.edge.layer,)))
        sparse = (x for x in self.sparse if x.layer is None or matches(number, name, (x.layer,)))
        return steers, next(sparse, None)

    def _layer(self, module: nn.Module) -> tuple[int, str]:
        """The number and name of a module's layer, which the model's watch tells, if it has one."""
        name = self.names[module]
        number = self.attended.setdefault(name, len(self.attended))
        watch = WATCHED.get(module)
        if watch is not None and watch.model() is self.model and name in watch.registry.shown:
            number = list(watch.registry.shown).index(name)
        return number, name

    def check(self, verb: str) -> None:
        """Raise ValueError if the model ran, and a change was about nothing in it."""
        changes: tuple[Steer | Sparse, ...] = (*self.steers, *self.sparse)
        missed = [change for change in changes if change not in self.touched]
        if missed and self.ran:
            there = ", ".join(f"{n} {name}" for name, n in list(self.attended.items())[:40])
            raise ValueError(
                f"{missed[0]} {verb} nothing: its layer, keys or queries were not in any "
                f"call. The layers that attended were {there or 'none'}"
            )


RUNNING: list[Experiment] = []
"""The experiments that run, the outermost first."""


@dataclass
class Interventions:
    """The changes to one model's calls; most of the time there are none."""

    registry: LayerRegistry
    silenced: dict[str, int] = field(default_factory=dict)  # heads that are switched off, by module
    modules: weakref.WeakValueDictionary[str, nn.Module] = field(
        default_factory=weakref.WeakValueDictionary
    )
    proofs: Proofs = field(default_factory=lambda: Proofs(strict=True))  # of changed calls

    def silence(self, name: str, out: Tensor, axis: int = -3) -> Tensor:
        """The output of a module's heads, along an axis; a head that is switched off gives 0."""
        if name not in self.silenced:
            return out
        if out.ndim < 4:
            return torch.zeros_like(out)  # (B, N, D): one head
        kept = torch.ones(out.shape[axis], dtype=out.dtype, device=out.device)
        kept[self.silenced[name]] = 0
        return out * kept.reshape(-1, *[1] * (-1 - axis))

    @property
    def running(self) -> bool:
        """True if calls may be changed and must all be heard; then nothing runs compiled."""
        return bool(self.silenced) or bool(RUNNING)

    def wants(self, name: str) -> bool:
        """True if experiments are about this module, which attends."""
        return any(steers or sparse for _, steers, sparse in self._about(name))

    def change(
        self, name: str, call: Call, kind: Kind, forgotten: int | None = None
    ) -> ChangedCall | None:
        """A module's call as the experiments change it; None if they leave it as it is."""
        about = [one for one in self._about(name) if one[1] or one[2]]
        if not about:
            return None
        if split_calls() is not None:
            raise ValueError(
                f"the attention of {name or 'the model'} can't be changed while its sequence is "
                "split between processes; leave context_parallel first"
            )
        given = [(one, steer) for one, steers, _ in about for steer in steers]
        found = self._holes(name, call, kind, forgotten or 0, given)
        policies: list[Policy] = []
        for experiment, _, sparse in about:
            if sparse is not None:
                experiment.touched.add(sparse)
                policies.append(sparse.policy)
        if not found and not policies:
            return None
        changed = _steered(name, call, found)
        if not policies:
            return changed
        heads = call.q.shape[1]
        share = self.registry.placed(name, heads, call.q.shape[3])
        if share is not None:  # the budgets of this rank's heads
            own = range(share[0], share[0] + heads)
            policies = [of_heads(policy, own, share[1]) for policy in policies]
        return sparsified(name, changed, policies, kind, forgotten or 0)

    def _holes(
        self,
        name: str,
        call: Call,
        kind: Kind,
        forgotten: int,
        given: Sequence[tuple[Experiment, Steer]],
    ) -> list[tuple[Steer, Hole]]:
        """The parts of a call that steers change."""
        start = first_position(call) + forgotten if kind == "self" else 0
        place = Place.of(call.q, call.k)
        share = self.registry.placed(name, place.heads, call.q.shape[3])
        found: list[tuple[Steer, Hole]] = []
        for experiment, steer in given:
            span = self._span(name, steer)
            hole = hole_of(steer.edge, span, place, start, forgotten, share)
            elsewhere = share is not None and steer.edge.head not in (
                None, *range(share[0], share[0] + place.heads)
            )  # fmt: skip
            if hole is not None or elsewhere:  # the heads of other ranks are changed there
                experiment.touched.add(steer)
            if hole is not None and steer.changes:
                found.append((steer, hole))
        return found

    def refuse(self, name: str, reason: str) -> None:
        """Raise ValueError if a module that can't be changed was to be."""
        if self.wants(name):
            raise ValueError(
                f"the attention of {name or 'the model'} can't be changed, nor keys hidden from "
                f"its heads: {reason}"
            )

    def _about(self, name: str) -> list[tuple[Experiment, tuple[Steer, ...], Sparse | None]]:
        """What each experiment would change in a module, the outermost first."""
        module = self.modules.get(name) if RUNNING else None
        if module is None:
            return []
        return [(one, *one.about(module)) for one in RUNNING if module in one.names]

    def _span(self, name: str, steer: Steer) -> Span:
        """The keys of a steer; those of a span are stated by the watch."""
        keys = steer.edge.keys
        if isinstance(keys, tuple):
            return keys
        watch = WATCHED.get(self.modules[name])
        spans = {} if watch is None else watch.options.spans
        if keys not in spans:
            there = f"there are {', '.join(spans)}" if spans else "it has none"
            raise ValueError(
                f"{steer} is about the span {keys!r}, which the watch of the model must name, "
                f"hw.watch(model, spans={{{keys!r}: (first, last)}}); {there}"
            )
        return spans[str(keys)]


def _steered(name: str, call: Call, found: Sequence[tuple[Steer, Hole]]) -> ChangedCall:
    """The call under the mask with all holes, and with factors in runs of rows."""
    own, place = call, Place.of(call.q, call.k)
    holes = [hole for steer, hole in found if steer.hides and hole.fixed]
    mask = without(call.mask, holes, place) if holes else None
    rest = list(found)
    if mask is not None:
        call = call.changed(mask=mask)
        rest = [(steer, hole) for steer, hole in found if not (steer.hides and hole.fixed)]
    runs = segments(rest, place, torch.promote_types(call.q.dtype, torch.float32))
    if len(runs) > 1 and sharded(*call[:3]) is not None:
        raise ValueError(
            f"the heads of {name or 'the model'} are DTensors, and factors can't be limited to "
            "some queries there; steer all queries"
        )
    return ChangedCall(own, call, tuple(runs))
