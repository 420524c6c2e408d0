"""A section of `bench.gpu`: one query against a long cache."""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend
from torch.nn.attention.flex_attention import flex_attention

import headwise as hw
from bench.gpu_timing import Fused, Row, Run, interleaved, normal, replayed, say

CELLS = {  # batch, query heads, key heads, keys
    "batch 1, 32/8 heads, 32k": (1, 32, 8, 32768),
    "batch 16, 32/8, 8k": (16, 32, 8, 8192),
    "batch 64, 32/8, 4k": (64, 32, 8, 4096),
    "batch 1, 32/32, 32k": (1, 32, 32, 32768),
    "batch 1, 64/8, 128k": (1, 64, 8, 131072),
}


def decoding() -> list[Row]:
    """One query against a long cache: useful bytes per second of whole calls, and of graphs."""
    rows: list[Row] = []
    for name, (batch, heads, key_heads, keys) in CELLS.items():
        q = normal(batch, heads, 1, 128)
        k, v = normal(batch, key_heads, keys, 128), normal(batch, key_heads, keys, 128)
        runs: dict[str, Run] = {
            "headwise": lambda q=q, k=k, v=v: hw.attention(q, k, v, mask=hw.mask.causal()),
            "cudnn": Fused(SDPBackend.CUDNN_ATTENTION, q, k, v),
            "flash": Fused(SDPBackend.FLASH_ATTENTION, q, k, v),
        }
        graphs = {f"{x}, graph": replayed(run) for x, run in runs.items()}
        flex = torch.compile(flex_attention, dynamic=False)
        runs["flex"] = lambda q=q, k=k, v=v, f=flex: f(q, k, v, enable_gqa=True)
        for kind, cache in caches(batch, keys).items():
            cache.write(k, v)
            runs[kind] = lambda q=q, c=cache: c.attend(q, mask=hw.mask.causal())
        ms = interleaved(runs) | {x: t / 5 for x, t in interleaved(graphs).items()}
        whole = 2 * k.nbytes
        speed = {x: round(whole / t / 1e9, 2) for x, t in ms.items()}
        best = max(speed[x] for x in ("cudnn", "flash", "flex") if x in speed)
        rows.append(
            say({"cell": name} | speed | {"to the best": round(speed["headwise"] / best, 2)})
        )
    return rows


def caches(batch: int, keys: int) -> dict[str, hw.nn.Packed]:
    pool = hw.nn.PagePool(batch * keys // 128, page=128)
    return {"pages": hw.nn.PagedCache(pool), "int8": hw.nn.Int8Cache()}
