"""attn_implementation="headwise" in transformers: fused attention that reports what it does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from headwise.api import attention, attention_map
from headwise.core.mask_rules import Grid, to_mask
from headwise.handover import held_positions, split_calls
from headwise.nn.call import Call
from headwise.nn.head_shares import numbered_dropout
from headwise.watching.adapters.interface import InterfaceCall, to_call
from headwise.watching.adapters.mask_tensor import MaskTensor, UnwrittenMask
from headwise.watching.adapters.packed_sequences import by_lengths
from headwise.watching.adapters.paged_calls import to_paged_call
from headwise.watching.adapters.scaled_dot_product import MaskMemo
from headwise.watching.adapters.traced_rules import read_rule
from headwise.watching.head_weights import head_place
from headwise.watching.recorder.paged_record import PagedCall

NAME = "headwise"
PAGED = "headwise_paged"  # the same while continuous batching runs, which needs no masks
WEIGHTS = 1 << 26  # handed out per layer at most, if asked for
_memo = MaskMemo()


def register() -> None:
    """Make "headwise" an attention implementation of transformers; `import headwise.transformers`.

    Both halves are registered: transformers passes no mask at all, not even for padding, to an
    implementation without a mask function of the same name.

    >>> import transformers
    >>> register()
    >>> config = transformers.LlamaConfig(
    ...     hidden_size=32, num_attention_heads=4, num_hidden_layers=1, intermediate_size=64,
    ...     vocab_size=99, attn_implementation="headwise")
    >>> model = transformers.LlamaForCausalLM(config).eval()
    >>> model(torch.tensor([[1, 2, 3]])).logits.shape
    torch.Size([1, 3, 99])
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionInterface.register(PAGED, attend)
    AttentionMaskInterface.register(NAME, mask)
    _take_requests()


def _take_requests() -> None:
    """Let continuous batching take this implementation: it knows its own by their names.

    No mask function has the other name, so that models make no masks. Making one reads from the
    device, which waits, and which a CUDA graph can't capture.
    """
    try:
        from transformers import ContinuousBatchingManager as Manager
    except ImportError:  # of a transformers without it
        return
    switch = getattr(Manager, "switch_to_cb_friendly_attn", None)
    if switch is None or hasattr(switch, "__wrapped__"):
        return

    @wraps(switch)
    def accept(self: Any, model: Any, *given: Any, **options: Any) -> Any:
        if model.config._attn_implementation == NAME:
            model.set_attn_implementation(PAGED)
            self._original_attn_impl = NAME  # which it brings back
        elif model.config._attn_implementation != PAGED:
            return switch(self, model, *given, **options)

    Manager.switch_to_cb_friendly_attn = accept  # type: ignore[method-assign]


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    look: Callable[[Call], Tensor] | None = None,
    step: Callable[[PagedCall], Tensor] | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """An attention function of transformers: q (B, Hq, N, D), k and v of Hkv heads.

    Returns (B, N, Hq, Dv), and the weights (B, Hq, N, M) if `output_attentions` asks for them.
    `look` computes the call if the model is watched, `step` one of continuous batching.
    """
    if options.get("cache") is not None:
        given = InterfaceCall(NAME, module, query, key, value, None, options)
        paged, _ = to_paged_call(given)
        return (paged.batch.attend() if step is None else step(paged))[None], None
    watched = look is not None
    call = _to_call(module, query, key, value, attention_mask, options, watched)
    # A tensor-parallel plan gives a rank some of the heads.
    share = head_place(module, query.shape[1], query.shape[3]) if dropout else None
    call = call.changed(dropout=numbered_dropout(dropout, share))
    out = attention(*call[:3], **call.options()) if look is None else look(call)
    shown = weights(call) if options.get("output_attentions") else None
    return out.transpose(1, 2).contiguous(), shown


def _to_call(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    given: Any,
    options: dict[str, Any],
    watched: bool,
) -> Call:
    ours = isinstance(given, MaskTensor | UnwrittenMask)
    # Without a mask every key is seen, as with eager attention, whatever the module's is_causal is.
    plain = InterfaceCall("eager", module, q, k, v, None if ours else given, options)
    call = to_call(plain, "self", None, _memo)
    if ours:
        _refuse_other_keys(given, k)
        if isinstance(given, MaskTensor):
            call = call.changed(mask=given.mask)
        elif watched or call.bias is not None or options.get("output_attentions"):
            call = call.changed(mask=given.of_positions())
        else:
            call = call._replace(k=given.packed(k), v=given.packed(v)).changed(mask=given.mask)
    apart = by_lengths(options, call.q, call.k, _memo)
    if apart is None:
        return call
    shown = call.given.mask
    return call.changed(mask=apart if shown is None else shown & apart)


def _refuse_other_keys(given: MaskTensor | UnwrittenMask, k: Tensor) -> None:
    masked, keys = given.shape[-1], k.shape[2]
    if masked in (1, keys) or split_calls() is not None:  # whose masks are of the whole sequence
        return
    raise ValueError(
        f"its mask is of {masked} keys, and its attention has {keys}: headwise can't know which of "
        "them are hidden; use attn_implementation='eager'"
    )


def weights(call: Call) -> Tensor:
    """All weights of a call, (B, Hq, N, M); ValueError if there are too many."""
    shape = (*call.q.shape[:3], call.k.shape[2])
    if torch.Size(shape).numel() > WEIGHTS:
        raise ValueError(
            f"output_attentions=True asks for {shape} weights per layer, and headwise returns at "
            f"most {WEIGHTS:,}; with hw.watch(model) as seen: seen.map(layer, head) has any of them"
        )
    return attention_map(call.q, call.k, **call.given.of_weights()).to_tensor()


