"""The recorder that adapters hand a model's attention calls to: it observes and keeps them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from headwise.api import attention, observe, statistics
from headwise.core.edges import Edge, hole_of, without
from headwise.core.intervals import Mask
from headwise.core.observation import STATISTICS, Observation
from headwise.core.place import Place
from headwise.core.reduction import Columns
from headwise.core.spans import PREFIX, Span, within
from headwise.distributed.sharded_tensors import local_part
from headwise.handover import sharded, split_calls
from headwise.nn.call import Call
from headwise.watching.board import Board
from headwise.watching.layer import WatchedLayer
from headwise.watching.proof import Proofs
from headwise.watching.seen_call import (
    Kind,
    SeenCall,
    address,
    bent,
    first_position,
    newest_key,
    owned,
    padding_rows,
    versions_of,
)
from headwise.watching.unread import UnreadModules

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
    spans: Mapping[str, Span] = field(default_factory=dict)  # `stats` has them as span_<name>


@dataclass
class CallRecorder:
    """Observes the calls of one model. `active` is False in steps that are passed over."""

    options: WatchOptions
    layers: dict[str, WatchedLayer] = field(default_factory=dict)
    boards: dict[object, Board] = field(default_factory=dict)  # by device, and group if compiled
    active: bool = True
    tokens: Tensor | None = None  # (B, N) of the last pass, if the model was called with tokens
    silenced: dict[str, int] = field(default_factory=dict)  # heads that are switched off
    edges: tuple[Edge, ...] = ()  # that are knocked out
    cut_edges: set[Edge] = field(default_factory=set)  # that have hidden something
    unread: UnreadModules = field(init=False)
    proofs: Proofs = field(init=False)
    cut_proofs: Proofs = field(default_factory=lambda: Proofs(strict=True))  # of knocked-out calls
    passes: int = 0  # of the model, whether or not any attention was seen
    numbered: bool = False  # a step has ended: layers keep their numbers
    some_layers: bool = False  # other ranks have other layers of the model, which shift its numbers
    attended: dict[str, int] = field(default_factory=dict)  # modules asked about edges, in order
    _observed: set[str] = field(
        default_factory=set
    )  # inside their own pass; a recomputation must be too
    _selected: dict[str, bool] = field(default_factory=dict)
    _depth: int = 0  # modules of the model that are running
    _calls: dict[str, int] = field(default_factory=dict)  # calls of each module in this pass so far
    _ids: Tensor | None = None  # the tokens that this forward was called with
    _first: int = 0  # the position of its first token
    _past: bool = False  # this forward continues from a cache
    _hidden: tuple[Mask, torch.Size, Tensor | None] | None = None  # the padding of the last mask
    _cut: tuple[Mask, Mask | None] | None = None  # the last mask with edges cut, and the one before

    def __post_init__(self) -> None:
        self.unread = UnreadModules(self.options.strict, self.asked_for)
        self.proofs = Proofs(self.options.strict)

    def board(self, device: torch.device) -> Board:
        """The board of a device, a new one if need be."""
        if device not in self.boards:
            self.boards[device] = Board(Columns(self.options.stats), device)
        return self.boards[device]

    def group_board(self, group: tuple[int, str], device: torch.device) -> Board:
        """The board of layers that are built alike and run compiled: it must not move."""
        key = (device, *group)
        if key not in self.boards:
            self.boards[key] = Board(Columns(self.options.stats), device)
        return self.boards[key]

    def traced_layer(
        self, module: str, again: int, kind: Kind, heads: int, board: Board
    ) -> WatchedLayer | None:
        """The layer of a module that runs compiled; None if it was not asked for.

        `again` counts its calls before in the same pass.
        """
        name = self._distinct(f"{module}#{again}" if again else module, kind)
        if name not in self._selected:
            self._select(name, kind, heads, known=False)
        layer = self.layers.get(name)
        moves = layer is not None and (layer.slot is None or layer.slot.board is not board)
        if layer is not None and moves:
            layer.slot = board.slot(heads) if layer.slot is None else layer.slot.moved(board)
            layer.compiled = layer.recorded = True
        return layer

    def renumber(self, order: Iterable[str]) -> None:
        """Number the layers in this order of their names, until a step has ended.

        Compiled code shows its layers group by group, not in the order in which they run.
        """
        if self.numbered:
            return
        names = [name for name in order if name in self._selected]
        names += [name for name in self._selected if name not in names]
        self._selected = {name: self._selected[name] for name in names}
        self.layers = {name: self.layers[name] for name in names if name in self.layers}
        for number, name in enumerate(names):
            if name in self.layers:
                self.layers[name].number = number

    def begin(self, given: tuple[Any, ...] = (), options: Mapping[str, Any] | None = None) -> None:
        """A module of the model starts to run; a pass begins with the outermost one."""
        if recomputing():
            return
        if self._depth == 0:
            self.passes += 1
            self._calls, self._past, self._first, self._ids = {}, False, 0, None
        self._depth += 1
        if given or options:
            self._ids = token_ids(given, options or {})

    def end(self) -> None:
        """A module has run, with or without an error."""
        if recomputing() or self._depth == 0:
            return
        self._depth -= 1
        if self._depth:
            return
        self._hidden = self._cut = None
        before, ids = self.tokens, self._ids
        before = None if before is None else before[:, : self._first]  # the rest was taken back
        if self._past and before is not None and ids is not None and len(before) == len(ids):
            self.tokens = torch.cat((before, ids), 1)
        elif ids is not None or not self._past:
            self.tokens = None if self._past else ids
        self.unread.warn()

    def asked_for(self, name: str) -> bool:
        """True if a layer of this name would be one of those that are looked at."""
        return self.matches(len(self._selected), name)

    def matches(self, number: int, name: str) -> bool:
        """True if a layer of this number and name was asked for."""
        wanted = self.options.layers
        return wanted is None or matches(number, name, wanted)

    def wants(self, name: str) -> bool:
        """True if this module's call should be handed over."""
        if recomputing():
            return name in self._observed  # it must do the same again
        if not self.active:
            return False
        known = [on for key, on in self._selected.items() if key.partition("#")[0] == name]
        return not known or any(known)

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
    ) -> None:
        """Observe a call whose output (B, Hq, N, Dv) the model computes itself.

        `maps=False` keeps nothing of it for a map, whatever the options say. `forgotten` counts the
        tokens before its first key that a cache no longer holds; None if that is not known. `known`
        has statistics that the call does not show, (B, Hq, N) each. `proof` is how far the model's
        output is off, if it was compared.
        """
        if recomputing():
            return
        share = None
        if sharded(*call[:3]) is not None:  # this rank's heads, under the numbers of all
            part, given, share = local_part(*call[:3], call.options())
            call, out = Call(*part, **given), None if out is None else out.to_local()  # type: ignore[attr-defined]
        q, k, v = (x.detach() for x in call[:3])
        options = call._replace(q=q, k=k, v=v).options()
        look = self._look(kind, k.shape[2], forgotten)
        del options["dropout"], options["engine"]
        known = known or {}
        if call.dropout or (out is not None and out.shape[:3] != q.shape[:3]):
            out = None  # its norm would be that of something else
        found = known if out is None else {*known, "output_norm"}
        look["stats"] = tuple(x for x in look["stats"] if x not in found)
        # Where the output is known, its norm needs no values and no second weighting of them.
        v = v if "output_norm" in look["stats"] else v[..., :0]
        seen = statistics(q, k, v, **options, **look)
        for stat in (x for x in self.options.stats if x in found):
            if stat in known:
                value = known[stat]
                seen.values[stat] = value if seen.rows is None else value.index_select(2, seen.rows)
            elif out is not None:
                seen.values[stat] = norms(out.detach(), seen)
        self._keep(name, call, kind, padding, seen, maps, forgotten, proof, share)

    def inside(
        self,
        name: str,
        call: Call,
        kind: Kind = "self",
        padding: Tensor | None = None,
        forgotten: int | None = None,
    ) -> Tensor:
        """Compute a call's output (B, Hq, N, Dv), and observe it in the same pass.

        Some cases are observed beside the output instead: a sample of the rows needs no pass over
        all of them; an engine that was asked for by name must compute the output; with dropout, the
        output's norm would be that of what is left of it; and of DTensors, this rank's heads are
        observed.
        """
        beside = self.options.rows is not None or call.engine != "auto" or bool(call.dropout)
        if beside or sharded(*call[:3]) is not None:
            out = attention(call.q, call.k, call.v, **call.options())
            with self.unread.reading(name):
                self.beside(name, call, kind, padding, out, forgotten=forgotten)
            return out
        try:
            look = self._look(kind, call.k.shape[2], forgotten)
            out, seen = observe(call.q, call.k, call.v, **call.options(), **look)
        except Exception as error:
            if recomputing():
                raise  # PyTorch ends a recomputation by an exception, once it has what it needs
            out = attention(call.q, call.k, call.v, **call.options())  # or it raises the same
            self.unread.fail(name, error)
            return out
        if not recomputing():
            self._observed.add(name)
            with self.unread.reading(name):
                for key in ("lse", "entropy"):  # those that have gradients
                    if key in seen.values:
                        seen.values[key] = seen.values[key].detach()
                self._keep(name, call, kind, padding, seen, forgotten=forgotten)
        return out

    def silence(self, name: str, out: Tensor, axis: int = -3) -> Tensor:
        """The output of a module's heads, along an axis; a head that is switched off gives 0."""
        if name not in self.silenced:
            return out
        if out.ndim < 4:
            return torch.zeros_like(out)  # (B, N, D): one head
        kept = torch.ones(out.shape[axis], dtype=out.dtype, device=out.device)
        kept[self.silenced[name]] = 0
        return out * kept.reshape(-1, *[1] * (-1 - axis))

    def edges_of(self, name: str) -> tuple[Edge, ...]:
        """The edges of a module that are knocked out."""
        if not self.edges:
            return ()
        number = self.attended.setdefault(name, len(self.attended))
        if name in self._selected:
            number = list(self._selected).index(name)
        return tuple(edge for edge in self.edges if matches(number, name, (edge.layer,)))

    def cut(self, name: str, call: Call, kind: Kind, forgotten: int | None = None) -> Call:
        """A module's call without the edges that are knocked out."""
        edges = self.edges_of(name)
        if not edges:
            return call
        start = first_position(call) + (forgotten or 0) if kind == "self" else 0
        place = Place.of(call.q, call.k)
        holes = {edge: hole_of(edge, place, start, forgotten or 0) for edge in edges}
        found = {edge: hole for edge, hole in holes.items() if hole is not None}
        self.cut_edges.update(found)
        if not found:
            return call
        mask = without(call.mask, list(found.values()), place)
        self._cut = (mask, call.mask)
        return call._replace(mask=mask)

    def refuse_edges(self, name: str, reason: str) -> None:
        """Raise ValueError if edges of a module are knocked out, which can't be done there."""
        if self.edges_of(name):
            raise ValueError(f"keys can't be hidden from heads of {name or 'the model'}: {reason}")

    def _look(self, kind: Kind, keys: int, forgotten: int | None) -> dict[str, Any]:
        options = self.options
        stats, spans = plain_statistics(self._stats(kind)), options.spans
        if options.maps and options.rows is None and "lse" not in stats:
            stats = (*stats, "lse")
        return {
            "stats": stats,
            "rows": options.rows,
            "sink_keys": options.sink_keys,
            "spans": {} if kind == "window" else within(spans, keys, forgotten or 0),
        }

    def _keep(
        self,
        name: str,
        call: Call,
        kind: Kind,
        padding: Tensor | None,
        seen: Observation,
        maps: bool = True,
        forgotten: int | None = None,
        proof: Tensor | None = None,
        share: tuple[int, int] | None = None,
    ) -> None:
        options, whole, divided = self.options, call, split_calls()
        if self._cut is not None and call.mask is self._cut[0]:
            whole = call._replace(mask=self._cut[1])  # which tells positions and padding
        first = first_position(whole) if kind == "self" else 0
        start = first + (forgotten or 0) if kind == "self" else 0
        self._first = max(self._first, start)
        self._past = self._past or start > 0
        layer = self._layer(self._resolved(name, kind), call, kind)
        if layer is None:
            return
        if share is not None:
            layer.share, layer.first_head = share, share[0]
        if padding is None and kind == "self":
            padding = self._padding(whole) if divided is None else divided.padded_rows
        lse = seen.values.get("lse") if seen.rows is None and options.maps else None
        if "lse" not in options.stats:
            seen.values.pop("lse", None)
        kept = split = None
        if options.maps and maps and divided is not None:  # most of its keys are elsewhere
            none = call.v.new_empty(*call.v.shape[:3], 0)
            part = call._replace(q=call.q.detach(), k=call.k.detach(), v=none)
            split = (divided, owned(part))
        elif options.maps and maps:
            k = call.k.detach()
            if kind == "self" and k.shape[2] > first + call.q.shape[2]:
                k = k.clone()  # a cache with room to spare, which it will write into
            none = call.v.new_empty(*call.v.shape[:3], 0)  # a view would hold all the values
            kept = call._replace(q=call.q.detach(), k=k, v=none)
        last = layer.last
        if forgotten is None and last is not None and forgets(layer, call, start):
            start = last.start + last.queries  # the cache's first keys are not the sequence's
            self._first = max(self._first, start)
        continues = self._continues(layer, call, start)
        found = SeenCall(
            call.q.shape[0],
            call.q.shape[2],
            start,
            seen if options.maps else None,
            padding if options.maps else None,
            kept,
            lse,
            bent(call),
            call.k.shape[2],
            newest_key(call, first + call.q.shape[2] - 1) if kind == "self" else None,
            address(call.k),
            kept=None if split is None else versions_of(split[1]),
            split=split,
        )
        layer.add(found, continues)
        assert layer.slot is not None
        layer.slot.add(seen, padding, proof)
        layer.recorded = True
        layer.stats = tuple(x for x in options.stats if x in layer.stats or x in seen.values)

    def _padding(self, call: Call) -> Tensor | None:
        """The rows that are padding by a call's mask, which the layers of a model often share."""
        if call.mask is None:
            return None
        known, shape = self._hidden, call.q.shape[:1] + call.q.shape[2:3] + call.k.shape[2:3]
        if known is None or known[0] is not call.mask or known[1] != shape:
            known = (call.mask, shape, padding_rows(call.mask, call.q, call.k))
            self._hidden = known
        return known[2]

    def _resolved(self, name: str, kind: Kind) -> str:
        """A distinct name for each depth at which a pass uses the same module, and each kind."""
        again = self._calls.get(name, 0)
        self._calls[name] = again + 1
        if again and kind == "self" and not self._past and self._depth:
            name = f"{name}#{again}"
        return self._distinct(name, kind)

    def _distinct(self, name: str, kind: Kind) -> str:
        """A name that no layer of another kind has."""
        known = self.layers.get(name)
        return name if known is None or known.kind == kind else f"{name}#{kind}"

    def _continues(self, layer: WatchedLayer, call: Call, start: int) -> bool:
        """True if a call adds rows to the one before: the next step of a model that generates."""
        last = layer.last
        if last is None or layer.ended or last.batch != call.q.shape[0]:
            return False  # beams begin with a larger batch
        if layer.kind == "self":  # before the end: tokens were taken back
            return 0 < start <= last.start + last.queries
        if layer.kind == "window":
            return self._past
        again = self._depth > 0 and self._calls.get(layer.module, 0) > 1
        same = call.q.shape[2] == 1 and last.address == address(call.k)
        return self._past or again or same

    def _layer(self, name: str, call: Call, kind: Kind) -> WatchedLayer | None:
        """The layer of this name, a new one if need be; None if it was not asked for."""
        if name not in self._selected:
            self._select(name, kind, call.q.shape[1], width=call.q.shape[3])
        layer = self.layers.get(name)
        if layer is not None and (layer.slot is None or layer.slot.board.device != call.q.device):
            board, slot = self.board(call.q.device), layer.slot
            layer.slot = board.slot(layer.heads) if slot is None else slot.moved(board)
        return layer

    def _select(
        self, name: str, kind: Kind, heads: int, known: bool = True, width: int = 0
    ) -> None:
        """Number a layer that is seen for the first time, and keep it if it was asked for.

        While its number is not known for certain, every layer is kept.
        """
        number = len(self._selected)
        self._selected[name] = self.matches(number, name) or not known or self.some_layers
        if self._selected[name]:
            sampled, stats = self.options.rows is not None, self._stats(kind)
            self.layers[name] = WatchedLayer(number, name, kind, heads, sampled, stats, width=width)

    def _stats(self, kind: Kind) -> tuple[str, ...]:
        """The statistics that are seen of a layer of this kind."""
        stats = self.options.stats if kind != "window" else plain_statistics(self.options.stats)
        return tuple(x for x in stats if kind == "self" or x not in WITHIN)

    def leave_out(self, layers: Iterable[WatchedLayer], error: Exception) -> None:
        """Take the layers of a module out of the recording: it was misread."""
        for layer in layers:
            self._selected[layer.name] = False
            self.layers.pop(layer.name, None)
            self.unread.leave_out(layer.module, error)

    def known(self) -> list[str]:
        """The names of all attention layers the model has shown so far."""
        return list(self._selected)


