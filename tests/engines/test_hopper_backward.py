"""The Hopper backward: emulated on a CPU, compiled without a GPU, and run on one under `-m gpu`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.core.options import Options
from headwise.core.problem import Terms, pose
from headwise.core.row_sums import RowTotals
from headwise.engines.gradients import BackwardInputs, Gradients

pytest.importorskip("triton", reason="the engine's kernel is written in Gluon, a part of Triton")

from headwise.engines import failures
from headwise.engines.triton.host import attention_call, backward_choice, hopper_backward_call
from headwise.engines.triton.host.backward_choice import SWITCH, takes
from headwise.engines.triton.host.cards import Card
from headwise.engines.triton.host.hopper_backward_call import differentiate_hopper
from tests.engines import interval_masks as masks
from tests.thinned import thinned

HERE = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
on_hopper = pytest.mark.skipif(not HERE, reason="its kernel runs on Hopper GPUs only")
pytestmark = [pytest.mark.gpu] if HERE else []  # emulated where there is none
DEVICE = torch.device("cuda" if HERE else "cpu")


def wide(*tensors: Tensor) -> list[Tensor]:
    return [x.double().detach().requires_grad_() for x in tensors]


def normal(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def given(case: str) -> tuple[list[Tensor], Options]:
    """Random tensors, and the options of a call."""
    batch, heads, key_heads, n, m, width, options = CASES[case]
    torch.manual_seed(n + m)
    q, k, v = (normal(batch, x, y, width) for x, y in ((heads, n), (key_heads, m), (key_heads, m)))
    if "sinks" in options:
        options = options | {"sinks": torch.randn(heads, device=DEVICE)}
    return [q, k, v], Options(**options)


CAUSAL = hw.mask.causal()
IDS = torch.arange(500, device=DEVICE) // 130  # of documents
CASES = {
    "full": (1, 1, 1, 128, 256, 128, {}),
    "full, 64 wide": (1, 1, 1, 256, 128, 64, {}),
    "causal": (1, 2, 2, 384, 384, 128, {"mask": CAUSAL}),
    "causal, odd, grouped": (2, 4, 2, 201, 331, 96, {"mask": CAUSAL}),
    "causal, 64 wide": (1, 2, 1, 300, 300, 40, {"mask": CAUSAL}),
    "window": (1, 2, 1, 500, 500, 72, {"mask": CAUSAL & hw.mask.window(70)}),
    "both sides": (1, 1, 1, 450, 450, 64, {"mask": hw.mask.window(50, 90)}),
    "rows see nothing": (1, 2, 2, 300, 140, 128, {"mask": hw.mask.causal(offset=-160)}),
    "sinks": (1, 2, 1, 200, 200, 128, {"mask": CAUSAL, "sinks": True}),
    "documents, grouped": (
        1, 4, 2, 420, 420, 64, {"mask": CAUSAL & hw.mask.documents(IDS[:420])},
    ),
    "sinks and window": (
        1, 2, 1, 410, 410, 128,
        {"mask": CAUSAL & (hw.mask.window(60) | hw.mask.prefix(4)), "sinks": True},
    ),
    "capped": (1, 2, 1, 150, 200, 96, {"mask": CAUSAL, "softcap": 1.5}),
    "capped documents, 64 wide": (
        1, 1, 1, 300, 300, 64,
        {"mask": hw.mask.documents(IDS[:300]), "softcap": 1.5},
    ),
}  # fmt: skip


def differentiated(
    tensors: list[Tensor],
    options: Options,
    seed: int,
    entropy: bool,
    hidden: Callable[[Tensor], Tensor] = lambda x: x,
) -> tuple[Gradients, list[Tensor]]:
    """The kernel's gradients of a random sum of results, and the reference's.

    The kernel's keys and values are what `hidden` returns.
    """
    q, k, v = wide(*tensors)
    sinks = None if options.sinks is None else options.sinks.double().requires_grad_()
    more = {"mask": options.mask, "softcap": options.softcap, "sinks": sinks}
    truth, seen = hw.observe(
        q, k, v, **more, stats=("lse", "entropy", "max_logit"), engine="reference"
    )
    some = seen.lse > -torch.inf
    torch.manual_seed(7)
    pull = torch.randn_like(truth), torch.randn_like(seen.lse), torch.randn_like(seen.lse)
    total = (truth * pull[0]).sum()
    if entropy:
        total = total + (seen.lse * pull[1])[some].sum() + (seen.entropy * pull[2]).sum()
    learns = [x for x in (q, k, v, sinks) if x is not None]
    expected = torch.autograd.grad(total, learns)
    given = [tensors[0], *map(hidden, tensors[1:])]
    call = prepared(given, options, truth, seen, pull, entropy)
    assert takes(*call[:4], call[0].dtype)
    if HERE:
        return differentiate_hopper(*call), list(expected)
    from tests.engines.gluon_on_cpu import emulated  # greenlet need not be where a GPU is

    with emulated(seed=seed):
        return differentiate_hopper(*call), list(expected)


def prepared(
    tensors: list[Tensor],
    options: Options,
    out: Tensor,
    seen: hw.Observation,
    pull: tuple[Tensor, ...],
    entropy: bool,
) -> tuple[Tensor, Tensor, Tensor, Terms, BackwardInputs]:
    """What the kernel's backward takes, from the results of an exact forward."""
    q, k, v = tensors
    terms = pose("attention", q, k, v, options).terms(banded=True)
    lse, largest, ent = (x.detach().float() for x in (seen.lse, seen.max_logit, seen.entropy))
    some = lse > -torch.inf
    above = torch.where(largest > -torch.inf, seen.lse - seen.max_logit, 0.0).detach().float()
    totals = RowTotals(lse, largest, above)
    grads = [x.float().masked_fill(~some, 0) if entropy else None for x in pull[1:]]
    halves = [x.detach().to(q.dtype) for x in (out, pull[0])]
    return q, k, v, terms, BackwardInputs(halves[0], totals, ent, halves[1], *grads)


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


