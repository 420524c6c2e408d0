"""Several models of one shape as one: a step of it trains them all, with as many kernels as one.

A small model leaves a GPU waiting between kernels. The inputs of R models of B sequences each stand
one after the other on the batch axis, (R · B, ...); what has no parameters never notices, and a
layer with parameters multiplies each model's part by that model's own.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise import Dot
from headwise import mask as masks
from headwise.extend import Causal, Lengths, Mask
from headwise.nn import Additive, FixedAttention, Memory, MultiHeadAttention

LONGEST = 32
"""The most tokens of a sentence that the kernels take."""


def stacked(models: Sequence[Any]) -> nn.Module:
    """One module that computes what each of several equal modules does, (R · B, ...) at a time.

    Parameters keep their names and get a leading axis R. A module with parameters of a kind that is
    not known here raises a ValueError.

    >>> one, other = nn.Linear(3, 4), nn.Linear(3, 4)
    >>> x = torch.randn(2, 5, 3)
    >>> torch.allclose(stacked([one, other])(x)[1], other(x[1]), atol=1e-6)
    True
    """
    first: nn.Module = models[0]
    if (kind := STACKED.get(type(first))) is not None:
        return kind(models)
    if next(first.parameters(recurse=False), None) is not None:
        raise ValueError(
            f"{type(first).__name__} has parameters of its own and can't be stacked; build it of "
            f"{', '.join(x.__name__ for x in STACKED)}"
        )
    joined = copy.copy(first)
    joined._modules = first._modules | {
        name: stacked([model._modules[name] for model in models])
        for name in dict(first.named_children())
    }
    if getattr(joined, "head", joined) is None:  # logits by the embedding's matrix
        joined.head = Unembedding(joined.embedding)
    return joined


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (R · B, ..., in) by weight (R, out, in) and bias (R, out), each model's part by its own."""
    rows = x.reshape(len(weight), -1, x.shape[-1])
    if bias is None:
        out = torch.bmm(rows, weight.mT)
    else:
        out = torch.baddbmm(bias[:, None], rows, weight.mT)
    return out.view(*x.shape[:-1], weight.shape[1])


def joined_parameter(modules: Sequence[nn.Module], name: str) -> nn.Parameter:
    """A parameter of all modules, with a leading axis."""
    return nn.Parameter(torch.stack([getattr(module, name).detach() for module in modules]))


class StackedLinear(nn.Module):
    """Several nn.Linear."""

    def __init__(self, modules: Sequence[Any]) -> None:
        super().__init__()
        self.weight = joined_parameter(modules, "weight")
        self.bias = None if modules[0].bias is None else joined_parameter(modules, "bias")

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class StackedEmbedding(nn.Module):
    """Several nn.Embedding."""

    def __init__(self, modules: Sequence[nn.Embedding]) -> None:
        super().__init__()
        self.weight = joined_parameter(modules, "weight")

    def forward(self, tokens: Tensor) -> Tensor:
        runs, vocabulary, _ = self.weight.shape
        first = torch.arange(runs, device=tokens.device) * vocabulary  # of each model's rows
        numbers = tokens.reshape(runs, -1) + first[:, None]
        return F.embedding(numbers, self.weight.flatten(0, 1)).view(*tokens.shape, -1)


class Unembedding(nn.Module):
    """Logits by the matrix of an embedding, which stays the embedding's."""

    def __init__(self, embedding: Any) -> None:
        super().__init__()
        self.embedding = (embedding,)  # in a tuple: its parameter has one name

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.embedding[0].weight)


class StackedNorm(nn.Module):
    """Several nn.LayerNorm."""

    def __init__(self, modules: Sequence[nn.LayerNorm]) -> None:
        super().__init__()
        self.eps = modules[0].eps
        self.weight, self.bias = (joined_parameter(modules, x) for x in ("weight", "bias"))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(len(self.weight), -1, x.shape[-1])
        if kernels_serve(x):
            out: Tensor = short_kernels().ShortNorm.apply(rows, self.weight, self.bias, self.eps)
            return out.view(x.shape)
        even = F.layer_norm(rows, x.shape[-1:], eps=self.eps)
        return torch.addcmul(self.bias[:, None], even, self.weight[:, None]).view(x.shape)


