"""nn.MultiheadAttention: called directly, inside PyTorch's layers, and on their fast path.

PyTorch leaves its fast path if hooks or modes are active, and the fast path rounds differently. So
the forwards are replaced in their classes, and nothing is hooked inside an encoder layer.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.core.mask_reading import HIDDEN
from headwise.core.options import Options
from headwise.nn.call import Call
from headwise.nn.torch_masks import read_torch_masks
from headwise.score import Dot
from headwise.watching.adapters import traced
from headwise.watching.adapters.module_forwards import named_modules
from headwise.watching.adapters.other_sequence import is_same
from headwise.watching.adapters.patching import Replacement, Undo, unheard
from headwise.watching.adapters.torch_calls import Listener
from headwise.watching.recorder.call_recorder import CallRecorder
from headwise.watching.recorder.changed_call import ChangedCall
from headwise.watching.recorder.held_call import DROPPED, Output
from headwise.watching.recorder.seen_call import Kind


class Arguments(NamedTuple):
    """The arguments of nn.MultiheadAttention's forward."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_padding_mask: Tensor | None = None
    need_weights: bool = True
    attn_mask: Tensor | None = None
    average_attn_weights: bool = True
    is_causal: bool = False


@dataclass(eq=False)
class TorchModules:
    """PyTorch's attention modules in a watched model, by identity, and its listener."""

    names: dict[int, str]
    listener: Listener
    seen: set[int] = field(default_factory=set)  # attentions that ran in the present layer

    @property
    def recorder(self) -> CallRecorder:
        """The recorder that the calls are shown to."""
        return self.listener.recorder


def attach(model: nn.Module, listener: Listener) -> list[Undo]:
    """Show the calls of nn.MultiheadAttention in the model to the recorder; returns the undoing."""
    listener.readers[F.multi_head_attention_forward] = partial(_functional, listener.recorder)
    kinds = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
    names = {id(m): name for name, m in named_modules(model) if isinstance(m, kinds)}
    if not names:
        return []
    modules = TorchModules(names, listener)
    return [replacement.add(modules, listener.recorder.aside) for replacement in _REPLACED]


def _forward(look: Callable[..., Any]) -> Callable[[Any, list[TorchModules]], Callable[..., Any]]:
    """A forward that lets `look` run the original for the modules of a watched model."""

    def make(original: Any, users: list[TorchModules]) -> Callable[..., Any]:
        @functools.wraps(original)
        def forward(self: nn.Module, *given: Any, **options: Any) -> Any:
            if torch.compiler.is_compiling():
                return _traced(original, self, given, options)
            for modules in users:
                if id(self) in modules.names:
                    run = _Run(original, self, given, options)
                    return look(modules, self, run, *given, **options)
            return original(self, *given, **options)

        return forward

    return make


@dataclass(frozen=True)
class _Run:
    """A module's own forward with the arguments that it was called with."""

    original: Callable[..., Any]
    module: nn.Module
    given: tuple[Any, ...]
    options: dict[str, Any]

    def __call__(self) -> Any:
        return self.original(self.module, *self.given, **self.options)


def _output(
    module: nn.MultiheadAttention, changed: ChangedCall, given: Arguments
) -> tuple[Tensor, Tensor | None]:
    """The module's results for a call that experiments have changed, computed by headwise."""
    axes = given.query.ndim
    heads = changed.dropping(module.dropout if module.training else 0.0).attend()
    out: Tensor = module.out_proj(heads.transpose(1, 2).flatten(2))  # (B, N, width)
    if axes == 2:
        out = out[0]
    elif not module.batch_first:
        out = out.transpose(0, 1)
    if not given.need_weights:
        return out, None
    weights = changed.weights()
    weights = weights.mean(1) if given.average_attn_weights else weights
    return out, weights[0] if axes == 2 else weights


def _traced(
    original: Callable[..., Any],
    module: nn.Module,
    given: tuple[Any, ...],
    options: dict[str, Any],
) -> Any:
    """A forward in compiled code. An encoder layer's fast path does not call its attention."""
    if isinstance(module, nn.MultiheadAttention):
        with traced.uncounted():
            out = original(module, *given, **options)
        read = traced.read_or_count(
            module, lambda: _read_call(module, Arguments(*given, **options)), out[0]
        )
        if read is not None:
            call, kind, padding = read
            traced.beside(module, call, kind == "cross", padding)
        return out
    if not isinstance(module, nn.TransformerEncoderLayer):
        return original(module, *given, **options)
    before = len(traced.ATTENDED)
    out = original(module, *given, **options)
    calls = len(traced.ATTENDED) > before
    if not calls and isinstance(module.self_attn, nn.MultiheadAttention):
        _traced_layer(module, *given, **options)
    return out


