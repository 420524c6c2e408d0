"""The experiments that run now, and the watches that are attached, by the modules they are about.

An experiment changes the attention of a model's modules, whoever watches them: whichever recorder
serves a module's call asks here what is to be changed in it.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

from torch import nn

from headwise.core.edges import Steer
from headwise.core.policies import Policy
from headwise.watching.recorder.layer_registry import LayerRegistry
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
