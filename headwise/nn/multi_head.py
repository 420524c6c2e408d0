"""Multi-head attention as a layer: projections around `hw.attention`."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from headwise.api import attention_map, observe
from headwise.bias import Bias
from headwise.checks import check_flag
from headwise.core.arguments import is_integer
from headwise.core.intervals import Mask
from headwise.core.observation import Observation
from headwise.core.options import Options
from headwise.core.problem import check_mask, describe
from headwise.dropout import Dropout
from headwise.handover import held_positions, split_calls
from headwise.maps.attention_map import AttentionMap
from headwise.nn.caches.cache import Cache, Memory, RollbackOnError
from headwise.nn.caches.packed_cache import Packed, WriteOnly
from headwise.nn.call import (
    Call,
    check_dtype,
    check_inputs,
    check_positions,
    check_source,
    indices,
    position_and_cache,
)
from headwise.nn.head_shares import head_share, numbered_dropout
from headwise.nn.layer_options import (
    Projections,
    Separate,
    Shared,
    Unprojected,
    Widths,
    check_options,
)
from headwise.nn.learned_scores import LEARNED, LearnedScore
from headwise.nn.norms import Norm
from headwise.nn.positions import Position, PositionModule
from headwise.nn.state_dicts import translate
from headwise.score import Dot, Score


class Gated(Protocol):
    """A layer that multiplies each head's output by its entry of a gate (heads,), if it has one."""

    head_gate: Tensor | None


class DroppedHeads:
    """The heads that `drop_heads` switched off; `restore()` switches them on again."""

    def __init__(self, layer: Gated, before: Tensor | None) -> None:
        self._layer, self._before = layer, before

    def restore(self) -> None:
        """Put the gate back as it was before."""
        self._layer.head_gate = self._before

    def __enter__(self) -> DroppedHeads:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.restore()


def gate_without(
    gate: Tensor | None, dropped: int | Iterable[int] | Tensor, heads: int, like: Tensor
) -> Tensor:
    """A gate (heads,) with zeros for the heads dropped now or before, on the device of `like`.

    >>> gate_without(None, [1], 3, torch.empty(0))
    tensor([1., 0., 1.])
    """
    if isinstance(dropped, Tensor):
        dropped = dropped.flatten().tolist()
    if is_integer(dropped):
        chosen = [dropped]
    elif isinstance(dropped, Iterable):
        chosen = list(dropped)
    else:
        raise ValueError(f"drop_heads takes the numbers of heads, not {describe(dropped)}")
    for head in chosen:
        if not is_integer(head) or not -heads <= head < heads:
            raise ValueError(
                f"there is no head {head!r}; this attention has heads 0 to {heads - 1}"
            )
    gate = torch.ones(heads, device=like.device) if gate is None else gate.detach().clone()
    gate[chosen] = 0
    return gate


