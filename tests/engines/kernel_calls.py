"""Calls of every kernel of the GPU engines, by names such as "causal 64 bfloat16".

Without a GPU they are compiled (`tests.engines.fits`), on one they run (`tests.gpu_race`). Each
returns what it computed.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor

import headwise as hw
from headwise.core.reduction import CallRows
from headwise.engines.triton.board_call import add_to_board

DEVICE = "cpu"  # of all tensors
N = 600  # queries and keys: four tiles of 128, and a part of one
LONG = {"cpu": 16384, "cuda": 4096}  # a length at which moments are computed without visiting pairs
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "tf32": torch.float32}


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def leaves(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    return [normal(*shape, dtype=dtype).requires_grad_() for shape in shapes]


def zeros(*shape: int, dtype: torch.dtype = torch.float32, learn: bool = False) -> Tensor:
    return torch.zeros(shape, device=DEVICE, dtype=dtype, requires_grad=learn)


def options(kind: str) -> dict[str, Any]:
    """Return the options of a call of this kind."""
    causal, window = hw.mask.causal(), hw.mask.window(150)
    ids = torch.arange(N, device=DEVICE) // 100
    far = torch.rand(N, N, device=DEVICE) > 0.5
    return {
        "plain": {},
        "causal": {"mask": causal},
        "capped": {"mask": causal, "softcap": 20.0},
        "documents": {"mask": causal & hw.mask.documents(ids)},
        "alibi": {"bias": hw.ALiBi(2), "dropout": 0.1, "sinks": zeros(2), "mask": causal},
        "bias": {"bias": zeros(N, N, learn=True), "dropout": 0.1, "softcap": 9.0},
        "half": {"bias": zeros(2, N, N, dtype=torch.bfloat16)},
        "dense": {"mask": hw.mask.dense(far)},
        "buckets": {"bias": buckets(), "mask": causal},
        "both": {"bias": buckets(), "mask": hw.mask.dense(far), "dropout": 0.1},
        "window": {"mask": causal & window},
        "two intervals": {"mask": causal & (window | hw.mask.prefix(4))},
        "prefix": {"mask": causal | hw.mask.prefix(200)},
        "lengths": {"mask": hw.mask.lengths([450])},
        "sinks": {"mask": causal, "sinks": zeros(2, learn=True)},
    }[kind]


def of_weights(kind: str) -> dict[str, Any]:
    """Return the options of a map of this kind, which has no dropout."""
    return {name: x for name, x in options(kind).items() if name != "dropout"}


def learnable(options: dict[str, Any]) -> list[Tensor]:
    """Return the options' tensors that have a gradient."""
    bias = options.get("bias")
    given = getattr(bias, "table", bias), options.get("sinks")
    return [x for x in given if isinstance(x, Tensor) and x.requires_grad]


def buckets() -> hw.RelativeBuckets:
    return hw.RelativeBuckets(zeros(8, 2, learn=True))


def both_ways(kind: str, width: int, dtype: torch.dtype, engine: str = "triton") -> list[Tensor]:
    """Make a call with every statistic, and compute its gradients."""
    given, more = leaves(dtype, (1, 2, N, width), (1, 1, N, width), (1, 1, N, width)), options(kind)
    out, seen = hw.observe(*given, engine=engine, **more)
    loss = out.float().sum() + seen.entropy.sum()
    return [out, *seen.values.values(), *torch.autograd.grad(loss, [*given, *learnable(more)])]


def attended(kind: str, width: int, dtype: torch.dtype, engine: str = "triton") -> list[Tensor]:
    """Make a call without statistics, and compute its gradients."""
    given, more = leaves(dtype, (1, 2, N, width), (1, 1, N, width), (1, 1, N, width)), options(kind)
    out = hw.attention(*given, engine=engine, **more)
    return [out, *torch.autograd.grad(out.float().sum(), [*given, *learnable(more)])]


@torch.no_grad()
def decode(width: int, dtype: torch.dtype) -> list[Tensor]:
    """Make decoding steps, plain and with a cap, with few rows per key head and with the most."""
    found = []
    for heads in (8, 64):
        q, k = normal(1, heads, 1, width, dtype=dtype), normal(1, 1, 2048, width, dtype=dtype)
        found.append(hw.attention(q, k, k, engine="triton", softcap=20.0))
        if dtype == torch.bfloat16:  # on a GPU a plain step is 16-bit
            found.append(hw.attention(q, k, k, engine="triton"))
    return found


