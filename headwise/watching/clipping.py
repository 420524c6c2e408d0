"""QK-clip: the known remedy for attention logits that keep growing."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor, nn

from headwise.core.host_copy import HostCopy
from headwise.watching.head_scaling import HeadScaling, ScaledLayer
from headwise.watching.head_weights import head_place, query_key_weights
from headwise.watching.ranks.sharded_weights import OutputFactors, reshard
from headwise.watching.recorder.layer import WatchedLayer
from headwise.watching.recording import Recording
from headwise.watching.training_steps import SteppedRecording

HARMLESS = ("out", "o_", "v_", "value", "post", "final", "pre_", "input", "attn_sub", "inner_attn",
            "q_a_", "kv_a_")  # fmt: skip
"""Prefixes of norms that come before the queries and keys, or after the output."""

OF_OUTPUT = "LayerNorm"
"""transformers' name of the norm after the output in BERT and its relatives."""


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


class Clips(Sequence[Clip]):
    """The heads that were clipped in a step; on a GPU, reading them waits for their figures.

    ValueError if a logit was infinite or NaN: then no head was clipped.
    """

    def __init__(
        self, step: int, layers: Sequence[tuple[WatchedLayer, int]], found: Tensor
    ) -> None:
        self.step, self._layers = step, layers  # each with all of its heads; found: (2, heads)
        self._copy = HostCopy.of(found)
        self._read: list[Clip] | None = None

    @property
    def arrived(self) -> bool:
        """True if reading them waits for nothing."""
        return self._copy.arrived

    def _clips(self) -> list[Clip]:
        if self._read is None:
            largest, factors = (iter(x) for x in self._copy.read().tolist())
            found = []
            for layer, heads in self._layers:
                for head in range(heads):
                    value, factor = next(largest), next(factors)
                    if value == math.inf:
                        raise ValueError(
                            f"hw.qk_clip: head {layer.number}.{head} has a logit that is infinite "
                            f"or NaN at step {self.step}, which no scaling repairs; go back to the "
                            "last checkpoint"
                        )
                    if factor < 1:
                        clip = Clip(layer.number, layer.module, head, value, factor, layer.sampled)
                        found.append(clip)
            self._read = found
        return self._read

    @overload
    def __getitem__(self, wanted: int) -> Clip: ...
    @overload
    def __getitem__(self, wanted: slice) -> list[Clip]: ...
    def __getitem__(self, wanted: int | slice) -> Clip | list[Clip]:
        return self._clips()[wanted]

    def __len__(self) -> int:
        return len(self._clips())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._clips() == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._clips())


_done: weakref.WeakKeyDictionary[Recording, Clips] = weakref.WeakKeyDictionary()