def plain_statistics(stats: Iterable[str]) -> tuple[str, ...]:
    """The statistics that are not weights on spans."""
    return tuple(name for name in stats if not name.startswith(PREFIX))


def forgets(layer: WatchedLayer, call: Call, start: int) -> bool:
    """True if a call's cache has forgotten tokens, rather than taken the last ones back.

    Then the newest key of the call before is still there, right before the call's own. Written-out
    logits have no keys: there a full cache shows as many as the time before.
    """
    last = layer.last
    if last is None or not layer.prompted or not 0 < start < last.start + last.queries:
        return False
    before = newest_key(call, start - 1)
    if last.newest is None or before is None:
        return last.keys == call.k.shape[2]
    return last.newest.shape == before.shape and torch.equal(last.newest, before)


def token_ids(given: tuple[Any, ...], options: Mapping[str, Any]) -> Tensor | None:
    """The tokens (B, N) a model is called with; None if there are none, or two kinds of them."""
    names = ("input_ids", "decoder_input_ids")
    values = [*given, *(options[name] for name in names if name in options)]
    found = [x.detach() for x in values if isinstance(x, Tensor) and x.ndim == 2]
    found = [x for x in found if not x.is_floating_point() and x.dtype != torch.bool]
    return found[0] if len(found) == 1 else None


def matches(number: int, name: str, wanted: Sequence[int | str]) -> bool:
    """True if a layer was asked for, by its number or by a pattern such as "*.3.attn"."""
    return any(
        number == one if isinstance(one, int) else fnmatchcase(name, one) or name == one
        for one in wanted
    )


def norms(out: Tensor, seen: Observation) -> Tensor:
    """The norms of the observed rows of an output (B, H, N, D); 0 for rows that see no key."""
    rows = out if seen.rows is None else out.index_select(2, seen.rows)
    wide = torch.promote_types(out.dtype, torch.float32)
    found: Tensor = torch.linalg.vector_norm(rows, dim=-1, dtype=wide)
    return torch.where(seen.sees, found, 0.0)


def recomputing() -> bool:
    """True if this forward runs inside a backward, as gradient checkpointing recomputes one."""
    inside: bool = torch._C._current_graph_task_id() != -1
    return inside
