"""What adapters talk to: they hand over a model's attention calls, it looks and keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from headwise.api import attention, observe, statistics
from headwise.core.observation import STATISTICS, Observation
from headwise.core.place import Place
from headwise.nn.call import Call
from headwise.score import Dot, General
from headwise.watching.layer import WITHIN, Kind, Layer, Part
from headwise.watching.padding import padding_rows


@dataclass(frozen=True)
class Looking:
    """What to look at, and how closely."""

    stats: tuple[str, ...] = STATISTICS
    rows: int | None = None
    layers: tuple[int | str, ...] | None = None
    heads: tuple[int, ...] | None = None
    every: int = 1
    maps: bool = True
    sink_keys: int = 1


@dataclass
class Recorder:
    """Looks at the calls of one model. `active` is False in steps that are passed over."""

    looking: Looking
    layers: dict[str, Layer] = field(default_factory=dict)
    active: bool = True
    tokens: Tensor | None = None  # (B, N) of the last pass, where the model was called with them
    silenced: dict[str, int] = field(default_factory=dict)  # heads that are switched off
    ran: bool = False  # the model did run, whether or not an attention was seen
    _observed: set[str] = field(default_factory=set)  # from inside: a recomputation does so too
    _selected: dict[str, bool] = field(default_factory=dict)
    _depth: int = 0  # modules of the model that are running
    _calls: dict[str, int] = field(default_factory=dict)  # of each module in this pass so far
    _ids: Tensor | None = None  # what this forward was called with
    _past: bool = False  # this forward goes on from a cache

    def begin(self, given: tuple[Any, ...] = (), options: Mapping[str, Any] | None = None) -> None:
        """A module of the model starts to run; the outermost one makes a pass."""
        if recomputing():
            return
        if self._depth == 0:
            self.ran, self._calls, self._past, self._ids = True, {}, False, None
        self._depth += 1
        if given or options:
            self._ids = token_ids(given, options or {})

    def end(self) -> None:
        """It has run, well or not."""
        if recomputing() or self._depth == 0:
            return
        self._depth -= 1
        if self._depth:
            return
        before, ids = self.tokens, self._ids
        if self._past and before is not None and ids is not None and len(before) == len(ids):
            self.tokens = torch.cat((before, ids), 1)
        elif ids is not None or not self._past:
            self.tokens = None if self._past else ids

    def wants(self, name: str) -> bool:
        """Whether to hand over this module's call: not where nobody looks at it."""
        if recomputing():
            return name in self._observed  # it must do again what it did
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
    ) -> None:
        """Look at a call whose output (B, Hq, N, Dv) someone else computes, or has computed.

        `maps=False` keeps nothing of it for a map, whatever was asked for.
        """
        if recomputing():
            return
        q, k, v = (x.detach() for x in call[:3])
        options, look = call._replace(q=q, k=k, v=v).options(), self._look(kind)
        del options["dropout"], options["engine"]
        norm = None
        if out is not None and look["rows"] is None and not call.dropout:
            # The output is known, so its norm needs no values and no second weighting of them.
            norm, v = torch.linalg.vector_norm(out.detach(), dim=-1, dtype=wide(out)), v[..., :0]
            look["stats"] = tuple(x for x in look["stats"] if x != "output_norm")
        seen = statistics(q, k, v, **options, **look)
        if norm is not None and "output_norm" in self.looking.stats:
            seen.values["output_norm"] = norm
        self._keep(name, call, kind, padding, seen, maps)

    def inside(
        self, name: str, call: Call, kind: Kind = "self", padding: Tensor | None = None
    ) -> Tensor:
        """Compute a call's output (B, Hq, N, Dv), and look at it in the same pass.

        A sample of the rows needs no pass over all of them, an engine that was asked for by name
        stays the one that computes the output, and where a CPU is to compute gradients PyTorch's
        kernel with the statistics beside it is faster than one pass with a backward of its own.
        """
        learning = call.q.device.type == "cpu" and torch.is_grad_enabled() and call.q.requires_grad
        if self.looking.rows is not None or call.engine != "auto" or learning:
            out = attention(call.q, call.k, call.v, **call.options())
            self.beside(name, call, kind, padding, out)
            return out
        out, seen = observe(call.q, call.k, call.v, **call.options(), **self._look(kind))
        if not recomputing():
            self._observed.add(name)
            seen.values = {key: value.detach() for key, value in seen.values.items()}
            self._keep(name, call, kind, padding, seen)
        return out

    def silence(self, name: str, out: Tensor, axis: int = -3) -> Tensor:
        """The output of a module's heads, along an axis, without the head that is switched off."""
        if name not in self.silenced:
            return out
        if out.ndim < 4:
            return torch.zeros_like(out)  # (B, N, D): there is one head
        kept = torch.ones(out.shape[axis], dtype=out.dtype, device=out.device)
        kept[self.silenced[name]] = 0
        return out * kept.reshape(-1, *[1] * (-1 - axis))

    def _look(self, kind: Kind) -> dict[str, Any]:
        looking = self.looking
        stats = tuple(x for x in looking.stats if kind == "self" or x not in WITHIN)
        if looking.maps and looking.rows is None and "lse" not in stats:
            stats = (*stats, "lse")
        return {"stats": stats, "rows": looking.rows, "sink_keys": looking.sink_keys}

    def _keep(
        self,
        name: str,
        call: Call,
        kind: Kind,
        padding: Tensor | None,
        seen: Observation,
        maps: bool = True,
    ) -> None:
        looking = self.looking
        start = first_position(call) if kind == "self" else 0
        self._past = self._past or start > 0
        layer = self._layer(self._resolved(name, kind), call, kind)
        if layer is None:
            return
        if padding is None and kind == "self":
            padding = padding_rows(call.mask, call.q, call.k)
        lse = seen.values.get("lse") if seen.rows is None else None
        if "lse" not in looking.stats:
            seen.values.pop("lse", None)
        kept = None
        if looking.maps and maps:
            k = call.k.detach()
            if kind == "self" and k.shape[2] > start + call.q.shape[2]:
                k = k.clone()  # a cache with room to spare, which it will write into
            none = call.v.new_empty(*call.v.shape[:3], 0)  # a view would hold all the values
            kept = call._replace(q=call.q.detach(), k=k, v=none)
        continues = self._continues(layer, call, start)
        last = layer.last
        if continues and last is not None and forgetting(layer, call, start):
            start = last.start + last.queries  # the cache's first keys are not the sequence's
        part = Part(call.q.shape[2], start, seen, padding, kept, lse, bent(call), address(call.k))
        layer.add(part, continues)

    def _resolved(self, name: str, kind: Kind) -> str:
        """A name of its own for each depth at which a pass uses the same module, and each kind."""
        again = self._calls.get(name, 0)
        self._calls[name] = again + 1
        if again and kind == "self" and not self._past and self._depth:
            name = f"{name}#{again}"
        known = self.layers.get(name)
        return name if known is None or known.kind == kind else f"{name}#{kind}"

    def _continues(self, layer: Layer, call: Call, start: int) -> bool:
        """Whether a call adds rows to the one before: the next step of a model that generates."""
        last = layer.last
        if last is None or layer.ended or last.observation.sees.shape[0] != call.q.shape[0]:
            return False  # beams begin with a larger batch
        if layer.kind == "self":  # before the end: tokens were taken back
            return 0 < start <= last.start + last.queries or forgetting(layer, call, start)
        again = self._depth > 0 and self._calls.get(layer.name.partition("#")[0], 0) > 1
        same = call.q.shape[2] == 1 and last.keys == address(call.k)
        return self._past or again or same

    def _layer(self, name: str, call: Call, kind: Kind) -> Layer | None:
        """The layer of this name, a new one if need be; None: it was not asked for."""
        if name not in self._selected:
            number = len(self._selected)
            wanted = self.looking.layers
            self._selected[name] = wanted is None or matches(number, name, wanted)
            if self._selected[name]:
                sampled = self.looking.rows is not None
                self.layers[name] = Layer(number, name, kind, call.q.shape[1], sampled)
        return self.layers.get(name)

    def known(self) -> list[str]:
        """The names of all attention layers the model has shown so far."""
        return list(self._selected)


