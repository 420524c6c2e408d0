"""QK-clip: the known remedy for attention logits that keep growing."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headwise.watching.figure_names import figure
from headwise.watching.head_weights import QueryKeyWeights, query_key_weights
from headwise.watching.layer import WatchedLayer
from headwise.watching.recording import Recording

HARMLESS = ("out", "o_", "v_", "value", "post", "final", "pre_", "input", "attn_sub", "inner_attn")
"""Prefixes of norms that come before the queries and keys, or after the output."""

OF_OUTPUT = "LayerNorm"
"""transformers' name of the norm after the output in BERT and its relatives."""

_used: weakref.WeakKeyDictionary[Recording, int] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Clip:
    """A head that was clipped: its logits are now `factor` times what they were.

    `lower_bound` is True if only some rows were looked at: the largest logit was at least
    `max_logit`, and may still be above the limit.
    """

    layer: int
    name: str
    head: int
    max_logit: float
    factor: float
    lower_bound: bool


@torch.no_grad()
def qk_clip(model: nn.Module, seen: Recording, limit: float = 100.0) -> list[Clip]:
    """Shrink the queries and keys of each head whose largest logit exceeds the limit.

    The rows of W_q and W_k that belong to such a head, and of their biases, are multiplied by
    √(limit / max), so that its largest logit for the same input is `limit`. Keys that several heads
    share shrink as little as the head with the smallest excess needs, and the queries make up the
    rest: every head gets its own factor exactly, and no weight grows. Call it after the optimiser's
    step; the figures of a step are used once. The optimiser's state stays as it is.

    With torch.distributed the processes agree on the largest logits, so all of them must call it.
    ValueError if scaling the weights does not scale the logits (QK-norm, cosine or additive scores,
    a softcap, a position bias), or if the weights are not known. Nothing is changed then.

    >>> import torch, headwise as hw
    >>> model = hw.nn.MultiHeadAttention(64, 8)
    >>> _ = torch.nn.init.normal_(model.query.weight, std=30)
    >>> x = torch.randn(1, 10, 64)
    >>> with hw.watch(model) as before: _ = model(x)
    >>> clipped = hw.qk_clip(model, before, limit=50)
    >>> with hw.watch(model) as after: _ = model(x)
    >>> max(before.heads()["max_logit_max"]) > 200, round(max(after.heads()["max_logit_max"]), 3)
    (True, 50.0)
    """
    if not limit > 0:
        raise ValueError(f"hw.qk_clip(limit={limit}): the limit must be positive")
    step = _step(seen)
    if _used.get(seen, -1) >= step:
        return []
    largest, lower_bound = _largest(seen)
    agreed = _agreed(largest)
    _refuse_infinite(agreed, seen)
    made = {
        path: _made(model, path, seen) for path in agreed
    }  # all of them first: if one fails nothing is changed
    done = []
    for path, heads in agreed.items():
        factors = {head: limit / value for head, value in heads.items() if value > limit}
        if factors:
            scale(made[path], factors)
        number = _layers(seen, path)[0].number
        done += [
            Clip(number, path, head, heads[head], factor, lower_bound)
            for head, factor in factors.items()
        ]
    _used[seen] = step
    return done


