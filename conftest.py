"""What every test and every example runs under: a safe CPU, few threads, repeatable problems."""

import functools
import gc
import importlib
import importlib.util
import os
from collections.abc import Iterator
from types import SimpleNamespace

# Some virtual machines advertise AMX and then die with an illegal instruction in a bf16 matrix
# product. oneDNN reads this when torch loads it, so it comes before the import.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# A graph that the compiler kept on disk may call an operator as an earlier version defined it.
os.environ.setdefault("TORCHINDUCTOR_FX_GRAPH_CACHE", "0")
os.environ.setdefault("TORCHINDUCTOR_AUTOGRAD_CACHE", "0")

# PyTorch's compiler imports setuptools, which fails where Python's own distutils came first.
if importlib.util.find_spec("setuptools"):
    importlib.import_module("setuptools")

import pytest
import torch
from hypothesis import HealthCheck, settings

# Without a GPU triton's kernels run on its interpreter; it reads this when it is first imported.
if importlib.util.find_spec("triton") and not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def remembering() -> None:
    """Let Triton's interpreter look up the names of the language once, not in every call."""
    from triton.runtime import interpreter
    from triton.runtime.interpreter import inspect, tl

    @functools.cache
    def names(place: object) -> list[str]:
        return [name for name, value in inspect.getmembers(place) if tl.core.is_builtin(value)]

    def builtins(place: object) -> list[tuple[str, object]]:
        return [(name, getattr(place, name)) for name in names(place)]

    interpreter.inspect = SimpleNamespace(**{**vars(inspect), "getmembers": builtins})


if "TRITON_INTERPRET" in os.environ:
    remembering()

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))

settings.register_profile(
    "quick",
    max_examples=30,
    deadline=None,  # the first call of an op is slow and says nothing about the next
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("thorough", settings.get_profile("quick"), max_examples=300)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none, and make what tests share on one worker alone."""
    for item in items:
        fixtures = getattr(item, "_fixtureinfo").name2fixturedefs  # noqa: B009 - a private name
        scopes = {found[-1].scope for found in fixtures.values() if found}
        if "browser" in fixtures:
            item.add_marker(pytest.mark.xdist_group("browser"))
        elif "module" in scopes and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def set_aside() -> None:
    """Free what is garbage, and let collections pass over what is left: it stays for long."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    """Set aside what is imported: whoever collects garbage would read all of it."""
    set_aside()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Set aside what a file of tests has left."""
    if nextitem is not None and nextitem.path != item.path:
        set_aside()


@pytest.fixture(autouse=True)
def repeatable(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test starts from the same random numbers, and from products of float32 in float32.

    The interpreter is for tests that name triton; the others choose engines as users do.
    """
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")
    if "triton" not in request.node.nodeid:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    yield
    assert torch.get_float32_matmul_precision() == "highest", "this test leaves tf32 switched on"