@torch.no_grad()
def decode_biased(width: int, dtype: torch.dtype) -> list[Tensor]:
    q, k = normal(1, 64, 1, width, dtype=dtype), normal(1, 1, 2048, width, dtype=dtype)
    mask = hw.mask.dense(torch.rand(1, 2048, device=DEVICE) > 0.5)
    out, seen = hw.observe(q, k, k, engine="triton", mask=mask, bias=zeros(1, 2048))
    return [out, *seen.values.values()]


@torch.no_grad()
def stored(width: int, dtype: torch.dtype) -> list[Tensor]:
    """Make decoding steps over an int8 cache and a paged cache."""
    found = []
    for heads in (8, 64):
        for cache in (hw.nn.Int8Cache(), hw.nn.PagedCache(hw.nn.PagePool(64, 64))):
            k = normal(1, 1, N, width, dtype=dtype)
            cache.write(k, k)
            found.append(cache.attend(normal(1, heads, 1, width, dtype=dtype), engine="triton"))
    return found


def map_loops(width: int, dtype: torch.dtype) -> list[Tensor]:
    q, k = normal(1, 2, N, width, dtype=dtype), normal(1, 1, N, width, dtype=dtype)
    found: list[Tensor] = []
    for kind in ("causal", "both"):
        amap = hw.attention_map(q, k, **of_weights(kind))
        found += [amap.pool(8), amap.received(), *amap.top(4), amap.kept(4), amap.needed(0.9)]
    return found


def effect_loops(width: int, dtype: torch.dtype) -> list[Tensor]:
    q, grad = (normal(1, 2, N, width, dtype=dtype) for _ in range(2))
    k = normal(1, 1, N, width, dtype=dtype)
    found: list[Tensor] = []
    for kind in ("causal", "both"):
        emap = hw.effect_map(q, k, k, grad, **of_weights(kind))
        found += [emap.pool(8), emap.received(), *emap.row_largest()]
        emap.top(4)
    return found


def sparse_loops(width: int, dtype: torch.dtype) -> list[Tensor]:
    found: list[Tensor] = []
    for kind in ("causal", "both"):
        given = leaves(dtype, (1, 2, N, width), (1, 1, N, width), (1, 1, N, width))
        more = options(kind)
        some = hw.sparse.Indices(torch.randint(0, N, (1, 1, N, 9), device=DEVICE))
        blocks = hw.sparse.Blocks(64, 3, by="exact")  # the bits of a row are one word
        chosen = () if kind == "both" else (some, blocks)
        for policy in (hw.sparse.TopK(8), *chosen):
            out = hw.sparse.attention(*given, policy, **more)
            found += [out, *torch.autograd.grad(out.float().sum(), [*given, *learnable(more)])]
        amap = hw.attention_map(*given[:2], mask=hw.mask.causal())
        found += [amap.kept(some), *amap.recall(some)]
    step = given[0][:, :, -1:]  # one row
    found.append(hw.sparse.attention(step, *given[1:], hw.sparse.TopK(8), mask=hw.mask.causal()))
    return found


def index_losses(width: int, dtype: torch.dtype) -> list[Tensor]:
    q, k = normal(1, 2, N, width, dtype=dtype), normal(1, 1, N, width, dtype=dtype)
    found: list[Tensor] = []
    for kind in ("causal", "both"):
        index = leaves(dtype, (1, 4, N, 64), (1, N, 64))
        index += leaves(torch.bfloat16, (1, 4, N))
        for selected in (None, torch.randint(0, N, (1, N, 9), device=DEVICE)):
            loss = hw.index_loss(q, k, *index, selected=selected, **of_weights(kind))
            found += [loss, *torch.autograd.grad(loss, index)]
    return found


@torch.no_grad()
def moments(width: int, dtype: torch.dtype) -> list[Tensor]:
    """Compute moments without visiting pairs, which only happens in long calls."""
    heads = 16 if DEVICE == "cpu" else 2
    q = normal(1, heads, LONG[DEVICE], width, dtype=dtype)
    found: list[Tensor] = []
    for mask in (None, hw.mask.causal()):
        found += hw.observe(q, q, q, engine="triton", mask=mask)[1].values.values()
    return found


