"""Check that calls fit the memory of GPUs that are not here: `python -m tests.engines.fits`.

`python -m tests.engines.fits 86 "decode 128 bfloat16"` compiles the kernels of that call for that
generation, and prints the launches that do not fit at first: a launch would then try smaller tiles.
Without calls it checks all of them, which takes minutes; without a generation, all generations.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from typing import Any

import torch

import headwise as hw
from headwise.engines import failures
from headwise.engines.triton.host import tile_shapes as shapes
from tests.engines.compiled_triton import normal, stand_in

SHARED = {80: 166912, 86: 101376, 90: 232448, 100: 232448, 120: 101376}  # bytes per program
N = 600
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "tf32": torch.float32}


def refused(call: Callable[[], object]) -> list[str]:
    """Return the launches of a call that found no room."""
    found: list[str] = []
    smaller = shapes.smaller

    def heard(large: shapes.Shape) -> shapes.Shape | None:
        error = sys.exception()
        found.append(f"{large}: {error}")
        return smaller(large)

    shapes.smaller, shapes._CHOSEN = heard, {}
    try:
        call()
    except RuntimeError as error:
        found.append(str(error))
    finally:
        shapes.smaller = smaller
    return found


def options(kind: str) -> dict[str, Any]:
    """Return the options of a call of this kind."""
    causal, far = hw.mask.causal(), torch.rand(N, N) > 0.5
    return {
        "plain": {},
        "causal": {"mask": causal},
        "capped": {"mask": causal, "softcap": 20.0},
        "documents": {"mask": causal & hw.mask.documents(torch.arange(N) // 100)},
        "alibi": {"bias": hw.ALiBi(2), "dropout": 0.1, "sinks": torch.zeros(2), "mask": causal},
        "bias": {"bias": torch.zeros(N, N, requires_grad=True), "dropout": 0.1, "softcap": 9.0},
        "half": {"bias": torch.zeros(2, N, N, dtype=torch.bfloat16)},
        "dense": {"mask": hw.mask.dense(far)},
        "buckets": {"bias": buckets(), "mask": causal},
        "both": {"bias": buckets(), "mask": hw.mask.dense(far), "dropout": 0.1},
    }[kind]


def buckets() -> hw.RelativeBuckets:
    return hw.RelativeBuckets(torch.zeros(8, 2, requires_grad=True))


def both_ways(kind: str, width: int, dtype: torch.dtype) -> None:
    """Make a call with every statistic, and compute its gradients."""
    q, k, v = (normal(1, heads, N, width, dtype=dtype).requires_grad_() for heads in (2, 1, 1))
    out, seen = hw.observe(q, k, v, engine="triton", **options(kind))
    (out.float().sum() + seen.entropy.sum()).backward()


@torch.no_grad()
def decode(width: int, dtype: torch.dtype) -> None:
    """Make decoding steps, plain and with a cap, with few rows per key head and with the most."""
    for heads in (8, 64):
        q, k = normal(1, heads, 1, width, dtype=dtype), normal(1, 1, 2048, width, dtype=dtype)
        hw.attention(q, k, k, engine="triton", softcap=20.0)
        if dtype == torch.bfloat16:  # on a GPU a plain step is 16-bit
            hw.attention(q, k, k, engine="triton")


@torch.no_grad()
def decode_biased(width: int, dtype: torch.dtype) -> None:
    q, k = normal(1, 64, 1, width, dtype=dtype), normal(1, 1, 2048, width, dtype=dtype)
    mask, bias = hw.mask.dense(torch.rand(1, 2048) > 0.5), torch.zeros(1, 2048)
    hw.observe(q, k, k, engine="triton", mask=mask, bias=bias)


@torch.no_grad()
def stored(width: int, dtype: torch.dtype) -> None:
    """Make decoding steps over an int8 cache and a paged cache."""
    for heads in (8, 64):
        for cache in (hw.nn.Int8Cache(), hw.nn.PagedCache(hw.nn.PagePool(64, 64))):
            k = normal(1, 1, N, width, dtype=dtype)
            cache.write(k, k)
            cache.attend(normal(1, heads, 1, width, dtype=dtype), engine="triton")


def map_loops(width: int, dtype: torch.dtype) -> None:
    q, k = normal(1, 2, N, width, dtype=dtype), normal(1, 1, N, width, dtype=dtype)
    for kind in ("causal", "both"):
        given = options(kind)
        given.pop("dropout", None)
        amap = hw.attention_map(q, k, **given)
        amap.pool(8), amap.received(), amap.top(4), amap.kept(4), amap.needed(0.9)


def effect_loops(width: int, dtype: torch.dtype) -> None:
    q, grad = (normal(1, 2, N, width, dtype=dtype) for _ in range(2))
    k = normal(1, 1, N, width, dtype=dtype)
    for kind in ("causal", "both"):
        given = options(kind)
        given.pop("dropout", None)
        emap = hw.effect_map(q, k, k, grad, **given)
        emap.pool(8), emap.received(), emap.row_largest(), emap.top(4)


def sparse_loops(width: int, dtype: torch.dtype) -> None:
    for kind in ("causal", "both"):
        q, k, v = (normal(1, heads, N, width, dtype=dtype).requires_grad_() for heads in (2, 1, 1))
        out = hw.sparse.attention(q, k, v, hw.sparse.TopK(8), **options(kind))
        out.float().sum().backward()


def index_losses(width: int, dtype: torch.dtype) -> None:
    q, k = normal(1, 2, N, width, dtype=dtype), normal(1, 1, N, width, dtype=dtype)
    index = normal(1, 4, N, 64, dtype=dtype), normal(1, N, 64, dtype=dtype), normal(1, 4, N)
    index = tuple(x.requires_grad_() for x in index)
    for kind in ("causal", "both"):
        given = options(kind)
        given.pop("dropout", None)
        hw.index_loss(q, k, *index, **given).backward()


@torch.no_grad()
def moments(width: int, dtype: torch.dtype) -> None:
    """Compute moments without visiting pairs, which only happens in long calls."""
    q = torch.zeros(1, 16, 16384, width, dtype=dtype)
    for mask in (None, hw.mask.causal()):
        hw.observe(q, q, q, engine="triton", mask=mask)


def additive(width: int, dtype: torch.dtype) -> None:
    q, k, v = (normal(1, 2, N, width, dtype=dtype).requires_grad_() for _ in range(3))
    score = hw.Additive(normal(2, width, dtype=dtype).requires_grad_())
    mask = hw.mask.causal() & hw.mask.dense(torch.rand(N, N) > 0.5)
    out, seen = hw.observe(q, k, v, score=score, mask=mask, engine="triton")
    (out.float().sum() + seen.entropy.sum()).backward()


OTHERS: dict[str, Callable[[int, torch.dtype], None]] = {
    "decode": decode,
    "decode_biased": decode_biased,
    "stored": stored,
    "maps": map_loops,
    "effects": effect_loops,
    "sparse": sparse_loops,
    "indexer": index_losses,
    "moments": moments,
    "additive": additive,
}
KINDS = ("plain", "causal", "capped", "documents", "alibi", "bias", "half", "dense", "buckets")


def every() -> list[str]:
    """Return the names of all calls."""
    found = [" ".join(map(str, x)) for x in product(OTHERS, (64, 128, 256), DTYPES)]
    found += [" ".join(map(str, x)) for x in product((*KINDS, "both"), (64, 128, 256), DTYPES)]
    return [x for x in found if _exists(*x.split())]


def _exists(kind: str, width: str, dtype: str) -> bool:
    if kind in ("stored", "moments"):
        return dtype == "bfloat16" and (kind, width) != ("moments", "256")
    return kind != "additive" or width != "256"


def check(call: str) -> list[str]:
    """Return the launches of a call that do not fit at first, or do not compile at all."""
    failures.forget()  # of the call before
    kind, width, dtype = call.split()
    torch.backends.cuda.matmul.fp32_precision = "tf32" if dtype == "tf32" else "ieee"
    given = int(width), DTYPES[dtype]
    if kind in OTHERS:
        found = refused(lambda: OTHERS[kind](*given))
    else:
        found = refused(lambda: both_ways(kind, *given))
    return [*found, *failures.failed().values()]


def main(generation: int, calls: list[str]) -> None:
    stand_in(generation, SHARED[generation])
    for call in calls:
        print(json.dumps([generation, call, check(call)]), flush=True)


def asked() -> argparse.Namespace:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shape)
    parser.add_argument("generation", type=int, nargs="?", choices=SHARED)
    parser.add_argument("call", nargs="*", choices=[[], *every()], metavar="call")
    return parser.parse_args()


if __name__ == "__main__":
    given = asked()
    if given.generation is not None:
        main(given.generation, given.call or every())
    else:
        for each in SHARED:
            subprocess.run([sys.executable, "-m", "tests.engines.fits", str(each)], check=True)
