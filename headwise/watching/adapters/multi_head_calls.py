"""nn.MultiheadAttention in all its ways: called, inside PyTorch's layers, and on their fast path.

PyTorch leaves its fast path where hooks or modes are about, and the fast path rounds otherwise. So
the forwards are replaced in their classes, and nothing is hooked inside an encoder layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import _pop_mode_temporarily

from headwise.mask import Mask, causal
from headwise.nn.call import Call
from headwise.score import Dot
from headwise.watching.adapters.headwise_calls import Undo
from headwise.watching.adapters.mask_intervals import read, split
from headwise.watching.adapters.replacement import Replacement, taken
from headwise.watching.layer import Kind
from headwise.watching.recorder import Recorder

if TYPE_CHECKING:
    from headwise.watching.adapters.torch_calls import Listener


@dataclass(eq=False)
class Watched:
    """The modules of PyTorch's own in a watched model, by identity, and who hears of them."""

    names: dict[int, str]
    recorder: Recorder
    listener: Listener
    seen: set[int] = field(default_factory=set)  # attentions that ran in the present layer


def attach(model: nn.Module, recorder: Recorder, listener: Listener) -> list[Undo]:
    """Let every nn.MultiheadAttention of the model tell the recorder; returns what undoes it."""
    kinds = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
    names = {id(m): name for name, m in model.named_modules() if isinstance(m, kinds)}
    if not names:
        return []
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention) and (
            module.bias_k is not None or module.add_zero_attn
        ):
            option = "add_zero_attn" if module.bias_k is None else "add_bias_kv"
            raise ValueError(
                f"{names[id(module)] or 'this nn.MultiheadAttention'} uses {option}: its keys are "
                "more than its tokens, and headwise can't say where they stand"
            )
    watched = Watched(names, recorder, listener)
    return [replacement.add(watched) for replacement in _REPLACED]


def _forward(look: Callable[..., Any]) -> Callable[[Any, list[Watched]], Callable[..., Any]]:
    """A forward that lets `look` run the original for the modules of a watched model."""

    def make(original: Any, users: list[Watched]) -> Callable[..., Any]:
        @functools.wraps(original)
        def forward(self: nn.Module, *given: Any, **options: Any) -> Any:
            for watched in users:
                if id(self) in watched.names:
                    run = partial(original, self, *given, **options)
                    return look(watched, self, run, *given, **options)
            return original(self, *given, **options)

        return forward

    return make


