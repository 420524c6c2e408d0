"""What was seen of a model: its layers, a table of heads, maps, and a series of steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headwise.map import AttentionMap
from headwise.watching.layer import Layer
from headwise.watching.table import Table, Value

NAN = float("nan")


@dataclass(frozen=True)
class Entry:
    """One step of a series: its number and its table of heads."""

    step: int
    table: Table


class Recording:
    """The heads of a model, as far as they were looked at."""

    series: list[Entry]

    @property
    def layers(self) -> list[Layer]:
        """The layers that were seen, in the order in which they ran."""
        raise NotImplementedError

    def heads(self) -> Table:
        """A row a head: layer, name, kind, head and the figures of every statistic.

        They are means over all rows that see a key and are no padding, and the largest or smallest
        value where the name says so, since the last step of a training or else of all there was.
        """
        rows: list[dict[str, Value]] = []
        figures = [(layer, layer.figures()) for layer in self.layers]
        columns = list(dict.fromkeys(name for _, found in figures for name in found))
        for layer, found in figures:
            for head in range(layer.heads) if found else ():
                row: dict[str, Value] = {"layer": layer.number, "name": layer.name}
                row |= {"kind": layer.kind, "head": head}
                row |= {x: float(found[x][head]) if x in found else NAN for x in columns}
                rows.append(row)
        if not rows and self.series:
            return self.series[-1].table
        return Table(rows)

    def layer(self, which: int | str) -> Layer:
        """A layer by its number, -1 being the last, or by its name."""
        layers = self.layers
        for layer in layers:
            if which in (layer.number, layer.name):
                return layer
        if isinstance(which, int) and -len(layers) <= which < 0:
            return layers[which]
        there = ", ".join(f"{layer.number} {layer.name}" for layer in layers[:40])
        raise ValueError(f"there is no layer {which!r}; there are {there or 'none yet'}")

    def map(self, layer: int | str, head: int, batch: int = 0) -> AttentionMap:
        """The map of one head in the last pass, (1, 1, N, M): exact on demand, never stored."""
        found = self.layer(layer)
        if not -found.heads <= head < found.heads:
            raise ValueError(
                f"layer {layer!r} ({found.name}) has heads 0 to {found.heads - 1}; {head} is none"
            )
        return found.map().head(batch, head % found.heads)

    def __repr__(self) -> str:
        heads = sum(layer.heads for layer in self.layers)
        steps = f", {len(self.series)} steps" if self.series else ""
        return f"<{type(self).__name__} of {len(self.layers)} layers, {heads} heads{steps}>"

    def _repr_html_(self) -> str:
        return self.heads()._repr_html_()

    def __rich__(self) -> Any:
        return self.heads().__rich__()
