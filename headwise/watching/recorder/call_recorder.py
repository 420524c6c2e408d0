"""The recorder that adapters hand a model's attention calls to: it observes and keeps them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import torch
from torch import Tensor

from headwise.api import attention, observe, statistics
from headwise.core.intervals import Mask
from headwise.core.observation import Observation
from headwise.core.options import Options
from headwise.core.spans import within
from headwise.distributed.sharded_tensors import local_part
from headwise.handover import sharded, split_calls
from headwise.nn.call import Call
from headwise.watching.recorder.changed_call import ChangedCall, unchanged
from headwise.watching.recorder.checkpointing import recomputing
from headwise.watching.recorder.held_call import HeldCall, HeldRows, Output
from headwise.watching.recorder.interventions import Interventions
from headwise.watching.recorder.layer import LARGEST, WatchedLayer
from headwise.watching.recorder.layer_registry import LayerRegistry
from headwise.watching.recorder.marked_keys import Marked, MarkedKeys, weigh
from headwise.watching.recorder.model_passes import ModelPasses, forgets
from headwise.watching.recorder.other_layers import OtherLayers
from headwise.watching.recorder.paged_record import PagedCall, PagedRecords, captures
from headwise.watching.recorder.proof import Proofs
from headwise.watching.recorder.repeated_call import RepeatedCall
from headwise.watching.recorder.seen_call import (
    Kind,
    SeenCall,
    address,
    first_position,
    newest_key,
    owned,
    padding_rows,
    versions_of,
    why_not_linear,
)
from headwise.watching.recorder.unread import UnreadModules
from headwise.watching.recorder.watch_options import WatchOptions, plain_statistics

Hold = Callable[[HeldRows], HeldCall]


@dataclass
class CallRecorder:
    """Observes the calls of one model. `active` is False in steps that are passed over."""

    options: WatchOptions
    active: bool = True
    aside: bool = False
    """It only serves experiments, and steps aside where a watch sees the same module."""
    registry: LayerRegistry = field(init=False)
    passes: ModelPasses = field(init=False)
    interventions: Interventions = field(init=False)
    unread: UnreadModules = field(init=False)
    proofs: Proofs = field(init=False)
    paged: PagedRecords = field(init=False)
    others: OtherLayers = field(init=False)
    marked: MarkedKeys = field(init=False)
    _computed: dict[Kind, tuple[str, ...]] = field(init=False)  # statistics of each kind of layer
    _observed: set[str] = field(default_factory=set)
    """Modules that were observed inside their own pass; a recomputation of them must be too."""
    _repeated: dict[str, RepeatedCall] = field(default_factory=dict)
    """The last call of each module whose calls can be observed again by what it prepared."""
    _hidden: tuple[Mask, torch.Size, Tensor | None] | None = None  # the padding of the last mask

    def __post_init__(self) -> None:
        self.registry = LayerRegistry(self.options)
        self.passes = ModelPasses(self._end_pass)
        self.interventions = Interventions(self.registry)
        self.unread = UnreadModules(self.options.strict, self.registry.asked_for)
        self.proofs = Proofs(self.options.strict)
        options = self.options
        stats = plain_statistics(options.stats)
        self.paged = PagedRecords(stats, options.maps, options.sink_keys)
        self.others = OtherLayers(self.options.maps)
        self.marked = MarkedKeys({name: ids for name, ids in options.marked.items() if ids})
        self._computed = {kind: computed_statistics(self.options, kind) for kind in get_args(Kind)}

    def _end_pass(self) -> None:
        self._hidden = None
        self.unread.warn()

    def wants(self, name: str) -> bool:
        """True if this module's call should be handed over; ValueError in torch.jit.trace."""
        if torch._C._get_tracing_state() is not None:  # it would record what the watch does too
            raise ValueError(
                "torch.jit.trace can't record a watched model: detach() the watch first, or trace "
                "the model before it is watched"
            )
        if recomputing():
            return name in self._observed or self._awaited(name) is not None
        if not self.active:
            return False
        return self.registry.watches(name)

    def beside(
        self,
        name: str,
        call: Call,
        kind: Kind = "self",
        padding: Tensor | None = None,
        out: Tensor | None = None,
        maps: bool = True,
        forgotten: int | None = None,
        known: Mapping[str, Tensor] | None = None,
        proof: Tensor | None = None,
        changed: ChangedCall | None = None,
        output: Output | str | None = None,
        marked: Mapping[str, Marked] | None = None,
    ) -> None:
        """Observe a call whose output (B, Hq, N, Dv) the model computes itself.

        `maps=False` keeps nothing of it for a map, whatever the options say. `forgotten` counts the
        tokens before its first key that a cache no longer holds; None if that is not known. `known`
        has statistics that the call does not show, (B, Hq, N) each. `proof` is how far the model's
        output is off, if it was compared. `changed` is the call under the weights that experiments
        gave it. `output` is the tensor of the model whose gradient tells that of the call's output.
        `marked` has the keys of spans that its module told.
        """
        if recomputing():
            self._hold_again(name, call, output, out)
            return
        plain = changed is None and not known and marked is None and maps
        if (
            plain
            and proof is None
            and self._beside_again(name, call, kind, padding, out, forgotten)
        ):
            return
        share, whole = None, call
        if self.options.effects and not maps:
            output = f"it is written out, and has more than {LARGEST:,} weights per call"
        held = self._hold(call, output, out, changed) if self.options.effects else None
        if changed is not None:
            call = changed.single or changed.call
        if sharded(*call[:3]) is not None:  # this rank's heads, under the numbers of all
            part, given, share = local_part(*call)
            call, out = Call(*part, given), None if out is None else out.to_local()  # type: ignore[attr-defined]
        q, k, v = (x.detach() for x in call[:3])
        found_keys = self._marked(name, kind, q.shape[2]) if marked is None else self._asked(marked)
        look = self._look(name, kind, k.shape[2], forgotten, found_keys)
        known = known or {}
        if call.dropout or (out is not None and out.shape[:3] != q.shape[:3]):
            out = None  # its norm would be that of something else
        found = known if out is None else {*known, "output_norm"}
        look["stats"] = tuple(x for x in look["stats"] if x not in found)
        # Where the output is known, its norm needs no values and no second weighting of them.
        v = v if "output_norm" in look["stats"] else v[..., :0]
        if changed is None or changed.single is not None:
            seen = statistics(q, k, v, call.given, **look)
        else:
            seen = changed.statistics(**look)
            shown = changed.for_map()
            call, maps = shown or call, maps and shown is not None
        if changed is None or changed.single is not None:
            self._weigh(found_keys, call, forgotten, seen)
        self._add_losses(name, changed or unchanged(call), kind, seen)
        for stat in (x for x in self.options.stats if x in found):
            if stat in known:
                value = known[stat]
                seen.values[stat] = value if seen.rows is None else value.index_select(2, seen.rows)
            elif out is not None:
                seen.values[stat] = norms(out.detach(), seen)
        layer = self._keep(
            name, call, whole, kind, padding, seen, maps, forgotten, proof, share, held, found_keys
        )
        if plain and layer is not None and not call.dropout:
            self._remember(name, layer, (q, k, v), call.given, look, seen)

    def inside(
        self,
        name: str,
        call: Call,
        kind: Kind = "self",
        padding: Tensor | None = None,
        forgotten: int | None = None,
        changed: ChangedCall | None = None,
    ) -> Tensor:
        """Compute a call's output (B, Hq, N, Dv), and observe it in the same pass.

        Some cases are observed beside the output instead: a sample of the rows needs no pass over
        all of them; an engine that was asked for by name must compute the output; with dropout, the
        output's norm would be that of what is left of it; and of DTensors, this rank's heads are
        observed.
        """
        whole, single = call, call if changed is None else changed.single
        beside = self.options.rows is not None or call.engine != "auto" or bool(call.dropout)
        if beside or single is None or sharded(*call[:3]) is not None:
            out = (call if changed is None else changed).attend()
            with self.unread.reading(name):
                self.beside(
                    name, call, kind, padding, out, forgotten=forgotten, changed=changed,
                    output=itself(out),
                )  # fmt: skip
            return out
        call = single
        plain = changed is None and not recomputing()
        again = self._again(name, call, kind, forgotten, call[:3]) if plain else None
        if again is not None:
            known, out, seen = again
            seen = _detached(seen)
            with self.unread.reading(name):
                self._note(known.layer, call, call, kind, padding, seen, forgotten, repeated=known)
            return out
        try:
            marked = self._marked(name, kind, call.q.shape[2])
            look = self._look(name, kind, call.k.shape[2], forgotten, marked)
            out, seen = observe(call.q, call.k, call.v, **call.options(), **look)
        except Exception as error:
            if recomputing():
                raise  # PyTorch ends a recomputation by an exception, once it has what it needs
            out = attention(call.q, call.k, call.v, **call.options())  # or it raises the same
            self.unread.fail(name, error)
            return out
        if recomputing():
            self._hold_again(name, call, itself(out), out)
        else:
            self._observed.add(name)
            with self.unread.reading(name):
                self._add_losses(name, changed or unchanged(call), kind, seen)
                self._weigh(marked, call, forgotten, seen)
                _detached(seen)
                held = self._hold(call, itself(out), out) if self.options.effects else None
                layer = self._keep(
                    name, call, whole, kind, padding, seen, forgotten=forgotten, held=held,
                    marked=marked,
                )  # fmt: skip
            if plain and layer is not None:
                self._remember(name, layer, call[:3], call.given, look, seen)
        return out

    def _again(
        self,
        name: str,
        call: Call,
        kind: Kind,
        forgotten: int | None,
        tensors: tuple[Tensor, Tensor, Tensor],
    ) -> tuple[RepeatedCall, Tensor, Observation] | None:
        """Observe a call like the last one of its module; None if it may be another one.

        It is a whole sequence that attends to itself, the first call of its module in this pass.
        """
        known = self._repeated.get(name)
        if known is None or kind != "self" or forgotten or self.marked.found:
            return None
        if split_calls() is not None or not self.passes.first_call(name, kind):
            return None
        if self.registry.layers.get(name) is not known.layer or not known.valid:
            return None
        try:
            found = known.observe(tensors, call.given)
        except Exception:  # it is reported if it happens again
            found = None
        if found is None:
            del self._repeated[name]
            return None
        self.passes.note_call(name, kind)
        return known, *found

    def _beside_again(
        self,
        name: str,
        call: Call,
        kind: Kind,
        padding: Tensor | None,
        out: Tensor | None,
        forgotten: int | None,
    ) -> bool:
        """`beside` of a call like the last one of its module; False if it may be another one."""
        normed = "output_norm" in self.options.stats
        if call.dropout or (normed and (out is None or out.shape[:3] != call.q.shape[:3])):
            return False
        tensors = call.q, call.k, call.v[..., :0]
        found = self._again(name, call, kind, forgotten, tensors)
        if found is None:
            return False
        known, _, seen = found
        if normed and out is not None:
            seen.values["output_norm"] = norms(out.detach(), seen)
        self._note(known.layer, call, call, kind, padding, seen, forgotten, repeated=known)
        return True

    def _remember(
        self,
        name: str,
        layer: WatchedLayer,
        tensors: tuple[Tensor, Tensor, Tensor],
        options: Options,
        look: dict[str, Any],
        seen: Observation,
    ) -> None:
        """Remember what a call was observed by, if the next ones of its module may be like it."""
        self._repeated.pop(name, None)
        q, k, _ = tensors
        more = self.options.effects or self.options.spans or self.options.sparse.named
        whole = layer.name == name and layer.kind == "self" and q.shape[2] == k.shape[2]
        if more or not whole or layer.share is not None or self.marked.found:
            return
        asked = look["stats"], look["rows"], look["sink_keys"]
        known = RepeatedCall.of(layer, tensors, options, *asked, seen)
        if known is not None:
            self._repeated[name] = known

    def of_requests(self, name: str, call: PagedCall, proof: Tensor | None = None) -> Tensor:
        """Compute and observe a step of continuous batching; returns the output (T, Hq, Dv)."""
        q, keys = call.batch.q, call.batch.keys
        q, keys = (x.transpose(0, 1)[None] for x in (q, keys))
        layer = self.registry.layer(name, Call(q, keys, keys, Options()), "self")
        if layer is None:
            return call.batch.attend()
        ids = self.passes.ids
        known = ids is not None and ids.numel() == len(q[0, 0])
        call = replace(call, tokens=ids if known else None, step=self.passes.count)
        try:
            with torch.no_grad():
                out, seen = self.paged.observe(name, call)
        except Exception as error:
            self.unread.fail(name, error)
            return call.batch.attend()
        assert layer.slot is not None
        before = layer.slot.read()[:-1].clone() if self.paged.warms_up(call) else None
        layer.slot.add(seen, None, proof)
        if before is not None:  # nobody asked for these tokens
            layer.slot.read()[:-1].copy_(before)
        layer.recorded, layer.replayed = True, layer.replayed or captures(q)
        layer.stats = tuple(x for x in self.options.stats if x in seen.values)
        return out

    def _add_losses(self, name: str, call: ChangedCall, kind: Kind, seen: Observation) -> None:
        """Add what sparse attention would lose, if the watch was given policies."""
        policies = self.options.sparse
        if not policies.for_kind(kind):
            return
        try:
            if split_calls() is not None:
                raise ValueError("its sequence is split between processes")
            share = self.registry.placed(name, call.call.q.shape[1], call.call.q.shape[3])
            seen.values |= call.losses(policies, kind, seen.rows, share)
        except ValueError as error:  # the policy was made for another call
            said = ValueError(f"what it would lose under sparse= is not known: {error}")
            self.unread.fail(name, said)

    def _marked(self, name: str, kind: Kind, rows: int) -> Mapping[str, Marked]:
        """The marked keys of a call whose rows are the tokens of the pass."""
        marked = self.marked
        own = kind == "self" and rows == marked.rows and not self.registry.in_tower(name)
        return marked.found if own and split_calls() is None else {}

    def _asked(self, marked: Mapping[str, Marked]) -> Mapping[str, Marked]:
        """Those that the user did not name otherwise."""
        return {name: keys for name, keys in marked.items() if name in self.options.marked}

    def _weigh(
        self, marked: Mapping[str, Marked], call: Call, forgotten: int | None, seen: Observation
    ) -> None:
        """Add the weight on marked keys, such as those of an image."""
        if not marked:
            return
        weigh(marked, call, forgotten or 0, self.options.rows, seen)
        if "top_prob" not in self.options.stats:
            seen.values.pop("top_prob")

    def _look(
        self,
        name: str,
        kind: Kind,
        keys: int,
        forgotten: int | None,
        marked: Mapping[str, Marked],
    ) -> dict[str, Any]:
        options, stats = self.options, self._computed[kind]
        if marked and "top_prob" not in stats:
            stats = (*stats, "top_prob")
        spanned = kind != "window" and not self.registry.in_tower(name)
        return {
            "stats": stats,
            "rows": options.rows,
            "sink_keys": options.sink_keys,
            "spans": within(options.spans, keys, forgotten or 0) if spanned else {},
        }

    def _keep(
        self,
        name: str,
        call: Call,
        whole: Call,
        kind: Kind,
        padding: Tensor | None,
        seen: Observation,
        maps: bool = True,
        forgotten: int | None = None,
        proof: Tensor | None = None,
        share: tuple[int, int] | None = None,
        held: Hold | None = None,
        marked: Mapping[str, Marked] | None = None,
    ) -> WatchedLayer | None:
        """Keep a call in its layer; None if that was not asked for."""
        # `whole` is the call before experiments changed it: its mask tells positions and padding.
        passes = self.passes
        first = first_position(whole) if kind == "self" else 0
        start = first + (forgotten or 0) if kind == "self" else 0
        passes.first = max(passes.first, start)
        passes.past = passes.past or start > 0
        name, again = passes.depth_name(name, call, kind)
        name = self.registry.distinct_name(name, kind)
        layer = self.registry.layer(name, call, kind)
        if layer is None:
            return None
        layer.take_place(share)
        self._note(
            layer, call, whole, kind, padding, seen, forgotten, maps, proof, held, first, again,
            marked,
        )  # fmt: skip
        return layer

    def _note(
        self,
        layer: WatchedLayer,
        call: Call,
        whole: Call,
        kind: Kind,
        padding: Tensor | None,
        seen: Observation,
        forgotten: int | None,
        maps: bool = True,
        proof: Tensor | None = None,
        held: Hold | None = None,
        first: int = 0,
        again: bool = False,
        marked: Mapping[str, Marked] | None = None,
        repeated: RepeatedCall | None = None,
    ) -> None:
        """Add a call to its layer; `first` is where its rows begin among its keys."""
        options, passes, divided = self.options, self.passes, split_calls()
        start = first + (forgotten or 0) if kind == "self" else 0
        if padding is None and kind == "self":
            padding = self._padding(whole) if divided is None else divided.padded_rows
        lse = seen.values.get("lse") if seen.rows is None and options.maps else None
        if "lse" not in options.stats:
            seen.values.pop("lse", None)
        own_end = first + call.q.shape[2] if kind == "self" else None  # of the keys of its rows
        kept = part = None
        if options.maps and maps and divided is not None:
            part = part_for_map(call)
        elif options.maps and maps:
            kept = call_for_map(call, own_end)
        last = layer.last
        if forgotten is None and last is not None and forgets(layer, call, start):
            start = last.start + last.queries  # the cache's first keys are not the sequence's
            passes.first = max(passes.first, start)
        continues = passes.continues(layer, call, start, again)
        found = SeenCall(
            call.q.shape[0],
            call.q.shape[2],
            start,
            seen if options.maps else None,
            padding if options.maps else None,
            kept,
            lse,
            why_not_linear(call),
            call.k.shape[2],
            None if own_end is None else newest_key(call, own_end - 1),
            address(call.k),
            kept=None if part is None else versions_of(part),
            split=None if part is None or divided is None else (divided, part),
        )
        layer.add(found, continues)
        layer.parts = {part: keys.shown for part, keys in (marked or {}).items()}
        if held is not None:
            layer.held = held(HeldRows(start, forgotten or 0, padding, divided))
        assert layer.slot is not None
        layer.recorded = True
        if repeated is not None:
            repeated.add(seen, padding)
            return
        layer.slot.add(seen, padding, proof)
        layer.stats = tuple(x for x in options.stats if x in layer.stats or x in seen.values)

    def _hold(
        self,
        call: Call,
        output: Output | str | None,
        out: Tensor | None,
        changed: ChangedCall | None = None,
    ) -> Hold:
        """Return what holds a call for its effects, once it is known where its rows stand."""
        if changed is not None:
            shown = changed.for_map()
            if shown is None:
                output = f"experiments change it, and it has more than {LARGEST:,} weights per call"
            call = shown or call
        if sharded(*call[:3]) is not None:
            output = "its queries, keys and values are DTensors"
        return lambda rows: HeldCall.of(call, output, out, rows)

    def _awaited(self, name: str) -> WatchedLayer | None:
        """The layer of a module whose forward ran without gradients, and may be run again."""
        layer = self.registry.layers.get(name) if self.options.effects else None
        waits = layer is not None and layer.held is not None and layer.held.awaits
        return layer if waits else None

    def _hold_again(
        self, name: str, call: Call, output: Output | str | None, out: Tensor | None
    ) -> None:
        """Hold a call that is recomputed with gradients: checkpoints may run it without first."""
        layer = self._awaited(name)
        if layer is not None:
            assert layer.held is not None
            layer.held = HeldCall.of(call, output, out, layer.held.rows)

    def _padding(self, call: Call) -> Tensor | None:
        """The rows that are padding by a call's mask, which the layers of a model often share."""
        if call.mask is None:
            return None
        known, shape = self._hidden, call.q.shape[:1] + call.q.shape[2:3] + call.k.shape[2:3]
        if known is None or known[0] is not call.mask or known[1] != shape:
            known = (call.mask, shape, padding_rows(call.mask, call.q, call.k))
            self._hidden = known
        return known[2]

    def leave_out(self, layers: Iterable[WatchedLayer], error: Exception) -> None:
        """Take the layers of a module out of the recording: it was misread."""
        for layer in layers:
            self.registry.drop(layer)
            self.unread.leave_out(layer.module, error)


