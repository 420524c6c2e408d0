"""The Triton engine: every kernel under Triton's interpreter, and on a GPU under `-m gpu`.

The generated problems are those of the other engines; tests special to kernels follow.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, seed, settings
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import headwise as hw
from tests.engines.agreement import assert_agrees
from tests.problems import KINDS, Recipe, every_pair, recipes

pytest.importorskip("triton", reason="the engine's kernels are written in Triton")

from headwise.engines.triton.host import cards
from headwise.engines.triton.host.operands import loadable, stride_unit

# NumPy, which Triton's interpreter uses, warns when 32-bit hashes wrap around and exponentials
# underflow. Both are intended.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

KERNELS = {  # what the kernels do
    "score": tuple(kind for kind in KINDS["score"] if kind != "additive"),
    "dtype": tuple(kind for kind in KINDS["dtype"] if kind != "float64"),
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


# The interpreter takes seconds for a problem, so `make test` leaves five of six to
# `make test-all`; a GPU takes them all.
pairs = [
    pytest.param(recipe, id=str(recipe.seed), marks=pytest.mark.slow if recipe.seed % 6 else ())
    for recipe in every_pair(**KERNELS)
]


@pytest.mark.parametrize("recipe", pairs)
def test_every_pair_of_options_agrees_with_the_reference(recipe: Recipe) -> None:
    assert_agrees(recipe, "triton", DEVICE)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [pytest.param(*pair.values, id=pair.id) for pair in pairs])
def test_every_pair_of_options_agrees_on_the_device(recipe: Recipe) -> None:
    assert_agrees(recipe, "triton", DEVICE)


@pytest.mark.slow
@settings(max_examples=20)
@given(recipe=recipes(**KERNELS))
def test_any_problem_agrees_with_the_reference(recipe: Recipe) -> None:
    assert_agrees(recipe, "triton", DEVICE)


@pytest.mark.gpu
@pytest.mark.parametrize("share", range(5))  # each compiles its own kernels, in parallel
def test_any_problem_agrees_with_the_reference_on_the_device(share: int) -> None:
    @seed(share)
    @settings(max_examples=4)
    @given(recipe=recipes(**KERNELS))
    def agrees(recipe: Recipe) -> None:
        assert_agrees(recipe, "triton", DEVICE)

    agrees()


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


MASKS = {
    "none": None,
    "causal": hw.mask.causal(),
    "window": hw.mask.causal() & hw.mask.window(40),
    "documents": hw.mask.causal() & hw.mask.documents(torch.arange(130) // 50),
    "sinks and window": hw.mask.causal() & (hw.mask.window(20) | hw.mask.prefix(4)),
    "padding": hw.mask.lengths([130, 0]),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_rows_and_keys_of_several_blocks_agree(mask: hw.mask.Mask | None) -> None:
    q, k, v = normal(2, 2, 70, 16), normal(2, 1, 130, 16), normal(2, 1, 130, 24)
    check(q, k, v, 1e-5, mask=mask)


def check(q: Tensor, k: Tensor, v: Tensor, tolerance: float, **options: object) -> None:
    """Compare output, statistics and gradients with the reference in float64."""
    found = everything("triton", q, k, v, **options)
    compare(found, everything("reference", *(x.double() for x in (q, k, v)), **options), tolerance)


def compare(found: dict[str, Tensor], truth: dict[str, Tensor], tolerance: float) -> None:
    """Compare each by its norm, except infinities, which must be the same."""
    for name, x in found.items():
        y = truth[name]
        assert torch.equal(x.isinf(), y.isinf()), name
        x, y = x.masked_fill(x.isinf(), 0).double(), y.masked_fill(y.isinf(), 0).double()
        assert float((x - y).norm()) <= tolerance * float(y.norm()) + 1e-12, name


def everything(
    engine: str, q: Tensor, k: Tensor, v: Tensor, **options: object
) -> dict[str, Tensor]:
    """Return output, statistics, and gradients through the output, lse and entropy."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, seen = hw.observe(*leaves, engine=engine, **options)
    lse = seen.lse.masked_fill(seen.lse == -torch.inf, 0)
    loss = out.sin().sum() + lse.sin().sum() + seen.entropy.sin().sum()
    grads = torch.autograd.grad(loss, leaves)
    values = {"out": out, **seen.values} | dict(zip("qkv", grads, strict=True))
    return {name: x.detach() for name, x in values.items()}


