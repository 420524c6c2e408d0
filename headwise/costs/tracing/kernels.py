"""The functions that models call while they are traced: attention, its masks, and experts.

transformers lets a function stand in for each; calls of PyTorch's and headwise's own attention are
heard while a model is traced. These compute nothing, and count the kernel that would run on the
chosen device, under the mask that the model would use.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from fractions import Fraction
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headwise import api
from headwise import mask as masks
from headwise.core.intervals import Mask
from headwise.core.mask_rules import Grid, bounded_mask, by_rows, known
from headwise.core.patterns import Causal
from headwise.costs.kernel import Kernel
from headwise.costs.tracing.attention_calls import fused, headwise_attention
from headwise.costs.tracing.recorder import Recorder, storage_id
from headwise.messages import say

NAME = "headwise_cost"
ANSWERED = 1 << 26  # pairs that an unknown rule is asked about at most

SDPA = torch._C._nn.scaled_dot_product_attention
"""What every name of it ends in."""

_recorders: list[Recorder] = []
_alone = threading.RLock()  # one trace at a time


def register() -> None:
    """Make the functions known to transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask)
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError:
        return
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts)


@contextmanager
def counting(recorder: Recorder) -> Iterator[None]:
    """Count for this recorder, inside an outer one's block for it alone."""
    with _alone:
        _recorders.append(recorder)
        try:
            with AttentionCalls():
                yield
        finally:
            _recorders.pop()