def computed_statistics(options: WatchOptions, kind: Kind) -> tuple[str, ...]:
    """The statistics that are computed of a call, and the lse if a map needs it; spans apart."""
    stats = plain_statistics(options.stats_of(kind))
    if options.maps and options.rows is None and "lse" not in stats:
        stats = (*stats, "lse")
    return stats


def _detached(seen: Observation) -> Observation:
    """The same, with those values detached that have gradients."""
    for key in ("lse", "entropy"):
        if key in seen.values:
            seen.values[key] = seen.values[key].detach()
    return seen


def itself(out: Tensor) -> Output:
    """An output (B, Hq, N, Dv) that the model goes on with."""
    return Output(out, lambda grad: grad)


def call_for_map(call: Call, own_end: int | None) -> Call:
    """A call with what its map needs; `own_end` is where the keys of its own rows end."""
    k = call.k.detach()
    if own_end is not None and k.shape[2] > own_end:
        k = k.clone()  # a cache with room to spare, which it will write into
    none = call.v.new_empty(*call.v.shape[:3], 0)  # a view would hold all the values
    return call._replace(q=call.q.detach(), k=k, v=none)


def part_for_map(call: Call) -> Call:
    """A copy of the call on a part of a sequence, whose map needs keys of the other ranks too."""
    none = call.v.new_empty(*call.v.shape[:3], 0)
    return owned(call._replace(q=call.q.detach(), k=call.k.detach(), v=none))


def norms(out: Tensor, seen: Observation) -> Tensor:
    """The norms of the observed rows of an output (B, H, N, D); 0 for rows that see no key."""
    rows = out if seen.rows is None else out.index_select(2, seen.rows)
    wide = torch.promote_types(out.dtype, torch.float32)
    found: Tensor = torch.linalg.vector_norm(rows, dim=-1, dtype=wide)
    return torch.where(seen.sees, found, 0.0)