class MultiHeadAttention(nn.Module):
    """Attention with learned projections: x (B, N, d_model) -> (B, N, d_model).

    A head has width d_model / heads unless `head_dim` is given, and its values the same width if
    `value_dim` is not. Groups of query heads share `kv_heads` key and value heads. `context_dim` is
    the width of another sequence to attend to, or a pair if keys and values are made from different
    ones. `mask` applies to every call; a call's own mask narrows it further. `load_state_dict` also
    takes the weights of nn.MultiheadAttention and of transformers' BERT, GPT-2, Llama and Qwen.

    >>> import torch, headwise as hw
    >>> attn = hw.nn.MultiHeadAttention(64, 8, mask=hw.mask.causal(), position=hw.nn.Rotary())
    >>> attn(torch.randn(2, 10, 64)).shape
    torch.Size([2, 10, 64])
    >>> sum(p.numel() for p in attn.parameters()) == 4 * 64**2 + 4 * 64
    True
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        context_dim: int | tuple[int, int] | None = None,
        bias: bool = True,
        out_bias: bool | None = None,
        projections: Projections = Separate(),
        score: Score | LearnedScore = Dot(),
        position: Position | None = None,
        qk_norm: Norm | None = None,
        mask: Mask | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        dropout: float | Dropout = 0.0,
        engine: str = "auto",
    ) -> None:
        super().__init__()
        widths = Widths.of(d_model, heads, kv_heads, head_dim, value_dim, context_dim)
        widths.check(projections)
        check_options(score, position, qk_norm, mask, softcap, sinks, dropout, engine)
        out_bias = bias if out_bias is None else out_bias
        check_flag("bias", bias)
        check_flag("out_bias", out_bias)
        self.widths, self.projections = widths, projections
        self.d_model, self.heads, self.kv_heads = d_model, heads, widths.kv_heads
        self.head_dim, self.value_dim = widths.head_dim, widths.value_dim
        self.mask, self.softcap, self.dropout, self.engine = mask, softcap, dropout, engine
        self.query: nn.Module = nn.Identity()
        self.key: nn.Module | None = None  # None if keys are made like queries
        if isinstance(projections, Separate | Shared):
            self.query = nn.Linear(d_model, heads * self.head_dim, bias=bias)
        if isinstance(projections, Separate):
            self.key = nn.Linear(widths.context[0], self.kv_heads * self.head_dim, bias=bias)
        self.value = nn.Linear(widths.context[1], self.kv_heads * self.value_dim, bias=bias)
        self.out = nn.Linear(heads * self.value_dim, d_model, bias=out_bias)
        self.score: nn.Module | Score
        self.score = score.build(heads, self.head_dim) if isinstance(score, LEARNED) else score
        self.position: PositionModule | None = None
        if position is not None:
            self.position = position.build(d_model, heads, self.head_dim)
        self.query_norm = None if qk_norm is None else qk_norm.build(self.head_dim)
        self.key_norm = None if qk_norm is None else qk_norm.build(self.head_dim)
        self.sinks = nn.Parameter(torch.zeros(heads)) if sinks else None
        self.head_gate: Tensor | None  # (heads,): each head's output is multiplied by its entry
        self.register_buffer("head_gate", None, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the projections anew: Glorot's uniform weights, biases zero."""
        for module in (self.query, self.key, self.value, self.out):
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def _load_from_state_dict(self, state: dict[str, Tensor], prefix: str, *others: Any) -> None:
        translate(self.widths, self.projections, state, prefix, errors=others[-1])
        super()._load_from_state_dict(state, prefix, *others)

    def forward(
        self,
        x: Tensor,
        context: Tensor | Memory | None = None,
        *,
        values: Tensor | None = None,
        mask: Mask | None = None,
        bias: Bias | None = None,
        cache: Cache | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """x (B, N, d_model) or (N, d_model) attends to itself, or to `context` (B, M, context_dim).

        Values are made from `values` (B, M, context_dim) if given. `mask` and `bias` refer to the
        whole sequence, including the tokens in the `cache`. `positions` (N,) or (B, N) number the
        tokens of x if they do not simply continue the sequence.
        """
        late = self.position is not None and self.position.rotates_late
        packed = cache if isinstance(cache, Packed) and not late else None
        call = self.prepare(
            x,
            context,
            values=values,
            mask=mask,
            bias=bias,
            cache=cache if packed is None else WriteOnly(packed),
            positions=positions,
        )
        with RollbackOnError(cache, x.shape[-2]):
            if packed is not None:  # its kernel reads the pages or the int8 numbers directly
                out = packed.attend(call.q, **call.options())
            else:
                out = call.attend()
        return self.join(out)

    def observe(
        self,
        x: Tensor,
        context: Tensor | Memory | None = None,
        *,
        values: Tensor | None = None,
        mask: Mask | None = None,
        bias: Bias | None = None,
        cache: Cache | None = None,
        positions: Tensor | None = None,
        stats: Iterable[str] | None = None,
        rows: int | Tensor | None = None,
        sink_keys: int = 1,
    ) -> tuple[Tensor, Observation]:
        """The output of a call and the statistics of each head, as from `hw.observe`.

        >>> import torch, headwise as hw
        >>> out, seen = hw.nn.MultiHeadAttention(64, 8).observe(torch.randn(2, 10, 64))
        >>> seen.entropy.shape
        torch.Size([2, 8, 10])
        """
        call = self.prepare(
            x,
            context,
            values=values,
            mask=mask,
            bias=bias,
            cache=cache,
            positions=positions,
        )
        statistics: dict[str, Any] = {"stats": stats, "rows": rows, "sink_keys": sink_keys}
        with RollbackOnError(cache, x.shape[-2]):
            out, seen = observe(call.q, call.k, call.v, **call.options(), **statistics)
        return self.join(out), seen

    def attention_map(
        self,
        x: Tensor,
        context: Tensor | Memory | None = None,
        *,
        mask: Mask | None = None,
        bias: Bias | None = None,
        positions: Tensor | None = None,
    ) -> AttentionMap:
        """The weights of a call as a lazy matrix, as from `hw.attention_map`.

        >>> import torch, headwise as hw
        >>> amap = hw.nn.MultiHeadAttention(64, 8).attention_map(torch.randn(2, 10, 64))
        >>> amap[0, 3, :2, :].sum(-1)
        tensor([1.0000, 1.0000])
        """
        call = self.prepare(x, context, mask=mask, bias=bias, positions=positions)
        values = call.v if split_calls() is None else None  # a split map knows no values
        return attention_map(call.q, call.k, values, **call.given.of_weights())

    def remember(self, context: Tensor, values: Tensor | None = None) -> Memory:
        """Project a context (B, M, context_dim) once, for many calls that attend to it.

        >>> import torch, headwise as hw
        >>> attn = hw.nn.MultiHeadAttention(64, 8)
        >>> x, context = torch.randn(2, 3, 64), torch.randn(2, 10, 64)
        >>> torch.equal(attn(x, attn.remember(context)), attn(x, context))
        True
        """
        check_source(self.widths, context, values)
        check_dtype(self.value, context=context, values=values)
        projection = self.query if self.key is None else self.key
        k = self._compared(projection(context), self.key_norm)
        v = _split(self.value(context if values is None else values), self.value_dim)
        if self.position is not None and self.position.rotates:
            at, length = held_positions(k.shape[-2], k.device)
            k = self.position.rotate(k, self.position.waves(at, length))
        return Memory(k, v)

    def drop_heads(self, heads: int | Iterable[int] | Tensor) -> DroppedHeads:
        """Switch heads off: they add nothing to the output until `restore()`, or in a `with` block.

        To measure importance by gradient, set `head_gate` to ones (heads,) that require a gradient.

        >>> import torch, headwise as hw
        >>> attn, x = hw.nn.MultiHeadAttention(64, 8), torch.randn(1, 4, 64)
        >>> whole = attn(x)
        >>> with attn.drop_heads([0, 3]):
        ...     print(torch.equal(attn(x), whole))
        False
        >>> torch.equal(attn(x), whole)
        True
        """
        before = self.head_gate
        self.head_gate = gate_without(before, heads, self.heads, self.out.weight)
        return DroppedHeads(self, before)

    def prepare(
        self,
        x: Tensor,
        context: Tensor | Memory | None = None,
        *,
        values: Tensor | None = None,
        mask: Mask | None = None,
        bias: Bias | None = None,
        cache: Cache | None = None,
        positions: Tensor | None = None,
    ) -> Call:
        """The call of `hw.attention` that a forward makes: projected, with positions, cached.

        >>> import torch, headwise as hw
        >>> attn, x = hw.nn.MultiHeadAttention(64, 8), torch.randn(2, 10, 64)
        >>> call = attn.prepare(x)
        >>> out = hw.attention(call.q, call.k, call.v, **call.options())
        >>> torch.equal(attn.out(out.transpose(1, 2).flatten(2)), attn(x))
        True
        """
        check_inputs(self.widths, x, context, values, cache)
        check_dtype(self.value, x=x, context=context, values=values)
        if positions is not None:
            check_positions(self.position, x, positions)
        bias, at = self._bias(bias), positions
        if self.position is not None and (self.position.rotates or self.position.at_input):
            if at is None:
                at = indices(x) + (0 if cache is None else cache.length)
            x = self.position.add(x, at)
        projected = self.query(x)
        q = self._compared(projected, self.query_norm)
        if isinstance(context, Memory):
            k, v = context.keys, context.values
        else:
            source = x if context is None else context
            if self.key is not None:
                projected = self.key(source)
            elif context is not None:
                projected = self.query(source)
            k = self._compared(projected, self.key_norm)
            v = _split(self.value(source if values is None else values), self.value_dim)
        if self.mask is not None:
            mask = self.mask if mask is None else self.mask & mask
        check_mask(mask)
        q, k, v = position_and_cache(self.position, (q, k, v), at, context, cache)
        if cache is not None:
            with RollbackOnError(cache, q.shape[-2]):
                mask = cache.place(mask, q.shape[-2])
                bias = cache.place_bias(bias) if isinstance(bias, Tensor) else bias
        return Call(
            q,
            k,
            v,
            Options(
                score=self.score() if isinstance(self.score, nn.Module) else self.score,
                mask=mask,
                bias=bias,
                softcap=self.softcap,
                sinks=self.sinks,
                dropout=self._dropout(q.shape[-3]),
                engine=self.engine,
            ),
        )

    def _compared(self, x: Tensor, norm: nn.Module | None) -> Tensor:
        """Queries or keys (..., N, H·D) as (..., H, N, D), normed if asked for."""
        x = _split(x, self.head_dim)
        if isinstance(self.projections, Unprojected) and self.head_dim == self.d_model:
            x = x.expand(*x.shape[:-3], self.heads, -1, -1)  # every head sees the whole input
        return x if norm is None else norm(x)

    def _dropout(self, heads: int) -> float | Dropout:
        """The dropout of a call with these heads: under a tensor-parallel plan, a rank's share."""
        if not self.training or heads == self.heads:
            return self.dropout if self.training else 0.0
        share = head_share(getattr(self.query, "weight", None), heads, self.head_dim)
        return numbered_dropout(self.dropout, share)

    def _bias(self, bias: Bias | None) -> Bias | None:
        own = None if self.position is None else self.position.bias()
        if own is not None and bias is not None:
            raise ValueError(
                f"bias= can't be combined with the bias of {self.position}; build the module "
                "without position=, and pass the sum of both as one tensor"
            )
        return bias if own is None else own

    def join(self, out: Tensor) -> Tensor:
        """Concatenate the heads' outputs (..., Hq, N, Dv) and apply the output projection."""
        if self.head_gate is not None:
            out = out * self.head_gate.to(out.dtype)[:, None, None]
        joined: Tensor = self.out(out.transpose(-2, -3).flatten(-2))
        return joined

    def extra_repr(self) -> str:
        parts = [f"d_model={self.d_model}, heads={self.heads}"]
        if self.kv_heads != self.heads:
            parts.append(f"kv_heads={self.kv_heads}")
        if self.mask is not None:
            parts.append(f"mask={self.mask}")
        return ", ".join(parts)


def _split(x: Tensor, width: int) -> Tensor:
    """(..., N, H·width) as (..., H, N, width). H comes from the tensor, which may be a shard."""
    heads: Tensor = x.unflatten(-1, (-1, width))
    return heads.transpose(-2, -3)