def _traced_layer(
    layer: nn.TransformerEncoderLayer,
    src: Tensor,
    src_mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
) -> None:
    """Record the attention of a layer that took its fast path."""
    x = src.detach()
    x = layer.norm1(x) if layer.norm_first else x
    arguments = Arguments(x, x, x, src_key_padding_mask, True, src_mask)
    call, kind, padding = _read_call(layer.self_attn, arguments)
    traced.beside(layer.self_attn, call, kind == "cross", padding)


def _attention(
    modules: TorchModules,
    module: nn.MultiheadAttention,
    run: Callable[..., Any],
    *positional: Any,
    **options: Any,
) -> Any:
    """An attention that is called, on its fast path or not."""
    given, name = Arguments(*positional, **options), modules.names[id(module)]
    modules.listener.refuse_other_threads(name)
    with modules.listener.off(), unheard():
        changed = None
        if modules.recorder.interventions.wants(name):
            if given.attn_mask is not None and given.attn_mask.requires_grad:
                raise ValueError(
                    "attention can't be changed where attn_mask has a gradient; detach it"
                )
            call, kind, _ = _read_call(module, given, learning=True)
            changed = modules.recorder.interventions.change(name, call, kind)
        if changed is None:
            out = run()
        else:
            out = _output(module, changed, given)
    modules.seen.add(id(module))
    if modules.recorder.wants(name):
        with modules.recorder.unread.reading(name):
            _look(modules, module, given, changed, out[0])
    return out


