"""One attention call, checked and in the form that every engine takes."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.bias import ALiBi, Bias, RelativeBuckets, Sum, parts_of
from headwise.core.arguments import is_integer, is_scalar
from headwise.core.intervals import FURTHEST, Mask
from headwise.core.options import PLAIN, Options
from headwise.core.place import Place, check_placed, placed
from headwise.dropout import Dropout
from headwise.score import Dot, rewrite

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Terms(NamedTuple):
    """Everything of a problem except q, k, v, as the flat arguments of an operator."""

    additive: Tensor | None  # (Hq, D): Σ w tanh(q + k) instead of scale · q·k
    intervals: Tensor | None  # (P, 2, B|1, Hq|1, N) int32, keys of the call, clamped to [0, M]
    dense: Tensor | None  # (B|1, Hq|1, N|1, M|1) bool
    position: Tensor  # (B|1, N) int32: the key position at which each query stands
    bias: Tensor | None  # (B|1, Hq|1, N|1, M|1)
    slopes: Tensor | None  # (Hq,): -slope · |i - j|
    relative: Tensor | None  # (Hq, 2R + 1): indexed by clamp(i - j, -R, R) + R
    sinks: Tensor | None  # (Hq,)
    seed: Tensor | None  # int64 (), or (3,) with the first batch entry and head
    scale: float
    softcap: float  # 0 for none
    dropout: float
    first_key: int
    band: list[int] | None = None
    """[shift]: row r stands at the key position r + shift, and `position` is empty.
    [shift, low, high]: it also sees only the keys [r + low, r + high) of the call, cut by
    `intervals` if there are any.
    """

    def without_band(self, queries: int, keys: int) -> Terms:
        """The same terms with positions and intervals as tensors, for a call of this size."""
        if self.band is None:
            return self
        shift, *bounds = self.band
        rows = torch.arange(queries, dtype=torch.int32, device=self.position.device)
        intervals = self.intervals
        if bounds:
            first, last = ((rows + bound).clamp(0, keys) for bound in bounds)
            if intervals is None:
                intervals = torch.stack((first, last))[None, :, None, None]
            else:
                first, last = intervals[:, 0].maximum(first), intervals[:, 1].minimum(last)
                intervals = torch.stack((first, last.maximum(first)), 1)
        return self._replace(position=(rows + shift)[None], intervals=intervals, band=None)

    def of_rows(self, rows: slice) -> Terms:
        """The same terms for some of the rows."""

        def cut(x: Tensor | None, axis: int) -> Tensor | None:
            if x is None or x.shape[axis] == 1:
                return x
            return x.narrow(axis, rows.start, rows.stop - rows.start)

        position = self.position if self.band else cut(self.position, -1)
        assert position is not None
        return self._replace(
            intervals=cut(self.intervals, -1),
            dense=cut(self.dense, -2),
            bias=cut(self.bias, -2),
            position=position,
            band=[x + rows.start for x in self.band] if self.band else self.band,
        )

    @property
    def plain(self) -> bool:
        """True if a logit is just scale · q·k."""
        added = (self.additive, self.bias, self.slopes, self.relative)
        return self.softcap == 0 and all(term is None for term in added)


@dataclass(frozen=True, eq=False)
class Problem:
    """A checked call: q (B, Hq, N, D), k (B, Hkv, M, D), v (B, Hkv, M, Dv) and the rest."""

    q: Tensor
    k: Tensor
    v: Tensor
    place: Place
    scale: float
    additive: Tensor | None = None
    mask: Mask | None = None
    bias: Bias | None = None
    softcap: float = 0.0
    sinks: Tensor | None = None
    dropout: float = 0.0
    seed: Tensor | None = None
    rows: Tensor | None = None  # the rows that q holds, if it holds a sample of them

    def at(self, rows: Tensor) -> Problem:
        """The same problem for these query rows only."""
        return replace(self, q=self.q.index_select(2, rows), rows=rows)

    def intervals(self, mask: Mask | None = None) -> Tensor | None:
        """The mask as (P, 2, B|1, Hq|1, N) bounds among the call's keys; None if it has none."""
        mask = self.mask if mask is None else mask
        if mask is None or mask.pieces == 0:
            return None
        place = self.place
        ready = mask.table(place)
        if ready is not None:
            return self._sampled(ready, -1)
        bounds = [bound for piece in mask.intervals(place) for bound in piece]
        bounds = [bound - place.first_key for bound in bounds] if place.first_key else bounds
        shape = torch.broadcast_shapes(*(bound.shape for bound in bounds), (1, 1, place.queries))
        whole = torch.stack([bound.expand(shape) for bound in bounds]).clamp_(0, place.keys)
        return self._sampled(whole.unflatten(0, (mask.pieces, 2)), -1)

    def dense(self) -> Tensor | None:
        """The mask as booleans if it is a dense one, else None."""
        if self.mask is None or self.mask.pieces:
            return None
        return self._sampled(self.mask.to_dense(self.place), -2)

    def shift(self) -> int | Tensor:
        """Query i of the whole sequence stands at key i + shift: an int or one per batch entry."""
        stated = None if self.mask is None else self.mask.alignment(self.place)
        return self.place.offset if stated is None else stated

    def diagonal(self) -> int | None:
        """Row i of the call stands at key i + diagonal of the call; None if that varies."""
        shift = self.shift()
        if self.rows is not None or isinstance(shift, Tensor):
            return None
        return self.place.first_query + shift - self.place.first_key

    def position(self) -> Tensor:
        """The key position at which each query stands, (B|1, N) int32."""
        shift = self.shift()
        rows = self._sampled(self.place.rows()[None], -1)
        return rows + (shift.reshape(-1, 1) if isinstance(shift, Tensor) else shift)

    def band(self) -> tuple[list[int] | None, Mask | None]:
        """`Terms.band`, and the mask that it leaves to be applied."""
        shift, place = self.shift(), self.place
        if self.rows is not None or isinstance(shift, Tensor):
            return None, self.mask
        shift += place.first_query
        bounds, rest = (None, None) if self.mask is None else self.mask.apart(place)
        if bounds is None:
            return [shift], rest
        step = place.first_query - place.first_key
        return [shift, bounds[0] + step, bounds[1] + step], rest

    def terms(self, banded: bool = False) -> Terms:
        """The problem as flat arguments of an operator; `banded` if the operator takes a band."""
        (bias, added), device = parts_of(self.bias), self.q.device
        tensor = None if added is None else placed(added, self.place).to(device)
        band, rest = self.band() if banded else (None, self.mask)
        return Terms(
            additive=self.additive,
            intervals=None if rest is None else self.intervals(rest),
            dense=self.dense(),
            position=self.position() if band is None else self.q.new_empty(0, dtype=torch.int32),
            bias=None if tensor is None else self._sampled(tensor, -2),
            slopes=bias.slopes.to(device) if isinstance(bias, ALiBi) else None,
            relative=bias.by_distance().to(device) if isinstance(bias, RelativeBuckets) else None,
            sinks=self.sinks,
            seed=self.seed,
            scale=self.scale,
            softcap=self.softcap,
            dropout=self.dropout,
            first_key=self.place.first_key,
            band=band,
        )

    def start(self) -> int | Tensor:
        """The key of the call at which each row's sequence begins: an int or (B|1, Hq|1, N|1)."""
        start = 0 if self.mask is None else self.mask.start(self.place)
        start = start - self.place.first_key if self.place.first_key else start
        return self._sampled(start, -1) if isinstance(start, Tensor) else start

    def _sampled(self, tensor: Tensor, axis: int) -> Tensor:
        """The tensor's entries for `rows`, unless it is broadcast over rows."""
        if self.rows is None or (tensor.shape[axis] == 1 and self.place.queries != 1):
            return tensor
        return tensor.index_select(axis, self.rows)

    @property
    def grouped(self) -> bool:
        """True if each key head serves more than one query head."""
        if self.q.shape[1] != self.k.shape[1]:  # noqa: SIM103 (a symbol under a compiler)
            return True
        return False


