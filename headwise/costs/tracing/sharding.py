"""One rank's part of a traced model under tensor parallelism."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from headwise.costs.workload import share
from headwise.messages import say
from headwise.models import Bert, ViT
from headwise.nn import AdditiveAttention, FixedAttention, MultiHeadAttention, swap_attention
from headwise.nn.feed_forward import GatedFeedForward

COLUMNS = ("colwise", "colwise_gather_output", "packed_colwise")
ROWS = ("rowwise", "packed_rowwise", "rowwise_split_input")
KEYS = ("k_proj", "v_proj")  # with fewer key heads than ranks each rank holds one head
EXPERTS = {"up_proj": -2, "gate_up_proj": -2, "gate_proj": -2, "down_proj": -1}
"""The axis of hidden entries in the weights of experts."""


def sharded(model: nn.Module, ranks: int) -> nn.Module:
    """A copy whose weights are those of one rank by the plan of transformers.

    ValueError if they do not divide.
    """
    config: Any = getattr(model, "config", None)
    plan = dict(getattr(model, "_tp_plan", None) or {})
    if not plan:
        raise ValueError(
            say("transformers has no plan for tensor parallelism of {kind!r}; leave tp out of "
                "mesh", kind=getattr(config, "model_type", type(model).__name__))
        )  # fmt: skip
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = getattr(text, "num_attention_heads", None)
    groups: Any = getattr(text, "num_key_value_heads", None) or heads
    if isinstance(heads, int):
        share(say("attention with heads"), heads, ranks, "tp")
        check_groups(groups, ranks)
    made = copy.deepcopy(model)
    for module in made.modules():
        module.__dict__.pop("forward", None)  # the original's, which counts for it
    for path, module in made.named_modules():
        style = _style(plan, path)
        if isinstance(module, nn.Linear) and style is not None:
            name = path.rpartition(".")[2]
            keys = name in KEYS and isinstance(groups, int) and groups < ranks
            _cut_linear(module, style, groups if keys else ranks, ranks)
        for name, weight in list(module.named_parameters(recurse=False)):
            style = _style(plan, f"{path}.{name}")
            transposed = getattr(module, "is_transposed", False)
            if style is not None and name in EXPERTS and weight.ndim == 3:
                axis = EXPERTS[name] if not transposed else -3 - EXPERTS[name]
                _cut(module, name, axis, ranks)
    table = made.get_input_embeddings()  # type: ignore[operator]
    out = made.get_output_embeddings()  # type: ignore[operator]
    tied = out is not None and out.weight is table.weight
    if isinstance(table, nn.Embedding):
        _cut(table, "weight", 0, ranks, uneven=True)
    if tied:
        out.weight = table.weight
    return made


def own_rank(model: nn.Module, ranks: int) -> nn.Module:
    """A copy of a module of headwise or PyTorch with one rank's heads, hidden and vocabulary."""
    made = copy.deepcopy(model)
    for module in made.modules():
        module.__dict__.pop("forward", None)  # the original's, which counts for it
    made = swap_attention(made)
    for module in made.modules():
        if isinstance(module, MultiHeadAttention | FixedAttention):
            _cut_heads(module, ranks)
        elif isinstance(module, AdditiveAttention):
            share(say("attention with heads"), 1, ranks, "tp")
        elif isinstance(module, GatedFeedForward):
            _cut_hidden((module.gate, module.up), module.down, ranks)
        elif isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
            _cut_hidden((module.linear1,), module.linear2, ranks)
        elif isinstance(module, nn.Sequential) and len(module) == 3:
            _cut_hidden((module[0],), module[2], ranks)
    tables = [getattr(made, name, None) for name in ("embedding", "target_embedding", "head")]
    for each in [made] if isinstance(made, nn.Embedding) else tables:
        if isinstance(each, nn.Embedding | nn.Linear) and not isinstance(made, ViT):
            _cut(each, "weight", 0, ranks, uneven=True)
    if isinstance(made, Bert):
        _cut(made, "readout_bias", 0, ranks, uneven=True)
    return made


def _cut_heads(module: MultiHeadAttention | FixedAttention, ranks: int) -> None:
    """Keep one rank's heads of an attention module."""
    before, groups = module.heads, getattr(module, "kv_heads", module.heads)
    if not isinstance(getattr(module, "query", module.value), nn.Linear):
        raise ValueError(say("heads that are not projected can't be divided over ranks (tp)"))
    module.heads = share(say("attention with heads"), before, ranks, "tp")
    check_groups(groups, ranks)
    for name in ("query", "key", "value"):
        each = getattr(module, name, None)
        if isinstance(each, nn.Linear):
            _cut_linear(each, "colwise", min(groups, ranks) if name != "query" else ranks, ranks)
    _cut_linear(module.out, "rowwise", ranks, ranks)
    if isinstance(module, FixedAttention):
        _cut(module, "logits", 0, ranks)
        return
    module.kv_heads = max(1, groups // ranks)
    if module.sinks is not None:
        _cut(module, "sinks", 0, ranks)
    parts = [each for each in (module.score, module.position) if isinstance(each, nn.Module)]
    for part in parts:
        for name, weight in list(part.named_parameters()):
            if before in weight.shape:
                _cut(part, name, list(weight.shape).index(before), ranks)


def _cut_hidden(ups: Sequence[nn.Module], down: nn.Module, ranks: int) -> None:
    """Keep one rank's hidden entries of a feed-forward layer."""
    for each in (*ups, down):
        if isinstance(each, nn.Linear):
            _cut_linear(each, "rowwise" if each is down else "colwise", ranks, ranks)


def check_groups(groups: int, ranks: int) -> None:
    """Raise ValueError if key heads neither divide over ranks nor divide them."""
    if groups % ranks and ranks % groups:
        raise ValueError(
            say(
                "{heads} key heads neither divide over {ranks} ranks (tp={ranks}) nor divide "
                "{ranks}, so that each rank would hold one; choose another tp",
                heads=groups,
                ranks=ranks,
            )
        )


def _style(plan: dict[str, str], path: str) -> str | None:
    general = re.sub(r"\.\d+(?=\.|$)", ".*", path)
    return plan.get(general)


def _cut_linear(module: nn.Linear, style: str, parts: int, ranks: int) -> None:
    if style in COLUMNS:
        outer = style == "colwise_gather_output"
        for name in ("weight", "bias"):
            if getattr(module, name) is not None:
                _cut(module, name, 0, parts, uneven=outer)
    elif style in ROWS:
        _cut(module, "weight", 1, ranks)


def _cut(module: nn.Module, name: str, axis: int, ranks: int, uneven: bool = False) -> None:
    """Keep one rank's part of a weight along an axis; the first rank has the larger part."""
    weight: Any = getattr(module, name)
    shape = list(weight.shape)
    if uneven:
        shape[axis] = -(-shape[axis] // ranks)
    else:
        shape[axis] = share(say("a hidden width"), shape[axis], ranks, "tp")
    empty = torch.empty(shape, dtype=weight.dtype, device="meta")
    setattr(module, name, nn.Parameter(empty, weight.requires_grad))
