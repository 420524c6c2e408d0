"""A kernel that does not compile or launch is a reason, reported once; another engine serves."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.engines import calls, failures
from headwise.engines.failures import KernelError

pytest.importorskip("triton", reason="the kernels are written in Triton")

from headwise.engines.triton.engine import TRITON
from headwise.engines.triton.host import backward_call, decoding_call, forward_call
from headwise.engines.triton.host import statistics_call as single_call
from headwise.engines.triton.host.cards import INTERPRETING
from headwise.engines.triton.kernels.maps import map_lse

pytestmark = pytest.mark.skipif(not INTERPRETING, reason="on a GPU its own kernels would be broken")
CAUSAL = hw.mask.causal()


class Broken:
    """A kernel whose launch fails."""

    def __init__(self, kernel: Any, error: Exception) -> None:
        self.fn, self.error, self.tries = kernel.fn, error, 0

    def __getitem__(self, grid: Any) -> Any:
        def launch(*given: Any, **options: Any) -> Any:
            self.tries += 1
            raise self.error

        return launch


@pytest.fixture(autouse=True)
def triton_comes_first(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the plan choose the Triton engine for CPU tensors, as it does on a GPU."""
    monkeypatch.setattr(type(TRITON), "devices", ("cpu",))
    monkeypatch.setattr(type(TRITON), "rank", 0)
    failures.forget()
    calls.forget()
    yield
    failures.forget()
    calls.forget()


def broken(
    patch: pytest.MonkeyPatch, module: Any, name: str, error: Exception | None = None
) -> Broken:
    made = Broken(getattr(module, name), error or RuntimeError("no\nPTX for sm_999"))
    patch.setattr(module, name, made)
    return made


def three(learns: bool = False, width: int = 16) -> list[Tensor]:
    return [torch.randn(1, 2, 40, width, requires_grad=learns) for _ in range(3)]


def gradients(given: list[Tensor], **options: Any) -> list[Tensor]:
    out, seen = hw.observe(*given, mask=CAUSAL & hw.mask.window(9), **options)
    return [out, seen.self_mass, *torch.autograd.grad(out.sum() + seen.entropy.sum(), given)]


def close(found: Any, truth: Any) -> None:
    torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-4)