@torch.no_grad()
def qk_clip(model: nn.Module, seen: Recording, limit: float = 100.0) -> Sequence[Clip]:
    """Shrink the queries and keys of each head whose largest logit exceeds the limit.

    The rows of W_q and W_k that belong to such a head, and of their biases, are multiplied by
    √(limit / max), so that its largest logit for the same input is `limit`. Keys that several heads
    share shrink as little as the head with the smallest excess needs, and the queries make up the
    rest: every head gets its own factor exactly, and no weight grows. In latent attention (MLA) the
    rotary key, which all heads share, stays, and the rotary part of a head's queries takes the
    whole factor. Tied weights are scaled once,
    and those that make something else stay as they are. Call it after the optimiser's step; the
    figures of a step are used once. The optimiser's state stays as it is. Nothing waits for a GPU:
    the largest logits are read there, and what was clipped when somebody looks.

    With torch.distributed the processes agree on the largest logits, so all of them must call it.
    Parameters may be DTensors, of FSDP2 or of a tensor-parallel plan: each process scales its part.
    If `seen` has a mesh, it is the largest logits of its last step that count, and processes may
    have different layers; each returns the clips of its own.

    ValueError if scaling the weights does not scale the logits (QK-norm, cosine or additive scores,
    a softcap, a position bias), if the weights are not known, or if they are tied in a way that no
    scaling does justice. Nothing is changed then.

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
    step, before = _step(seen), _done.pop(seen, None)
    if before is not None:
        len(before)  # one step late it raises if there was nothing to clip
        if before.step >= step:
            _done[seen] = before
            return []
    layers: dict[str, list[WatchedLayer]] = {}
    for layer in seen.layers if step >= 0 else ():
        layers.setdefault(layer.module, []).append(layer)
    reshard(model)
    outputs = OutputFactors()
    made = {path: _scaled_layer(model, path, each, outputs) for path, each in layers.items()}
    scaling = HeadScaling.of(model, made)  # or nothing changes
    if not made:
        return []
    largest = _largest(seen, layers, made)
    if not largest:
        return []
    device = next(iter(largest.values())).device
    together = torch.cat([x.to(device, non_blocking=True) for x in largest.values()])
    factors = torch.where(together > limit, limit / together, 1.0)
    broken = (together == torch.inf).any()  # then none is clipped, on any process
    if isinstance(seen, SteppedRecording) and seen.ranks is not None:
        broken = broken | seen.ranks.infinite("max_logit").to(device)
    factors = torch.where(broken, 1.0, factors)
    parts = factors.split([len(x) for x in largest.values()])
    agreed = scaling.agreed(dict(zip(largest, parts, strict=True)))
    scaling.apply(agreed)
    outputs.apply()
    first = [(layers[path][0], len(found)) for path, found in largest.items()]
    clips = Clips(step, first, torch.stack((together, torch.cat([*agreed.values()]))))
    if clips.arrived:
        len(clips)
    _done[seen] = clips
    return clips


def watched_module(model: nn.Module, path: str) -> nn.Module:
    """A watched module by its name, in the model or in what DDP or the compiler wraps."""
    for wrapper in ("", "module.", "_orig_mod."):
        for name in (path.removeprefix(wrapper), wrapper + path):
            try:
                return model.get_submodule(name)
            except AttributeError:
                continue
    raise ValueError(f"hw.qk_clip: there is no {path!r} in this {type(model).__name__}")


def _step(seen: Recording) -> int:
    """The number of the step whose figures the recording holds now."""
    running = any(layer.recorded for layer in seen.layers)
    if isinstance(seen, SteppedRecording) and seen.ranks is not None:
        if running and seen.last_step is None:
            raise ValueError(
                "hw.qk_clip: the figures of a watch with a mesh are joined when a step ends; call "
                "it after the optimiser's step, or after watch.step()"
            )
    elif running:
        return int(getattr(seen, "steps", 0))
    return -1 if seen.last_step is None else seen.last_step


def _largest(
    seen: Recording, layers: dict[str, list[WatchedLayer]], made: dict[str, ScaledLayer]
) -> dict[str, Tensor]:
    """The largest logit of each module's heads, (heads,), on its device, over all processes.

    -inf where none is wanted. NaN becomes infinite, so that no other process's logit hides it.
    """
    joined = seen.ranks.columns() if isinstance(seen, SteppedRecording) and seen.ranks else None
    recorded = any(layer.recorded for each in layers.values() for layer in each)
    found = {}
    for path, each in layers.items():
        parts = []
        for layer in each:
            assert layer.slot is not None
            columns = layer.slot.board.columns
            if "max_logit" not in columns.stats:
                raise ValueError(
                    "hw.qk_clip reads max_logit, which was not recorded; name it in stats="
                )
            if joined is not None and layer.name not in joined:
                continue  # it was seen for the first time, and joins the others in the next step
            if joined is not None:
                values = joined[layer.name]
            else:
                values = layer.slot.read() if recorded else layer.slot.ended()
            parts.append(values[columns.largest("max_logit")].nan_to_num(torch.inf, torch.inf))
        if parts:
            found[path] = torch.stack(parts).amax(0)
    if joined is None:
        found = _agreed(found, made)
    wanted = getattr(getattr(seen, "options", None), "heads", None)
    for largest in found.values() if wanted is not None else ():
        for head in set(range(len(largest))) - set(wanted or ()):
            largest[head] = -torch.inf
    return found


def _agreed(largest: dict[str, Tensor], made: dict[str, ScaledLayer]) -> dict[str, Tensor]:
    """The same of all heads over all processes, whose weights stay equal and who fail together."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return largest
    home = "cuda" if distributed.get_backend() == "nccl" else "cpu"
    whole = {}
    for path, x in largest.items():
        whole[path] = x.new_full((made[path].heads,), -torch.inf)
        whole[path][made[path].own] = x
    together = torch.cat([x.to(home) for x in whole.values()])
    distributed.all_reduce(together, op=distributed.ReduceOp.MAX)
    parts = together.split([len(x) for x in whole.values()])
    return {path: x.to(largest[path].device) for path, x in zip(largest, parts, strict=True)}


def _scaled_layer(
    model: nn.Module, path: str, layers: Sequence[WatchedLayer], outputs: OutputFactors
) -> ScaledLayer:
    """The weights of a module's queries and keys; ValueError if they do not set the logits."""
    module, layer = watched_module(model, path), layers[0]
    reasons = [reason for each in layers if (reason := why_not(module, each)) is not None]
    if reasons:
        raise ValueError(f"hw.qk_clip can't clip {path or 'the model'}: {reasons[0]}")
    first, heads = head_place(module, layer.heads, layer.width) or (0, layer.heads)
    try:
        of_all = outputs.by_head(module, path, heads)
        weights = of_all or query_key_weights(module, path, layer.heads)
    except ValueError as unknown:
        raise ValueError(f"hw.qk_clip can't clip {unknown}") from unknown
    if of_all is None:
        first = layer.first_head  # of a watch with a mesh
    return ScaledLayer(module, weights, slice(first, first + layer.heads), heads)


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
    return layer.last.not_linear


def _is_norm(name: str, child: nn.Module) -> bool:
    named = "norm" in name.lower() or "norm" in type(child).__name__.lower()
    return named and not isinstance(child, nn.Identity)