def pose(
    call: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options = PLAIN,
    *,
    first_query: int = 0,
    first_key: int = 0,
    offset: int | None = None,
) -> Problem:
    """Check a call and make it a `Problem`; a ValueError restates the call."""
    try:
        return _pose(q, k, v, options, first_query, first_key, offset)
    except ValueError as error:
        stated = restate(call, q, k, v, mask=options.mask, bias=options.bias)
        raise ValueError(f"{error}\n  in {stated}") from None


def _pose(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options,
    first_query: int,
    first_key: int,
    offset: int | None,
) -> Problem:
    score, mask, bias, softcap, sinks, dropout, _ = options
    q, k, v = _autocast(q, k, v)
    _check_tensors(q, k, v)
    for name, first in (("first_query", first_query), ("first_key", first_key)):
        if not is_integer(first) or not 0 <= first <= FURTHEST:
            raise ValueError(f"{name}={first!r} must be an integer from 0 to 2**30")
    learned = getattr(score, "weight", getattr(score, "temperature", None))
    if isinstance(learned, Tensor):
        _check_data("score", learned, q)
    scored = rewrite(Dot() if score is None else score, q, k)
    batch, heads, queries, keys = q.shape[0], q.shape[1], q.shape[2], k.shape[2]
    place = Place(
        batch,
        heads,
        queries,
        keys,
        first_query,
        first_key,
        keys - queries if offset is None else offset,
        q.device,
        whole=offset is None,
    )
    check_mask(mask)
    if mask is not None:
        mask.check(place)
        stated = mask.alignment(place)
        if mask.shows_all(place) and not isinstance(stated, Tensor):
            # it hides no key, but still states the alignment
            mask, place = None, place if stated is None else replace(place, offset=stated)
    _check_bias(bias, place, q)
    _check_sinks(sinks, q)
    check_softcap(softcap)
    rate, seed = _dropout(dropout, q.device)
    return Problem(
        scored.q,
        scored.k,
        v,
        place,
        scored.scale,
        scored.additive,
        mask,
        bias,
        float(softcap or 0.0),
        None if sinks is None else sinks.to(q.device),
        rate,
        seed,
    )


