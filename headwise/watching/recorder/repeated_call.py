"""A call like the last one of its module, observed again by what that one prepared.

Every step of a training makes the same calls. What is asked of them, how an engine computes it and
where it is recorded are then known, and only the tensors are new.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from headwise.core.observation import Asked, Observation, SampledRows
from headwise.core.options import Options
from headwise.engines import calls
from headwise.engines.contract import Prepared
from headwise.engines.failures import KernelError
from headwise.watching.recorder.board import RepeatedRecord, Slot
from headwise.watching.recorder.layer import WatchedLayer

Tensors = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class RepeatedCall:
    """What the calls of a module share, as long as their description stays the same."""

    layer: WatchedLayer
    slot: Slot
    asked: Asked
    rows: SampledRows | None
    key: calls.Key
    prepared: Prepared
    record: RepeatedRecord | None  # None: the slot does it

    @classmethod
    def of(
        cls,
        layer: WatchedLayer,
        tensors: Tensors,
        options: Options,
        stats: tuple[str, ...],
        rows: int | None,
        sink_keys: int,
        seen: Observation,
    ) -> RepeatedCall | None:
        """Remember a call that a layer has just observed; None if no engine prepared it."""
        q, k, _ = tensors
        asked = Asked.of(stats, sink_keys, {}, k.shape[2])
        some = SampledRows.of(rows, q.shape[2], q.device)
        key, _ = _described(tensors, options, asked, some)
        prepared = None if key is None else calls.known(key)
        if key is None or prepared is None or layer.slot is None:
            return None
        return cls(layer, layer.slot, asked, some, key, prepared, layer.slot.repeated(seen))

    @property
    def valid(self) -> bool:
        """True unless the layer records elsewhere since."""
        return self.layer.slot is self.slot

    def add(self, seen: Observation, padding: Tensor | None) -> None:
        """Add the rows of such a call to the board."""
        if self.record is None:
            self.slot.add(seen, padding)
        else:
            self.record.add(seen, padding)

    def observe(self, tensors: Tensors, options: Options) -> tuple[Tensor, Observation] | None:
        """Return the output and the statistics; None if the call is not like the last one."""
        key, given = _described(tensors, options, self.asked, self.rows)
        if key != self.key:
            return None
        try:
            out, *found = self.prepared(*(given if self.rows is None else self.rows.of_call(given)))
        except KernelError:
            calls.drop(self.key)  # another engine serves the call
            return None
        computed, stats = self.asked.computed, self.asked.stats
        values = dict(zip(computed, found, strict=True))
        highest = values["max_logit"]
        if len(stats) < len(computed):
            values = {name: values[name] for name in stats}
        return out, Observation(values, highest, None if self.rows is None else self.rows.numbers)


def _described(
    tensors: Tensors, options: Options, asked: Asked, rows: SampledRows | None
) -> tuple[calls.Key | None, tuple[Tensor, ...]]:
    """Describe a call as `observe` and `statistics` do."""
    options = Options(*options[:5])  # of the weights before dropout, by any engine
    sample = None if rows is None else rows.key
    return calls.describe(tensors, options, asked.computed, asked.sink_keys, sample)
