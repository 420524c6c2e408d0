"""A prepared call of the Triton engine gives the same numbers by launches alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import headwise as hw
from headwise.core.intervals import Interval
from headwise.core.patterns import Causal
from headwise.core.place import Place
from headwise.engines import calls
from headwise.engines.contract import Prepared
from headwise.mask import Mask

pytest.importorskip("triton", reason="prepared calls are launches of Triton's kernels")

import triton
import triton.language as tl

from headwise.engines.triton.host.launches import Launches
from tests.engines.test_citizen import their_warnings

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CAUSAL = hw.mask.causal()
IDS = (torch.arange(40, device=DEVICE) // 16)[None]


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    calls.forget()
    yield
    calls.forget()


def three(*shape: int) -> list[Tensor]:
    return [torch.randn(shape or (1, 2, 40, 16), device=DEVICE) for _ in range(3)]


def prepared() -> list[Prepared]:
    return list(calls._PREPARED.values())


def prepare(run: Callable[..., object]) -> None:
    """Make a call once, which prepares it."""
    run(*three())
    assert len(prepared()) == 1


MASKS: dict[str, hw.mask.Mask | None] = {
    "no mask": None,
    "causal": CAUSAL,
    "a window": CAUSAL & hw.mask.window(7),
    "documents": CAUSAL & hw.mask.documents(IDS),
    "sinks and a window": CAUSAL & (hw.mask.window(7) | hw.mask.prefix(2)),
}


@pytest.mark.parametrize("kind", MASKS)
def test_a_prepared_call_gives_what_a_new_one_gives(kind: str) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, engine: str = "triton") -> tuple[Tensor, ...]:
        out, seen = hw.observe(q, k, v, mask=MASKS[kind], engine=engine)
        return hw.attention(q, k, v, mask=MASKS[kind], engine=engine), out, *seen.values.values()

    run(*three())
    assert len(prepared()) == 2
    given = three()
    for found, wanted in zip(run(*given), run(*given, "reference"), strict=True):
        torch.testing.assert_close(found, wanted, atol=2e-5, rtol=2e-4)
    before = run(*given)
    calls.forget()
    assert all(torch.equal(x, y) for x, y in zip(before, run(*given), strict=True))


@pytest.mark.parametrize("kind", ["causal", "documents", "sinks"])
def test_a_prepared_call_has_gradients_too(kind: str) -> None:
    def run(*given: Tensor, engine: str = "triton") -> list[Tensor]:
        sinks = torch.linspace(-1, 1, 2, device=DEVICE, requires_grad=True)
        mask = MASKS.get(kind, CAUSAL)
        more = {"sinks": sinks} if kind == "sinks" else {}
        out, seen = hw.observe(*given, mask=mask, engine=engine, **more)
        loss = out.sin().sum() + seen.lse.sum() + seen.entropy.cos().sum()
        values = [x.detach() for x in seen.values.values()]
        return [out.detach(), *values, *torch.autograd.grad(loss, (*given, *more.values()))]

    prepare(lambda *given: run(*(x.requires_grad_() for x in given)))
    leaves = [x.requires_grad_() for x in three()]
    for found, wanted in zip(run(*leaves), run(*leaves, engine="reference"), strict=True):
        torch.testing.assert_close(found, wanted, atol=2e-5, rtol=2e-4)
    assert len(prepared()) == 1


def test_sampled_rows_are_prepared() -> None:
    def run(*given: Tensor, engine: str = "triton") -> list[Tensor]:
        out, seen = hw.observe(*given, mask=CAUSAL, rows=7, engine=engine)
        return [out, *seen.values.values()]

    run(*three())
    assert len(prepared()) == 2  # the output, and the statistics of some rows
    given = three()
    for found, wanted in zip(run(*given), run(*given, engine="reference"), strict=True):
        torch.testing.assert_close(found, wanted, atol=2e-5, rtol=2e-4)
    assert len(prepared()) == 2


def test_arguments_that_are_not_tensors_are_refused() -> None:
    q, k, _ = three()
    with pytest.raises(ValueError, match="need to be tensors"):
        hw.attention(q, k, [1.0], engine="triton")


def test_a_prepared_call_leaves_earlier_results_alone() -> None:
    prepare(lambda q, k, v: hw.attention(q, k, v, engine="triton"))
    given = three()
    first = hw.attention(*given, engine="triton")
    kept = first.clone()
    hw.attention(*three(), engine="triton")
    assert torch.equal(first, kept)
    assert torch.equal(first, hw.attention(*given, engine="triton"))


def test_documents_of_another_batch_are_prepared_too() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, engine: str = "triton") -> Tensor:
        return hw.attention(q, k, v, mask=CAUSAL & hw.mask.documents(ids), engine=engine)

    prepare(lambda *given: run(*given, IDS))
    given, other = three(), (torch.arange(40, device=DEVICE) // 9)[None]
    torch.testing.assert_close(run(*given, other), run(*given, other, "reference"))
    assert len(prepared()) == 1


def test_sinks_and_caps_are_prepared() -> None:
    def run(*given: Tensor, engine: str = "triton", cap: float = 5.0) -> Tensor:
        sinks = torch.linspace(-1, 1, 2, device=DEVICE)
        return hw.attention(*given, sinks=sinks, softcap=cap, mask=CAUSAL, engine=engine)

    prepare(run)
    given = three()
    torch.testing.assert_close(run(*given), run(*given, engine="reference"))
    torch.testing.assert_close(run(*given, cap=2.0), run(*given, engine="reference", cap=2.0))


def test_projections_that_lie_in_one_tensor_are_told_apart() -> None:
    def run(packed: Tensor, engine: str = "triton") -> Tensor:
        q, k, v = packed.unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4).unbind(0)
        return hw.attention(q, k, v, mask=CAUSAL, engine=engine)

    for _ in range(3):
        packed = torch.randn(1, 40, 96, device=DEVICE)
        torch.testing.assert_close(run(packed), run(packed, "reference"))
    assert len(prepared()) == 1


def test_one_tensor_in_three_roles_is_never_prepared() -> None:
    for _ in range(3):
        q, k, v = three()
        torch.testing.assert_close(
            hw.attention(q, q, q, engine="triton"), hw.attention(q, q, q, engine="reference")
        )
    assert not prepared()
    torch.testing.assert_close(
        hw.attention(q, k, v, engine="triton"), hw.attention(q, k, v, engine="reference")
    )


def test_a_subclass_of_a_mask_is_another_mask() -> None:
    class Later(Causal):
        def intervals(self, place: Place) -> tuple[Interval, ...]:
            ((first, last),) = super().intervals(place)
            return ((first, last - 5),)

        def apart(self, place: Place) -> tuple[None, Mask]:
            return None, self

    prepare(lambda q, k, v: hw.attention(q, k, v, mask=CAUSAL, engine="triton"))
    q, k, v = three()
    found = hw.attention(q, k, v, mask=Later(), engine="triton")
    torch.testing.assert_close(found, hw.attention(q, k, v, mask=Later(), engine="reference"))


def test_a_negated_view_is_read_negated() -> None:
    prepare(lambda q, k, v: hw.attention(q, k, v, engine="triton"))
    q, k, v = three()
    found = hw.attention(torch._neg_view(q), k, v, engine="triton")
    torch.testing.assert_close(found, hw.attention(-q, k, v, engine="reference"))


def test_pytorchs_newer_switch_for_tf32_may_be_used() -> None:
    switches = torch.backends.cuda.matmul
    before, switches.fp32_precision = switches.fp32_precision, "tf32"
    try:
        prepare(lambda q, k, v: hw.attention(q, k, v, engine="triton"))
    finally:
        switches.fp32_precision = before


def test_another_shape_stride_scale_or_address_is_another_call() -> None:
    prepare(lambda *given: hw.attention(*given, engine="triton"))
    q, k, v = three()
    wide = torch.randn(1, 2, 40, 17, device=DEVICE)[..., 1:]
    for given, scale in (
        ((q[:, :, :30], k, v), None),
        ((q.transpose(1, 2).contiguous().transpose(1, 2), k, v), None),
        ((q, k, v), 0.3),
        ((wide, k, v), None),
    ):
        score = hw.Dot(scale)
        found = hw.attention(*given, score=score, engine="triton")
        torch.testing.assert_close(found, hw.attention(*given, score=score, engine="reference"))


def test_a_call_without_a_batch_is_prepared() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, engine: str = "triton") -> Tensor:
        return hw.attention(q[0], k[0], v[0], mask=CAUSAL, engine=engine)

    prepare(run)
    given = three()
    torch.testing.assert_close(run(*given), run(*given, "reference"))


def test_modes_and_transforms_still_see_the_call() -> None:
    prepare(lambda *given: hw.attention(*given, engine="triton"))
    q, k, v = three()
    learning = q.clone().requires_grad_()
    assert hw.attention(learning, k, v, engine="triton").requires_grad
    expected = hw.attention(q, k, v, engine="reference")
    with their_warnings():  # since PyTorch 2.15 it warns of the missing batching rule
        mapped = torch.func.vmap(lambda x: hw.attention(x, k, v, engine="triton"))(q[None])
    torch.testing.assert_close(mapped[0], expected)

    class Counts(TorchFunctionMode):
        heard = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            Counts.heard += func is hw.attention
            return func(*args, **(kwargs or {}))

    with Counts():
        hw.attention(q, k, v, engine="triton")
    assert Counts.heard == 1
    for wrong in ({"engine": "tritn"}, {"mask": q > 0}, {"softcap": -1.0}):
        with pytest.raises(ValueError, match=r"in hw\.attention"):
            hw.attention(q, k, v, **{"engine": "triton"} | wrong)


def test_autocast_casts_what_is_not_of_its_dtype_and_leaves_the_rest() -> None:
    def run(*given: Tensor) -> Tensor:
        with torch.autocast(DEVICE, dtype=torch.float16):
            return hw.attention(*given, mask=CAUSAL, engine="triton")

    prepare(lambda *given: hw.attention(*given, mask=CAUSAL, engine="triton"))
    given = three()
    assert run(*given).dtype == torch.float16
    halves = [x.half() for x in given]
    found = [run(*halves) for _ in range(3)]
    assert len(prepared()) == 2
    assert all(torch.equal(x, run(*given)) for x in found)


def test_dropout_draws_anew_each_time() -> None:
    given = three()
    found = [hw.attention(*given, dropout=0.5, engine="triton") for _ in range(4)]
    assert not any(torch.equal(found[0], x) for x in found[1:])
    assert not prepared()


def test_a_mask_of_the_wrong_shape_is_still_refused() -> None:
    mask = hw.mask.documents(IDS)
    prepare(lambda *given: hw.attention(*given, mask=mask, engine="triton"))
    for _ in range(3):
        with pytest.raises(ValueError, match="ids have shape"):
            hw.attention(*three(1, 2, 30, 16), mask=mask, engine="triton")


def test_a_shape_that_was_tuned_is_used_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from headwise.engines.triton.host import tile_shapes as shapes
    from headwise.engines.triton.host.cards import card

    launched = []

    def spy(launches: Launches, *given: Any, **options: Any) -> None:
        launched.append((options["ROWS"], options["KEYS"]))
        start(launches, *given, **options)

    start = Launches.start

    prepare(lambda *given: hw.attention(*given, engine="triton"))
    here = card(torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device(DEVICE))
    usual = shapes.default("forward", 16, 4, here)
    other = replace(usual, rows=2 * usual.rows)
    shapes.use("forward", 16, 4, here, other)
    try:
        assert not prepared()
        monkeypatch.setattr(Launches, "start", spy)
        hw.attention(*three(), engine="triton")
        assert launched == [(other.rows, other.keys)]
    finally:
        shapes.use("forward", 16, 4, here, usual)


@pytest.mark.gpu
def test_a_prepared_call_can_be_captured_and_runs_on_any_stream() -> None:
    def run(*given: Tensor) -> Tensor:
        return hw.attention(*given, mask=CAUSAL, engine="triton")

    prepare(run)
    given = three()
    run(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(*given)
    for x in given:
        x.normal_()
    graph.replay()
    expected = hw.attention(*given, mask=CAUSAL, engine="reference")
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-4)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    found = []
    for stream in streams:
        with torch.cuda.stream(stream):
            found.append(run(*given))
    torch.cuda.synchronize()
    assert all(torch.equal(x, out) for x in found)


@triton.jit
def doubled(x, found):
    """Double sixteen numbers."""
    at = tl.arange(0, 16)
    tl.store(found + at, 2 * tl.load(x + at))


@pytest.mark.parametrize("computed", [False, True], ids=["launches", "computes too"])
def test_a_call_that_does_more_than_launch_is_not_prepared(computed: bool) -> None:
    x, other = torch.randn(2, 16, device=DEVICE).unbind(0)
    launches = Launches(x)
    found = torch.empty_like(x)
    launches.allocated(found)
    launches.start(doubled, (1, 1, 1), None, (x * 1 if computed else x, found), 1, 1)
    assert torch.equal(found, 2 * x)
    call = launches.prepared((found,))
    assert (call is None) == computed
    assert call is None or torch.equal(call(other)[0], 2 * other)


def test_a_failed_attempt_leaves_nothing_behind() -> None:
    x, other = torch.randn(2, 16, device=DEVICE).unbind(0)
    launches = Launches(x)
    mark = launches.mark()
    launches.allocated(torch.empty(1000, device=DEVICE))
    launches.back_to(mark)
    found = torch.empty_like(x)
    launches.allocated(found)
    launches.start(doubled, (1, 1, 1), None, (x, found), 1, 1)
    call = launches.prepared((found,))
    assert call is not None
    assert len(call.made) == len(call.launches) == 1
    assert torch.equal(call(other)[0], 2 * other)