def _encoder_layer(
    modules: TorchModules,
    layer: nn.TransformerEncoderLayer,
    run: Callable[[], Any],
    src: Tensor,
    src_mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Any:
    """A layer whose fast path does not call its attention."""
    modules.listener.refuse_other_threads(modules.names[id(layer)])
    modules.seen.discard(id(layer.self_attn))
    with modules.listener.off(), _unhooked(layer):
        out = run()
    attention = layer.self_attn
    name = modules.names.get(id(attention))
    if name is None or id(attention) in modules.seen or not modules.recorder.wants(name):
        return out
    with modules.recorder.unread.reading(name), unheard():
        x = src.detach()
        if x.is_nested:
            lengths = torch.tensor([len(row) for row in x.unbind()], device=x.device)
            x = x.to_padded_tensor(0.0)
            src_key_padding_mask = torch.arange(x.shape[1], device=x.device) >= lengths[:, None]
        x = layer.norm1(x) if layer.norm_first else x
        _look(modules, attention, Arguments(x, x, x, src_key_padding_mask, True, src_mask))
    return out


def _encoder(
    modules: TorchModules,
    encoder: nn.TransformerEncoder,
    run: Callable[[], Any],
    *_: Any,
    **__: Any,
) -> Any:
    """An encoder, which passes nested tensors to its layers if no mode is active."""
    with modules.listener.off():
        return run()


_SIGNATURE = inspect.signature(F.multi_head_attention_forward)
_REPLACED: tuple[Replacement[TorchModules], ...] = (
    Replacement(nn.MultiheadAttention, "forward", _forward(_attention)),
    Replacement(nn.TransformerEncoderLayer, "forward", _forward(_encoder_layer)),
    Replacement(nn.TransformerEncoder, "forward", _forward(_encoder)),
)


def _look(
    modules: TorchModules,
    module: nn.MultiheadAttention,
    given: Arguments,
    changed: ChangedCall | None = None,
    out: Tensor | None = None,
) -> None:
    """Show the call to the recorder: its projections are computed once more."""
    with unheard():
        name, recorder = modules.names[id(module)], modules.recorder
        call, kind, padding = _read_call(module, given)
        output: Output | str | None = None
        if module.training and module.dropout:
            output = DROPPED
        elif out is not None and not out.is_nested:
            output = Output(out, partial(_before_projection, module))
        recorder.beside(name, call, kind, padding, changed=changed, output=output)


def _before_projection(module: nn.MultiheadAttention, grad: Tensor) -> Tensor:
    """The gradient of the heads' outputs (B, H, N, D), from that of the module's output."""
    grad = grad @ module.out_proj.weight.detach().to(grad.dtype)
    if grad.ndim == 2:
        grad = grad[None]
    elif not module.batch_first:
        grad = grad.transpose(0, 1)
    heads: Tensor = grad.unflatten(-1, (module.num_heads, -1))
    return heads.transpose(1, 2)


def _read_call(
    module: nn.MultiheadAttention, given: Arguments, learning: bool = False
) -> tuple[Call, Kind, Tensor | None]:
    """The call that a module's forward makes, its kind, and the rows that are padding.

    Gradients flow to the inputs if it is `learning`.
    """
    if module.bias_k is not None or module.add_zero_attn:
        option = "add_zero_attn" if module.bias_k is None else "add_bias_kv"
        raise ValueError(
            f"it uses {option}: it has more keys than tokens, and their positions are not known"
        )
    query, key, value = given[:3]
    if query.ndim == 3 and module.batch_first:
        query, key, value = _turned(query, key, value)
    weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    if module._qkv_same_embed_dim:
        weights = module.in_proj_weight.chunk(3)  # type: ignore[assignment]
    return _projected(
        (query, key, value),
        weights,
        module.in_proj_bias,
        module.num_heads,
        (given.attn_mask, given.key_padding_mask),
        {"is_causal": given.is_causal, "need_weights": given.need_weights},
        learning,
    )


def _functional(recorder: CallRecorder, name: str, *given: Any, **options: Any) -> None:
    """Show a call of F.multi_head_attention_forward to the recorder."""
    named = _SIGNATURE.bind(*given, **options)
    named.apply_defaults()
    x = named.arguments
    if x["bias_k"] is not None or x["add_zero_attn"] or x["static_k"] is not None:
        raise ValueError("it adds keys that are not tokens, or has its own keys")
    if x["use_separate_proj_weight"]:
        weights = tuple(x[f"{part}_proj_weight"] for part in "qkv")
    else:
        weights = x["in_proj_weight"].chunk(3)
    call, kind, padding = _projected(
        (x["query"], x["key"], x["value"]),
        weights,
        x["in_proj_bias"],
        x["num_heads"],
        (x["attn_mask"], x["key_padding_mask"]),
        {"is_causal": x["is_causal"], "need_weights": x["need_weights"]},
    )
    recorder.beside(name, call, kind, padding)


def _projected(
    inputs: tuple[Tensor, Tensor, Tensor],
    weights: tuple[Any, ...],
    biases: Tensor | None,
    heads: int,
    masks: tuple[Tensor | None, Tensor | None],
    hints: dict[str, bool],
    learning: bool = False,
) -> tuple[Call, Kind, Tensor | None]:
    """Project the inputs (N, B, width) or (N, width) once more: the call, its kind and padding."""
    query, key, value = inputs
    across: Kind = "self" if is_same(query, key) or is_same(query, value) else "cross"
    if query.ndim == 2:
        query, key, value = query[:, None], key[:, None], value[:, None]
    parts = (None,) * 3 if biases is None else biases.chunk(3)
    inputs = (query, key, value)
    inputs = inputs if learning else (query.detach(), key.detach(), value.detach())
    made = (F.linear(x, *one) for x, *one in zip(inputs, weights, parts, strict=True))
    q, k, v = (x.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3) for x in made)
    same = across == "self"
    attn_mask, key_padding_mask = masks
    mask, bias = read_torch_masks(
        attn_mask, key_padding_mask, heads, **hints, same_sequence=same, hidden=HIDDEN
    )
    padding = None
    if key_padding_mask is not None and across == "self":
        padding = key_padding_mask.reshape(-1, k.shape[2])
        padding = padding if padding.dtype == torch.bool else padding == -torch.inf
    bias = None if bias is None else bias.detach()
    return Call(q, k, v, Options(Dot(), mask, bias)), across, padding


def _turned(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(B, N, width) as (N, B, width); what was the same tensor still is."""
    q = query.transpose(0, 1)  # compared by `is`: torch 2.11 can't trace id() of a tensor
    k = q if key is query else key.transpose(0, 1)
    if value is key:
        return q, k, k
    return q, k, q if value is query else value.transpose(0, 1)


@contextmanager
def _unhooked(layer: nn.TransformerEncoderLayer) -> Iterator[None]:
    """Take the watch's hooks off a layer while PyTorch looks for hooks on it."""
    hidden = []
    if isinstance(layer.self_attn, nn.MultiheadAttention):
        for module in layer.modules():
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                ours = {key: hook for key, hook in hooks.items() if _is_ours(hook)}
                hidden.append((hooks, ours))
                for key in ours:
                    del hooks[key]
    try:
        yield
    finally:
        for hooks, ours in hidden:
            hooks.update(ours)


def _is_ours(hook: Any) -> bool:
    function = hook.func if isinstance(hook, partial) else hook
    return str(getattr(function, "__module__", "")).startswith("headwise.watching")
