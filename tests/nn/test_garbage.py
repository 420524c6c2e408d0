"""Every constructor and call of hw.nn refuses nonsense in words that name it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from headwise.nn import MultiHeadAttention
from tests.nn.garbage import complaints

D, HEADS, B, N = 32, 4, 2, 9
Make = Callable[[], dict[str, Any]]


def x() -> Tensor:
    return torch.randn(B, N, D)


def heads(tokens: int = N) -> Tensor:
    return torch.randn(B, 2, tokens, 8)


def described() -> dict[str, tuple[Callable[..., object], Make]]:
    layer = {"d_model": 32, "heads": 4, "head_dim": 8}
    kinds: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
        (hw.nn.LayerNorm, {"eps": 1e-5, "bias": True}, {"width": 32}),
        (hw.nn.RMSNorm, {"eps": 1e-5}, {"width": 32}),
        (hw.nn.ReLU, {"width": 64}, {"d_model": 32, "bias": True}),
        (hw.nn.GELU, {"width": 64, "approximate": "tanh"}, {"d_model": 32, "bias": True}),
        (hw.nn.SwiGLU, {"width": 64}, {"d_model": 32, "bias": True}),
        (hw.nn.Bahdanau, {"width": 16}, {"query_dim": 8, "key_dim": 8}),
        (hw.nn.Additive, {}, {"heads": 4, "head_dim": 8}),
        (hw.nn.General, {}, {"heads": 4, "head_dim": 8}),
        (hw.nn.Cosine, {"temperature": 5.0}, {"heads": 4, "head_dim": 8}),
        (hw.nn.ALiBi, {"learned": True}, layer),
        (
            hw.nn.RelativeBuckets,
            {"buckets": 32, "max_distance": 64, "bidirectional": True},
            layer,
        ),
        (hw.nn.Learned, {"length": 9}, layer),
        (hw.nn.Sinusoidal, {"base": 1e4}, layer),
        (
            hw.nn.Rotary,
            {"base": 1e4, "width": 8, "layout": "halves", "scaling": hw.nn.LinearScaling(2.0)},
            layer,
        ),
        (hw.nn.LinearScaling, {"factor": 2.0}, {}),
        (hw.nn.DynamicNTK, {"factor": 2.0, "trained_length": 8}, {}),
        (
            hw.nn.YaRN,
            {
                **{"factor": 2.0, "trained_length": 8, "fast": 32.0, "slow": 1.0},
                **{"attention": 1.0, "whole": True},
            },
            {},
        ),
        (hw.nn.Llama3Scaling, {"factor": 2.0, "trained_length": 8, "low": 1.0, "high": 4.0}, {}),
    ]
    found: dict[str, tuple[Callable[..., object], Make]] = {}
    for kind, fields, sizes in kinds:
        found[kind.__name__] = (kind, lambda fields=fields: dict(fields))
        if sizes:
            build = kind(**fields).build
            found[f"{kind.__name__}.build"] = (build, lambda sizes=sizes: dict(sizes))
    return found


LAYER = {
    **{"d_model": D, "heads": HEADS, "kv_heads": 2, "head_dim": 8, "value_dim": 8},
    **{"context_dim": D, "bias": True, "out_bias": True, "projections": hw.nn.Separate()},
    **{"score": hw.Dot(), "position": hw.nn.Rotary(), "qk_norm": hw.nn.RMSNorm()},
    **{"mask": hw.mask.causal(), "softcap": 5.0, "sinks": True, "dropout": 0.1},
    **{"engine": "auto"},
}
CONSTRUCTORS: dict[str, tuple[Callable[..., object], Make]] = {
    **described(),
    "MultiHeadAttention": (MultiHeadAttention, lambda: dict(LAYER)),
    "FixedAttention": (
        hw.nn.FixedAttention,
        lambda: {
            **{"d_model": D, "heads": HEADS, "length": N, "bias": True},
            **{"mask": hw.mask.causal(), "engine": "auto"},
        },
    ),
    "AdditiveAttention": (
        hw.nn.AdditiveAttention,
        lambda: {"query_dim": 8, "key_dim": 8, "width": 8},
    ),
    "Residual": (
        hw.nn.Residual,
        lambda: {
            **{"d_model": D, "arrangement": hw.nn.PreNorm()},
            **{"norm": hw.nn.LayerNorm(), "dropout": 0.1},
        },
    ),
    "Block": (
        hw.nn.Block,
        lambda: {
            **{"d_model": D, "attention": nn.Identity(), "feed_forward": nn.Identity()},
            **{"norm": hw.nn.LayerNorm(), "arrangement": hw.nn.PreNorm(), "dropout": 0.1},
        },
    ),
    "FixedCache": (hw.nn.FixedCache, lambda: {"capacity": 9}),
    "SlidingCache": (hw.nn.SlidingCache, lambda: {"window": 9, "spare": 2}),
    "PagePool": (hw.nn.PagePool, lambda: {"pages": 9, "page": 4}),
    "PagedCache": (hw.nn.PagedCache, lambda: {"pool": hw.nn.PagePool(4)}),
    "Memory": (hw.nn.Memory, lambda: {"keys": heads(), "values": heads()}),
    "TorchCall": (
        hw.nn.TorchCall,
        lambda: {"attention": MultiHeadAttention(D, HEADS), "batch_first": True},
    ),
    "swap_attention": (hw.nn.swap_attention, lambda: {"model": nn.Identity()}),
    "restore_attention": (hw.nn.restore_attention, lambda: {"model": nn.Identity()}),
}
CACHES: dict[str, Callable[[], hw.nn.Cache]] = {
    "GrowingCache": hw.nn.GrowingCache,
    "FixedCache": lambda: hw.nn.FixedCache(40),
    "SlidingCache": lambda: hw.nn.SlidingCache(5),
    "PagedCache": lambda: hw.nn.PagedCache(hw.nn.PagePool(64, 4)),
    "Int8Cache": hw.nn.Int8Cache,
}


def attention(**options: Any) -> MultiHeadAttention:
    options = {"mask": hw.mask.causal(), "kv_heads": 2, **options}
    return MultiHeadAttention(D, HEADS, **options).eval()


def calls() -> dict[str, tuple[Callable[..., object], Make]]:
    rotary, plain = attention(position=hw.nn.Rotary()), attention()
    learned = attention(position=hw.nn.Learned(N))
    fixed = hw.nn.FixedAttention(D, HEADS, 40, mask=hw.mask.causal()).eval()
    additive = hw.nn.AdditiveAttention(D, D, 16)
    torch_call = hw.nn.TorchCall(MultiHeadAttention(D, HEADS), True)
    own = {"mask": None, "positions": torch.arange(N)}
    return {
        "rotary": (rotary, lambda: {"x": x(), "bias": None, **own}),
        "learned": (learned, lambda: {"x": x(), "bias": None, **own}),
        "cross": (plain, lambda: {"x": x(), "context": x(), "values": x(), "mask": None}),
        "observe": (plain.observe, lambda: {"x": x(), "mask": None}),
        "attention_map": (plain.attention_map, lambda: {"x": x(), "mask": None, "bias": None}),
        "remember": (plain.remember, lambda: {"context": x(), "values": x()}),
        "drop_heads": (attention().drop_heads, lambda: {"heads": [0]}),
        "fixed": (fixed, lambda: {"x": x(), "cache": None, **own}),
        "fixed, observed": (fixed.observe, lambda: {"x": x(), "mask": None}),
        "additive": (
            additive,
            lambda: {"queries": x(), "keys": x(), "values": x(), "mask": None},
        ),
        "TorchCall()": (
            torch_call,
            lambda: {
                **{"query": x(), "key": x(), "value": x(), "key_padding_mask": None},
                **{"attn_mask": None, "need_weights": True},
            },
        ),
        **{
            f"with a {name}": (
                lambda make=make, **given: with_cache(rotary, make(), **given),
                lambda: {"x": x(), "mask": None, "bias": None},
            )
            for name, make in CACHES.items()
        },
        "as a cache": (lambda cache: plain(x(), cache=cache), lambda: {"cache": None}),
    }


def with_cache(attn: MultiHeadAttention, cache: hw.nn.Cache, **given: Any) -> None:
    with torch.no_grad():
        attn(x(), cache=cache)
        try:
            attn(cache=cache, **given)
        except Exception:
            assert int(cache.length) == N, "a refused call stays in the cache"
            raise


def cache_methods() -> dict[str, tuple[Callable[..., object], Make]]:
    found: dict[str, tuple[Callable[..., object], Make]] = {}
    for name, make in CACHES.items():

        def append(keys: Any, values: Any, make: Any = make, before: int = 3) -> None:
            cache = make()
            cache.append(heads(before), heads(before))
            cache.append(keys, values)

        def first(keys: Any, values: Any, make: Any = make) -> None:
            make().append(keys, values)

        def rollback(count: Any, make: Any = make) -> None:
            cache = make()
            cache.append(heads(3), heads(3))
            cache.rollback(count)

        def reorder(index: Any, make: Any = make) -> None:
            cache = make()
            cache.append(heads(3), heads(3))
            cache.reorder(index)

        def both() -> dict[str, Any]:
            return {"keys": heads(), "values": heads()}

        found[f"{name}.append"] = (append, both)
        found[f"{name}.append, first"] = (first, both)
        found[f"{name}.rollback"] = (rollback, lambda: {"count": 1})
        found[f"{name}.reorder"] = (reorder, lambda: {"index": torch.tensor([1, 0])})
    both = {"keys": heads(), "values": heads()}
    found["FixedCache.reserve"] = (hw.nn.FixedCache(9).reserve, lambda: dict(both))
    found["PagePool.take"] = (hw.nn.PagePool(64).take, lambda: {"count": 1})
    index = {"index": torch.tensor([0, 0])}
    found["Memory.reorder"] = (hw.nn.Memory(**both).reorder, lambda: dict(index))
    return found


EVERY = {**CONSTRUCTORS, **calls(), **cache_methods()}


@pytest.mark.parametrize("what", EVERY)
def test_nonsense_is_refused_in_words(what: str) -> None:
    call, make = EVERY[what]
    found = [" | ".join(complaint) for complaint in complaints(call, make)]
    assert not found, "\n" + "\n".join(found)
