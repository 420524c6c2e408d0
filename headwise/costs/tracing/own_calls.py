"""How modules of headwise and of PyTorch are called: their inputs, caches and widths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from headwise import models
from headwise.core.intervals import Mask
from headwise.costs.workload import Tokens
from headwise.messages import say
from headwise.models.lstm import State
from headwise.models.transformer import DecoderLayer
from headwise.nn import AdditiveAttention, Block, FixedAttention, MultiHeadAttention
from headwise.nn.caches.cache import Cache, Memory
from headwise.nn.feed_forward import GatedFeedForward
from headwise.nn.positions import LearnedPosition
from headwise.nn.swap import TorchCall

ATTENTION = (MultiHeadAttention, FixedAttention, AdditiveAttention, nn.MultiheadAttention)
TOKENS = (models.GPT, models.Bert, models.Conv)
PAIRS = (models.Transformer, models.LSTM)
TORCH = (nn.TransformerEncoderLayer, nn.TransformerEncoder)
TORCH_PAIRS = (nn.TransformerDecoderLayer, nn.TransformerDecoder, nn.Transformer)
PLAIN = (GatedFeedForward, nn.Sequential, nn.LayerNorm, nn.RMSNorm, nn.Linear)


class HeldCache(Cache):
    """A cache that holds so many tokens, without their numbers."""

    def __init__(self, held: int) -> None:
        self.held = held

    @property
    def length(self) -> int:
        return self.held

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        k, v = (x.new_empty(*x.shape[:2], self.held + x.shape[2], x.shape[3])
                for x in (keys, values))  # fmt: skip
        return k, v

    def place(self, mask: Mask | None, queries: int) -> Mask | None:
        return mask

    def rollback(self, count: int) -> None:
        """Nothing was written."""

    def fresh(self) -> HeldCache:
        return HeldCache(self.held)


@dataclass(frozen=True)
class OwnCall:
    """A module, and its call for a batch of tokens."""

    model: nn.Module
    crosses: bool  # an attention module that attends to another sequence

    @property
    def pair(self) -> bool:
        """True for an encoder with a decoder."""
        return isinstance(self.model, PAIRS + TORCH_PAIRS + (DecoderLayer,)) or self.crosses

    @property
    def own_length(self) -> bool:
        """True if every call has the same length, such as an image's."""
        return isinstance(self.model, models.ViT)

    @property
    def runs(self) -> bool:
        """False for a module that is called with other things than a sequence, such as a score."""
        known = (*TOKENS, *PAIRS, *TORCH, *TORCH_PAIRS, *PLAIN, *ATTENTION, models.ViT, Block,
                 DecoderLayer, TorchCall, nn.Embedding)  # fmt: skip
        return isinstance(self.model, known)

    @property
    def longest(self) -> int | None:
        """The most tokens that it has positions for; None if any number has."""
        config, position = (getattr(self.model, name, None) for name in ("config", "position"))
        if isinstance(config, models.FixedGPTConfig | models.BertConfig):
            return config.context
        if isinstance(position, LearnedPosition) and isinstance(self.model, TOKENS + PAIRS):
            return position.table.num_embeddings
        return None

    @cached_property
    def widths(self) -> dict[str, int]:
        """The widths that have letters, no two of them equal."""
        found: dict[str, Any] = {"h": width_of(self.model)}
        for module in self.model.modules():
            if isinstance(module, nn.Embedding):
                found.setdefault("V", module.num_embeddings)
            elif isinstance(module, GatedFeedForward):
                found.setdefault("f", module.gate.out_features)
            elif isinstance(module, nn.Sequential) and isinstance(module[0], nn.Linear):
                found.setdefault("f", module[0].out_features)
            for letter, name in (("a", "heads"), ("a", "num_heads"), ("g", "kv_heads"),
                                 ("d", "head_dim"), ("v", "value_dim")):  # fmt: skip
                if isinstance(module, ATTENTION) and hasattr(module, name):
                    found.setdefault(letter, getattr(module, name))
        if found.get("f") == 4 * found["h"]:
            del found["f"]  # it is written as 4h
        order = [letter for letter in "hfVagdv" if found.get(letter, 0) > 1]
        return {x: found[x] for n, x in enumerate(order)
                if found[x] not in [found[y] for y in order[:n]]}  # fmt: skip

    def caches(self, path: str) -> bool:
        """True if decoding keeps the keys and values of the attention with this path."""
        encodes = isinstance(self.model, models.Transformer) and path.startswith("encoder.")
        return not (isinstance(self.model, models.Bert | models.ViT) or encodes)

    @cached_property
    def is_layer(self) -> bool:
        """True for a layer, and False for a model of many."""
        return not any(isinstance(each, nn.ModuleList) for each in self.model.modules())

    def state(self, batch: int) -> int:
        """The numbers of a recurrent state for so many sequences."""
        return 2 * batch * self.model.config.d_model if isinstance(self.model, models.LSTM) else 0

    def run(self, tokens: Tokens, context: int, dtype: torch.dtype) -> partial[Any]:
        """The call of so many tokens, after those that a cache holds; ValueError if none can."""
        model: Any = self.model
        batch, width = tokens.batch, width_of(model)

        def x(length: int, width: int = width) -> Tensor:
            return torch.empty(batch, length, width, dtype=dtype, device="meta", requires_grad=True)

        def ids(length: int) -> Tensor:
            return torch.empty(batch, length, dtype=torch.int64, device="meta")

        if not self.runs:
            return partial(lambda: None)
        if tokens.cached:
            return self._step(tokens, context, x, ids)
        n = tokens.queries
        if isinstance(model, (*TOKENS, nn.Embedding)):
            return partial(model, ids(n))
        if isinstance(model, PAIRS):
            return partial(model, ids(context), ids(n))
        if isinstance(model, models.ViT):
            config = model.config
            sides = config.channels, config.image, config.image
            return partial(model, torch.empty(batch, *sides, dtype=dtype, device="meta"))
        if isinstance(model, MultiHeadAttention) and self.crosses:
            widths = model.widths.context
            values = None if widths[0] == widths[1] else x(context, widths[1])
            return partial(model, x(n), x(context, widths[0]), values=values)
        if isinstance(model, AdditiveAttention):
            return partial(model, x(n), x(context, model.key.in_features))
        if isinstance(model, nn.MultiheadAttention | TorchCall):
            inner: Any = model.attention.widths.context if isinstance(model, TorchCall) else (
                model.kdim, model.vdim)  # fmt: skip
            one = _turned(model, x(n))
            same = not self.crosses and inner == (width, width)
            key = one if same else _turned(model, x(context, inner[0]))
            value = key if inner[0] == inner[1] else _turned(model, x(context, inner[1]))
            return partial(model, one, key, value, need_weights=False)
        if isinstance(model, nn.Transformer):
            return partial(model, _turned(model, x(context)), _turned(model, x(n)))
        if isinstance(model, (*TORCH_PAIRS, DecoderLayer)):
            return partial(model, _turned(model, x(n)), _turned(model, x(context)))
        return partial(model, _turned(model, x(n)))

    def _step(
        self, tokens: Tokens, context: int, x: Callable[..., Tensor], ids: Callable[[int], Tensor]
    ) -> partial[Any]:
        """The call of the last tokens: the others are in a cache, and an encoder has run."""
        model: Any = self.model
        n, held = tokens.queries, HeldCache(tokens.keys - tokens.queries)
        if isinstance(model, models.GPT):
            return partial(model, ids(n), caches=[held.fresh() for _ in model.blocks])
        if isinstance(model, models.Transformer):
            memories = [_memory(layer.cross_attention, x, context) for layer in model.decoder]
            caches = [held.fresh() for _ in model.decoder]
            return partial(model.decode, ids(n), memories, caches=caches)
        if isinstance(model, models.LSTM):
            memory = None if model.attention is None else _memory(model.attention, x, context)
            hidden, cell = x(1)[:, 0], x(1)[:, 0]
            return partial(model.write, ids(n), State(hidden, cell, memory, None))
        if isinstance(model, AdditiveAttention) or (
            isinstance(model, MultiHeadAttention) and self.crosses
        ):
            return partial(model, x(n), _memory(model, x, context))
        if isinstance(model, DecoderLayer):
            return partial(model, x(n), _memory(model.cross_attention, x, context), cache=held)
        if isinstance(model, MultiHeadAttention | FixedAttention | Block):
            return partial(model, x(n), cache=held)
        if isinstance(model, (*PLAIN, nn.Embedding, models.Conv)):
            return self.run(Tokens(tokens.batch, n, n, n), n, x(1).dtype)
        raise ValueError(
            say("{name} keeps no cache; leave out keys, or make them the queries",
                name=type(model).__name__)
        )  # fmt: skip