def without_dropout(problem: Problem) -> Problem:
    """The same problem without dropout."""
    return replace(problem, dropout=0.0, seed=None) if problem.dropout else problem


def check_mask(mask: object) -> None:
    """Raise ValueError for anything but a mask or None."""
    if mask is not None and not isinstance(mask, Mask):
        raise ValueError(
            f"mask= takes a headwise mask such as hw.mask.causal(), not {describe(mask)}; "
            "hw.mask.dense(bool_tensor) wraps a tensor that is True where a query may attend"
        )


def check_softcap(softcap: float | None) -> None:
    """Raise ValueError unless softcap is a positive number or None."""
    if softcap is None:
        return
    given: object = softcap
    if isinstance(given, Tensor) and given.requires_grad:
        raise ValueError(
            "softcap is a number, and this tensor would get no gradient; use softcap=float(softcap)"
        )
    if not is_scalar(given) or not 0 < float(given) < math.inf:
        raise ValueError(f"softcap={softcap!r} must be positive and finite, or None for no cap")


def restate(call: str, q: object, k: object, v: object, **options: object) -> str:
    """The call in short: hw.attention(q float32 (1, 8, 16, 64), ...)."""
    given = {"q": q, "k": k, "v": v}
    if isinstance(v, Tensor) and v.shape[-1:] == (0,):
        del given["v"]  # the placeholder of a map without values
    parts = [f"{name} {describe(x)}" for name, x in given.items()]
    parts += [f"{name}={describe(x)}" for name, x in options.items() if x is not None]
    return f"hw.{call}({', '.join(parts)})"