def _attention(
    watched: Watched,
    module: nn.MultiheadAttention,
    run: Callable[[], Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Any:
    """An attention that is called, by its fast path or not."""
    watched.listener.refuse_other_threads(watched.names[id(module)])
    with unheard(watched.listener), taken():
        out = run()
    watched.seen.add(id(module))
    if watched.recorder.wants(watched.names[id(module)]):
        ignored = is_causal and key_padding_mask is None and not need_weights
        _look(watched, module, query, key, value, attn_mask, key_padding_mask, ignored)
    return out


def _encoder_layer(
    watched: Watched,
    layer: nn.TransformerEncoderLayer,
    run: Callable[[], Any],
    src: Tensor,
    src_mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Any:
    """A layer whose fast path does not call its attention."""
    watched.listener.refuse_other_threads(watched.names[id(layer)])
    watched.seen.discard(id(layer.self_attn))
    with unheard(watched.listener), _unhooked(layer):
        out = run()
    attention = layer.self_attn
    name = watched.names.get(id(attention))
    if name is None or id(attention) in watched.seen or not watched.recorder.wants(name):
        return out
    x = src.detach()
    if x.is_nested:
        lengths = torch.tensor([len(row) for row in x.unbind()], device=x.device)
        x = x.to_padded_tensor(0.0)
        src_key_padding_mask = torch.arange(x.shape[1], device=x.device) >= lengths[:, None]
    with torch.no_grad(), taken():
        x = layer.norm1(x) if layer.norm_first else x
    _look(watched, attention, x, x, x, src_mask, src_key_padding_mask, False)
    return out


def _encoder(
    watched: Watched, encoder: nn.TransformerEncoder, run: Callable[[], Any], *_: Any, **__: Any
) -> Any:
    """An encoder, which hands nested tensors to its layers if nothing is about."""
    with unheard(watched.listener):
        return run()


_REPLACED: tuple[Replacement[Watched], ...] = (
    Replacement(nn.MultiheadAttention, "forward", _forward(_attention)),
    Replacement(nn.TransformerEncoderLayer, "forward", _forward(_encoder_layer)),
    Replacement(nn.TransformerEncoder, "forward", _forward(_encoder)),
)


def _look(
    watched: Watched,
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    is_causal: bool,
) -> None:
    """Hand the call over: its projections once more, its masks in our words."""
    across: Kind = "self" if _are_same(query, key) or _are_same(query, value) else "cross"
    if query.ndim == 2:
        query, key, value = (x[None] for x in (query, key, value))
    elif not module.batch_first:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    with torch.no_grad(), taken():
        q, k, v = _projected(module, query.detach(), key.detach(), value.detach())
        mask, bias = _masks(attn_mask, key_padding_mask, is_causal, module.num_heads, across)
    padding = None
    if key_padding_mask is not None and across == "self":
        padding = key_padding_mask.reshape(-1, k.shape[2])
        padding = padding if padding.dtype == torch.bool else padding == -torch.inf
    call = Call(q, k, v, Dot(), mask, bias, None, None, 0.0, "auto")
    watched.recorder.beside(watched.names[id(module)], call, across, padding)


def _projected(
    module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, ...]:
    """Queries, keys and values of the heads, (B, H, N, D)."""
    if module._qkv_same_embed_dim:
        weights: tuple[Any, ...] = module.in_proj_weight.chunk(3)
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    packed: Tensor | None = module.in_proj_bias
    biases = (None,) * 3 if packed is None else packed.chunk(3)
    made = (F.linear(*one) for one in zip((query, key, value), weights, biases, strict=True))
    return tuple(x.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for x in made)


def _masks(
    attn_mask: Tensor | None,
    padding: Tensor | None,
    is_causal: bool,
    heads: int,
    kind: Kind,
) -> tuple[Mask | None, Tensor | None]:
    """(N, M) or (B · H, N, M), and (B, M), True = hidden or added to the logits, in our words."""
    if is_causal:
        return causal(offset=0), None  # the hint is taken at its word
    shown: Tensor | None = None
    added: Tensor | None = None
    if attn_mask is not None and attn_mask.ndim == 3:
        attn_mask = attn_mask.unflatten(0, (-1, heads))
    if padding is not None:
        padding = padding.reshape(-1, 1, 1, padding.shape[-1])
    for given in (attn_mask, padding):
        if given is None:
            continue
        seen, bias = (~given, None) if given.dtype == torch.bool else split(given.detach())
        if seen is not None:
            shown = seen if shown is None else shown & seen
        if bias is not None:
            added = bias if added is None else added + bias
    return None if shown is None else read(shown, stands=kind == "self"), added


@contextmanager
def unheard(listener: Listener) -> Iterator[None]:
    """Where PyTorch looks for modes, and must not find ours."""
    depth: int = torch._C._len_torch_function_stack()
    if depth and torch._C._get_function_stack_at(depth - 1) is listener:
        with _pop_mode_temporarily():
            yield
    else:  # not on; or beneath another mode, for which PyTorch leaves its fast path anyway
        yield


@contextmanager
def _unhooked(layer: nn.TransformerEncoderLayer) -> Iterator[None]:
    """Where PyTorch looks for hooks on the layer, and must not find those of a watch."""
    hidden = []
    if isinstance(layer.self_attn, nn.MultiheadAttention):
        for module in layer.modules():
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                ours = {key: hook for key, hook in hooks.items() if _is_ours(hook)}
                if ours:
                    hidden.append((hooks, dict(hooks)))
                    for key in ours:
                        del hooks[key]
    try:
        yield
    finally:
        for hooks, before in hidden:
            hooks.clear()
            hooks.update(before)


def _is_ours(hook: Any) -> bool:
    function = hook.func if isinstance(hook, partial) else hook
    return str(getattr(function, "__module__", "")).startswith("headwise.watching")


def _are_same(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are the same numbers; a part of a sequence is not the sequence."""
    if x is y or x.is_nested or y.is_nested:
        return x is y
    begins = x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
    return begins and x.storage_offset() == y.storage_offset() and x.shape == y.shape
