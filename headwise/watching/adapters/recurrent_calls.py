"""Recurrences of linear attention and state-space models, in the files of transformers' models."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.watching.adapters.module_forwards import named_modules
from headwise.watching.adapters.patching import Replacement, Undo, places
from headwise.watching.adapters.torch_calls import Listener
from headwise.watching.recorder.checkpointing import recomputing
from headwise.watching.recorder.other_layers import (
    FUNCTIONS,
    MAMBA,
    MAMBA2,
    RG_LRU,
    Recurrence,
    other_kinds,
)

SAMPLE = 64  # tokens of Mamba, every one of which has a decay per channel and state


def attach(model: nn.Module, listener: Listener) -> list[Undo]:
    """Note a model's layers without a softmax, and show their recurrences; returns the undoing."""
    others, names = listener.recorder.others, {id(x): name for name, x in named_modules(model)}
    layers = [(x, names[id(x)], kind) for x, kind in other_kinds(model) if id(x) in names]
    others.kinds = {name: kind for _, name, kind in layers}
    decays = ((name, fixed_decay(module)) for module, name, _ in layers)
    others.fixed = {name: decay for name, decay in decays if decay is not None}
    if not others.kinds or listener.recorder.aside:
        return []

    def wanted(value: object) -> bool:
        return isinstance(value, FunctionType) and value.__name__ in FUNCTIONS

    return [_replacement(owner, name).add(listener) for owner, name in {*places(model, wanted)}]


@functools.cache  # watches share a replacement
def _replacement(owner: Any, name: str) -> Replacement[Listener]:
    return Replacement(owner, name, _make)


def _make(original: Any, users: list[Listener]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def run(*given: Any, **options: Any) -> Any:
        out = original(*given, **options)
        if torch.compiler.is_compiling() or recomputing():
            return out
        for listener in users:
            recorder = listener.recorder
            name = listener.frames[-1].name if listener.frames else ""
            if recorder.active and name in recorder.others.kinds:
                with recorder.unread.reading(name, "its recurrence was not read: "):
                    bound = signature.bind(*given, **options)
                    bound.apply_defaults()
                    call = _read(original.__name__, bound.arguments, out)
                    recorder.others.record(name, call)
        return out

    return run


def fixed_decay(module: nn.Module) -> Tensor | None:
    """The logarithms of the decays (H, channels) of a layer in which no token changes them."""
    rates, slopes = getattr(module, "time_decay", None), getattr(module, "slope_rate", None)
    if isinstance(rates, Tensor):  # RWKV's, one per channel
        return -rates.detach().float().exp().flatten()[None]
    if isinstance(slopes, Tensor):  # of lightning attention, one per head
        return -slopes.detach().float().flatten()[:, None]
    return None


def _read(name: str, given: dict[str, Any], out: Any) -> Recurrence:
    """The recurrence of a call, and the state that it returned."""
    state = out[1] if isinstance(out, tuple) else None
    if FUNCTIONS[name] == MAMBA2:
        return _mamba2(given, state)
    if FUNCTIONS[name] == MAMBA:
        return _mamba(given, state)
    if FUNCTIONS[name] == RG_LRU:
        return _rg_lru(given, state)
    q, k = (given[side].detach().float() for side in ("query", "key"))
    if given["use_qk_l2norm_in_kernel"]:
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    q, k = (x.repeat_interleave(given["g"].shape[2] // x.shape[2], 2) for x in (q, k))
    decay = given["g"].detach()
    decay = decay if decay.ndim == 4 else decay[..., None]
    write, begun = given["beta"].detach(), given["initial_state"] is not None
    return Recurrence(q * q.shape[-1] ** -0.5, k, decay, write, True, state, begun)


def _mamba(given: dict[str, Any], state: Tensor | None) -> Recurrence:
    """A state-space layer in which every channel has a recurrence of its own: all as one head."""
    step = given["dt"].detach()[:, :, :: -(-given["dt"].shape[2] // SAMPLE)]  # (B, channels, N)
    if given["delta_bias"] is not None:
        step = step + given["delta_bias"].detach()[:, None]
    step = (F.softplus(step) if given["delta_softplus"] else step).float()
    decay = given["A"].detach().float()[:, None] * step[..., None]  # (B, channels, N, states)
    decay = decay.transpose(1, 2).flatten(2)[:, :, None]
    none = decay.new_zeros(*decay.shape[:3], 0)
    state = None if state is None else state.detach()[:, None]
    return Recurrence(none, none, decay, decay[..., 0], False, state, False)


def _rg_lru(given: dict[str, Any], state: Tensor | None) -> Recurrence:
    """A gated linear unit whose channels have a decay each, in the blocks of its heads."""
    heads = given["self"].num_attention_heads
    decay = given["recurrent_gate"].detach().float().unflatten(2, (heads, -1))
    decay = decay.clamp_min(torch.finfo(torch.float32).tiny).log()
    none = decay.new_zeros(*decay.shape[:3], 0)
    state = None if state is None else state.detach().unflatten(1, (heads, -1))
    begun = given["recurrent_states"] is not None
    return Recurrence(none, none, decay, decay[..., 0], False, state, begun)


def _mamba2(given: dict[str, Any], state: Tensor | None) -> Recurrence:
    """C, B and Δ of a state-space layer as queries, keys and writes; its D x is no part of it."""
    step = given["dt"].detach()
    step = step if given["dt_bias"] is None else step + given["dt_bias"].to(step.dtype)
    step = F.softplus(step) if given["dt_softplus"] else step
    step = step.clamp(*given["dt_limit"]).float()
    groups = step.shape[-1] // given["B"].shape[2]
    q, k = (given[x].detach().float().repeat_interleave(groups, 2) for x in ("C", "B"))
    decay = (given["A"].detach().float() * step)[..., None]
    return Recurrence(q, k, decay, step, False, state, given["initial_states"] is not None)