def test_the_same_call_gives_the_same_bits() -> None:
    q, k, v = normal(1, 4, 70, 16), normal(1, 2, 70, 16), normal(1, 2, 70, 16)
    first, second = (everything("triton", q, k, v, mask=hw.mask.causal()) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("score", ["dot", "additive"])
def test_gradients_of_the_entropy_may_have_any_strides(score: str) -> None:
    rows = 128 if DEVICE == "cuda" else 32  # they fill whole blocks, which need no padding
    q, k, v = (normal(1, 2, rows, 8) for _ in range(3))
    share, weight = normal(1, rows, 2), normal(8)
    grads = []
    for engine, wide in (("triton", torch.float32), ("reference", torch.float64)):
        leaves = [x.to(wide).requires_grad_() for x in (q, k)]
        options = {"score": hw.Additive(weight.to(wide))} if score == "additive" else {}
        _, seen = hw.observe(*leaves, v.to(wide), engine=engine, **options)
        loss = (seen.entropy.transpose(1, 2) * share).sum()
        grads.append(torch.autograd.grad(loss, leaves))
    for x, y in zip(*grads, strict=True):
        assert (x - y).norm() <= 1e-4 * y.norm()


def test_strides_beyond_32_bits_are_passed_whole() -> None:
    assert stride_unit([64, 4096], 16) == 16
    assert stride_unit([64, 4100], 16) == 1
    assert stride_unit([64, 1 << 31], 16) == 1
    apart = torch.empty_strided((1, 1, 64, 16), (1, 1, 1 << 24, 1), device="meta")
    assert loadable(apart)[0].stride(2) == 16
    assert loadable(apart[:, :, ::2])[0].shape == (1, 1, 32, 16)


def test_operators_pass_pytorchs_own_check() -> None:
    q, k, v = (normal(1, 2, 5, 16).requires_grad_() for _ in range(3))
    position = torch.arange(5, dtype=torch.int32, device=DEVICE)[None]
    none = [None] * 5
    arguments = (q, k, v, None, None, None, position, *none, 0.25, 0.0, 0.0, 0, None, 7)
    torch.library.opcheck(torch.ops.headwise.triton.default, arguments)


def test_compiled_calls_agree_for_every_length() -> None:
    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    def compiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return hw.attention(q, k, v, mask=hw.mask.causal(), engine="triton")

    for n in (7, 9):
        q, k, v = (normal(1, 2, n, 16).requires_grad_() for _ in range(3))
        assert torch.allclose(
            compiled(q, k, v), hw.attention(q, k, v, mask=hw.mask.causal()), atol=1e-5
        )


@pytest.mark.parametrize(
    "mask",
    [
        None,
        hw.mask.causal(),
        hw.mask.causal() & hw.mask.window(3),
        hw.mask.causal() & hw.mask.documents(torch.arange(12) // 5),
        hw.mask.lengths([7, 0]),
    ],
    ids=str,
)
def test_operations_are_counted_as_the_streaming_engine_counts_them(
    mask: hw.mask.Mask | None,
) -> None:
    q = normal(2, 1, 12, 16)
    counts = []
    for engine in ("triton", "streaming"):
        with FlopCounterMode(display=False) as counter:
            hw.attention(q, q, q, mask=mask, engine=engine)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_a_second_derivative_is_refused_in_words() -> None:
    q = normal(1, 1, 4, 16).requires_grad_()
    out = hw.attention(q, q, q, engine="triton")
    (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="triton engine has no second derivative"):
        torch.autograd.grad(grad.sum(), q)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float64}, "float64"),
        ({"width": 257}, "257"),
        ({"width": 129, "score": hw.Additive(torch.ones(129))}, "head widths of 1 to 128"),
    ],
)
def test_the_kernels_refuse_what_they_cannot_do_with_a_reason(
    change: dict[str, object], reason: str
) -> None:
    q = torch.zeros(1, 1, 4, change.pop("width", 16), dtype=change.pop("dtype", torch.float32))
    q = q.to(DEVICE)
    options = {name: hw.Additive(torch.ones(q.shape[-1], device=DEVICE)) for name in change}
    with pytest.raises(ValueError, match=reason):
        hw.attention(q, q, q, engine="triton", **options)
    assert hw.attention(q, q, q, **options).shape == q.shape


# Every combination compiles kernels of its own, which takes seconds: every mask at the widths that
# have shapes of their own, the hardest and none at the others.
LARGE = [
    pytest.param(dtype, width, mask, id=f"{str(dtype)[6:]}-{width}-{mask}")
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
    for width in (16, 20, 64, 80, 128, 256)
    for mask in (
        MASKS if dtype == torch.bfloat16 and width in (64, 128) else ("none", "sinks and window")
    )
]


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "width", "mask"), LARGE)
def test_large_problems_agree(dtype: torch.dtype, width: int, mask: str) -> None:
    n, m = 1000, 1337
    made = {
        **MASKS,
        "window": hw.mask.causal() & hw.mask.window(300),
        "documents": hw.mask.causal() & hw.mask.documents(torch.arange(m) // 400),
        "sinks and window": hw.mask.causal() & (hw.mask.window(200) | hw.mask.prefix(4)),
        "padding": hw.mask.lengths([m, 0]),
    }[mask]
    q, k, v = (normal(2, h, length, width, dtype=dtype) for h, length in ((4, n), (2, m), (2, m)))
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}[dtype]
    check(q, k, v, tolerance, mask=made)


