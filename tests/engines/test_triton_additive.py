"""The additive score by its own kernels: the other engines' problems, and its special cases."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import headwise as hw
from tests.engines.agreement import assert_agrees
from tests.problems import Recipe, every_pair

pytest.importorskip("triton", reason="the kernels are written in Triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

KERNELS = {"score": ("additive",), "bias": ("none",), "dtype": ("float32", "bfloat16", "float16")}
SMALL = [  # the interpreter takes seconds for each
    Recipe("additive", mask="causal", sinks="sinks", dtype="float32", seed=3, longest=8),
    Recipe("additive", mask="any", softcap="cap", dropout="dropout", dtype="bfloat16", longest=8),
]
pairs = [
    *(pytest.param(recipe, id=f"small-{recipe.seed}") for recipe in SMALL),
    *(
        pytest.param(recipe, id=str(recipe.seed), marks=pytest.mark.slow)
        for recipe in every_pair(**KERNELS)
    ),
]


@pytest.mark.parametrize("recipe", pairs)
def test_every_pair_of_options_agrees_with_the_reference(recipe: Recipe) -> None:
    assert_agrees(recipe, "triton", DEVICE)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def grads(leaves: list[Tensor], mask: hw.mask.Mask, engine: str) -> list[Tensor]:
    q, k, v, weight = leaves
    out = hw.attention(q, k, v, score=hw.Additive(weight), mask=mask, engine=engine)
    return [out, *torch.autograd.grad(out.sin().sum(), leaves)]


def test_sums_too_large_for_exponentials_and_hidden_keys_agree() -> None:
    q, k, v, weight = normal(1, 1, 9, 4), normal(1, 1, 40, 4), normal(1, 1, 40, 4), normal(4)
    q[:, :, 2], k[:, :, 5] = 100.0, -97.0  # tanh(3), but e^{200} overflows
    mask = hw.mask.lengths(35)
    truth = grads([x.double().requires_grad_() for x in (q, k, v, weight)], mask, "reference")
    k[:, :, 35:], v[:, :, 35:] = torch.nan, torch.nan
    found = grads([x.requires_grad_() for x in (q, k, v, weight)], mask, "triton")
    for x, y in zip(found, truth, strict=True):
        assert x.isfinite().all()
        assert (x.double() - y).norm() <= 1e-5 * y.norm()


def test_a_small_tanh_keeps_its_digits_in_the_weights_gradient() -> None:
    q, k, v, weight = normal(1, 1, 9, 4), normal(1, 1, 40, 4), normal(1, 1, 40, 4), normal(4)
    leaves = [x.requires_grad_() for x in (q / 1000, k / 1000, v, weight)]
    truth = grads(
        [x.detach().double().requires_grad_() for x in leaves], hw.mask.causal(), "reference"
    )
    found = grads(leaves, hw.mask.causal(), "triton")
    assert (found[-1].double() - truth[-1]).norm() <= 2e-6 * truth[-1].norm()


@torch.no_grad()
def test_tiny_and_zero_weights_agree() -> None:
    q, k, v = normal(1, 2, 9, 6), normal(1, 2, 40, 6), normal(1, 2, 40, 4)
    weight = torch.tensor([[1.0, 0.0, -1e-6, 1e-30, 3.0, 0.0], [0.0] * 6], device=DEVICE)
    found, seen = hw.observe(q, k, v, score=hw.Additive(weight), engine="triton")
    wide = [x.double() for x in (q, k, v)]
    truth, right = hw.observe(*wide, score=hw.Additive(weight.double()), engine="reference")
    assert (found.double() - truth).abs().max() <= 1e-6
    assert (seen.max_logit.double() - right.max_logit).abs().max() <= 2e-6
    assert (seen.max_logit[:, 1] == 0).all()


@torch.no_grad()
def test_the_keys_of_one_query_are_split_over_programs() -> None:
    q, k, v, weight = normal(1, 2, 1, 8), normal(1, 1, 600, 8), normal(1, 1, 600, 8), normal(8)
    found, seen = hw.observe(q, k, v, score=hw.Additive(weight), engine="triton")
    wide = [x.double() for x in (q, k, v)]
    truth, right = hw.observe(*wide, score=hw.Additive(weight.double()), engine="reference")
    assert (found.double() - truth).abs().max() <= 1e-6
    assert (seen.entropy.double() - right.entropy).abs().max() <= 1e-5
    assert (seen.logit_var.double() - right.logit_var).abs().max() <= 1e-4


def test_a_bias_is_refused_and_served_by_another_engine() -> None:
    q = normal(1, 1, 4, 8)
    options = {"score": hw.Additive(torch.ones(8, device=DEVICE)), "bias": torch.zeros(4, 4)}
    options["bias"] = options["bias"].to(DEVICE)
    with pytest.raises(ValueError, match="its additive kernels take no bias"):
        hw.attention(q, q, q, engine="triton", **options)
    assert hw.attention(q, q, q, **options).shape == q.shape


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [16, 33, 64, 128])
def test_large_problems_agree(dtype: torch.dtype, width: int) -> None:
    mask = hw.mask.causal() & hw.mask.window(300)
    q, k, v, weight = (normal(2, h, 500, width, dtype=dtype) for h in (4, 2, 2, 4))
    leaves = [x.detach().requires_grad_() for x in (q, k, v, weight[0, :, 0])]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}[dtype]
    for x, y in zip(grads(leaves, mask, "triton"), grads(wide, mask, "reference"), strict=True):
        assert (x.double() - y).norm() <= tolerance * y.norm()


@pytest.mark.gpu
@torch.no_grad()
def test_memory_is_linear_in_the_length() -> None:
    q, k, v = (normal(1, 8, 32768, 64, dtype=torch.bfloat16) for _ in range(3))
    weight = normal(8, 64, dtype=torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    hw.attention(q, k, v, score=hw.Additive(weight), engine="triton")
    assert torch.cuda.max_memory_allocated() - before < 16 * q.nbytes


@pytest.mark.gpu
def test_a_graph_of_what_streaming_serves_is_captured_with_another_engine() -> None:
    """Additive scores wider than triton takes, under a mask of tensors."""
    q, k, v = (torch.randn(3, 1, n, 200, device="cuda") for n in (2, 5, 5))
    score = hw.Additive(torch.randn(200, device="cuda"))
    mask = hw.mask.lengths(torch.tensor([5, 1, 3], device="cuda"))

    def call() -> Tensor:
        return hw.attention(q, k, v, score=score, mask=mask)

    assert hw.explain(q, k, v, score=score, mask=mask).engine == "streaming"
    expected = call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    out.zero_()
    graph.replay()
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