def scale(made: QueryKeyWeights, factors: Mapping[int, float]) -> None:
    """Multiply the logits of some heads, by scaling the weights of their queries and keys."""
    weight = made.queries[0]
    factor = torch.ones(weight.shape[0], dtype=torch.float64)
    for head, value in factors.items():
        factor[head] = value
    if made.shared:
        _multiply(made.queries, factor.sqrt().to(weight.device))
        return
    groups = made.keys[0].shape[0]
    of_keys = factor.reshape(groups, -1).amax(1).sqrt()  # the least reduction among its heads
    of_queries = factor / of_keys.repeat_interleave(len(factor) // groups)
    _multiply(made.queries, of_queries.to(weight.device))
    _multiply(made.keys, of_keys.to(weight.device))


def find(model: nn.Module, path: str) -> nn.Module:
    """A watched module by its name, in the model or in what DDP or the compiler wraps."""
    for wrapper in ("", "module.", "_orig_mod."):
        for name in (path.removeprefix(wrapper), wrapper + path):
            try:
                return model.get_submodule(name)
            except AttributeError:
                continue
    raise ValueError(f"hw.qk_clip: there is no {path!r} in this {type(model).__name__}")


def _multiply(parameters: list[Tensor], factor: Tensor) -> None:
    for x in parameters:
        x.mul_(factor.to(x.dtype).reshape(-1, *[1] * (x.ndim - 1)))


def _step(seen: Recording) -> int:
    """The number of the step whose figures the recording holds now."""
    if any(layer.recorded for layer in seen.layers):
        return int(getattr(seen, "steps", 0))
    return seen.series[-1].step if seen.series else -1


def _largest(seen: Recording) -> tuple[dict[str, dict[int, float]], bool]:
    """The largest logit of each head, by the path of its module, and True if rows were sampled.

    NaN becomes infinite, so that no other process's logit hides it.
    """
    table = seen.heads()
    values = figure(table, "max_logit_max")
    if len(table) and not values:
        raise ValueError("hw.qk_clip reads max_logit, which was not recorded; name it in stats=")
    found: dict[str, dict[int, float]] = {}
    for row, value in zip(table, values, strict=True):
        value = math.inf if math.isnan(value) else value
        heads = found.setdefault(str(row["name"]).partition("#")[0], {})
        heads[int(row["head"])] = max(value, heads.get(int(row["head"]), value))
    return found, "max_logit_max" not in table.columns


def _agreed(largest: dict[str, dict[int, float]]) -> dict[str, dict[int, float]]:
    """The same over all processes, so that their weights stay equal and they fail together."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return largest
    found = [x for heads in largest.values() for x in heads.values()]
    values = torch.tensor(found, dtype=torch.float64)
    if distributed.get_backend() == "nccl":
        values = values.cuda()
    distributed.all_reduce(values, op=distributed.ReduceOp.MAX)
    agreed = iter(values.tolist())
    return {path: {head: next(agreed) for head in heads} for path, heads in largest.items()}


def _refuse_infinite(largest: dict[str, dict[int, float]], seen: Recording) -> None:
    for path, heads in largest.items():
        for head, value in heads.items():
            if value == math.inf:
                raise ValueError(
                    f"hw.qk_clip: head {_layers(seen, path)[0].number}.{head} has a logit that is "
                    "infinite or NaN, which no scaling repairs; go back to the last checkpoint"
                )


def _made(model: nn.Module, path: str, seen: Recording) -> QueryKeyWeights:
    """The weights of a module's queries and keys; ValueError if they do not set the logits."""
    module, layers = find(model, path), _layers(seen, path)
    reasons = [reason for layer in layers if (reason := why_not(module, layer)) is not None]
    if reasons:
        raise ValueError(f"hw.qk_clip can't clip {path or 'the model'}: {reasons[0]}")
    try:
        return query_key_weights(module, path, layers[0].heads)
    except ValueError as unknown:
        raise ValueError(f"hw.qk_clip can't clip {unknown}") from unknown


def _layers(seen: Recording, path: str) -> list[WatchedLayer]:
    """The layers of a module: one that runs at several depths has several."""
    return [layer for layer in seen.layers if layer.module == path]


def why_not(module: nn.Module, layer: WatchedLayer) -> str | None:
    """The reason why scaling the weights does not scale the logits; None if it does.

    A norm of queries and keys undoes a scaling, and a bias or a cap does not scale along. A norm
    whose name does not tell its place is taken for one of queries and keys.
    """
    for name, child in module.named_children():
        if _is_norm(name, child) and name != OF_OUTPUT and not name.lower().startswith(HARMLESS):
            return f"it normalises queries and keys ({name}), which undoes a scaling"
    for owner in (module, getattr(module, "config", None)):
        if getattr(owner, "clip_qkv", None):
            return "its queries and keys are clamped (clip_qkv)"
    if layer.last is None:
        return "the recording holds its figures only, and not how its logits were made"
    return layer.last.bent


def _is_norm(name: str, child: nn.Module) -> bool:
    named = "norm" in name.lower() or "norm" in type(child).__name__.lower()
    return named and not isinstance(child, nn.Identity)