def additive(width: int, dtype: torch.dtype) -> list[Tensor]:
    given = leaves(dtype, *[(1, 2, N, width)] * 3)
    score = hw.Additive(normal(2, width, dtype=dtype).requires_grad_())
    mask = hw.mask.causal() & hw.mask.dense(torch.rand(N, N, device=DEVICE) > 0.5)
    out, seen = hw.observe(*given, score=score, mask=mask, engine="triton")
    grads = torch.autograd.grad(out.float().sum() + seen.entropy.sum(), [*given, score.weight])
    return [out, *seen.values.values(), *grads]


@torch.no_grad()
def record(width: int, dtype: torch.dtype) -> list[Tensor]:
    """Add statistics to a board, with padding and a proof and without."""
    board, slot = zeros(4, 6, 8, dtype=torch.float64), zeros(1, dtype=torch.int64)
    values, proof = normal(3, 2, 4, N, dtype=torch.float32), zeros(dtype=torch.float64)
    for more in ((None, None), (zeros(2, N, dtype=torch.bool), proof)):
        add_to_board(board, slot, CallRows([*values, None], values[1], *more, [0], [1]))
    return [board]


@torch.no_grad()
def pages(width: int, dtype: torch.dtype) -> list[Tensor]:
    """Serve four requests over pages, watched and not, decoding and with prompts.

    The weights that keys receive are not returned: they are added up in any order.
    """
    from headwise.engines.triton.host import ragged_kernel
    from headwise.watching.recorder.ragged_batch import Marks, Pages, RaggedBatch

    page, rows, found = 16, 64, []
    counts = torch.tensor([0, 1, 40, 41, 45], dtype=torch.int32, device=DEVICE)
    held = torch.tensor([0, 30, 70, 101, 130], dtype=torch.int32, device=DEVICE)
    table = torch.arange(4 * 4, device=DEVICE, dtype=torch.int32)
    q = normal(48, 8, width, dtype=dtype)  # and three rows of padding
    keys, values = normal(2, page * rows, 2, width, dtype=dtype)
    packed, paged = Pages(None), Pages(table, page, 4)
    each = Pages(torch.arange(130, device=DEVICE))
    capped = {"softcap": 9.0, "sinks": zeros(8)}
    for where, form, look in (
        (paged, {}, True), (packed, {"window": 20}, True), (each, capped, True), (each, {}, False),
    ):  # fmt: skip
        batch = RaggedBatch(q, keys, values, counts, held, where, 39, 0.1, **form)
        marks = Marks(where, torch.arange(48, device=DEVICE), zeros(page * rows, 8))
        found += ragged_kernel.launch(batch, look, 1, marks if look else None)
    return found


OTHERS: dict[str, Callable[[int, torch.dtype], list[Tensor]]] = {
    "decode": decode,
    "decode_biased": decode_biased,
    "stored": stored,
    "maps": map_loops,
    "effects": effect_loops,
    "sparse": sparse_loops,
    "indexer": index_losses,
    "moments": moments,
    "additive": additive,
    "record": record,
    "pages": pages,
}
KINDS = ("plain", "causal", "capped", "documents", "alibi", "bias", "half", "dense", "buckets")


def every() -> list[str]:
    """Return the names of all calls that compile kernels of their own."""
    found = [" ".join(map(str, x)) for x in product(OTHERS, (64, 128, 256), DTYPES)]
    found += [" ".join(map(str, x)) for x in product((*KINDS, "both"), (64, 128, 256), DTYPES)]
    return [x for x in found if _exists(*x.split())]


def _exists(kind: str, width: str, dtype: str) -> bool:
    if kind in ("stored", "moments"):
        return dtype == "bfloat16" and (kind, width) != ("moments", "256")
    if kind == "record":
        return (width, dtype) == ("64", "bfloat16")
    if kind == "pages":
        return (width, dtype) in (("64", "bfloat16"), ("64", "float32"), ("256", "bfloat16"))
    return kind != "additive" or width != "256"


def make(call: str, engine: str = "triton", observed: bool = True) -> list[Tensor]:
    """Make a call by its name; the engine and `observed` are those of calls of attention."""
    kind, width, dtype = call.rsplit(" ", 2)
    torch.backends.cuda.matmul.fp32_precision = "tf32" if dtype == "tf32" else "ieee"
    given = int(width), DTYPES[dtype]
    if kind in OTHERS:
        return OTHERS[kind](*given)
    return (both_ways if observed else attended)(kind, *given, engine)
