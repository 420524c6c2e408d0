"""The requests of a model that generates by continuous batching, each as a recording."""

from __future__ import annotations

from functools import cached_property

from torch import Tensor

from headwise.core.observation import Observation
from headwise.watching.recorded_pass import RecordedPass
from headwise.watching.recorder.layer import WatchedLayer
from headwise.watching.recorder.paged_record import HeldRequest, whole_call
from headwise.watching.recorder.seen_call import SeenCall


class Request(RecordedPass):
    """One request: what its rows did and what its keys received, as if it had run alone."""

    def __init__(self, held: HeldRequest, layers: list[WatchedLayer]) -> None:
        self.id, self.series, self.alarms = held.id, [], []
        self._held, self._length = held, held.length()
        self._of = [layer for layer in layers if layer.name in held.layers]

    def __len__(self) -> int:
        """The number of its tokens in the cache: the last one that was generated is not there."""
        return self._length

    @property
    def tokens(self) -> Tensor:
        return self._held.tokens[None, : self._length]

    @cached_property
    def layers(self) -> list[WatchedLayer]:
        """Its layers, with the numbers of the watch."""
        return [self._layer(layer) for layer in self._of]

    def _layer(self, seen: WatchedLayer) -> WatchedLayer:
        held = self._held.layers[seen.name]
        stats, figures = held.stats, held.figures[: self._length].permute(1, 2, 0)[:, None]
        values = dict(zip((*stats, "lse"), figures, strict=True))
        call, lse = whole_call(held, self._length), values["lse"]
        rows = Observation({name: values[name] for name in stats}, values.get("max_logit", lse))
        layer = WatchedLayer(seen.number, seen.name, "self", seen.heads, stats=stats)
        layer.take_place(seen.share)
        layer.add(SeenCall(1, self._length, 0, rows, None, call, lse, keys=self._length), False)
        return layer

    def received(self, layer: int | str) -> Tensor:
        """The weight that each key of a layer has received so far, (Hq, tokens).

        The sums of the columns of its maps, kept up while it runs: the lowest can be evicted. Where
        requests share pages, they are summed now, from its map.
        """
        found = self.layer(layer)
        if self._held.shared:
            return found.map().received()[0]
        return self._held.layers[found.name].received[: self._length].T

    def __repr__(self) -> str:
        return f"<Request {self.id!r}: {self._length} tokens, {len(self._of)} layers>"