class StackedRootNorm(nn.Module):
    """Several nn.RMSNorm."""

    def __init__(self, modules: Sequence[nn.RMSNorm]) -> None:
        super().__init__()
        self.eps = modules[0].eps
        self.weight = joined_parameter(modules, "weight")

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(len(self.weight), -1, x.shape[-1])
        even = F.rms_norm(rows, x.shape[-1:], eps=self.eps)
        return (even * self.weight[:, None]).view(x.shape)


class StackedWeight(nn.Module):
    """The weights of several learned scores."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.weight = joined_parameter(modules, "weight")


class StackedFixed(nn.Module):
    """Several hw.nn.FixedAttention."""

    def __init__(self, modules: Sequence[FixedAttention]) -> None:
        super().__init__()
        first = modules[0]
        self.heads, self.mask, self.length = first.heads, first.mask, first.length
        self.logits = joined_parameter(modules, "logits")  # (R, H, length, length)
        self.value, self.out = (stacked([m.get_submodule(x) for m in modules]) for x in SIDES)

    def forward(self, x: Tensor, *, mask: Mask | None = None, cache: None = None) -> Tensor:
        size, runs = x.shape[1], len(self.logits)
        if size > self.length:
            raise ValueError(f"x {tuple(x.shape)} is longer than the {self.length} fixed positions")
        logits = self.logits[:, :, :size, :size]
        logits = logits.repeat_interleave(x.shape[0] // runs, 0)
        hidden = hidden_keys(self.mask or mask, size, size, x)
        v = in_heads(self.value(x), self.heads)
        out: Tensor = self.out(mixed(wide(logits) + hidden, v))
        return out


class StackedAttention(nn.Module):
    """Several hw.nn.MultiHeadAttention, materialised: their sequences are short.

    Each may have a scale of its own. `head_gate` (H,) multiplies the output of each head.
    """

    def __init__(self, modules: Sequence[MultiHeadAttention]) -> None:
        super().__init__()
        first = modules[0]
        score, position = first.score, first.position
        weights = dict(score.named_parameters()) if isinstance(score, nn.Module) else {}
        learned = [x.ndim for x in weights.values()] == [2] and "weight" in weights
        turned = position is not None and position.rotates and not position.rotates_late
        unknown = (position and not turned, first.sinks, first.softcap, first.dropout)
        grouped = first.kv_heads != first.heads
        if any(unknown) or grouped or not (learned or isinstance(score, Dot)):
            raise ValueError(
                f"{first} can't be stacked: it takes plain heads, Dot or Additive, and Rotary"
            )
        self.heads, self.head_dim, self.mask = first.heads, first.head_dim, first.mask
        self.position = position
        self.query_norm, self.key_norm = (
            None if first.query_norm is None else stacked([m.get_submodule(x) for m in modules])
            for x in ("query_norm", "key_norm")
        )
        scales = [1.0 if learned else scale_of(module) for module in modules]
        self.scale = scales[0]
        factors = torch.tensor([each / self.scale for each in scales])
        self.factors: Tensor | None  # (R,): of the queries, where scales differ
        self.register_buffer("factors", None if len({*scales}) == 1 else factors, persistent=False)
        self.score = StackedWeight([m.get_submodule("score") for m in modules]) if learned else None
        self.query = stacked([m.query for m in modules])
        self.key = None if first.key is None else stacked([m.get_submodule("key") for m in modules])
        self.value, self.out = (stacked([m.get_submodule(x) for m in modules]) for x in SIDES)
        self.head_gate: Tensor | None = None

    def remember(self, context: Tensor) -> Memory:
        """Keys and values of a context (R · B, M, d_model)."""
        keys = (self.query if self.key is None else self.key)(context)
        return Memory(keys[:, None], self.value(context)[:, None])  # as one wide head

    def forward(
        self,
        x: Tensor,
        context: Tensor | Memory | None = None,
        *,
        mask: Mask | None = None,
        cache: None = None,
    ) -> Tensor:
        source = x if context is None else context
        memory = source if isinstance(source, Memory) else self.remember(source)
        q, k, v = self.queries(x), memory.keys[:, 0], memory.values[:, 0]
        mask = self.mask or mask
        plain = self.position is None and self.query_norm is None
        fused = plain and kernels_serve(x, q.shape[1], k.shape[1])
        out: Tensor = (self.fused if fused else self.materialised)(q, k, v, mask)
        if self.head_gate is not None:
            out = out * self.head_gate.repeat_interleave(out.shape[-1] // self.heads).to(out.dtype)
        joined: Tensor = self.out(out)
        return joined

    def queries(self, x: Tensor) -> Tensor:
        """Queries (R · B, N, H · D), times each model's factor."""
        q: Tensor = self.query(x)
        if self.factors is None:
            return q
        return q * self.factors.repeat_interleave(len(q) // len(self.factors))[:, None, None]

    def fused(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None) -> Tensor:
        """Attention of q (R · B, N, H · D) in one kernel."""
        weight = None if self.score is None else self.score.weight.contiguous()
        lengths = torch.as_tensor(mask.n, device=q.device) if isinstance(mask, Lengths) else None
        apply = short_kernels().ShortAttention.apply
        out: Tensor = apply(
            q, k, v, weight, lengths, self.heads, self.scale, isinstance(mask, Causal)
        )
        return out

    def materialised(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None) -> Tensor:
        """Attention of q (R · B, N, H · D), step by step."""
        return mixed(self.logits(q, k, mask), in_heads(v, self.heads))

    def logits(self, q: Tensor, k: Tensor, mask: Mask | None) -> Tensor:
        """The logits (R · B, H, N, M) of queries and keys (R · B, N, H · D); -inf where hidden."""
        hidden = hidden_keys(mask, q.shape[1], k.shape[1], q)
        return self.scored(
            self.compared(q, self.query_norm), self.compared(k, self.key_norm), hidden
        )

    def compared(self, x: Tensor, norm: nn.Module | None) -> Tensor:
        """Queries or keys (R · B, N, H · D) as they are compared: (R · B, H, N, D)."""
        x = in_heads(x, self.heads)
        if norm is not None:
            x = norm(x)
        if self.position is not None:
            places = torch.arange(x.shape[2], device=x.device)
            x = self.position.rotate(x, self.position.waves(places, x.shape[2]))
        return x

    def scored(self, q: Tensor, k: Tensor, hidden: Tensor) -> Tensor:
        """The logits (R · B, H, N, M), at least in float32; `hidden` is added to them."""
        if self.score is None:
            shape = (*q.shape[:3], k.shape[2])
            logits = hidden.expand(shape).clone(memory_format=torch.contiguous_format)
            one, other = wide(q).flatten(0, 1), wide(k).flatten(0, 1)
            return logits.flatten(0, 1).baddbmm_(one, other.mT, alpha=self.scale).view(shape)
        runs = len(self.score.weight)
        pairs = torch.tanh(q[..., :, None, :] + k[..., None, :, :])  # (R · B, H, N, M, D)
        weight = self.score.weight.to(pairs.dtype).repeat_interleave(len(q) // runs, 0)
        logits = (pairs.flatten(2, 3) @ weight[..., None]).view(pairs.shape[:-1])
        return wide(logits) + hidden


def scale_of(module: MultiHeadAttention) -> float:
    """The factor of a layer's dot products."""
    assert isinstance(module.score, Dot)
    return module.head_dim**-0.5 if module.score.scale is None else module.score.scale


SIDES = ("value", "out")


def wide(x: Tensor) -> Tensor:
    """A tensor in float32 or wider, contiguous."""
    return x.to(torch.promote_types(x.dtype, torch.float32), memory_format=torch.contiguous_format)


def in_heads(x: Tensor, heads: int) -> Tensor:
    """(B, N, H · D) as (B, H, N, D)."""
    out: Tensor = x.unflatten(-1, (heads, -1)).transpose(1, 2)
    return out


def mixed(logits: Tensor, v: Tensor) -> Tensor:
    """The values by softmax of the logits, heads joined: (B, N, H · D)."""
    out: Tensor = logits.softmax(-1).to(v.dtype) @ v
    return out.transpose(1, 2).flatten(2)


def short_kernels() -> ModuleType:
    """The kernels, which need Triton."""
    from headwise.apps.train import short_kernels

    return short_kernels


def kernels_serve(x: Tensor, *sizes: int) -> bool:
    """True if the kernels take this tensor, and sentences of these lengths."""
    if x.dtype == torch.float64 or not (x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"):
        return False
    return max((0, *sizes)) <= LONGEST and kernels_work(x.device)


@cache
def kernels_work(device: torch.device) -> bool:
    """True if the kernels compile on this machine; warns if they don't."""
    try:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            q, k, v, g = (torch.randn(4, 9, 32, device=device, dtype=dtype) for _ in range(4))
        lengths = masks.lengths(torch.tensor([9, 1, 4, 7], device=device))
        for score, mask in ((Dot(), lengths), (Additive(), masks.causal())):
            pair = [MultiHeadAttention(32, 2, score=score) for _ in range(2)]
            layer = StackedAttention(pair).to(device, dtype)
            every = [x.requires_grad_() for x in (q, k, v)]
            outs = [each(q, k, v, mask) for each in (layer.fused, layer.materialised)]
            parts = [(out, *torch.autograd.grad(out, every, g)) for out in outs]
            worst = max(float((a - b).detach().abs().max()) for a, b in zip(*parts, strict=True))
            if not worst < 0.1:
                raise ValueError(f"they differ by {worst:.2g}")
    except Exception as error:  # whatever a version of Triton raises
        warnings.warn(f"without kernels for short sentences: {error!r:.300}", stacklevel=2)
        return False
    return True


def hidden_keys(mask: Mask | None, queries: int, keys: int, x: Tensor) -> Tensor:
    """-inf at keys that a mask hides, 0 elsewhere: (B|1, 1, N|1, M), in float32 or wider."""
    place = torch.arange(keys, device=x.device)
    zeros = torch.zeros((), device=x.device, dtype=torch.promote_types(x.dtype, torch.float32))
    if mask is None:
        return zeros.expand(1, 1, 1, keys)
    if isinstance(mask, Causal) and mask.offset is None:
        unseen = place > torch.arange(keys - queries, keys, device=x.device)[:, None]
    elif isinstance(mask, Lengths):
        unseen = place >= torch.as_tensor(mask.n, device=x.device)[:, None, None, None]
    else:
        raise ValueError(f"{mask!r} can't be stacked; causal() and lengths(n) can")
    return zeros.expand(unseen.shape).masked_fill(unseen, -torch.inf)


STACKED: dict[type[nn.Module], Callable[[Any], nn.Module]] = {
    nn.Linear: StackedLinear,
    nn.Embedding: StackedEmbedding,
    nn.LayerNorm: StackedNorm,
    nn.RMSNorm: StackedRootNorm,
    FixedAttention: StackedFixed,
    MultiHeadAttention: StackedAttention,
}
"""The layers with parameters that can be stacked."""


class Stack:
    """Equal models in training: the parameters of each are a row of `flat`, computed in `dtype`.

    `module` holds the weights as they were when `settle` was called last.
    """

    def __init__(
        self, models: Sequence[nn.Module], device: torch.device, dtype: torch.dtype
    ) -> None:
        self.runs, self.dtype = len(models), dtype
        joined = stacked(models).to(device)
        # Matrices before vectors: they stay aligned, as a GPU's matrix units want them.
        order = sorted(joined.named_parameters(), key=lambda each: each[1].ndim == 2)
        self.shapes = {name: parameter.shape for name, parameter in order}
        self.sizes = [shape[1:].numel() for shape in self.shapes.values()]
        self.flat = torch.cat([x.detach().flatten(1) for _, x in order], 1).requires_grad_()
        self.module = joined.to(dtype)

    def parts(self, flat: Tensor) -> list[Tensor]:
        """A matrix like `flat` by parameter, each (R, ...)."""
        shapes = self.shapes.values()
        return [
            part.view(shape) for part, shape in zip(flat.split(self.sizes, 1), shapes, strict=True)
        ]

    def columns(self, chosen: Callable[[str, torch.Size], bool]) -> Tensor:
        """1 for the columns of `flat` that hold a chosen parameter, by name and shape; else 0."""
        each = [float(chosen(name, shape)) for name, shape in self.shapes.items()]
        there = torch.tensor(each, device=self.flat.device, dtype=self.flat.dtype)
        return there.repeat_interleave(torch.tensor(self.sizes, device=there.device))

    def __call__(self, *inputs: Tensor, **options: Tensor) -> Tensor:
        """The output of all models, with gradients into `flat`."""
        weights = dict(zip(self.shapes, self.parts(self.flat.to(self.dtype)), strict=True))
        out: Tensor = torch.func.functional_call(self.module, weights, inputs, options)
        return out

    def settle(self) -> nn.Module:
        """Put the weights as they are now into `module`, and return it."""
        with torch.no_grad():
            named = dict(self.module.named_parameters())
            for name, part in zip(self.shapes, self.parts(self.flat), strict=True):
                named[name].copy_(part)
        return self.module

    def state(self, run: int) -> dict[str, Tensor]:
        """The parameters of one model, for its `load_state_dict`."""
        parts = self.parts(self.flat.detach())
        return {name: part[run].clone() for name, part in zip(self.shapes, parts, strict=True)}
