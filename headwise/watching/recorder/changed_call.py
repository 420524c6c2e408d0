"""A call as experiments change it: the same queries, keys and values under other weights.

Factors are in the logits when a policy of sparse attention chooses among them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headwise import mask as masks
from headwise import sparse
from headwise.api import attention_map, statistics
from headwise.bias import plus
from headwise.core.intervals import Mask
from headwise.core.mask_parts import rows_of
from headwise.core.observation import Observation, sample_rows, with_max_logit
from headwise.core.options import Options
from headwise.core.patterns import Dense
from headwise.core.place import Place
from headwise.core.policies import Evicted, Indices, Policy, TopK, Window, check_policy, of_rows
from headwise.core.problem import pose
from headwise.core.spans import Span
from headwise.core.steering import Segment
from headwise.engines.streaming.kept_keys import KeptKeys
from headwise.handover import sharded
from headwise.maps.sparse_losses import SparsePolicies, losses
from headwise.nn.call import Call
from headwise.watching.recorder.layer import LARGEST
from headwise.watching.recorder.seen_call import Kind


@dataclass(frozen=True, eq=False)
class ChangedCall:
    """A call with another mask, and with numbers that are added to its logits, in runs of rows."""

    own: Call  # as the model makes it
    call: Call  # with the mask of the experiments
    runs: tuple[Segment, ...]  # all rows, in order
    policies: tuple[Policy, ...] = ()  # a row keeps the keys that all of them keep

    @property
    def single(self) -> Call | None:
        """The call that computes all rows at once, if one does."""
        if self.policies or len(self.runs) > 1:
            return None
        return _biased(self.call, self.runs[0].logs)

    def dropping(self, dropout: float) -> ChangedCall:
        """The same call with this dropout."""
        return replace(self, call=self.call.changed(dropout=dropout))

    def attend(self) -> Tensor:
        """The output of the call, (B, Hq, N, Dv)."""
        found = [self._attend(run) for run in self.runs]
        return found[0] if len(found) == 1 else torch.cat(found, 2)

    def statistics(self, rows: int | None = None, **asked: Any) -> Observation:
        """The statistics of the rows, or of a sample of them, without gradients."""
        q, k, v = (x.detach() for x in self.call[:3])
        sampled = sample_rows(rows, q.shape[2], q.device)
        numbers = torch.arange(q.shape[2], device=q.device) if sampled is None else sampled
        found = []
        for options, here in self._by_rows(numbers):
            if self.policies:
                found.append(self._kept(q, k, v, options, here, **asked))
            else:
                found.append(statistics(q, k, v, options, **asked, rows=here))
        values = {name: torch.cat([x.values[name] for x in found], 2) for name in found[0].values}
        return Observation(values, torch.cat([x.highest for x in found], 2), sampled)

    def losses(
        self,
        policies: SparsePolicies,
        kind: Kind,
        rows: Tensor | None,
        share: tuple[int, int] | None = None,
    ) -> dict[str, Tensor]:
        """What sparse attention would lose in these rows, or in all, (B, Hq, N) each.

        `share` is the number of the call's first head and that of all heads, if it has some.
        """
        found = []
        numbers = torch.arange(self.call.q.shape[2], device=self.call.q.device)
        for options, here in self._by_rows(numbers if rows is None else rows):
            problem = pose("observe", *self.call[:3], options._replace(dropout=0.0))
            every = rows is None and len(self.runs) == 1
            problem = problem if every else problem.at(here)
            found.append(losses(problem, policies, kind, self.policies, share))
        return {name: torch.cat([x[name] for x in found], 2) for name in found[0]}

    def _by_rows(self, numbers: Tensor) -> Iterator[tuple[Options, Tensor]]:
        """The options of the call for runs of these rows, and their numbers."""
        for run in self.runs:
            here = numbers[(numbers >= run.rows.start) & (numbers < run.rows.stop)]
            if len(here):
                yield _biased(self.call, run.logs).given, here

    def weights(self) -> Tensor:
        """All weights, (B, Hq, N, M)."""
        call = self.for_map()
        if call is None:
            raise ValueError(
                "the weights of so long a call are not returned while some of its rows are steered"
            )
        return attention_map(call.q, call.k, **call.given.of_weights()).to_tensor()

    def for_map(self) -> Call | None:
        """One call with all weights, for a map; None if it would be too large to keep."""
        if (single := self.single) is not None:
            return single
        batch, heads, queries, _ = self.call.q.shape
        if batch * heads * queries * self.call.k.shape[2] > LARGEST:
            return None
        call = _biased(self.call, _rows_together(self.runs, heads, self.call.k.shape[2]))
        if not self.policies:
            return call
        problem = pose("sparsify", *call[:3], call.given._replace(dropout=0.0))
        return call.changed(mask=Dense(KeptKeys(problem, self.policies).dense()))

    def _attend(self, run: Segment) -> Tensor:
        """The output of some rows."""
        call = _biased(self.call, run.logs) if len(self.runs) == 1 else self._run(run)
        if not self.policies:
            return call.attend()
        policies = [of_rows(policy, run.rows) for policy in self.policies]
        if len(policies) == 1:
            options = call.given.keywords()
            del options["engine"]
            return sparse.attention(*call[:3], policies[0], **options)
        return KeptKeys(pose("sparsify", *call[:3], call.given), policies).attend()

    def _kept(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        options: Options,
        rows: Tensor,
        stats: tuple[str, ...],
        sink_keys: int,
        spans: Mapping[str, Span],
    ) -> Observation:
        """The statistics of some rows under the policies."""
        problem = pose("sparsify", q, k, v, options._replace(dropout=0.0)).at(rows)
        names = with_max_logit(stats)
        kept = KeptKeys(problem, self.policies).statistics(names, sink_keys, spans)
        highest = kept["max_logit"]
        wanted = {name: x for name, x in kept.items() if name in stats or name not in names}
        return Observation(wanted, highest, rows)

    def _run(self, run: Segment) -> Call:
        """The call of some rows."""
        call, rows = _biased(self.call, run.logs), run.rows
        mask = rows_of(call.mask, Place.of(call.q, call.k), rows)
        cut = call.changed(mask=mask, bias=_cut(call.bias, rows))
        return cut._replace(q=call.q[:, :, rows])


def unchanged(call: Call) -> ChangedCall:
    """A call as the model makes it."""
    return ChangedCall(call, call, (Segment(slice(0, call.q.shape[2]), None),))


def sparsified(
    name: str, changed: ChangedCall, policies: Sequence[Policy], kind: Kind, forgotten: int
) -> ChangedCall:
    """The call over the keys that all policies keep; `forgotten` keys came before its first one.

    Windows and evicted keys become a mask and a bias, which every engine takes.
    """
    call, fixed = changed.call, all(isinstance(x, Window | Evicted) for x in policies)
    try:
        if sharded(*call[:3]) is not None and not fixed:
            raise ValueError("its heads are DTensors, for which only Window and Evicted are served")
        place = Place.of(call.q, call.k)
        for policy in policies:
            _check(policy, replace(place, keys=place.keys + forgotten), call, kind)
        restricted: Call | None = call if fixed else None
        for policy in policies if fixed else ():
            restricted = restricted and _restricted(restricted, policy, forgotten)
        if restricted is not None:
            return replace(changed, call=restricted)
        return replace(changed, policies=tuple(_held(x, forgotten) for x in policies))
    except ValueError as error:
        raise ValueError(f"{name or 'the model'} can't be made sparse: {error}") from None


def _check(policy: Policy, place: Place, call: Call, kind: Kind) -> None:
    if isinstance(policy, Window) and kind == "cross":
        raise ValueError(
            f"{policy} counts from a row's own key, and its rows look at another sequence; choose "
            "other layers, or another policy"
        )
    check_policy(policy, place, call.k.shape[1])


def _held(policy: Policy, forgotten: int) -> Policy:
    """The policy for the keys that a cache still holds; ValueError if that is another choice."""
    if not forgotten or isinstance(policy, TopK):
        return policy
    if isinstance(policy, Window):
        return Window(policy.left, max(0, policy.sinks - forgotten))
    if isinstance(policy, Indices):
        return Indices(policy.keys - forgotten)  # negative numbers choose nothing
    if isinstance(policy, Evicted) or forgotten % policy.size:
        raise ValueError(
            f"its cache forgot the first {forgotten} keys, and {policy} counts from the first"
        )
    return policy


def _restricted(call: Call, policy: Policy, forgotten: int) -> Call | None:
    """The call over the keys of a window, or those that were not evicted.

    None if that is more intervals than a mask can have.
    """
    place = Place.of(call.q, call.k)
    if isinstance(policy, Evicted):
        kept = policy.kept()[..., forgotten:].to(call.q.device)
        kept = torch.nn.functional.pad(kept, (0, place.keys - kept.shape[-1]), value=True)
        if kept.shape[1] not in (1, place.heads):
            kept = kept.repeat_interleave(place.heads // kept.shape[1], 1)
        hidden = torch.zeros(kept.shape, device=kept.device).masked_fill(~kept, -torch.inf)
        return call.changed(bias=plus(call.bias, hidden[:, :, None]))
    assert isinstance(policy, Window)
    stated = None if call.mask is None else call.mask.alignment(place)
    sinks = max(0, policy.sinks - forgotten)
    near: Mask = masks.window(policy.left, 0, place.offset if stated is None else stated)
    near = near | masks.prefix(sinks) if sinks else near
    if call.mask is None:
        return call.changed(mask=near)
    if not 0 < call.mask.pieces * near.pieces <= 2:
        return None
    return call.changed(mask=call.mask & near)


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