@pytest.mark.gpu
def test_calls_can_be_captured_in_a_graph() -> None:
    q, k, v = (normal(1, 4, 500, 64, dtype=torch.bfloat16) for _ in range(3))

    def call() -> Tensor:
        return hw.attention(q, k, v, mask=hw.mask.causal(), engine="triton")

    expected = call()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    out.zero_()
    graph.replay()
    assert torch.equal(out, expected)


@pytest.mark.gpu
def test_a_new_length_does_not_compile_the_forward_again() -> None:
    from headwise.engines.triton.kernels.forward import forward

    def call(n: int) -> None:
        q = normal(1, 2, n, 64, dtype=torch.bfloat16)
        hw.attention(q, q, q, mask=hw.mask.causal(), engine="triton")

    call(1)  # its mask hides nothing and is dropped
    call(512)
    known = sum(len(cache[0]) for cache in forward.device_caches.values())
    for n in (16, 100, 513, 777):
        call(n)
    assert sum(len(cache[0]) for cache in forward.device_caches.values()) == known


def test_an_older_gpu_is_refused_with_its_name_and_another_engine_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = cards.Card("Tesla T4", 7, 5, 65536)
    monkeypatch.setattr(cards, "_INTERPRETED", old)
    monkeypatch.setattr(cards, "CARDS", {0: old})
    q = normal(1, 1, 4, 16)
    with pytest.raises(
        ValueError, match="needs an Ampere GPU or a later one, and this is Tesla T4"
    ):
        hw.attention(q, q, q, engine="triton")
    plan = hw.explain(q, q, q, softcap=5.0)
    assert plan.engine == "streaming"
    assert "Tesla T4" in str(plan.reasons["triton"])


@pytest.mark.gpu
@pytest.mark.parametrize("shared", [166912, 101376], ids=["A100", "RTX"])
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gpus_without_tma_compute_addresses(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, width: int, shared: int
) -> None:
    # Simulated by their tile shapes and loads, on any GPU.
    monkeypatch.setattr(cards, "CARDS", {0: cards.Card("older", 8, 0, shared)})
    q, k, v = (normal(1, heads, 300, width, dtype=dtype) for heads in (2, 1, 1))
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-4
    check(q, k, v, tolerance, mask=hw.mask.causal() & hw.mask.window(100))


@pytest.mark.gpu
def test_calls_on_several_streams_do_not_disturb_each_other() -> None:
    tensors = [[normal(1, 4, 700, 64, dtype=torch.bfloat16) for _ in range(3)] for _ in range(4)]
    mask = hw.mask.causal() & hw.mask.documents(torch.arange(700, device=DEVICE) // 300)
    expected = [hw.observe(*x, mask=mask, engine="triton") for x in tensors]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in tensors]
    found = []
    for _ in range(5):
        found = []
        for stream, x in zip(streams, tensors, strict=True):
            with torch.cuda.stream(stream):
                found.append(hw.observe(*x, mask=mask, engine="triton"))
    torch.cuda.synchronize()
    for (out, seen), (same, saw) in zip(found, expected, strict=True):
        assert torch.equal(out, same)
        assert all(torch.equal(seen.values[name], saw.values[name]) for name in saw.values)


@pytest.mark.gpu
def test_a_training_step_compiles_into_generated_code() -> None:
    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, seen = hw.observe(q, k, v, mask=hw.mask.causal(), softcap=20.0, engine="triton")
        return out.float().square().sum() + seen.entropy.sum()

    compiled = torch.compile(loss, fullgraph=True)
    for n in (256, 300):
        leaves = [normal(1, 2, n, 64, dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
        found = torch.autograd.grad(compiled(*leaves), leaves)
        wanted = torch.autograd.grad(loss(*leaves), leaves)
        for a, b in zip(found, wanted, strict=True):
            assert torch.allclose(a.float(), b.float(), rtol=2e-2, atol=1e-2)


def test_kernels_that_the_interpreter_runs_compile_too() -> None:
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.engines.compiled_triton"]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    names = {
        *("forward", "single", "fill_rows", "grad_queries", "grad_keys", "grad_bias"),
        *("grad_distance", "split_step", "merge_step", "cells", "log_sums", "largest"),
        *("prepare", "additive_forward", "additive_grad_queries", "additive_grad_keys", "add_rows"),
    }
    assert names <= set(json.loads(told.stdout))
