"""Few queries, many keys: split over programs and merged, for every form of KV cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.core.options import Options
from headwise.engines import calls
from headwise.engines.triton.stored_call import attend_stored
from headwise.nn import Int8Cache, PagedCache, PagePool

pytest.importorskip("triton", reason="the kernels are written in Triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CAUSAL = hw.mask.causal()


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def near(found: Tensor, truth: Tensor, tolerance: float = 1e-5) -> None:
    assert torch.equal(found.isinf(), truth.isinf())
    finite = ~truth.isinf()
    off = (found[finite].double() - truth[finite].double()).norm()
    assert off <= tolerance * truth[finite].double().norm() + 1e-6


OPTIONS = {
    "causal": {"mask": CAUSAL},
    "two pieces, sinks": {"mask": CAUSAL & (hw.mask.window(20) | hw.mask.prefix(4)), "sinks": 4},
    "padding, alibi": {"mask": hw.mask.lengths([70, 0]), "bias": 4},
}


@pytest.mark.parametrize("kind", OPTIONS)
def test_shares_of_the_keys_merge_to_the_whole(kind: str) -> None:
    options = dict(OPTIONS[kind])
    if "sinks" in options:
        options["sinks"] = normal(4)
    if "bias" in options:
        options["bias"] = hw.ALiBi(normal(4).abs())
    q, k, v = normal(2, 4, 3, 16), normal(2, 2, 70, 16), normal(2, 2, 70, 24)
    out, seen = hw.observe(q, k, v, engine="triton", **options)
    wide = {n: x.double() if isinstance(x, Tensor) else x for n, x in options.items()}
    truth, wanted = hw.observe(q.double(), k.double(), v.double(), engine="reference", **wide)
    near(out, truth)
    for name, x in seen.values.items():
        near(x, getattr(wanted, name), 1e-4)


@torch.no_grad()
@pytest.mark.parametrize("cache", [PagedCache(PagePool(16, 8)), Int8Cache()], ids=["pages", "int8"])
def test_the_kernel_reads_a_packed_cache_directly(cache: hw.nn.Packed) -> None:
    dtype = torch.float32 if DEVICE == "cpu" else torch.float16  # on a GPU steps are 16-bit
    q, k, v = (normal(2, h, n, 64, dtype=dtype) for h, n in ((4, 2), (2, 30), (2, 30)))
    cache = cache.fresh()
    cache.append(k, v)
    for options in ({"mask": CAUSAL}, {"softcap": 5.0, "sinks": normal(4)}):
        assert attend_stored(q, cache.held(), Options(**options)) is not None
        truth = hw.attention(q, *cache.read(), engine="reference", **options)
        near(cache.attend(q, **options), truth, 1e-5 if DEVICE == "cpu" else 4e-3)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kept", ["one piece", "pages", "int8"])
def test_a_16_bit_step_is_as_exact_with_every_cache(kept: str, dtype: torch.dtype) -> None:
    q, k, v = (normal(1, h, n, 64, dtype=dtype) for h, n in ((4, 1), (2, 1030), (2, 1030)))
    options = {"mask": CAUSAL, "engine": "triton"}
    if kept == "one piece":
        found = hw.attention(q, k, v, **options)
    else:
        cache = PagedCache(PagePool(9, 128)) if kept == "pages" else Int8Cache()
        cache.append(k, v)
        found = cache.attend(q, **options)
        k, v = cache.read()
    truth = hw.attention(q.double(), k.double(), v.double(), mask=CAUSAL, engine="reference")
    near(found, truth, 4 * torch.finfo(dtype).eps)


@torch.no_grad()
@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-4])
def test_small_values_in_int8_are_as_exact_in_float16(size: float) -> None:
    q, k, v = (normal(1, h, n, 64, dtype=torch.float16) for h, n in ((4, 1), (2, 200), (2, 200)))
    cache = Int8Cache()
    cache.append(k, size * v)
    held, found = cache.held(), cache.attend(q, engine="triton")
    values = held.values[:, :, :200].double() * held.value_scales[:, :, :200].double()
    keys = held.keys[:, :, :200].double() * held.key_scales[:, :, :200].double()
    truth = hw.attention(q.double(), keys, values, engine="reference")
    assert (found - truth).norm() < 1.5e-3 * truth.norm()


WRONG = {
    "another batch": ({"batch": 3}, {}, "batch sizes differ"),
    "another width": ({"width": 128}, {}, "64"),
    "a softcap below zero": ({}, {"softcap": -1.0}, "softcap"),
    "sinks of another shape": ({}, {"sinks": torch.zeros(3)}, "sinks"),
    "sinks of integers": ({}, {"sinks": torch.zeros(4, dtype=torch.int64)}, "floating-point"),
    "sinks in a list": ({}, {"sinks": [0.0] * 4}, "not a floating-point tensor"),
    "a keyword that is none": ({}, {"sotfcap": 5.0}, "sotfcap"),
}


@torch.no_grad()
@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("cache", [PagedCache(PagePool(16, 8)), Int8Cache()], ids=["pages", "int8"])
def test_wrong_arguments_to_a_cache_are_an_error(cache: hw.nn.Packed, case: str) -> None:
    made, options, word = WRONG[case]
    cache = cache.fresh()
    cache.append(normal(2, 2, 30, 64), normal(2, 2, 30, 64))
    with pytest.raises((ValueError, RuntimeError, TypeError), match=word):
        cache.attend(normal(made.get("batch", 2), 4, 2, made.get("width", 64)), **options)


def test_a_nan_sink_is_not_a_nan_logit() -> None:
    zeros = torch.zeros(1, 1, 40, 16, device=DEVICE)
    sinks = torch.tensor([torch.nan], device=DEVICE)
    for rows in (2, 40):  # the decoding kernels, and the forward
        _, seen = hw.observe(zeros[:, :, :rows], zeros, zeros, sinks=sinks, engine="triton")
        assert (seen.max_logit == 0).all()
        assert seen.lse.isnan().all()


DTYPE = torch.float32 if DEVICE == "cpu" else torch.float16


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The results of the kernels of a plain step."""
    from headwise.engines.triton.host import decoding_call

    found, step = [], decoding_call._step

    def spy(*given: Any) -> Tensor:
        found.append(step(*given))
        return found[-1]

    monkeypatch.setattr(decoding_call, "_step", spy)
    calls.forget()
    return found


