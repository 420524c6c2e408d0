"""The Hopper backward: emulated on a CPU, compiled without a GPU, and run on one under `-m gpu`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.core.options import Options
from headwise.core.problem import Problem, pose
from headwise.core.row_sums import RowTotals
from headwise.engines.gradients import BackwardInputs, Gradients

pytest.importorskip("triton", reason="the engine's kernel is written in Gluon, a part of Triton")

from headwise.engines.triton.host.hopper_backward_call import differentiate_hopper, takes
from tests.engines import gluon_on_cpu

HERE = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
on_hopper = pytest.mark.skipif(not HERE, reason="its kernel runs on Hopper GPUs only")
DEVICE = "cuda" if HERE else "cpu"


def wide(*tensors: Tensor) -> list[Tensor]:
    return [x.double().detach().requires_grad_() for x in tensors]


def posed(case: str, dtype: torch.dtype = torch.float16) -> tuple[Problem, Options]:
    """A problem with random tensors."""
    batch, heads, key_heads, n, m, width, options = CASES[case]
    torch.manual_seed(n + m)
    q = torch.randn(batch, heads, n, width, device=DEVICE).to(dtype)
    k, v = (torch.randn(batch, key_heads, m, width, device=DEVICE).to(dtype) for _ in range(2))
    given = Options(**options)
    return pose("attention", q, k, v, given), given


CASES = {
    "full": (1, 1, 1, 128, 256, 128, {}),
    "full, 64 wide": (1, 1, 1, 256, 128, 64, {}),
    "causal": (1, 2, 2, 384, 384, 128, {"mask": hw.mask.causal()}),
    "causal, odd, grouped": (2, 4, 2, 201, 331, 96, {"mask": hw.mask.causal()}),
    "causal, 64 wide": (1, 2, 1, 300, 300, 40, {"mask": hw.mask.causal()}),
    "window": (1, 2, 1, 500, 500, 72, {"mask": hw.mask.causal() & hw.mask.window(70)}),
    "both sides": (1, 1, 1, 450, 450, 64, {"mask": hw.mask.window(50, 90)}),
    "rows see nothing": (1, 2, 2, 300, 140, 128, {"mask": hw.mask.causal(offset=-160)}),
    "sinks": (1, 2, 1, 200, 200, 128, {"mask": hw.mask.causal(), "sinks": torch.randn(2)}),
}


def differentiated(
    problem: Problem, options: Options, seed: int, entropy: bool
) -> tuple[Gradients, list[Tensor]]:
    """The kernel's gradients of a random sum of results, and the reference's."""
    q, k, v = wide(problem.q, problem.k, problem.v)
    sinks = None if options.sinks is None else options.sinks.double().requires_grad_()
    truth, seen = hw.observe(
        q, k, v, mask=options.mask, sinks=sinks, stats=("lse", "entropy", "max_logit"),
        engine="reference",
    )  # fmt: skip
    some = seen.lse > -torch.inf
    torch.manual_seed(7)
    pull = torch.randn_like(truth), torch.randn_like(seen.lse), torch.randn_like(seen.lse)
    total = (truth * pull[0]).sum()
    if entropy:
        total = total + (seen.lse * pull[1])[some].sum() + (seen.entropy * pull[2]).sum()
    learns = [x for x in (q, k, v, sinks) if x is not None]
    expected = torch.autograd.grad(total, learns)
    lse, largest, ent = (x.detach().float() for x in (seen.lse, seen.max_logit, seen.entropy))
    log_total = torch.where(some, lse - largest, 0.0)
    out, grad = (x.detach().to(problem.q.dtype) for x in (truth, pull[0]))
    more = [x.float().masked_fill(~some, 0) if entropy else None for x in pull[1:]]
    given = BackwardInputs(out, RowTotals(lse, largest, log_total), ent, grad, *more)
    tensors = problem.q, problem.k, problem.v, problem.terms(banded=True), given
    assert takes(*tensors)
    if DEVICE == "cuda":
        return differentiate_hopper(*tensors), list(expected)
    with gluon_on_cpu.emulated(seed=seed):
        return differentiate_hopper(*tensors), list(expected)


def assert_near(found: Gradients, expected: list[Tensor], tolerance: float) -> None:
    pairs = zip(("q", "k", "v", "sinks"), expected, strict=False)
    for name, truth in pairs:
        x = getattr(found, name).double()
        assert not x.isnan().any(), name
        assert float((x - truth).norm()) <= tolerance * float(truth.norm()), name


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("entropy", [False, True], ids=["out", "all"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_the_references(case: str, entropy: bool) -> None:
    problem, options = posed(case)
    found, expected = differentiated(problem, options, 1, entropy)
    assert_near(found, expected, 3e-3)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("case", CASES)
def test_additions_in_turns_give_the_same_gradients(case: str) -> None:
    problem, options = posed(case)
    found, expected = differentiated(problem, options, 2, False)
    assert_near(found, expected, 3e-3)
    again, _ = differentiated(problem, options, 3, False)
    assert torch.equal(found.q, again.q)