def mask(
    batch_size: int,
    q_length: int | None = None,
    kv_length: int = 0,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Tensor] | None = None,
    attention_mask: Tensor | None = None,
    cache_position: Tensor | None = None,
    device: torch.device | str | None = None,
    **options: Any,
) -> Tensor | None:
    """A mask function of transformers: its rule, and padding (B, tokens), as one of our masks.

    What a model does with it is what it does with the mask of eager attention, which every model
    supports: numbers of this dtype to add to scores.

    Before transformers 5.4 `cache_position` (N,) numbered the queries; since then `q_length` and
    `q_offset` do. Nothing is dropped: an unknown rule is asked about every pair.

    If the sequence is split between processes, the mask is that of the whole sequence.

    Compiled code can't look into a tensor: it gets an `UnwrittenMask`, or None where nothing is
    hidden. A static cache, whose `q_offset` is a tensor, is there to be compiled: outside of
    compiled code it gets the tensor that eager attention gets, and so does a rule that compiled
    code can't read.
    """
    from transformers.masking_utils import causal_mask_function, eager_mask

    rule: Any = causal_mask_function if mask_function is None else mask_function
    if torch.compiler.is_compiling() or isinstance(q_offset, Tensor):
        place = {"q_length": q_length, "q_offset": q_offset, "cache_position": cache_position}
        given: dict[str, Any] = {
            "batch_size": batch_size,
            "kv_length": kv_length,
            "kv_offset": kv_offset,
            "mask_function": rule,
            "attention_mask": attention_mask,
            "device": device,
            **{key: value for key, value in place.items() if value is not None},
            **options,
        }
        unwritten = torch.compiler.is_compiling() and q_length is not None
        made: Tensor | None = _unwritten(given) if unwritten else eager_mask(**given)
        return made
    if (split := split_calls()) is not None:
        attention_mask, (_, kv_length) = split.tokens, held_positions(kv_length, _where(device))
        queries = torch.arange(kv_length, device=device)
    elif cache_position is not None:
        queries = cache_position
    else:
        where = attention_mask.device if device is None and attention_mask is not None else device
        queries = torch.arange(q_length or 0, device=where) + int(q_offset)
    padding = _padding(attention_mask, kv_offset + kv_length)
    grid = Grid(batch_size, queries, kv_offset, kv_length)
    found = to_mask(rule, padding, grid, partial(_tile, rule, padding, grid, options))
    shape = (batch_size, 1, len(queries), kv_length)
    return MaskTensor(found, shape, queries.device, options.get("dtype", torch.float32))


def _unwritten(given: dict[str, Any]) -> Any:
    """The mask in compiled code, as `mask` says, of the arguments of transformers' `eager_mask`."""
    from transformers.masking_utils import eager_mask, sdpa_mask

    batch, queries, keys = (given[x] for x in ("batch_size", "q_length", "kv_length"))
    first, key, padding = given.get("q_offset", 0), given["kv_offset"], given["attention_mask"]
    device = _where(given["device"])
    if isinstance(padding, UnwrittenMask):  # of the model that this one is a part of
        return padding
    if given.get("use_vmap") or (padding is not None and (padding.ndim != 2 or queries == 1)):
        return eager_mask(**given)
    rule = read_rule(given["mask_function"], batch, key, keys, device)
    if rule is None:
        return eager_mask(**given)
    if padding is not None:
        short = key + keys - padding.shape[1]
        padding = padding.bool()
        padding = torch.nn.functional.pad(padding, (0, short)) if short > 0 else padding
        padding = padding[:, key : key + keys]
    elif rule.shows_all and given.get("allow_is_bidirectional_skip", False):
        return None
    all_pairs = given | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return UnwrittenMask(
        rule,
        first - key,
        (batch, 1, queries, keys),
        padding,
        lambda: sdpa_mask(**all_pairs),
        device,
        given.get("dtype", torch.float32),
    )


def _tile(
    rule: Any, padding: Tensor | None, grid: Grid, options: dict[str, Any], rows: slice
) -> Tensor:
    """The pairs of some rows that a rule shows, (B, 1, rows, M) bool, as transformers reads it."""
    from transformers.masking_utils import sdpa_mask

    queries = grid.queries[rows]
    place: dict[str, Any] = {"cache_position": queries}
    if "q_length" in signature(sdpa_mask).parameters:
        place = {"q_length": len(queries), "q_offset": int(queries[0])}
    kept = {key: options[key] for key in ("use_vmap",) if key in options}
    return sdpa_mask(  # type: ignore[return-value]
        batch_size=grid.batch,
        kv_length=grid.keys,
        kv_offset=grid.first_key,
        mask_function=rule,
        attention_mask=padding,
        allow_is_causal_skip=False,
        device=queries.device,
        **place,
        **kept,
    )


def _where(device: torch.device | str | None) -> torch.device:
    """The device that is meant; transformers may leave it out.

    >>> _where(None), _where("meta")
    (device(type='cpu'), device(type='meta'))
    """
    return torch.device("cpu" if device is None else device)


def _padding(given: Tensor | None, tokens: int) -> Tensor | None:
    """The padding of this many tokens, (B, tokens) bool; None if there is none.

    The part of a static cache that no token fills yet is padding.
    """
    if given is None:
        return None
    short = tokens - given.shape[-1]
    padding = given.bool()
    padding = torch.nn.functional.pad(padding, (0, short)) if short > 0 else padding
    return None if bool(padding[:, :tokens].all()) else padding
