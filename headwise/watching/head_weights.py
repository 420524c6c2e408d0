"""The weights that make a layer's queries and keys, split by head, and how symmetric they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.handover import sharded
from headwise.nn import MultiHeadAttention
from headwise.nn.head_shares import head_share
from headwise.nn.layer_options import Unprojected


class QueryKeyWeights(NamedTuple):
    """Views of the parameters that make the queries and keys of each head, heads first.

    queries and keys: (H, width, inputs) of a weight, (H, width) of its bias. If `shared`, keys are
    made by the queries' parameters, and `keys` is empty. `names` are those of the layers, or of the
    parameters, that make queries, and of those that make keys. `turned` are queries for one key
    that all heads share and that stays as it is: the rotary part of latent attention (MLA).
    """

    queries: list[Tensor]
    keys: list[Tensor]
    shared: bool = False
    names: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    turned: Sequence[Tensor] = ()


@contextmanager
def replaced_parameters(
    module: nn.Module, replace: Callable[[nn.Module, nn.Parameter], Tensor | None]
) -> Iterator[None]:
    """Let other tensors stand for a module's parameters; None keeps the parameter."""
    before = []
    for part in module.modules():
        for name, parameter in part._parameters.items():
            found = None if parameter is None else replace(part, parameter)
            if parameter is not None and found is not None:
                before.append((part, name, parameter))
                part._parameters[name] = nn.Parameter(found, requires_grad=False)
    try:
        yield
    finally:
        for part, name, parameter in before:
            part._parameters[name] = parameter


SEPARATE = (
    ("q_proj", "k_proj"),  # Llama, Mistral, Qwen, Gemma, OPT, Bart, CLIP, ...
    ("query", "key"),  # BERT, ViT and their kin
    ("q_lin", "k_lin"),  # DistilBERT
    ("linear_q", "linear_k"),
    ("wq", "wk"),
    ("q", "k"),
)
"""Names of separate layers for queries and keys."""

STACKED = ("qkv_proj", "Wqkv", "qkv", "in_proj", "c_attn")
"""Layers that give all queries, then all keys, then all values."""


def query_key_weights(module: nn.Module, name: str, heads: int) -> QueryKeyWeights:
    """The parameters that make a layer's queries and keys; ValueError if they are not known."""
    for find in (_ours, _torch, _columns, _latent, _separate, _interleaved, _stacked):
        found = find(module, name, heads)
        if found is not None:
            return found
    children = ", ".join(child for child, _ in module.named_children()) or "none"
    raise _unknown(
        name,
        f"it is not known how {type(module).__name__} makes its queries and keys; its layers are "
        f"{children}",
    )


