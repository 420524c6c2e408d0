"""The options of `hw.watch`, and the layers and statistics that they ask for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from headwise.core.observation import STATISTICS
from headwise.core.spans import SPAN_PREFIX, Span
from headwise.maps.sparse_losses import ERROR, KEPT, NEEDED, NONE, SparsePolicies
from headwise.watching.recorder.seen_call import Kind

SPARSE = (NEEDED, KEPT, ERROR)
"""How the names of the figures begin that tell what sparse attention would lose."""

WITHIN = ("self_mass", "previous_mass", "distance")
"""Statistics that mean nothing where the tokens of one sequence look at another."""


@dataclass(frozen=True)
class WatchOptions:
    """The options of `hw.watch`: what to look at, and how closely."""

    stats: tuple[str, ...] = STATISTICS
    rows: int | None = None
    layers: tuple[int | str, ...] | None = None
    heads: tuple[int, ...] | None = None
    every: int = 1
    maps: bool = True
    sink_keys: int = 1
    strict: bool = False
    effects: bool = False  # hold calls for the effects of their edges
    spans: Mapping[str, Span] = field(default_factory=dict)  # `stats` has them as span_<name>
    marked: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Spans that are found by the numbers of their tokens; `stats` has them as span_<name>."""
    sparse: SparsePolicies = NONE  # `stats` has them as kept_<name> and error_<name>

    def ask_for(self, number: int, name: str) -> bool:
        """True if they ask for a layer of this number and name."""
        return self.layers is None or matches(number, name, self.layers)

    def stats_of(self, kind: Kind) -> tuple[str, ...]:
        """The statistics that are seen of a layer of this kind."""
        stats = self.stats if kind != "window" else plain_statistics(self.stats)
        sparse = self.sparse.figures(self.sparse.for_kind(kind))
        left_out = {*self.sparse.figures([*self.sparse.named])} - {*sparse}
        left_out |= {SPAN_PREFIX + name for name in self.marked}  # seen where they can be
        return tuple(x for x in stats if (kind == "self" or x not in WITHIN) and x not in left_out)


def matches(number: int, name: str, wanted: Sequence[int | str]) -> bool:
    """True if a layer was asked for, by its number or by a pattern such as "*.3.attn"."""
    return any(
        number == one if isinstance(one, int) else fnmatchcase(name, one) or name == one
        for one in wanted
    )


def plain_statistics(stats: Iterable[str]) -> tuple[str, ...]:
    """The statistics that are not weights on spans, nor what sparse attention would lose."""
    return tuple(name for name in stats if not name.startswith((SPAN_PREFIX, *SPARSE)))
