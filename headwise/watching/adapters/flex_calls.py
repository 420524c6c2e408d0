"""flex_attention that a model calls itself, compiled or not: observed from outside the call.

The function runs inside the compiler, where no mode of ours may be active. So it is replaced where
a model's own code finds it: in the files and in the classes of its modules, by whichever name, and
in PyTorch's own file.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex

from headwise.core.intervals import Mask
from headwise.core.mask_rules import by_rows
from headwise.core.options import Options
from headwise.core.place import Place
from headwise.nn.call import Call
from headwise.score import Dot
from headwise.watching.adapters.patching import Replacement, Undo, places, unheard
from headwise.watching.adapters.scaled_dot_product import lengths_differ
from headwise.watching.adapters.torch_calls import Listener
from headwise.watching.adapters.written.logits_call import from_logits
from headwise.watching.recorder.call_recorder import itself
from headwise.watching.recorder.layer import LARGEST
from headwise.watching.recorder.seen_call import Kind

_FLEX = flex.flex_attention
_OURS = "__watched_flex__"  # an attribute of a replacement: the function that it replaces


def attach(model: nn.Module, listener: Listener) -> list[Undo]:
    """Show the flex_attention calls of a model's own code to the recorder; returns the undoing."""
    found = set(places(model, _is_flex, flex))
    aside = listener.recorder.aside
    return [_replacement(owner, name).add(listener, aside) for owner, name in found]


def _is_flex(value: object) -> bool:
    """True if this is the function, compiled or not, or already a replacement of it."""
    if not isinstance(value, FunctionType):
        return False
    inside = (getattr(value, name, None) for name in ("_torchdynamo_orig_callable", _OURS))
    return any(one is _FLEX for one in (value, *inside))


@functools.cache
def _replacement(owner: Any, name: str) -> Replacement[Listener]:
    return Replacement(owner, name, _make)


def _make(original: Any, users: list[Listener]) -> Callable[..., Any]:
    @functools.wraps(original, updated=())
    def attend(*given: Any, **options: Any) -> Any:
        if not torch.compiler.is_compiling():
            for listener in users:
                if listener.listens:
                    return _observed(listener, original, given, options)
        return original(*given, **options)

    setattr(attend, _OURS, _FLEX)
    return attend


def _observed(
    listener: Listener, function: Any, given: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    """The function's own result; its call is shown to the recorder."""
    name, recorder = listener.frames[-1].name, listener.recorder
    recorder.interventions.refuse(name, "it calls flex_attention")
    listener.note_attention()
    with listener.off(), unheard():
        result = function(*given, **options)
        out = result[0] if isinstance(result, tuple) else result
        if recorder.wants(name):
            with recorder.unread.reading(name):
                call, kind = read_flex_call(name, listener.kind, *given, **options)
                proof = listener.prove(name, call, out.detach().transpose(1, 2))
                recorder.beside(name, call, kind, out=out, proof=proof, output=itself(out))
        silenced = recorder.interventions.silence(name, out)
    return (silenced, *result[1:]) if isinstance(result, tuple) else silenced


def read_flex_call(
    name: str,
    kind_by_arguments: Callable[[str, int, bool], Kind],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: flex.BlockMask | None = None,
    scale: float | None = None,
    *_: Any,
    **__: Any,
) -> tuple[Call, Kind]:
    """Read a call of flex_attention, and its kind.

    A block mask is asked about a few rows at a time, and kept as intervals if it is that. The
    logits that a score_mod makes are known pair by pair only, so a call has them written out.
    """
    q, k, v = (x.detach().expand(len(query), -1, -1, -1) for x in (query, key, value))
    across = block_mask is None and lengths_differ(q, k)
    kind: Kind = "cross"
    if not across:
        kind = kind_by_arguments(name, k.shape[2], block_mask is not None)
    mask = None if block_mask is None else _mask(name, block_mask, q, k, kind)
    call = Call(q, k, v, Options(Dot(scale), mask))
    return (call if score_mod is None else _modified(name, call, score_mod)), kind


def _mask(name: str, blocks: flex.BlockMask, q: Tensor, k: Tensor, kind: Kind) -> Mask:
    batch, heads = blocks.shape[:2]
    sizes = (batch, heads, q.shape[2], k.shape[2])
    try:
        return by_rows(blocks.mask_mod, sizes, q.device, kind == "self", None)
    except Exception as error:  # it is somebody else's function
        raise ValueError(
            f"the mask_mod of its flex_attention does not take whole rows: {error}"
        ) from error


def _modified(name: str, call: Call, score_mod: Callable[..., Tensor]) -> Call:
    """The same call with the logits that a score_mod makes, written out."""
    (batch, heads, queries, width), keys = call.q.shape, call.k.shape[2]
    if batch * heads * queries * keys > LARGEST:
        raise ValueError(
            f"its flex_attention has a score_mod, which "
            f"must be asked about each pair, and {batch} × {heads} × {queries} × {keys} pairs are "
            f"more than the {LARGEST:,} that headwise writes out; use a shorter input, or leave "
            "the layer out with layers="
        )
    exact = torch.promote_types(call.q.dtype, torch.float32)
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (call.k, call.v))
    scale = call.score.scale if isinstance(call.score, Dot) else None
    scores = call.q.to(exact) @ k.to(exact).mT * (width**-0.5 if scale is None else scale)
    numbers = [torch.arange(size, device=k.device) for size in scores.shape]
    asked = score_mod
    for axis in (4, 3, 2, 1):  # the key first: the innermost
        within = [0, *(0 if number == axis else None for number in range(1, 5))]
        asked = torch.vmap(asked, in_dims=tuple(within))
    logits = asked(scores, *numbers).to(exact)
    if call.mask is not None:
        logits = logits.masked_fill(~call.mask.to_dense(Place.of(call.q, k)), -torch.inf)
    return from_logits(logits, v)
