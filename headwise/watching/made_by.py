"""Where a layer's queries and keys are made: the rows of its weights that belong to each head."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from headwise.nn import MultiHeadAttention
from headwise.nn.projections import Unprojected
from headwise.score import Additive, Cosine


class Made(NamedTuple):
    """Views of the parameters that make the vectors of each head, the heads on the first axis.

    queries and keys: (H, width, inputs) of a weight, (H, width) of its bias. Where `shared`, keys
    are made by the queries' parameters, and `keys` is empty.
    """

    queries: list[Tensor]
    keys: list[Tensor]
    shared: bool = False


SEPARATE = (
    ("q_proj", "k_proj"),  # Llama, Mistral, Qwen, Gemma, OPT, Bart, CLIP, ...
    ("query", "key"),  # BERT, ViT and their kin
    ("q_lin", "k_lin"),  # DistilBERT
    ("linear_q", "linear_k"),
    ("wq", "wk"),
    ("q", "k"),
)
"""What separate layers for queries and keys are called."""

STACKED = ("qkv_proj", "Wqkv", "qkv", "in_proj")
"""Layers that give all queries, then all keys, then all values."""

NORMS = ("q_norm", "k_norm", "query_norm", "key_norm", "q_layernorm", "k_layernorm", "norm_q")
"""Layers after which the size of queries and keys is no longer that of the weights."""


ADDED = ("attn_logit_softcapping", "softcap", "relative_attention_bias", "alibi")
"""Attributes of layers whose logits are more than queries times keys."""


def made_by(module: nn.Module, name: str, heads: int) -> Made:
    """The parameters that make a layer's queries and keys; ValueError where weights don't do it."""
    for norm in NORMS:
        if isinstance(getattr(module, norm, None), nn.Module):
            raise _refused(name, f"it normalises queries and keys ({norm}), which undoes a scaling")
    for added in ADDED:
        if getattr(module, added, None) is not None:
            raise _refused(name, f"its logits are more than queries times keys ({added})")
    for find in (_ours, _torch, _columns, _separate, _interleaved, _stacked):
        found = find(module, name, heads)
        if found is not None:
            return found
    children = ", ".join(child for child, _ in module.named_children()) or "none"
    raise _refused(
        name,
        f"{type(module).__name__} makes its queries and keys in a way that is not known here; its "
        f"layers are {children}",
    )


def _ours(module: nn.Module, name: str, heads: int) -> Made | None:
    if not isinstance(module, MultiHeadAttention):
        return None
    score = module.score() if isinstance(module.score, nn.Module) else module.score
    if isinstance(score, Cosine):
        raise _refused(name, "the size of queries and keys has no part in a cosine score")
    if isinstance(score, Additive):
        raise _refused(name, "an additive score is not proportional to queries and keys")
    if module.position is not None and (bias := module.position.bias()) is not None:
        raise _refused(name, f"{type(bias).__name__} is added to its logits")
    if isinstance(module.projections, Unprojected):
        raise _refused(name, "Unprojected queries and keys are made by no weights")
    if module.key is None:
        return Made(_linear(module.query, name, heads), [], shared=True)
    queries = _linear(module.query, name, heads)
    return Made(queries, _linear(module.key, name, module.kv_heads))


def _torch(module: nn.Module, name: str, heads: int) -> Made | None:
    if not isinstance(module, nn.MultiheadAttention):
        return None
    held = dict(module.named_parameters(recurse=False))
    if "bias_k" in held:
        raise _refused(name, "add_bias_kv adds a key that no weights make")
    parts = []
    for packed in ("in_proj_weight", "in_proj_bias"):
        if packed in held:
            parts.append(held[packed].chunk(3))
    if "q_proj_weight" in held:
        parts.append((held["q_proj_weight"], held["k_proj_weight"]))
    queries, keys = ([part[which].unflatten(0, (heads, -1)) for part in parts] for which in (0, 1))
    return Made(queries, keys)


def _columns(module: nn.Module, name: str, heads: int) -> Made | None:
    """GPT-2's: a matrix with a column for each output; in cross-attention, without queries."""
    fused = getattr(module, "c_attn", None)
    if fused is None:
        return None
    alone = getattr(module, "q_attn", None)
    parts = [_outputs(fused, name).chunk(3 if alone is None else 2)]
    parts += [_float(fused.bias, name).chunk(len(parts[0]))]
    keys = [part[1 if alone is None else 0].unflatten(0, (heads, -1)) for part in parts]
    if alone is None:
        return Made([part[0].unflatten(0, (heads, -1)) for part in parts], keys)
    queries = [_outputs(alone, name), _float(alone.bias, name)]
    return Made([x.unflatten(0, (heads, -1)) for x in queries], keys)


def _separate(module: nn.Module, name: str, heads: int) -> Made | None:
    for first, second in SEPARATE:
        query, key = getattr(module, first, None), getattr(module, second, None)
        if isinstance(query, nn.Module) and isinstance(key, nn.Module):
            queries = _linear(query, f"{name}.{first}", heads)
            width = queries[0].shape[1]
            rows = key.weight.shape[0] if isinstance(key.weight, Tensor) else 0
            return Made(queries, _linear(key, f"{name}.{second}", rows // width))
    return None


def _interleaved(module: nn.Module, name: str, heads: int) -> Made | None:
    """GPT-NeoX's and Bloom's: a head's queries, keys and values, then the next head's."""
    fused = getattr(module, "query_key_value", None)
    if not isinstance(fused, nn.Linear):
        return None
    if fused.out_features != 3 * fused.in_features:
        raise _refused(name, "its query_key_value shares keys among heads, in an order of its own")
    parts = [x.unflatten(0, (heads, 3, -1)) for x in _parameters(fused, name)]
    return Made([x[:, 0] for x in parts], [x[:, 1] for x in parts])


def _stacked(module: nn.Module, name: str, heads: int) -> Made | None:
    fused = next((x for part in STACKED if isinstance(x := getattr(module, part, None), nn.Linear)),
                 None)  # fmt: skip
    if fused is None:
        return None
    width = getattr(module, "head_dim", fused.in_features // heads)
    shared, rest = divmod(fused.out_features // width - heads, 2)
    if rest or shared < 1:
        raise _refused(name, f"{fused.out_features} outputs are no {heads} heads of {width}")
    sizes = [heads * width, shared * width, shared * width]
    queries, keys, _ = zip(*(x.split(sizes) for x in _parameters(fused, name)), strict=True)
    return Made(
        [x.unflatten(0, (heads, width)) for x in queries],
        [x.unflatten(0, (shared, width)) for x in keys],
    )


def _linear(layer: nn.Module, name: str, heads: int) -> list[Tensor]:
    return [x.unflatten(0, (heads, -1)) for x in _parameters(layer, name)]


def _parameters(layer: nn.Module, name: str) -> list[Tensor]:
    """A linear layer's weight and bias, outputs on the first axis."""
    if not isinstance(layer, nn.Linear):
        raise _refused(name, f"{type(layer).__name__} is no plain linear layer")
    found: list[Tensor | None] = [layer.weight, layer.bias]
    return [_float(x, name) for x in found if x is not None]


def _outputs(layer: nn.Module, name: str) -> Tensor:
    """The weight (inputs, outputs) of GPT-2's layer, outputs first."""
    return _float(layer.weight, name).T


def _float(x: object, name: str) -> Tensor:
    if not isinstance(x, Tensor) or not x.dtype.is_floating_point:
        raise _refused(name, "its weights are quantised, or no tensors")
    return x


def _refused(name: str, reason: str) -> ValueError:
    return ValueError(f"hw.qk_clip can't clip {name}: {reason}")