def describe(x: object) -> str:
    """An argument in an error message: a tensor by its dtype and shape."""
    if isinstance(x, Tensor):
        return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"
    text = repr(x) if isinstance(x, Mask | ALiBi | RelativeBuckets) else f"{type(x).__name__} {x!r}"
    return text if len(text) <= 80 else type(x).__name__


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    kind = q.device.type
    if not autocasting(kind) or q.dtype == torch.float64:
        return q, k, v
    dtype = torch.get_autocast_dtype(kind)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def autocasting(kind: str) -> bool:
    """True if autocast is enabled for this kind of device."""
    return kind != "meta" and torch.is_autocast_enabled(kind)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A context without autocast, so that sums stay in float32."""
    if not autocasting(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def _check_data(name: str, x: Tensor, q: Tensor) -> None:
    """Raise ValueError for a sparse tensor, or one without data beside a q that has some."""
    if x.layout != torch.strided:
        raise ValueError(f"{name} is a {x.layout} tensor; use {name}.to_dense()")
    if x.is_meta and not q.is_meta:
        raise ValueError(f"{name} is on the meta device and has no data; q is on {q.device}")


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.layout != torch.strided:
            raise ValueError(f"{name} is a {x.layout} tensor; use {name}.to_dense()")
    if 0 in (q.shape[-1], k.shape[-1]):
        raise ValueError("queries and keys need a width of at least 1, and this one is 0")
    if not (q.dtype == k.dtype == v.dtype):
        raise ValueError(
            f"q, k and v have different dtypes: {q.dtype}, {k.dtype}, {v.dtype}; use one dtype"
        )
    if q.dtype not in DTYPES:
        raise ValueError(f"{q.dtype} is not supported; float64, float32, bfloat16 and float16 are")
    if not (q.device == k.device == v.device):
        raise ValueError(f"q, k and v are on different devices: {q.device}, {k.device}, {v.device}")
    if not (q.shape[0] == k.shape[0] == v.shape[0]):
        raise ValueError(f"batch sizes differ: q {q.shape[0]}, k {k.shape[0]}, v {v.shape[0]}")
    if k.shape[1:3] != v.shape[1:3]:
        raise ValueError(
            f"k has {k.shape[1]} heads and {k.shape[2]} keys, v {v.shape[1]} heads and "
            f"{v.shape[2]} keys; they must be equal"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"{q.shape[1]} query heads are not a multiple of {k.shape[1]} key heads; with grouped "
            "heads each key head serves the same number of query heads"
        )


def _check_bias(bias: object, place: Place, q: Tensor) -> None:
    if isinstance(bias, Sum):
        _check_bias(bias.distances, place, q)
        bias = bias.tensor
    if bias is None:
        return
    tensor = getattr(bias, "slopes", getattr(bias, "table", bias))
    if isinstance(tensor, Tensor):
        _check_data("bias", tensor, q)
    if isinstance(bias, ALiBi):
        if tuple(bias.slopes.shape) != (place.heads,):
            raise ValueError(
                f"hw.ALiBi has slopes {tuple(bias.slopes.shape)}; this call needs ({place.heads},)"
            )
    elif isinstance(bias, RelativeBuckets):
        if bias.table.ndim != 2 or bias.table.shape[1] != place.heads:
            raise ValueError(
                f"hw.RelativeBuckets has a table {tuple(bias.table.shape)}; "
                f"this call needs (buckets, {place.heads})"
            )
    elif isinstance(bias, Tensor):
        if not bias.dtype.is_floating_point:
            raise ValueError(
                f"bias has dtype {bias.dtype}; a boolean tensor belongs in mask=hw.mask.dense(...)"
            )
        check_placed("bias", bias, place)
    else:
        raise ValueError(f"bias={describe(bias)} is not a tensor, hw.ALiBi or hw.RelativeBuckets")


def _check_sinks(sinks: object, q: Tensor) -> None:
    if sinks is None:
        return
    heads = q.shape[1]
    if not isinstance(sinks, Tensor) or not sinks.is_floating_point():
        raise ValueError(
            f"sinks={describe(sinks)} is not a floating-point tensor; give one logit per query "
            f"head, ({heads},)"
        )
    if tuple(sinks.shape) != (heads,):
        raise ValueError(
            f"sinks has shape {tuple(sinks.shape)}; give one logit per query head, ({heads},)"
        )
    _check_data("sinks", sinks, q)


def _dropout(dropout: float | Dropout, device: torch.device) -> tuple[float, Tensor | None]:
    if isinstance(dropout, float) and dropout == 0:
        return 0.0, None
    given = dropout if isinstance(dropout, Dropout) else Dropout(dropout)
    if given.rate == 0:
        return 0.0, None
    return float(given.rate), given.seed_on(device)
