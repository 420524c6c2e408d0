"""The edges that mattered: the largest effects over all heads of a model, in one table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from headwise.core.observation import sample_rows
from headwise.maps.effect_map import EffectMap
from headwise.watching.recorder.layer import WatchedLayer
from headwise.watching.recorder.watch_options import WatchOptions
from headwise.watching.table import Table, Value

COLUMNS = ["layer", "name", "kind", "head", "batch", "query", "key", "weight", "effect"]


@dataclass(frozen=True)
class Tokens:
    """What is known of the tokens: their numbers (B, N), or the pieces that somebody names."""

    numbers: Tensor | None = None
    pieces: Sequence[str] | None = None
    source: Sequence[str] | None = None

    @property
    def known(self) -> bool:
        """True if there is anything to show."""
        return self.numbers is not None or self.pieces is not None

    def at(self, batch: int, position: int, elsewhere: bool) -> Value:
        """The token at a position of the sequence, or of the other one, of cross-attention."""
        pieces = self.source if elsewhere else self.pieces
        if pieces is not None:
            return pieces[position] if 0 <= position < len(pieces) else ""
        if self.numbers is None or elsewhere or self.pieces is not None:
            return ""
        there = batch < self.numbers.shape[0] and 0 <= position < self.numbers.shape[1]
        return int(self.numbers[batch, position]) if there else ""


def largest_edges(
    layers: Iterable[WatchedLayer], options: WatchOptions, count: int, tokens: Tokens
) -> Table:
    """The edges with the largest effects, largest magnitude first, one row each."""
    found: list[dict[str, Value]] = []
    notes = []
    for layer in layers:
        why = None if layer.held is None else layer.held.refusal()
        if layer.held is None or why is not None:
            notes.append(f"{layer.title}: {why or 'its calls were not seen in eager code'}")
            continue
        edges = list(_of_layer(layer, options, count, tokens))
        found = sorted(found + edges, key=lambda row: -abs(float(row["effect"])))[:count]
    if not found and notes:
        raise ValueError("no effects are known:\n  " + "\n  ".join(notes[:20]))
    shown = "; ".join(notes[:5]) + (f"; and {len(notes) - 5} more" if len(notes) > 5 else "")
    said = [f"(without effects: {shown})"] if notes else []
    said += [f"(of {options.rows} sampled rows per head)"] if options.rows is not None else []
    extra = ["query_token", "key_token"] if tokens.known else []
    return Table(found, [*COLUMNS[:7], *extra, *COLUMNS[7:]], note="\n".join(said) or None)


def _of_layer(
    layer: WatchedLayer, options: WatchOptions, count: int, tokens: Tokens
) -> Iterator[dict[str, Value]]:
    held = layer.held
    assert held is not None
    rows = held.sampled(options.rows)
    for first, emap in maps(layer, options.heads, rows):
        numbers = rows
        if options.rows is not None and rows is None:  # gathered from all ranks: sampled here
            numbers = sample_rows(options.rows, emap.shape[2], emap.region.q.device)
            emap = emap if numbers is None else emap.at(numbers)
        weights = emap.weights()
        effects, places = emap.largest(count)
        for effect, place in zip(effects.tolist(), places.tolist(), strict=True):
            b, h, i, j = place
            row = i if numbers is None else int(numbers[i])
            query, key = row + held.rows.start, j + held.rows.first_key
            where: dict[str, Value] = layer.place(first + h)
            where |= {"batch": b, "query": query, "key": key}
            if tokens.known:
                where["query_token"] = tokens.at(b, query, False)
                where["key_token"] = tokens.at(b, key, layer.kind == "cross")
            yield where | {"weight": float(weights[b, h, i, j]), "effect": effect}


def maps(
    layer: WatchedLayer, heads: Sequence[int] | None, rows: Tensor | None = None
) -> Iterator[tuple[int, EffectMap]]:
    """Maps of the heads that are watched: the number of the first among this rank's, and a map.

    A sequence that is split between ranks is gathered one head at a time.
    """
    held = layer.held
    assert held is not None
    if held.rows.split is None and heads is None:
        yield 0, held.map(rows)
        return
    wanted = range(layer.heads)
    if heads is not None:
        wanted = [x - layer.first_head for x in heads]  # type: ignore[assignment]
    for head in wanted:
        if 0 <= head < layer.heads:
            yield head, held.of_head(head).map(rows)