def test_a_step_of_more_batch_entries_than_a_grid_holds_is_refused() -> None:
    q = torch.zeros(65536, 1, 1, 64, device=DEVICE, dtype=DTYPE)
    k = torch.zeros(1, 1, 1024, 64, device=DEVICE, dtype=q.dtype).expand(65536, -1, -1, -1)
    hw.attention(q[:1], k[:1], k[:1], engine="triton")
    with pytest.raises(ValueError, match="room for 65535"):
        hw.attention(q, k, k, engine="triton")


def test_a_plain_step_has_kernels_of_its_own(steps: list[Tensor]) -> None:
    q, k, v = (normal(1, h, n, 64, dtype=DTYPE) for h, n in ((4, 2), (2, 1090), (2, 1090)))
    for mask in (None, CAUSAL):
        found = hw.attention(q, k, v, mask=mask, engine="triton")
        assert found is steps[-1]
        truth = hw.attention(q.double(), k.double(), v.double(), mask=mask, engine="reference")
        near(found, truth, 1e-3 if q.dtype == torch.float16 else 1e-5)
        near(hw.attention(q, k, v, mask=mask, engine="triton"), found, 0.0)
    assert len(steps) == 2  # the second calls were prepared


def test_other_calls_do_not_take_the_plain_step(steps: list[Tensor]) -> None:
    q, k = normal(1, 2, 2, 64, dtype=DTYPE), normal(1, 2, 300, 64, dtype=DTYPE)
    hw.attention(q.clone().requires_grad_(), k, k, engine="triton").sum().backward()
    with torch.no_grad():
        for options in (
            {"mask": hw.mask.window(3)},
            {"mask": hw.mask.causal(5)},
            {"score": hw.Cosine()},
            {"score": hw.Dot(torch.tensor(0.5))},  # a tensor, which may change
            {"softcap": 5.0},
        ):
            found = hw.attention(q, k, k, engine="triton", **options)
            near(found, hw.attention(q, k, k, engine="reference", **options), 2e-3)
        hw.attention(torch._neg_view(q), k, k, engine="triton")
        hw.attention(q, k[:, :, :5], k[:, :, :5], engine="triton")
    assert not steps


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [64, 80, 128, 256])
def test_long_caches_agree(dtype: torch.dtype, width: int) -> None:
    q, k, v = (normal(2, h, n, width, dtype=dtype) for h, n in ((8, 3), (2, 5000), (2, 5000)))
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}[dtype]
    for mask in (None, CAUSAL, CAUSAL & hw.mask.window(700), hw.mask.lengths([4000, 77])):
        found = hw.attention(q, k, v, mask=mask, engine="triton")
        truth = hw.attention(q.double(), k.double(), v.double(), mask=mask, engine="reference")
        near(found, truth, tolerance)


@pytest.mark.gpu
@torch.no_grad()
def test_a_step_can_be_captured_and_compiled() -> None:
    q, k = normal(1, 8, 1, 64, dtype=torch.bfloat16), normal(1, 2, 3000, 64, dtype=torch.bfloat16)
    expected = hw.attention(q, k, k, mask=CAUSAL)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = hw.attention(q, k, k, mask=CAUSAL)
    out.zero_()
    graph.replay()
    assert torch.equal(out, expected)
    compiled = torch.compile(lambda q, k: hw.attention(q, k, k, mask=CAUSAL), fullgraph=True)
    near(compiled(q, k), expected, 2e-2)


@pytest.mark.gpu
@torch.no_grad()
def test_a_step_waits_for_the_keys_that_were_just_written() -> None:
    q, k, v = (
        normal(1, h, n, 128, dtype=torch.bfloat16) for h, n in ((8, 1), (2, 4096), (2, 4096))
    )
    fresh = torch.empty_like(k)
    hw.attention(q, k, v, mask=CAUSAL)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        k.copy_(fresh)
        v.zero_()
        v.sub_(fresh)
        twice = hw.attention(q, k, v, mask=CAUSAL) * 2
    for _ in range(20):
        fresh.normal_()
        graph.replay()
        truth = hw.attention(q.double(), fresh.double(), -fresh.double(), engine="reference")
        near(twice, 2 * truth, 2e-2)
