"""One pass of a watched model that stays as it was: a request, or a step that was kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from headwise.watching.recorder.layer import WatchedLayer
from headwise.watching.recording import Recording
from headwise.watching.table import Table


class RecordedPass(Recording):
    """A recording of one pass: its figures are means over the rows of its layers."""

    def heads(self) -> Table:
        rows = []
        for layer in self.layers:
            figures = layer.observation.heads(layer.padding)
            for head in range(layer.heads):
                row = layer.place(head)
                row |= {name: float(x[head]) for name, x in figures.items()}
                rows.append(row)
        return Table(rows)


class KeptStep(RecordedPass):
    """A step whose last pass was kept, with the queries and keys of its maps."""

    def __init__(self, number: int, layers: Sequence[WatchedLayer], tokens: Tensor | None) -> None:
        self.number, self.series, self.alarms = number, [], []
        self._layers, self._tokens = [_as_it_was(layer) for layer in layers], tokens

    @property
    def layers(self) -> list[WatchedLayer]:
        return self._layers

    @property
    def tokens(self) -> Tensor | None:
        return self._tokens

    def __repr__(self) -> str:
        return f"<KeptStep {self.number} of {len(self._layers)} layers>"


def _as_it_was(layer: WatchedLayer) -> WatchedLayer:
    """A layer with the calls that it has now, which nothing adds to."""
    layer.adopt()
    return replace(layer, slot=None, late=None, held=None, _calls=list(layer._calls))