@torch.no_grad()
def symmetry(made: QueryKeyWeights) -> Tensor:
    """Σ M_ij M_ji / Σ M_ij² of each head's M = W_qᵀ W_k, (Hq,): 1 symmetric, −1 antisymmetric.

    Saponati et al. (2025): models that see both sides become symmetric, models that predict the
    next token do not. Unrelated weights give 0; NaN if queries and keys are made from inputs of
    different widths.

    >>> w = torch.randn(1, 4, 16)
    >>> symmetry(QueryKeyWeights([w], [], shared=True))
    tensor([1.], dtype=torch.float64)
    """
    q = made.queries[0].double()  # (Hq, D, inputs)
    if made.shared:
        return torch.ones(len(q), dtype=torch.float64)
    k = made.keys[0].double().repeat_interleave(len(q) // len(made.keys[0]), 0)
    if q.shape != k.shape:
        return torch.full((len(q),), torch.nan, dtype=torch.float64)
    crossed = k @ q.mT  # (Hq, D, D): M has rank D, so sums over its entries are small traces
    both = (crossed * crossed.mT).sum((1, 2))
    size = ((q @ q.mT) * (k @ k.mT)).sum((1, 2))
    return both / size.clamp_min(1e-300)


def _ours(module: nn.Module, name: str, heads: int) -> QueryKeyWeights | None:
    if not isinstance(module, MultiHeadAttention):
        return None
    if isinstance(module.projections, Unprojected):
        raise _unknown(name, "Unprojected queries and keys have no weights")
    queries = _linear(module.query, name, heads)
    if module.key is None:
        return QueryKeyWeights(queries, [], True, (("query",), ("query",)))
    keys = _linear(module.key, name, module.kv_heads)
    return QueryKeyWeights(queries, keys, names=(("query",), ("key",)))


def _torch(module: nn.Module, name: str, heads: int) -> QueryKeyWeights | None:
    if not isinstance(module, nn.MultiheadAttention):
        return None
    held = dict(module.named_parameters(recurse=False))
    if "bias_k" in held:
        raise _unknown(name, "add_bias_kv adds a key that is not made by weights")
    parts, packed = [], ("in_proj_weight", "in_proj_bias")
    for stored in packed:
        if stored in held:
            parts.append(held[stored].chunk(3))
    if "q_proj_weight" in held:
        parts.append((held["q_proj_weight"], held["k_proj_weight"]))
    queries, keys = ([_by_head(x[which], name, heads) for x in parts] for which in (0, 1))
    names = (*packed, "q_proj_weight"), (*packed, "k_proj_weight")
    return QueryKeyWeights(queries, keys, names=names)


def _columns(module: nn.Module, name: str, heads: int) -> QueryKeyWeights | None:
    """GPT-2's matrix, with a column for each output; in cross-attention without queries."""
    fused: Any = getattr(module, "c_attn", None)
    alone: Any = getattr(module, "q_attn", None)
    if type(fused).__name__ != "Conv1D":
        return None
    pieces = 3 if alone is None else 2
    parts = [x.chunk(pieces) for x in _transposed(fused, name)]
    keys = [_by_head(part[pieces - 2], name, heads) for part in parts]
    queries = [part[0] for part in parts] if alone is None else _transposed(alone, name)
    names = ("c_attn" if alone is None else "q_attn",), ("c_attn",)
    return QueryKeyWeights([_by_head(x, name, heads) for x in queries], keys, names=names)


def _latent(module: nn.Module, name: str, heads: int) -> QueryKeyWeights | None:
    """Latent attention (MLA): DeepSeek, Kimi, GLM, MiniCPM3, absorbed or not."""
    raised = getattr(module, "kv_b_proj", None)
    if not isinstance(raised, nn.Module):
        return None
    first = "q_proj" if getattr(module, "q_b_proj", None) is None else "q_b_proj"
    if not isinstance(getattr(module, first, None), nn.Module):
        return None
    plain, rotary = (getattr(module, f"qk_{part}_head_dim", None) for part in ("nope", "rope"))
    if not isinstance(plain, int) or not isinstance(rotary, int):
        raise _unknown(name, "qk_nope_head_dim does not tell which outputs of kv_b_proj are keys")
    queries = _linear(getattr(module, first), f"{name}.{first}", heads)
    if queries[0].shape[1] != plain + rotary:
        width = queries[0].shape[1]
        raise _unknown(name, f"{first} makes queries of {width}, not of {plain} + {rotary}")
    return QueryKeyWeights(
        [x[:, :plain] for x in queries],
        [x[:, :plain] for x in _linear(raised, f"{name}.kv_b_proj", heads)],
        names=((first,), ("kv_b_proj",)),
        turned=[x[:, plain:] for x in queries] if rotary else (),
    )


def _separate(module: nn.Module, name: str, heads: int) -> QueryKeyWeights | None:
    for first, second in SEPARATE:
        query, key = getattr(module, first, None), getattr(module, second, None)
        if isinstance(query, nn.Module) and isinstance(key, nn.Module):
            queries = _linear(query, f"{name}.{first}", heads)
            keys = _parameters(key, f"{name}.{second}")
            groups, rest = divmod(keys[0].shape[0], queries[0].shape[1])
            if rest or not groups or heads % groups:
                raise _unknown(
                    name,
                    f"the {keys[0].shape[0]} outputs of {second} are not keys for {heads} heads of "
                    f"width {queries[0].shape[1]}",
                )
            names = (first,), (second,)
            return QueryKeyWeights(queries, [_by_head(x, name, groups) for x in keys], names=names)
    return None


def _interleaved(module: nn.Module, name: str, heads: int) -> QueryKeyWeights | None:
    """GPT-NeoX's and BLOOM's matrix: a head's queries, keys and values, then the next head's."""
    names = ["query_key_value"]
    if getattr(module, "multi_query", None) is False:  # GPT-BigCode's, where keys are not shared
        names.insert(0, "c_attn")
    found = next((x for x in names if hasattr(module, x)), "")
    fused = getattr(module, found, None)
    if not isinstance(fused, nn.Linear):
        return None
    if fused.out_features != 3 * fused.in_features:
        raise _unknown(name, "its one layer shares keys among heads, in an unknown order")
    parts = [
        _by_head(x, name, 3 * heads).unflatten(0, (heads, 3)) for x in _parameters(fused, name)
    ]
    queries, keys = [x[:, 0] for x in parts], [x[:, 1] for x in parts]
    return QueryKeyWeights(queries, keys, names=((found,), (found,)))


def _stacked(module: nn.Module, name: str, heads: int) -> QueryKeyWeights | None:
    found = next((x for x in STACKED if isinstance(getattr(module, x, None), nn.Linear)), None)
    if found is None:
        return None
    fused: nn.Linear = getattr(module, found)
    width = getattr(module, "head_dim", fused.in_features // heads)
    groups = (fused.out_features // width - heads) // 2 if width else 0
    if groups < 1 or heads % groups or (heads + 2 * groups) * width != fused.out_features:
        raise _unknown(name, f"{fused.out_features} outputs are not {heads} heads of width {width}")
    sizes = [heads * width, groups * width, groups * width]
    queries, keys, _ = zip(*(x.split(sizes) for x in _parameters(fused, name)), strict=True)
    return QueryKeyWeights(
        [_by_head(x, name, heads) for x in queries],
        [_by_head(x, name, groups) for x in keys],
        names=((found,), (found,)),
    )


def _linear(layer: nn.Module, name: str, heads: int) -> list[Tensor]:
    return [_by_head(x, name, heads) for x in _parameters(layer, name)]


def _parameters(layer: nn.Module, name: str) -> list[Tensor]:
    """A linear layer's weight and bias, outputs on the first axis."""
    if not isinstance(layer, nn.Linear):
        kind = type(layer)  # peft's has PyTorch's name
        raise _unknown(name, f"{kind.__module__}.{kind.__name__} is not a plain linear layer")
    return _stored(layer, name)


def _transposed(layer: nn.Module, name: str) -> list[Tensor]:
    """The weight and bias of GPT-2's layer, whose weight is (inputs, outputs)."""
    return [x.T if x.ndim == 2 else x for x in _stored(layer, name)]


def _stored(layer: nn.Module, name: str) -> list[Tensor]:
    """A layer's weight and, if it has one, its bias; computed weights can't be changed."""
    held: tuple[object, ...] = (layer.weight, layer.bias)
    found = [x for x in held if isinstance(x, nn.Parameter) and _is_plain(x)]
    if len(found) < sum(x is not None for x in held):
        raise _unknown(name, "its weights are quantised, or computed from other tensors")
    return [*found]


def _is_plain(x: Tensor) -> bool:
    """True if its numbers can be scaled; torchao's tensors call themselves float and hold int8."""
    return x.dtype.is_floating_point and (type(x.data) is Tensor or is_sharded(x))


def _by_head(x: Tensor, name: str, heads: int) -> Tensor:
    """Outputs (heads · width, ...) as (heads, width, ...)."""
    if x.shape[0] % heads:
        raise _unknown(name, f"{x.shape[0]} outputs can't be split evenly into {heads} heads")
    split: Tensor = x.unflatten(0, (heads, -1))
    return split


def _unknown(name: str, reason: str) -> ValueError:
    return ValueError(f"{name or 'the model'}: {reason}")


def is_sharded(x: object) -> bool:
    """True for a DTensor."""
    return sharded(x) is not None


def head_place(module: nn.Module, heads: int, width: int) -> tuple[int, int] | None:
    """The number of the first of this rank's `heads`, and of all heads of the layer.

    Read from the weight that makes its queries, `width` wide; None if that does not tell.
    """
    return head_share(_query_weight(module), heads, width)


def _query_weight(module: nn.Module) -> Any:
    names = (
        ["query"]
        if isinstance(module, MultiHeadAttention)
        else ["q_b_proj", *(q for q, _ in SEPARATE)]
    )
    for name in names:
        found = getattr(getattr(module, name, None), "weight", None)
        if found is not None:
            return found
    return None
