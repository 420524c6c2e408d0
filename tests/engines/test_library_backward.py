"""PyTorch's backward kernels follow the engines' forwards where they are exact, and only there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import headwise as hw
from headwise.core.options import Options
from headwise.core.problem import pose
from headwise.engines import failures
from headwise.engines import library_kernels as library
from tests.engines.agreement import some_grads
from tests.oracle import answer
from tests.problems import Recipe, recipes
from tests.rounding import close, gradient_bounds

CAUSAL = hw.mask.causal()
Observed = tuple[Tensor, hw.Observation]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels of PyTorch that computed gradients, in their order."""
    names: list[str] = []
    run = library.LibraryKernel.gradients

    def listens(self: library.LibraryKernel, *given: object) -> library.Three:
        names.append(self.name)
        return run(self, *given)

    monkeypatch.setattr(library.LibraryKernel, "gradients", listens)
    return names


def three(
    queries: int = 20, keys: int = 20, width: int = 8, heads: int = 2, **kind: object
) -> list[Tensor]:
    """Return q of four heads, and k and v."""
    shapes = ((4, queries), (heads, keys), (heads, keys))
    return [torch.randn(1, h, n, width, **kind).requires_grad_() for h, n in shapes]


def gradients(leaves: list[Tensor], engine: str = "streaming", **options: object) -> list[Tensor]:
    out, _ = hw.observe(*leaves, engine=engine, stats=("entropy", "lse"), **options)
    return list(torch.autograd.grad(out.sin().sum(), leaves))


def same(found: list[Tensor], wanted: list[Tensor]) -> None:
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y.to(x.dtype))


PLAIN = recipes(
    score=("dot", "scaled"), mask=("none", "causal"), bias="none", softcap="none", sinks="none",
    dropout="none", widths="equal", dtype=("float64", "float32"),
)  # fmt: skip


@given(recipe=PLAIN)
def test_gradients_are_those_of_the_reference(recipe: Recipe) -> None:
    call = recipe.call()
    grads = some_grads(call, observed=False)
    leaves, wide = call.copy(), call.copy(torch.float64)
    leaves.observe("streaming")[0].backward(grads.out.to(leaves.q.dtype))
    wide.attention("reference").backward(grads.out)
    with torch.no_grad():
        allowed = gradient_bounds(call, answer(call), grads)
    for name, leaf in leaves.learnable().items():
        assert not close(leaf.grad, wide.learnable()[name].grad, allowed[name]), f"{name}: {recipe}"


