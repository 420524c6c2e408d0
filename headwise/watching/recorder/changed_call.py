"""A call as experiments change it: the same queries, keys and values under other weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headwise.api import attention_map, statistics
from headwise.bias import plus
from headwise.core.mask_parts import rows_of
from headwise.core.observation import Observation, sample_rows
from headwise.core.place import Place
from headwise.core.steering import Segment
from headwise.nn.call import Call
from headwise.watching.recorder.layer import LARGEST


@dataclass(frozen=True, eq=False)
class ChangedCall:
    """A call with another mask, and with numbers that are added to its logits, in runs of rows."""

    own: Call  # as the model makes it
    call: Call  # with the mask of the experiments
    runs: tuple[Segment, ...]  # all rows, in order

    @property
    def single(self) -> Call | None:
        """The call that computes all rows at once, if one does."""
        return _biased(self.call, self.runs[0].logs) if len(self.runs) == 1 else None

    def dropping(self, dropout: float) -> ChangedCall:
        """The same call with this dropout."""
        return replace(self, call=self.call.changed(dropout=dropout))

    def attend(self) -> Tensor:
        """The output of the call, (B, Hq, N, Dv)."""
        if (single := self.single) is not None:
            return single.attend()
        return torch.cat([self._run(run).attend() for run in self.runs], 2)

    def statistics(self, rows: int | None = None, **asked: Any) -> Observation:
        """The statistics of the rows, or of a sample of them, without gradients."""
        q, k, v = (x.detach() for x in self.call[:3])
        sampled = sample_rows(rows, q.shape[2], q.device)
        numbers = torch.arange(q.shape[2], device=q.device) if sampled is None else sampled
        found = []
        for run in self.runs:
            here = numbers[(numbers >= run.rows.start) & (numbers < run.rows.stop)]
            if len(here):
                found.append(
                    statistics(q, k, v, _biased(self.call, run.logs).given, **asked, rows=here)
                )
        values = {name: torch.cat([x.values[name] for x in found], 2) for name in found[0].values}
        return Observation(values, torch.cat([x.highest for x in found], 2), sampled)

    def weights(self) -> Tensor:
        """All weights, (B, Hq, N, M)."""
        call = self.for_map()
        if call is None:
            raise ValueError(
                "the weights of so long a call are not returned while some of its rows are steered"
            )
        return attention_map(call.q, call.k, **call.given.of_weights()).to_tensor()

    def for_map(self) -> Call | None:
        """One call with all weights, for a map; None if its bias would be too large to keep."""
        if (single := self.single) is not None:
            return single
        batch, heads, queries, _ = self.call.q.shape
        if batch * heads * queries * self.call.k.shape[2] > LARGEST:
            return None
        return _biased(self.call, _rows_together(self.runs, heads, self.call.k.shape[2]))

    def _run(self, run: Segment) -> Call:
        """The call of some rows."""
        call, rows = _biased(self.call, run.logs), run.rows
        mask = rows_of(call.mask, Place.of(call.q, call.k), rows)
        cut = call.changed(mask=mask, bias=_cut(call.bias, rows))
        return cut._replace(q=call.q[:, :, rows])


def _biased(call: Call, logs: Tensor | None) -> Call:
    return call if logs is None else call.changed(bias=plus(call.bias, logs))


def _cut(bias: Any, rows: slice) -> Any:
    """The rows of a bias that is a tensor over all pairs."""
    whole = isinstance(bias, Tensor) and bias.ndim > 1 and bias.shape[-2] > 1
    return bias[..., rows, :] if whole else bias


def _rows_together(runs: Sequence[Segment], heads: int, keys: int) -> Tensor | None:
    """What is added to the logits of all rows, (B|1, Hq, N, M)."""
    given = [run.logs for run in runs if run.logs is not None]
    if not given:
        return None
    none = given[0].new_zeros(1, heads, 1, keys)
    batch = max(len(x) for x in given)
    wide = [none if run.logs is None else run.logs.detach() for run in runs]
    lengths = [run.rows.stop - run.rows.start for run in runs]
    return torch.cat([x.expand(batch, -1, n, -1) for x, n in zip(wide, lengths, strict=True)], 2)