def own_call(model: nn.Module, context: int | None) -> OwnCall | None:
    """How a module of headwise or of PyTorch is called; None if it is not one that is known."""
    crosses = isinstance(model, AdditiveAttention) or (
        context is not None and isinstance(model, (*ATTENTION, TorchCall))
    )
    call = OwnCall(model, crosses)
    ours = type(model).__module__.startswith("headwise.nn.")
    return call if call.runs or ours else None


def across(module: nn.Module, given: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """True if a call of an attention module attends to another sequence."""
    if isinstance(module, nn.MultiheadAttention):
        key = given[1] if len(given) > 1 else options.get("key")
        return key is not (given[0] if given else options.get("query"))
    other = given[1] if len(given) > 1 else options.get("context")
    return isinstance(module, AdditiveAttention) or other is not None


def width_of(model: Any) -> int:
    """The width of a module's input; 1 if it has none."""
    if isinstance(model, AdditiveAttention):
        return int(model.query.in_features)
    for module in model.modules():
        for name in ("d_model", "embed_dim", "embedding_dim", "in_features"):
            found = getattr(module, name, None)
            if isinstance(found, int):
                return found
        if isinstance(module, nn.LayerNorm | nn.RMSNorm):
            return int(module.normalized_shape[-1])
    return 1


def _memory(attention: Any, x: Callable[..., Tensor], length: int) -> Memory:
    """The keys and values of a context, which were made before."""
    if isinstance(attention, AdditiveAttention):
        return Memory(x(length, attention.query.out_features)[:, None],
                      x(length, attention.key.in_features)[:, None])  # fmt: skip
    key = attention.query if attention.key is None else attention.key
    made = (key, attention.head_dim), (attention.value, attention.value_dim)
    k, v = (x(length, layer.out_features).unflatten(-1, (-1, width)).transpose(1, 2)
            for layer, width in made)  # fmt: skip
    return Memory(k.detach(), v.detach())


def _turned(model: nn.Module, x: Tensor) -> Tensor:
    """A sequence (B, N, width) as a module takes it: PyTorch's may have the batch second."""
    first = [m.batch_first for m in model.modules() if hasattr(m, "batch_first")]
    return x if all(first) else x.detach().transpose(0, 1).contiguous().requires_grad_()