@pytest.mark.parametrize("options", [{}, {"mask": CAUSAL}, {"mask": hw.mask.window(30)}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_plain_and_causal_calls_go_to_the_kernel(
    ran: list[str], options: dict[str, object], dtype: torch.dtype
) -> None:
    leaves = three(dtype=dtype)
    found = gradients(leaves, **options)
    assert ran == [library.CPU.name]
    same(found, gradients(leaves, "reference", **options))


REFUSED: dict[str, tuple[Callable[[], list[Tensor]], dict[str, object], str]] = {
    "softcap": (three, {"softcap": 30.0}, "has no softcap"),
    "sinks": (three, {"sinks": torch.zeros(4)}, "has no sinks"),
    "dropout": (three, {"dropout": hw.Dropout(0.1, 3)}, "dropout of its own"),
    "bias": (three, {"bias": torch.zeros(20, 20)}, "takes no bias"),
    "alibi": (three, {"bias": hw.ALiBi(4)}, "takes no bias"),
    "buckets": (three, {"bias": hw.RelativeBuckets(torch.zeros(8, 4))}, "takes no bias"),
    "additive": (three, {"score": hw.Additive(torch.ones(8))}, "dot scores only"),
    "scale": (three, {"score": hw.Dot(-0.5)}, "positive scales, and this is -0.5"),
    "fewer queries": (lambda: three(9), {"mask": CAUSAL}, "as many queries as keys"),
    "a window": (three, {"mask": CAUSAL & hw.mask.window(3)}, "no mask but causal()"),
    "an offset": (three, {"mask": hw.mask.causal(2)}, "no mask but causal()"),
    "blind rows": (three, {"mask": hw.mask.causal(-2)}, "no mask but causal()"),
    "two pieces": (three, {"mask": CAUSAL | hw.mask.prefix(4)}, "no mask but causal()"),
    "dense": (three, {"mask": hw.mask.dense(torch.ones(20, 20).bool())}, "no mask but causal()"),
    "bfloat16": (lambda: three(dtype=torch.bfloat16), {}, "rounds its sums to torch.bfloat16"),
    "values": (lambda: [*three()[:2], three(width=12)[2]], {}, "12 and 8 wide"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_engine_keeps_what_the_kernel_cannot_do_exactly(ran: list[str], case: str) -> None:
    make, options, word = REFUSED[case]
    leaves = make()
    plan = hw.explain(*leaves, engine="streaming", observed=True, **options)
    assert str(plan).splitlines()[-1].startswith("← backward   streaming's own: PyTorch's CPU")
    assert word in str(plan.backward)
    found = gradients(leaves, **options)
    assert not ran
    if leaves[0].dtype == torch.float32:
        same(found, gradients(leaves, "reference", **options))


@pytest.mark.parametrize("part", ["lse", "entropy"])
def test_a_gradient_of_lse_or_entropy_goes_to_the_engine(ran: list[str], part: str) -> None:
    leaves, found = three(), []
    for engine in ("streaming", "reference"):
        out, seen = hw.observe(*leaves, mask=CAUSAL, engine=engine)
        loss = out.sin().sum() + getattr(seen, part).sum()
        found.append(list(torch.autograd.grad(loss, leaves)))
    assert not ran
    same(*found)


def test_logits_that_leave_lse_coarse_go_to_the_engine(ran: list[str]) -> None:
    leaves = three()
    leaves[0] = (leaves[0].detach() * 500).requires_grad_()
    gradients(leaves)
    assert not ran


@pytest.mark.parametrize("change", ["missing", "other arguments"])
def test_an_operator_that_changed_is_not_used(
    ran: list[str], change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attribute = "operator" if change == "missing" else "arguments"
    monkeypatch.setattr(library.CpuKernel, attribute, "something_else")
    leaves = three()
    plan = hw.explain(*leaves, observed=True)
    assert f"is missing from PyTorch {torch.__version__}, or has changed" in str(plan.backward)
    same(gradients(leaves), gradients(leaves, "reference"))
    assert not ran


def test_a_kernel_that_fails_is_reported_and_the_engine_takes_over(
    ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: library.CpuKernel, *given: object) -> library.Three:
        raise RuntimeError("there is no plan for this")

    monkeypatch.setattr(library.CpuKernel, "run", fails)
    leaves = three()
    try:
        with pytest.warns(RuntimeWarning, match="there is no plan for this"):
            found = gradients(leaves)
        assert "failed on this machine" in str(hw.explain(*leaves, observed=True).backward)
        same(found, gradients(leaves))
    finally:
        failures.forget()
    same(found, gradients(leaves, "reference"))
    assert ran == [library.CPU.name]


def test_running_out_of_memory_is_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: library.CpuKernel, *given: object) -> library.Three:
        raise torch.OutOfMemoryError("too much")

    monkeypatch.setattr(library.CpuKernel, "run", fails)
    with pytest.raises(torch.OutOfMemoryError, match="too much"):
        gradients(three())


def test_a_kernel_that_is_switched_off_is_not_used(ran: list[str]) -> None:
    leaves = three()
    with sdpa_kernel(SDPBackend.MATH):
        gradients(leaves)
        assert "is switched off" in str(hw.explain(*leaves, observed=True).backward)
    assert not ran


@pytest.mark.parametrize("kind", ["expanded", "transposed", "strided", "offset"])
def test_gradients_of_any_layout_are_taken(ran: list[str], kind: str) -> None:
    leaves = three(heads=4)
    grad = {
        "expanded": torch.ones(()).expand(1, 4, 20, 8),
        "transposed": torch.randn(1, 20, 4, 8).transpose(1, 2),
        "strided": torch.randn(1, 4, 20, 16)[..., ::2],
        "offset": torch.randn(641)[1:].view(1, 4, 20, 8),
    }[kind]
    found = [
        list(torch.autograd.grad(hw.observe(*leaves, engine=engine)[0], leaves, grad))
        for engine in ("streaming", "reference")
    ]
    assert ran == [library.CPU.name]
    same(*found)


def test_a_plan_names_the_backward_of_every_engine() -> None:
    leaves = three()
    q, k, v = (x.detach() for x in leaves)
    assert hw.explain(q, k, v).backward is None
    assert "←" not in str(hw.explain(q, k, v))
    with torch.no_grad():
        assert hw.explain(*leaves).backward is None
    assert hw.explain(*leaves).backward == "PyTorch's, of the kernel that it chose"
    assert "autograd" in str(hw.explain(*leaves, engine="reference").backward)
    told = str(hw.explain(*leaves, observed=True, mask=CAUSAL)).splitlines()
    assert told[-1] == (
        "← backward   PyTorch's CPU kernel; streaming's own where lse or entropy has a gradient too"
    )
    learned = hw.explain(q, k, v, sinks=torch.zeros(4, requires_grad=True))
    assert "has no sinks" in str(learned.backward)


def test_one_input_alone_may_require_a_gradient(ran: list[str]) -> None:
    q, k, v = (x.detach() for x in three())
    k.requires_grad_()
    hw.observe(q, k, v, mask=CAUSAL)[0].sum().backward()
    assert ran == [library.CPU.name]
    assert q.grad is None
    assert v.grad is None
    (wanted,) = torch.autograd.grad(hw.attention(q, k, v, mask=CAUSAL).sum(), k)
    same([k.grad], [wanted])


def test_a_checkpointed_call_has_the_same_gradients(ran: list[str]) -> None:
    leaves = three()

    def run(*tensors: Tensor) -> Tensor:
        return hw.observe(*tensors, mask=CAUSAL)[0]

    out = checkpoint(run, *leaves, use_reentrant=False)
    found = list(torch.autograd.grad(out.sin().sum(), leaves))
    same(found, gradients(leaves, "reference", mask=CAUSAL))
    assert ran == [library.CPU.name]


def test_a_second_derivative_is_still_refused() -> None:
    leaves = three()
    out, _ = hw.observe(*leaves)
    (grad,) = torch.autograd.grad(out.sum(), leaves[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="streaming engine has no second derivative"):
        torch.autograd.grad(grad.sum(), leaves[0])


def test_a_compiled_step_uses_the_kernel_if_lse_stays_inside(ran: list[str]) -> None:
    def out_alone(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        out, seen = hw.observe(*tensors, mask=CAUSAL, engine="streaming")
        return out.sin().sum(), seen.entropy.detach().mean()

    def with_lse(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        out, seen = hw.observe(*tensors, mask=CAUSAL, engine="streaming")
        return out.sin().sum(), seen.lse

    for function, kernels in ((out_alone, [library.CPU.name]), (with_lse, [])):
        leaves = three()
        ran.clear()
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        loss, _ = compiled(*leaves)
        found = list(torch.autograd.grad(loss, leaves))
        assert ran == kernels
        same(found, gradients(leaves, "reference", mask=CAUSAL))


def test_the_triangle_is_known_from_bands_as_well() -> None:
    def found(mask: hw.mask.Mask | None, queries: int = 20, banded: bool = True) -> bool | None:
        q, k, v = three(queries)
        return library.is_causal(q, k, pose("attention", q, k, v, Options(mask=mask)).terms(banded))

    for banded in (True, False):
        assert found(None, banded=banded) is False
        assert found(None, 9, banded) is False
        assert found(CAUSAL, banded=banded) is True
        assert found(CAUSAL & hw.mask.window(19), banded=banded) is True
        assert found(CAUSAL & hw.mask.window(18), banded=banded) is None
        assert found(CAUSAL, 9, banded) is None
        assert found(hw.mask.causal(1), banded=banded) is None
        assert found(CAUSAL & hw.mask.documents(torch.arange(20) // 9), banded=banded) is None
        assert found(hw.mask.lengths([12]), banded=banded) is None


def test_rows_that_kernels_cannot_load_are_copied() -> None:
    whole = torch.randn(2, 3, 8, 16)
    heads_last = whole.transpose(1, 2)
    assert library.readable(whole) is whole
    assert library.readable(heads_last) is heads_last
    for x in (whole[..., 1:9], whole[..., ::2], whole[:1].expand(2, 3, 8, 16)):
        made = library.readable(x)
        assert made.is_contiguous()
        assert torch.equal(made, x)
    assert library.in_layout_of(whole, whole) is whole
    turned = library.in_layout_of(whole.transpose(1, 2), heads_last.clone())
    assert torch.equal(turned, heads_last)