def test_another_engine_serves_and_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, given = broken(monkeypatch, forward_call, "forward"), three()
    assert hw.explain(*given, mask=CAUSAL).engine == "triton"
    with pytest.warns(
        RuntimeWarning, match=r"triton engine.*float32 heads 16 wide.*sm_999"
    ) as told:
        close(
            hw.attention(*given, mask=CAUSAL), hw.attention(*given, mask=CAUSAL, engine="reference")
        )
    assert len(told) == 1
    plan = hw.explain(*given, mask=CAUSAL)
    assert plan.engine == "sdpa"
    assert "the kernel forward: RuntimeError: PTX for sm_999" in str(plan.reasons["triton"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hw.attention(*given, mask=CAUSAL)
        out, _ = hw.observe(*given, mask=CAUSAL)
    close(out, hw.attention(*given, mask=CAUSAL, engine="reference"))
    assert kernel.tries == 1


def test_calls_of_another_kind_are_still_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = broken(monkeypatch, forward_call, "forward")
    with pytest.warns(RuntimeWarning):
        hw.attention(*three())
    assert hw.explain(*three()).engine == "sdpa"
    assert hw.explain(*three(width=32)).engine == "triton"
    assert hw.explain(*three(), softcap=9.0).engine == "triton"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the same cause is not reported twice
        hw.attention(*three(width=32))
    assert kernel.tries == 2


def test_an_engine_requested_by_name_raises_and_then_refuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken(monkeypatch, forward_call, "forward")
    for learns in (False, True):
        given = three(learns)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(KernelError, match="sm_999"):
                hw.attention(*given, engine="triton")
        with pytest.raises(ValueError, match=r"engine='triton' can't serve.*failed.*sm_999"):
            hw.attention(*given, engine="triton")


@pytest.mark.parametrize("kernel", ["grad_queries", "grad_keys"])
def test_a_failing_backward_is_computed_by_another_engine(
    monkeypatch: pytest.MonkeyPatch, kernel: str
) -> None:
    failing, given = broken(monkeypatch, backward_call, kernel), three(learns=True)
    with pytest.warns(RuntimeWarning, match=f"the kernel {kernel}"):
        found = gradients(given)
    close(found, gradients(given, engine="reference"))
    close(gradients(given), found)
    assert failing.tries == 1
    assert hw.explain(*given, mask=CAUSAL).engine == "sdpa"
    with torch.no_grad():  # the forward works
        assert hw.explain(*given, mask=CAUSAL).engine == "triton"


def test_a_failing_statistic_leaves_the_whole_call_to_another_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken(monkeypatch, single_call, "single_key")
    given = three(learns=True)
    with pytest.warns(RuntimeWarning, match="the kernel single"):
        found = gradients(given)
    close(found, gradients(given, engine="reference"))


@torch.no_grad()
def test_a_prepared_call_that_fails_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    given = three()
    hw.attention(*given, mask=CAUSAL)
    (prepared,) = calls._PREPARED.values()

    def fails(*_: Any) -> None:
        raise RuntimeError("Triton Error [CUDA]: invalid device function")

    prepared.launches[:] = [x._replace(run=fails) for x in prepared.launches]
    found = hw.attention(*given, mask=CAUSAL)  # prepared again, which works
    close(found, hw.attention(*given, mask=CAUSAL, engine="reference"))
    assert prepared not in calls._PREPARED.values()
    assert hw.explain(*given, mask=CAUSAL).engine == "triton"

    (again,) = [x for x in calls._PREPARED.values() if hasattr(x, "launches")]
    again.launches[:] = [x._replace(run=fails) for x in again.launches]
    broken(monkeypatch, forward_call, "forward")
    with pytest.warns(RuntimeWarning, match="sm_999"):
        found = hw.attention(*given, mask=CAUSAL)
    close(found, hw.attention(*given, mask=CAUSAL, engine="reference"))
    assert hw.explain(*given, mask=CAUSAL).engine == "sdpa"


@torch.no_grad()
def test_running_out_of_memory_is_not_a_failure_of_the_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = three()
    for error in (
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ):
        with monkeypatch.context() as patch:
            broken(patch, forward_call, "forward", error)
            with pytest.raises(type(error), match="out of memory"):
                hw.attention(*given)
        assert hw.explain(*given).engine == "triton"
    hw.attention(*given)
    (prepared,) = calls._PREPARED.values()

    def fails(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    prepared.launches[:] = [x._replace(run=fails) for x in prepared.launches]
    with pytest.raises(torch.OutOfMemoryError):
        hw.attention(*given)


@torch.no_grad()
def test_a_step_over_a_cache_goes_on_without_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = broken(monkeypatch, decoding_call, "split_step")
    k, q = torch.randn(1, 2, 30, 64), torch.randn(1, 4, 1, 64)
    cache = hw.nn.PagedCache(hw.nn.PagePool(8, 16))
    cache.write(k, k)
    with pytest.warns(RuntimeWarning, match="cached attention"):
        found = cache.attend(q)
    tries = kernel.tries
    close(found, hw.attention(q, k, k, engine="reference"))
    close(cache.attend(q), found)
    assert kernel.tries == tries


def test_a_map_is_computed_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, (q, k, _) = broken(monkeypatch, map_lse, "log_sums"), three()
    with pytest.warns(RuntimeWarning, match="maps of float32"):
        found = hw.attention_map(q, k, mask=CAUSAL).pool(8)
    truth = hw.attention_map(q.double(), k.double(), mask=CAUSAL).pool(8)
    close(found, truth.float())
    hw.attention_map(q, k).received()
    assert kernel.tries == 1


def test_a_compiled_call_goes_on_when_its_kernels_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    given = three(learns=True)
    compiled = torch.compile(lambda *x: gradients_sum(*x), backend="aot_eager", fullgraph=True)
    kernels = [
        broken(monkeypatch, module, name)
        for module, name in (
            (forward_call, "forward"),
            (single_call, "single_key"),
            (backward_call, "grad_queries"),
        )
    ]
    truth = torch.autograd.grad(gradients_sum(*given, engine="reference"), given)
    with pytest.warns(RuntimeWarning, match="sm_999"):
        close(torch.autograd.grad(compiled(*given), given), truth)
    assert hw.explain(*given, observed=True).engine == "streaming"
    close(torch.autograd.grad(compiled(*given), given), truth)
    assert all(kernel.tries <= 1 for kernel in kernels)


def gradients_sum(*given: Tensor, engine: str = "auto") -> Tensor:
    out, seen = hw.observe(*given, mask=CAUSAL & hw.mask.window(9), engine=engine)
    total = out.sum() + seen.entropy.sum()
    for name in ("top_prob", "sink_mass", "self_mass", "previous_mass", "output_norm"):
        total = total + getattr(seen, name).sum()
    return total


def test_the_doctor_tries_every_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = pytest.importorskip("headwise.apps.cli.doctor", reason="the extra cli is missing")
    assert machine.tried_engines()["triton"] is None
    assert machine.kernel_traps() == ()
    broken(monkeypatch, map_lse, "log_sums")
    broken(monkeypatch, backward_call, "grad_keys")
    engines = machine.tried_engines()
    assert "the kernel grad_keys" in str(engines["triton"])
    assert engines["streaming"] is None
    (trap,) = machine.kernel_traps()
    assert "maps failed on this machine: the kernel of a map" in trap.what
    failures.forget()
    broken(monkeypatch, forward_call, "forward")
    assert "a small call failed: the kernel forward" in str(machine.tried_engines()["triton"])


def in_a_process_of_its_own(code: str) -> subprocess.CompletedProcess[str]:
    """Run code before headwise has imported anything of Triton."""
    command = [sys.executable, "-W", "always", "-c", code]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    return told


def test_an_engine_that_this_triton_can_not_load_is_left_out() -> None:
    told = in_a_process_of_its_own("""
import os
os.environ["TRITON_INTERPRET"] = "1"
import triton.runtime.errors, torch, headwise as hw
del triton.runtime.errors.OutOfResources
from headwise.engines.triton.engine import Triton
Triton.devices, Triton.rank = ("cpu",), 0
q = torch.randn(1, 2, 8, 16)
for _ in range(2):
    hw.attention(q, q, q)
    hw.attention_map(q, q).pool(4)
print(hw.explain(q, q, q))
""")
    assert told.stderr.count("triton engine can't be loaded on this machine") == 1
    assert "→ sdpa" in told.stdout
    assert "it can't be loaded: ImportError: cannot import name 'OutOfResources'" in told.stdout


def test_a_triton_without_the_copies_of_the_hopper_kernel_leaves_that_engine_out() -> None:
    """Triton 3.8 renamed them; the kernel takes either name, and without both is left out."""
    told = in_a_process_of_its_own("""
import torch
from triton.experimental.gluon.language.nvidia.hopper import tma
from headwise.engines.triton.engine import TRITON
from headwise.engines.triton.hopper import HOPPER
from headwise.engines.triton.host import cards
cards.CARDS[0] = cards.Card("an H100", 9, 0, 232448)
for name in ("async_store", "async_copy_shared_to_global"):
    if hasattr(tma, name):
        delattr(tma, name)
cuda = torch.device("cuda")
print(TRITON.absent(cuda), HOPPER.absent(cuda), HOPPER.absent(cuda), sep="; ")
""")
    triton, *hopper = told.stdout.strip().split("; ")
    assert triton == "None"
    assert hopper[0] == hopper[1]
    assert "it can't be loaded: AttributeError" in hopper[0]
    assert "async_copy_shared_to_global" in hopper[0]
    assert told.stderr.count("hopper engine can't be loaded on this machine") == 1