def mask(
    batch_size: int,
    q_length: int | None = None,
    kv_length: int = 0,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    cache_position: Tensor | None = None,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> Tensor:
    """A tensor (B, 1, N, M) on the meta device that stands for the mask of a rule."""
    recorder = _recorders[-1]
    queries = len(cache_position) if q_length is None and cache_position is not None else q_length
    assert queries is not None
    place = recorder.place(1, queries, kv_length)
    rows = queries * recorder.work.ranks.cp
    grid = Grid(1, torch.arange(q_offset, q_offset + rows), kv_offset, place.keys)
    shown = known(mask_function, grid)
    if shown is not None:
        found = bounded_mask(shown, grid)
    else:
        if queries * kv_length > ANSWERED:
            raise ValueError(
                "its mask is a rule of its own, and the sequence is too long to ask it"
            )
        sizes = (1, 1, queries, kv_length)
        found = by_rows(mask_function, sizes, torch.device("cpu"), q_offset - kv_offset, None)
    narrower = recorder.work.mask
    if narrower is not None and q_offset + queries == kv_offset + kv_length:
        found = narrower if found is None else found & narrower
    stand_in = torch.empty(batch_size, 1, queries, kv_length, dtype=dtype, device="meta")
    return recorder.remember(stand_in, found)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of q (B, Hq, N, D) over k and v: one kernel, or the model's own steps."""
    recorder = _recorders[-1]
    queries, keys = query.shape[2], key.shape[2]
    if query.shape[1] % key.shape[1]:
        raise ValueError(
            say("{heads} heads can't share {found} key heads", heads=query.shape[1],
                found=key.shape[1])
        )  # fmt: skip
    found: Mask | None = None
    if isinstance(attention_mask, Tensor):
        found = recorder.mask_of(attention_mask)
    elif (getattr(module, "is_causal", True) if is_causal is None else is_causal) and queries > 1:
        found = masks.causal() if queries == keys else masks.causal(0)
    if recorder.work.fused and dropout and recorder.work.device == "cpu" and module.training:
        plain = isinstance(found, Causal) and queries == keys
        made = sdpa_in_steps(
            recorder, found, query, key, value, None if plain else attention_mask, dropout, plain,
            scale=options.get("scaling"), enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip
        return made.transpose(1, 2).contiguous(), None
    if not recorder.work.fused:
        again_later = recorder.work.recompute == "attention"
        with recorder.recomputed((query, key, value)) if again_later else nullcontext():
            return model_in_steps(
                recorder, module, (query, key, value), attention_mask, found, dropout,
                softcap=softcap, s_aux=s_aux, position_bias=position_bias, **options,
            ), None  # fmt: skip
    made = fused(recorder, query, key, value, found, position_bias, s_aux,
                 softcap=bool(softcap or options.get("softcapping")))  # fmt: skip
    return made.transpose(1, 2).contiguous(), None


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """PyTorch's attention of q (…, N, E) over k and v."""
    recorder = _recorders[-1]
    if not query.is_meta or recorder.quiet or query.ndim not in (3, 4):
        return SDPA(query, key, value, attn_mask, dropout_p, is_causal, scale=scale,
                    enable_gqa=enable_gqa)  # fmt: skip
    found: Mask | None = None
    if attn_mask is not None:
        found = recorder.mask_of(attn_mask)
    elif is_causal:
        found = masks.causal() if query.shape[-2] == key.shape[-2] else masks.causal(0)
    found = recorder.narrowed(found)
    if not recorder.work.fused or (dropout_p and recorder.work.device == "cpu"):
        return sdpa_in_steps(recorder, found, query, key, value, attn_mask, dropout_p, is_causal,
                       scale=scale, enable_gqa=enable_gqa)  # fmt: skip
    if query.ndim == 3:
        heads = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
        return fused(recorder, *heads, found).squeeze(1)
    return fused(recorder, query, key, value, found)


def sdpa_in_steps(
    recorder: Recorder, found: Mask | None, query: Tensor, key: Tensor, *rest: Any, **options: Any
) -> Tensor:
    """PyTorch's own steps: what it does on the meta device, and on a CPU with dropout."""
    with recorder.under([(found, query.shape[-2], key.shape[-2])]), torch._C.DisableTorchFunction():
        return SDPA(query, key, *rest, **options)


MULTI_HEAD = F.multi_head_attention_forward
MULTI_HEAD_INSIDE: Any = FunctionType(
    MULTI_HEAD.__code__, {**vars(F), "has_torch_function": lambda tensors: False},
    argdefs=MULTI_HEAD.__defaults__,
)  # fmt: skip
"""The same code, which a mode hears inside: the function hands itself over to a mode as a whole."""


class AttentionCalls(TorchFunctionMode):
    """Hears calls of PyTorch's attention and of `hw.attention`, however code names them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is api.attention:
            q = args[0] if args else kwargs["q"]
            if q.is_meta and q.ndim == 4:
                return headwise_attention(_recorders[-1], *args, **kwargs)
        if func is MULTI_HEAD:
            with self:
                return MULTI_HEAD_INSIDE(*args, **kwargs)
        if func is F.rms_norm and _recorders[-1].work.device == "cuda":
            return RootMeanSquare.apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        return (sdpa if func is SDPA else func)(*args, **kwargs)


class RootMeanSquare(torch.autograd.Function):
    """RMSNorm as one kernel, which saves its input and a float32 number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: Any, weight: Any = None, eps: Any = None) -> Tensor:
        recorder = _recorders[-1]
        with recorder.muted():
            wide = torch.float64 if recorder.work.wide == 8 else torch.float32
            ctx.save_for_backward(x, x.new_empty(x.shape[: -len(shape)], dtype=wide))
            out = torch.empty_like(x)
        bytes_each = x.numel() * x.element_size()
        recorder.tape.run(Kernel("rms_norm", "norm", 0, bytes_each, bytes_each))
        recorder.tape.run(Kernel("rms_norm", "norm", 0, 2 * bytes_each, bytes_each), True)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None, None, None


def model_in_steps(
    recorder: Recorder,
    module: nn.Module,
    given: tuple[Tensor, Tensor, Tensor],
    attention_mask: Tensor | None,
    found: Mask | None,
    dropout: float,
    **options: Any,
) -> Tensor:
    """The model's own attention in steps, whose products are counted under the mask."""
    own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    queries, keys = given[0].shape[2], given[1].shape[2]
    with recorder.under([(found, queries, keys)]):
        if own is None:
            raise ValueError(f"{type(module).__name__} has no attention in steps; use fused=True")
        options = {name: value for name, value in options.items() if value is not None}
        out: Tensor = own(module, *given, attention_mask, dropout=dropout, **options)[0]
    return out


class Grouped(torch.autograd.Function):
    """Rows times the matrices of their experts: rows (S, inputs), weights (E, inputs, outputs)."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, outputs: int) -> Tensor:
        ctx.save_for_backward(rows, weights)
        return rows.new_empty(rows.shape[0], outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None, None


def experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts of a mixture, each with the rows that chose it, sorted by expert."""
    recorder = _recorders[-1]
    chosen, tokens = top_k_index.shape[-1], hidden_states.shape[0]
    order = top_k_index.reshape(-1).argsort()
    rows = hidden_states[order]
    used = Fraction(min(chosen, self.num_experts), self.num_experts)
    first = self.gate_up_proj if self.has_gate else self.up_proj
    made = _grouped(recorder, self, rows, first, "up", used)
    made = self._apply_gate(made) if self.has_gate else self.act_fn(made)
    made = _grouped(recorder, self, made, self.down_proj, "down", used)
    if getattr(self, "has_post_expert_norm", False):
        made = self.post_expert_norm(made)
    made = made * top_k_weights.reshape(-1)[order].unsqueeze(-1)
    made = made[order.argsort()].view(tokens, chosen, -1).sum(dim=1)
    return made.to(hidden_states.dtype)


def _grouped(
    recorder: Recorder, module: Any, rows: Tensor, weights: Tensor, label: str, used: Fraction
) -> Tensor:
    transposed = getattr(module, "is_transposed", False)
    inputs, outputs = weights.shape[1:] if transposed else reversed(weights.shape[1:])
    with recorder.muted():
        made: Tensor = Grouped.apply(  # type: ignore[no-untyped-call]
            rows, weights, outputs
        )
    recorder.product(f"experts {label}", rows.shape[0], outputs, inputs, 1, (rows, weights),
                     min(weights.shape[0], rows.shape[0]))  # fmt: skip
    recorder.used[id(weights)] = used
    recorder.touched.add(storage_id(weights))
    name = "gate_up" if label == "up" and module.has_gate else label
    has_bias = getattr(module, "has_bias", False)
    bias: Tensor | None = getattr(module, f"{name}_proj_bias") if has_bias else None
    if bias is None:
        return made
    recorder.used[id(bias)] = used
    return made + bias[:1].expand(rows.shape[0], -1)