def first_position(call: Call) -> int:
    """Where the first query stands among the keys: how many tokens came before it."""
    place = Place.of(call.q, call.k)
    if call.mask is None or place.queries == place.keys:
        return max(0, place.offset)
    stands = call.mask.alignment(place)
    if isinstance(stands, int):
        return max(0, stands)
    if call.mask.pieces:  # it stands beside the last key that it sees
        return max(0, max(int(last[..., 0].max()) for _, last in call.mask.intervals(place)) - 1)
    row = call.mask.to_dense(place)[:, :, 0].flatten(0, 1).any(0)  # (M,)
    return int(row.nonzero().max()) if row.any() else 0


def forgetting(layer: Layer, call: Call, start: int) -> bool:
    """Whether one more token came to a cache that is full: as many keys as the time before."""
    last = layer.last
    full = call.q.shape[2] == 1 and start + 1 == call.k.shape[2]
    return full and last is not None and layer.prompted and last.start + last.queries > start


def address(x: Tensor) -> int:
    """Where a tensor lies; 0 where PyTorch's transforms hide it."""
    try:
        return x.data_ptr()
    except RuntimeError:
        return 0


def bent(call: Call) -> str | None:
    """Why a logit is more than queries times keys times a number; None: it is not."""
    if call.softcap is not None:
        return f"its logits are capped at {call.softcap:g}"
    if not isinstance(call.score, Dot | General):
        return f"a {type(call.score).__name__.lower()} score is not proportional to its weights"
    if isinstance(call.bias, Tensor):
        return "its logits are written out, or a tensor is added to them"
    return None if call.bias is None else f"{type(call.bias).__name__} is added to its logits"


def token_ids(given: tuple[Any, ...], options: Mapping[str, Any]) -> Tensor | None:
    """The tokens (B, N) a model is called with; None where there are none, or two kinds of them."""
    names = ("input_ids", "decoder_input_ids")
    values = [*given, *(options[name] for name in names if name in options)]
    found = [x.detach() for x in values if isinstance(x, Tensor) and x.ndim == 2]
    found = [x for x in found if not x.is_floating_point() and x.dtype != torch.bool]
    return found[0] if len(found) == 1 else None


def matches(number: int, name: str, wanted: Sequence[int | str]) -> bool:
    """Whether a layer is one of those asked for, by number or by a pattern such as "*.3.attn"."""
    return any(
        number == one if isinstance(one, int) else fnmatchcase(name, one) or name == one
        for one in wanted
    )


def wide(x: Tensor) -> torch.dtype:
    """The dtype in which statistics of a tensor are computed."""
    return torch.promote_types(x.dtype, torch.float32)


def recomputing() -> bool:
    """Whether this forward runs inside a backward: gradient checkpointing does it a second time."""
    inside: bool = torch._C._current_graph_task_id() != -1
    return inside
