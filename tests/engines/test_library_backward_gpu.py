"""PyTorch's backward kernels on a GPU: cuDNN's, and FlashAttention's as on older GPUs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import headwise as hw
from headwise.core.options import Options
from headwise.core.problem import pose
from headwise.engines import library_backward
from headwise.engines import library_kernels as library
from tests.engines.test_library_backward import CAUSAL, gradients, ran

__all__ = ["ran"]  # a fixture

pytestmark = pytest.mark.gpu

HERE = torch.cuda.is_available()
HOPPER = HERE and torch.cuda.get_device_capability()[0] >= library_backward.HOPPER_GENERATION
KERNELS = [
    pytest.param(
        library.CUDNN, marks=pytest.mark.skipif(not HOPPER, reason="its backward is for Hopper")
    ),
    library.FLASH,
]
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.fixture(params=KERNELS, ids=lambda kernel: type(kernel).__name__)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> object:
    """The kernel for a Hopper GPU, and the one for an older one."""
    monkeypatch.setattr(library_backward, "kernel_on", lambda device, only: request.param)
    return request.param


def on_gpu(
    n: int, m: int, heads: tuple[int, int], width: int, dtype: torch.dtype, heads_last: bool = False
) -> list[Tensor]:
    made = []
    for h, length in ((heads[0], n), (heads[1], m), (heads[1], m)):
        x = torch.randn(2, h, length, width, device="cuda").to(dtype)
        x = x.transpose(1, 2).contiguous().transpose(1, 2) if heads_last else x
        made.append(x.requires_grad_())
    return made


def exact(leaves: list[Tensor], grad: Tensor, mask: hw.mask.Mask | None) -> list[Tensor]:
    wide = [x.detach().double().requires_grad_() for x in leaves]
    out = hw.attention(*wide, mask=mask, engine="reference")
    return list(torch.autograd.grad(out, wide, grad.double()))


def assert_near(found: list[Tensor], wanted: list[Tensor], tolerance: float) -> None:
    for x, y in zip(found, wanted, strict=True):
        assert (x.double() - y).norm() <= tolerance * y.norm()


SHAPES = [  # queries, keys, heads, width
    (512, 512, (4, 4), 64),
    (384, 384, (8, 2), 128),
    (256, 256, (6, 1), 96),
    (256, 384, (4, 4), 64),
    (1024, 1024, (4, 2), 80),
    (2048, 2048, (2, 1), 128),
    (300, 300, (8, 2), 128),
    (129, 129, (6, 1), 96),
    (200, 333, (4, 4), 64),
    (1000, 1000, (4, 2), 80),
    (640, 640, (2, 2), 256),
    (2100, 2100, (2, 1), 128),
]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("engine", ["auto", "triton"])
def test_gradients_on_a_gpu_are_those_of_the_reference(
    ran: list[str],
    kernel: library.LibraryKernel,
    engine: str,
    shape: tuple[int, int, tuple[int, int], int],
    dtype: torch.dtype,
) -> None:
    leaves = on_gpu(*shape, dtype)
    for mask in (None, CAUSAL) if shape[0] == shape[1] else (None,):
        ran.clear()
        out, _ = hw.observe(*leaves, mask=mask, engine=engine)
        grad = torch.randn_like(out)
        found = list(torch.autograd.grad(out, leaves, grad))
        problem = pose("observe", *leaves, Options(mask=mask))
        refused = kernel.refuses(*leaves, problem.terms(banded=True))
        assert ran == ([] if refused else [kernel.name]), refused
        whole = shape[0] % library.FEW == shape[1] % library.FEW == 0
        assert (refused is None) == (whole or kernel is library.FLASH) or shape[3] == 256
        assert_near(found, exact(leaves, grad, mask), TOLERANCE[dtype])


@pytest.mark.parametrize("kind", ["expanded", "transposed", "strided", "offset"])
@pytest.mark.parametrize("heads_last", [False, True])
def test_gradients_on_a_gpu_may_have_any_layout(
    ran: list[str], kernel: library.LibraryKernel, heads_last: bool, kind: str
) -> None:
    leaves = on_gpu(384, 384, (4, 2), 64, torch.bfloat16, heads_last)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    grad = {
        "expanded": normal(1, 4, 1, 64).expand(2, 4, 384, 64),
        "transposed": normal(2, 384, 4, 64).transpose(1, 2),
        "strided": normal(2, 4, 384, 128)[..., ::2],
        "offset": normal(2 * 4 * 384 * 64 + 1)[1:].view(2, 4, 384, 64),
    }[kind]
    out, _ = hw.observe(*leaves, mask=CAUSAL)
    found = list(torch.autograd.grad(out, leaves, grad))
    assert ran == [kernel.name]
    assert_near(found, exact(leaves, grad, CAUSAL), 1e-2)


@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_plans_for_our_layouts_and_those_for_pytorchs_are_kept_apart(
    ran: list[str], kernel: library.LibraryKernel, first: str
) -> None:
    # PyTorch keeps cuDNN's plans without the layouts of out and its gradient.
    backend = {library.CUDNN: SDPBackend.CUDNN_ATTENTION}.get(kernel, SDPBackend.FLASH_ATTENTION)
    n = 640 if first == "ours" else 768  # no other test has these plans
    leaves = on_gpu(n, n, (4, 4), 64, torch.bfloat16, heads_last=True)
    grad = torch.randn(2, n, 4, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    truth = exact(leaves, grad, CAUSAL)

    def theirs() -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*leaves, is_causal=True)

    def ours() -> Tensor:
        return hw.observe(*leaves, mask=CAUSAL)[0]

    for run in (ours, theirs, ours) if first == "ours" else (theirs, ours, theirs):
        assert_near(list(torch.autograd.grad(run(), leaves, grad)), truth, 1e-2)
    assert set(ran) == {kernel.name}


@pytest.mark.parametrize("n", [128, 129, 192, 200, 1000])
@pytest.mark.parametrize("mask", [None, CAUSAL], ids=str)
def test_rows_with_a_very_small_lse_have_finite_gradients(
    ran: list[str], kernel: library.LibraryKernel, mask: hw.mask.Mask | None, n: int
) -> None:
    shift = (5.0, -5.0, 0.0)  # logits near -200, beyond what exp(-lse) can hold
    leaves = [
        (x.detach() / 8 + c).requires_grad_()
        for x, c in zip(on_gpu(n, n, (2, 2), 64, torch.bfloat16), shift, strict=True)
    ]
    out, seen = hw.observe(*leaves, mask=mask)
    assert float(seen.lse.detach().max()) < -100
    grad = torch.randn_like(out)
    found = list(torch.autograd.grad(out, leaves, grad))
    whole = n % library.FEW == 0 or kernel is library.FLASH
    assert ran == ([kernel.name] if whole else [])
    assert all(x.isfinite().all() for x in found)
    assert_near(found[2:], exact(leaves, grad, mask)[2:], 1e-2)


def test_the_engine_keeps_what_kernels_on_a_gpu_cannot_do(
    ran: list[str], kernel: library.LibraryKernel
) -> None:
    leaves = on_gpu(256, 256, (4, 2), 64, torch.bfloat16)
    fewer = [leaves[0][:, :, :200].detach().requires_grad_(), *leaves[1:]]
    for tensors, options in (
        (leaves, {"softcap": 20.0}),
        (leaves, {"sinks": torch.zeros(4, device="cuda")}),
        (leaves, {"mask": CAUSAL & hw.mask.window(50)}),
        (leaves, {"mask": hw.mask.lengths([200, 256])}),
        (leaves, {"dropout": hw.Dropout(0.1, 3)}),
        (fewer, {"mask": CAUSAL}),
        ([x.detach().float().requires_grad_() for x in leaves], {}),
    ):
        plan = hw.explain(*tensors, observed=True, **options)
        assert str(plan.backward).startswith(f"triton's own: {kernel.name}")
        gradients(tensors, "auto", **options)
    for part in ("lse", "entropy"):
        out, seen = hw.observe(*leaves, mask=CAUSAL)
        (out.float().sum() + getattr(seen, part).sum()).backward()
    assert not ran


def test_deterministic_mode_keeps_the_engines_kernels(
    ran: list[str], kernel: library.LibraryKernel
) -> None:
    leaves = on_gpu(256, 256, (4, 2), 64, torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (gradients(leaves, "auto", mask=CAUSAL) for _ in range(2))
        assert "deterministic" in str(hw.explain(*leaves, observed=True).backward)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not ran
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def test_a_checkpointed_call_on_a_gpu_has_the_same_gradients(
    ran: list[str], kernel: library.LibraryKernel
) -> None:
    leaves = on_gpu(256, 256, (4, 2), 64, torch.bfloat16)
    grad = torch.randn_like(leaves[0])
    for reentrant in (False, True):
        out = checkpoint(
            lambda *x: hw.observe(*x, mask=CAUSAL)[0], *leaves, use_reentrant=reentrant
        )
        for leaf in leaves:
            leaf.grad = None
        out.backward(grad)
        assert_near([x.grad for x in leaves], exact(leaves, grad, CAUSAL), 1e-2)
    assert ran == [kernel.name] * 2


def test_a_compiled_step_on_a_gpu_uses_the_kernel(
    ran: list[str], kernel: library.LibraryKernel
) -> None:
    def loss(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        out, seen = hw.observe(*tensors, mask=CAUSAL)
        return out.float().square().sum(), seen.entropy.detach().mean()

    compiled = torch.compile(loss, fullgraph=True)
    for n in (256, 384):
        leaves = on_gpu(n, n, (4, 2), 64, torch.bfloat16)
        ran.clear()
        found = list(torch.autograd.grad(compiled(*leaves)[0], leaves))
        assert ran == [kernel.name]
        assert_near(
            found, [x.double() for x in torch.autograd.grad(loss(*leaves)[0], leaves)], 1e-2
        )


def test_a_backward_can_be_captured_in_a_graph(
    ran: list[str], kernel: library.LibraryKernel
) -> None:
    leaves = on_gpu(256, 256, (4, 2), 64, torch.bfloat16)
    grad = torch.randn_like(leaves[0])

    def step() -> list[Tensor]:
        out, _ = hw.observe(*leaves, mask=CAUSAL)
        return list(torch.autograd.grad(out, leaves, grad))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for x in found:
        x.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert set(ran) == {kernel.name}
    assert_near(found, exact(leaves, grad, CAUSAL), 1e-2)
