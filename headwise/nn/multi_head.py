"""Multi-head attention as a layer: projections around `hw.attention`, and nothing in between."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from headwise.api import attention, attention_map, observe
from headwise.bias import Bias
from headwise.core.intervals import Mask
from headwise.core.observation import Observation
from headwise.core.problem import check_mask
from headwise.maps.attention_map import AttentionMap
from headwise.nn.caches.cache import Cache, Memory, Undoing
from headwise.nn.caches.packed_cache import Packed, Unread
from headwise.nn.call import Call, numbers, placed
from headwise.nn.dropped_heads import DroppedHeads, gate_without
from headwise.nn.head_sizes import Widths, check_call
from headwise.nn.layer_options import check_options
from headwise.nn.learned_scores import LEARNED, LearnedScore
from headwise.nn.norms import Norm
from headwise.nn.placement import PositionModule
from headwise.nn.positions import Position
from headwise.nn.projections import Projections, Separate, Shared, Unprojected
from headwise.nn.state_dicts import translate
from headwise.score import Dot, Score


class MultiHeadAttention(nn.Module):
    """Attention with learned projections: x (B, N, d_model) -> (B, N, d_model).

    Heads are d_model / heads wide unless `head_dim` says otherwise (`head_dim=d_model`: full-width
    heads); values are as wide unless `value_dim` does. `kv_heads` key and value heads are shared by
    groups of query heads. `context_dim` is the width of another sequence to attend to, or a pair
    where keys and values are made from different ones. `mask` is what every call may see at most; a
    call's own mask narrows it. Weights of nn.MultiheadAttention, and of BERT, GPT-2, Llama and Qwen
    layers of transformers, load with `load_state_dict`.

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
        dropout: float = 0.0,
        engine: str = "auto",
    ) -> None:
        super().__init__()
        widths = Widths.of(d_model, heads, kv_heads, head_dim, value_dim, context_dim)
        widths.check(projections)
        check_options(score, position, qk_norm, mask, softcap, sinks, dropout, engine)
        self.widths, self.projections = widths, projections
        self.d_model, self.heads, self.kv_heads = d_model, heads, widths.kv_heads
        self.head_dim, self.value_dim = widths.head_dim, widths.value_dim
        self.mask, self.softcap, self.dropout, self.engine = mask, softcap, dropout, engine
        self.query: nn.Module = nn.Identity()
        self.key: nn.Module | None = None  # None: as queries are made
        if isinstance(projections, Separate | Shared):
            self.query = nn.Linear(d_model, heads * self.head_dim, bias=bias)
        if isinstance(projections, Separate):
            self.key = nn.Linear(widths.context[0], self.kv_heads * self.head_dim, bias=bias)
        self.value = nn.Linear(widths.context[1], self.kv_heads * self.value_dim, bias=bias)
        out_bias = bias if out_bias is None else out_bias
        self.out = nn.Linear(heads * self.value_dim, d_model, bias=out_bias)
        self.score: nn.Module | Score
        self.score = score.build(heads, self.head_dim) if isinstance(score, LEARNED) else score
        self.position: PositionModule | None = None
        if position is not None:
            self.position = position.build(d_model, heads, self.head_dim)
        self.query_norm = None if qk_norm is None else qk_norm.build(self.head_dim)
        self.key_norm = None if qk_norm is None else qk_norm.build(self.head_dim)
        self.sinks = nn.Parameter(torch.zeros(heads)) if sinks else None
        self.head_gate: Tensor | None  # (heads,): what each head's output is multiplied with
        self.register_buffer("head_gate", None, persistent=False)
        self.register_load_state_dict_pre_hook(translate)  # type: ignore[no-untyped-call]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start the projections anew: Glorot's uniform weights, biases zero."""
        for module in (self.query, self.key, self.value, self.out):
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

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

        `values` (B, M, context_dim) replace the context where values are made. `mask` and `bias`
        speak of the whole sequence, what the `cache` holds included. `positions` (N,) or (B, N)
        number x where it does not simply go on.
        """
        late = self.position is not None and self.position.turns_late
        packed = cache if isinstance(cache, Packed) and not late else None
        call = self.prepare(
            x,
            context,
            values=values,
            mask=mask,
            bias=bias,
            cache=cache if packed is None else Unread(packed),
            positions=positions,
        )
        with Undoing(cache, x.shape[-2]):
            if packed is not None:  # it need not be read to be attended to
                out = packed.attend(call.q, **call.options())
            else:
                out = attention(call.q, call.k, call.v, **call.options())
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
        """What a call returns, and what each head did; `hw.observe` explains the other options.

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
        looked: dict[str, Any] = {"stats": stats, "rows": rows, "sink_keys": sink_keys}
        with Undoing(cache, x.shape[-2]):
            out, seen = observe(call.q, call.k, call.v, **call.options(), **looked)
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
        """The weights of a call as a matrix that is never stored; `hw.attention_map` explains it.

        >>> import torch, headwise as hw
        >>> amap = hw.nn.MultiHeadAttention(64, 8).attention_map(torch.randn(2, 10, 64))
        >>> amap[0, 3, :2, :].sum(-1)
        tensor([1.0000, 1.0000])
        """
        call = self.prepare(x, context, mask=mask, bias=bias, positions=positions)
        options = call.options()
        del options["dropout"], options["engine"]  # a map is of the weights before dropout
        return attention_map(call.q, call.k, call.v, **options)

    def remember(self, context: Tensor, values: Tensor | None = None) -> Memory:
        """Project a context (B, M, context_dim) once, to be attended to many times.

        >>> import torch, headwise as hw
        >>> attn = hw.nn.MultiHeadAttention(64, 8)
        >>> x, context = torch.randn(2, 3, 64), torch.randn(2, 10, 64)
        >>> torch.equal(attn(x, attn.remember(context)), attn(x, context))
        True
        """
        projection = self.query if self.key is None else self.key
        k = self._compared(projection(context), self.key_norm)
        v = _split(self.value(context if values is None else values), self.value_dim)
        if self.position is not None and self.position.turns:
            k = self.position.turn(k, self.position.waves(numbers(k), k.shape[-2]))
        return Memory(k, v)

    def drop_heads(self, heads: Iterable[int]) -> DroppedHeads:
        """Switch heads off: what they saw no longer reaches the output, until `restore()`.

        As a context manager it restores by itself. For importance by gradient, set `head_gate` to
        ones (heads,) that require one.

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
        """What a call hands to `hw.attention`: q, k, v as they are projected, placed and cached.

        >>> import torch, headwise as hw
        >>> attn, x = hw.nn.MultiHeadAttention(64, 8), torch.randn(2, 10, 64)
        >>> call = attn.prepare(x)
        >>> out = hw.attention(call.q, call.k, call.v, **call.options())
        >>> torch.equal(attn.out(out.transpose(1, 2).flatten(2)), attn(x))
        True
        """
        check_call(self, x, context, values, cache, positions)
        bias, at = self._bias(bias), positions
        if self.position is not None and (self.position.turns or self.position.at_input):
            if at is None:
                at = numbers(x) + (0 if cache is None else cache.length)
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
        q, k, v = placed(self.position, (q, k, v), at, context, cache)
        if cache is not None:
            with Undoing(cache, q.shape[-2]):
                mask = cache.place(mask, q.shape[-2])
                bias = cache.place_bias(bias) if isinstance(bias, Tensor) else bias
        return Call(
            q,
            k,
            v,
            score=self.score() if isinstance(self.score, nn.Module) else self.score,
            mask=mask,
            bias=bias,
            softcap=self.softcap,
            sinks=self.sinks,
            dropout=self.dropout if self.training else 0.0,
            engine=self.engine,
        )

    def _compared(self, x: Tensor, norm: nn.Module | None) -> Tensor:
        """Queries or keys: (..., N, H·D) as (..., H, N, D), with their norm."""
        x = _split(x, self.head_dim)
        if isinstance(self.projections, Unprojected) and self.head_dim == self.d_model:
            x = x.expand(*x.shape[:-3], self.heads, -1, -1)  # every head sees the whole input
        return x if norm is None else norm(x)

    def _bias(self, bias: Bias | None) -> Bias | None:
        own = None if self.position is None else self.position.bias()
        if own is not None and bias is not None:
            raise ValueError(
                f"bias= can't join the bias that {self.position} is; add them up as one tensor, "
                "and build the module without position="
            )
        return bias if own is None else own

    def join(self, out: Tensor) -> Tensor:
        """The heads' outputs (..., Hq, N, Dv) side by side, through the last projection."""
        if self.head_gate is not None:
            out = out * self.head_gate.to(out.dtype)[:, None, None]
        joined: Tensor = self.out(out.transpose(-2, -3).flatten(-2))
        return joined

    def extra_repr(self) -> str:
        said = [f"d_model={self.d_model}, heads={self.heads}"]
        if self.kv_heads != self.heads:
            said.append(f"kv_heads={self.kv_heads}")
        if self.mask is not None:
            said.append(f"mask={self.mask}")
        return ", ".join(said)


def _split(x: Tensor, width: int) -> Tensor:
    """(..., N, H·width) as (..., H, N, width). H is read from the tensor: it may be a shard."""
    heads: Tensor = x.unflatten(-1, (-1, width))
    return heads.transpose(-2, -3)