@pytest.mark.parametrize(
    ("step", "count"), [(13, 3), pytest.param(1, 32, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_variants_compile_and_spill_nothing_in_their_loops(step: int, count: int) -> None:
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.engines.compiled_backward", str(step)]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    variants = json.loads(told.stdout)
    assert len(variants) == count
    for variant in variants:
        assert variant["shared"] <= 227 * 1024, variant
        assert variant["stack"] <= 160, variant


@pytest.mark.parametrize(("case", "entropy"), thinned(CASES, [False, True]))
def test_gradients_are_the_references(case: str, entropy: bool) -> None:
    tensors, options = given(case)
    found, expected = differentiated(tensors, options, 1, entropy)
    assert_near(found, expected, 3e-3)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("case", thinned(CASES))
def test_additions_in_turns_give_the_same_gradients(case: str) -> None:
    tensors, options = given(case)
    found, expected = differentiated(tensors, options, 2, False)
    assert_near(found, expected, 3e-3)
    again, _ = differentiated(tensors, options, 3, False)
    assert torch.equal(found.q, again.q)


@pytest.mark.parametrize(("mask", "width"), thinned(masks.MASKS, [64, 128]))
def test_every_mask_agrees_and_keys_that_no_row_sees_may_be_nan(
    mask: str, width: int, request: pytest.FixtureRequest
) -> None:
    if width == 64:
        request.getfixturevalue("deterministic")
    torch.manual_seed(width)
    with DEVICE:
        made = masks.MASKS[mask](270, 310)
    q, k, v = normal(2, 2, 270, width), normal(2, 1, 310, width), normal(2, 1, 310, width)

    def hidden(x: Tensor) -> Tensor:
        return masks.hide(x, made, 270)

    found, expected = differentiated([q, k, v], Options(mask=made), 4, width == 128, hidden)
    assert_near(found, expected, 3e-3)


def test_weights_of_large_logits_are_exact() -> None:
    torch.manual_seed(0)
    v = normal(1, 1, 130, 64)
    q, k = (torch.full_like(v, 300.0) for _ in range(2))  # logits around 630,000, a few apart
    q[..., :8], k[..., :8] = (torch.randint(-x, x, (130, 8), device=DEVICE).half() for x in (2, 8))
    found, expected = differentiated([q, k, v], Options(), 5, False)
    for x, truth in ((found.k, expected[1]), (found.v, expected[2])):
        assert float((x - truth).norm()) <= 1e-3 * float(truth.norm())


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("case", CASES)
def test_a_call_learns_through_it(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "1")
    monkeypatch.setattr(backward_choice, "LEAST", 1)
    tensors, options = given(case)
    q, k, v = (x.detach().requires_grad_() for x in tensors)
    more = {"mask": options.mask, "softcap": options.softcap, "sinks": options.sinks}
    out, seen = hw.observe(q, k, v, **more, stats=("entropy",), engine="hopper")
    found = torch.autograd.grad(out.float().square().sum() + seen.entropy.sum(), (q, k, v))
    a, b, c = wide(*tensors)
    out, seen = hw.observe(a, b, c, **more, stats=("entropy",), engine="reference")
    expected = torch.autograd.grad(out.square().sum() + seen.entropy.sum(), (a, b, c))
    for x, truth in zip(found, expected, strict=True):
        assert float((x - truth).norm()) <= 3e-3 * float(truth.norm())


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("case", ["causal, odd, grouped", "sinks and window"])
def test_bits_repeat_on_a_gpu(case: str) -> None:
    tensors, options = given(case)
    first = differentiated(tensors, options, 0, True)[0]
    for _ in range(50):
        again = differentiated(tensors, options, 0, True)[0]
        assert all(torch.equal(getattr(first, name), getattr(again, name)) for name in "qkv")


def test_a_kernel_that_fails_leaves_its_calls_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object) -> Gradients:
        raise failures.KernelError("no such instruction")

    monkeypatch.setattr(attention_call, "serves", lambda *given: True)
    monkeypatch.setattr(hopper_backward_call, "differentiate_hopper", fail)
    q, k, v = (torch.randn(1, 1, 40, 16, device=DEVICE, requires_grad=True) for _ in range(3))
    out, seen = hw.observe(q, k, v, stats=("entropy",), engine="triton")
    loss = out.sum() + seen.entropy.sum()
    with pytest.warns(RuntimeWarning, match="no such instruction"):
        found = torch.autograd.grad(loss, (q, k, v))
    out, seen = hw.observe(q, k, v, stats=("entropy",), engine="reference")
    expected = torch.autograd.grad(out.sum() + seen.entropy.sum(), (q, k, v))
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    failures.forget()


def test_it_serves_nothing_until_it_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = (normal(1, 1, 600, 64) for _ in range(3))
    terms = pose("attention", *tensors, Options(mask=CAUSAL)).terms(banded=True)
    q, k, v = (normal(1, 1, 600, 64) for _ in range(3))
    monkeypatch.setattr(backward_choice, "INTERPRETING", False)
    monkeypatch.setattr(backward_choice, "card", lambda device: Card("an H200", 9, 0, 0))
    assert not backward_choice.serves(q, k, v, terms, q.dtype)
    monkeypatch.setenv(SWITCH, "1")
    assert backward_choice.serves(q, k, v, terms, q.dtype)
    assert not backward_choice.serves(q[:, :, :9], k, v, terms, q.dtype)
    assert not backward_choice.serves(q, k, v, terms, torch.float32)
    assert not backward_choice.ahead(q, k, v, terms)
    monkeypatch.setattr(backward_choice, "AHEAD", frozenset({(64, True)}))
    assert backward_choice.ahead(q, k, v, terms)
