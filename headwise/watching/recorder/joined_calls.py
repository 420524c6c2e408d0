"""The calls of a model that generates as one: the rows of all steps against all keys."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise import mask as masks
from headwise.bias import parts_of, plus
from headwise.core.intervals import Mask
from headwise.core.observation import Observation
from headwise.core.place import Place, four
from headwise.nn.call import Call
from headwise.watching.recorder.seen_call import SeenCall


def joined_call(parts: list[SeenCall], calls: list[Call], across: bool, title: str) -> Call:
    """The calls of a pass as one, for its map: all of their queries against all keys.

    `parts` tell where each call stands in the pass; `across` is True if they look at another
    sequence. ValueError, with the layer's title, if the last call lacks keys that others saw.
    """
    if across and not all(part.alike is None or bool(part.alike) for part in parts):
        raise ValueError(
            f"the rows of {title} saw different keys: the sequence that it looks at changed while "
            "the model generated. Watch a single step to have its map"
        )
    last, end = calls[-1], parts[-1].start + parts[-1].queries
    before = [] if across else [call.k for call in calls[:-1]]
    begun = sum(k.shape[2] for k in before)
    k = torch.cat([*before, last.k[:, :, begun:end]], 2) if before else last.k
    if not across and not torch.equal(k, last.k[:, :, :end]):
        raise ValueError(
            f"the keys that earlier rows of {title} saw are gone: a cache forgot or rounded them, "
            "or beams changed places. Watch a pass over the whole text, or a single step, to have "
            "its map"
        )
    places = [
        Place.of(call.q, k) if across else _place_in_pass(call, part, k)
        for call, part in zip(calls, parts, strict=True)
    ]
    bias = last.bias
    tensors = [parts_of(call.bias)[1] for call in calls]
    if any(tensor is not None for tensor in tensors):  # an experiment may add one to some calls
        none = torch.zeros(1, device=k.device)
        given = [none if tensor is None else tensor for tensor in tensors]
        pairs = zip(given, places, strict=True)
        wide = [_widened(tensor, place, k.shape[2], 0.0) for tensor, place in pairs]
        shape = torch.broadcast_shapes(*(x.shape[:2] for x in wide))
        every = torch.cat([x.expand(*shape, -1, -1) for x in wide], 2)
        bias = plus(parts_of(bias)[0], every)
    mask = _joined_mask([call.mask for call in calls], places, k.shape[2])
    whole = last._replace(q=torch.cat([call.q for call in calls], 2), k=k)
    return whole.changed(mask=mask, bias=bias)


def joined_observation(seen: list[Observation], lengths: list[int]) -> Observation:
    """The statistics of all rows, from those of calls with so many rows each."""
    if len(seen) == 1:
        return seen[0]
    values = {name: torch.cat([x.values[name] for x in seen], 2) for name in seen[-1].values}
    rows = _joined_rows(seen, lengths)
    return Observation(values, torch.cat([x.highest for x in seen], 2), rows)


def _place_in_pass(call: Call, part: SeenCall, k: Tensor) -> Place:
    """The place of a call among the keys of the pass up to its own."""
    heads, keys = call.q.shape[1], part.start + part.queries
    return Place(len(k), heads, part.queries, keys, offset=part.start, device=k.device)


def _joined_mask(parts: list[Mask | None], places: list[Place], keys: int) -> Mask:
    """Each call's mask for its own rows; keys that came later stay hidden."""
    known = [
        (masks.lengths([place.keys] * place.batch) if mask is None else mask, place)
        for mask, place in zip(parts, places, strict=True)
    ]
    if any(mask.pieces == 0 for mask, _ in known):
        dense = [_widened(mask.to_dense(place), place, keys, False) for mask, place in known]
        return masks.dense(torch.cat(dense, 2))
    pieces = [mask.intervals(place) for mask, place in known]
    shape = torch.broadcast_shapes(*(x.shape[:-1] for part in pieces for x in part[0]))
    whole: Mask | None = None
    for number in range(max(map(len, pieces))):
        bounds = [part[number] if number < len(part) else None for part in pieces]
        first, last = (_joined_bounds(bounds, end, places, shape) for end in (0, 1))
        piece = masks.between(first, last)
        whole = piece if whole is None else whole | piece
    assert whole is not None
    return whole


def _joined_bounds(
    bounds: list[tuple[Tensor, Tensor] | None], end: int, places: list[Place], shape: torch.Size
) -> Tensor:
    """One end of an interval for the rows of all calls; a call without one sees nothing there."""
    found = []
    for bound, place in zip(bounds, places, strict=True):
        none = torch.zeros(1, dtype=torch.int32, device=place.device)
        edge = none if bound is None else bound[end].clamp(0, place.keys)
        found.append(edge.expand(*shape, place.queries))
    return torch.cat(found, -1)


def _widened(x: Tensor, place: Place, keys: int, fill: float) -> Tensor:
    """A (B|1, Hq|1, N|1, M|1) tensor with all rows, and columns for keys that came later."""
    x = four(x)
    x = x.expand(*x.shape[:2], place.queries, max(place.keys, x.shape[3]))[..., : place.keys]
    return F.pad(x, (0, keys - place.keys), value=fill)


def _joined_rows(seen: list[Observation], lengths: list[int]) -> Tensor | None:
    """The rows of the pass that were looked at; None if all were."""
    if all(part.rows is None for part in seen):
        return None
    found, start = [], 0
    for part, queries in zip(seen, lengths, strict=True):
        rows = part.rows
        rows = torch.arange(queries, device=part.highest.device) if rows is None else rows
        found.append(rows + start)
        start += queries
    return torch.cat(found)
