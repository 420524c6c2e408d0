"""Memory on a GPU grows with the length and not with its square: every interval mask and route."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.core.observation import STATISTICS
from headwise.core.options import Options
from headwise.core.problem import pose
from headwise.engines.plan import ENGINES
from tests.core.test_memory import LINEAR, MASKS, N

pytestmark = pytest.mark.gpu
SERVING = {engine.name: engine for engine in ENGINES}


def three(learn: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (
        torch.randn(1, 1, N, 64, device="cuda", dtype=torch.bfloat16, requires_grad=learn)
        for _ in range(3)
    )
    return q, k, v


def options(case: str) -> dict[str, object]:
    mask = MASKS[case]()
    return {} if mask is None else {"mask": mask}


def peak(call: Callable[[], object]) -> int:
    """Return the bytes that a call takes at most, after one that compiles its kernels."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def serves(engine: str, **given: object) -> None:
    """Skip the test if this machine's engine does not take such a call."""
    q, k, v = three()
    reason = SERVING[engine].absent(q.device)
    reason = reason or SERVING[engine].refuses(pose("attention", q, k, v, Options(**given)), True)
    if reason is not None:
        pytest.skip(reason)


def trained(engine: str, **given: object) -> None:
    q, k, v = three(learn=True)
    out, seen = hw.observe(q, k, v, engine=engine, **given)
    (out.float().sum() + seen.entropy.sum()).backward()


def read(**given: object) -> object:
    amap = hw.attention_map(*three(), **given)
    return amap.pool(64), amap.pool(64, "max"), amap.received(), amap.top(4), amap[0, 0, 2000:2002]


@pytest.mark.parametrize("engine", ["triton", "hopper"])
@pytest.mark.parametrize("case", MASKS)
def test_every_route_takes_linear_memory(case: str, engine: str) -> None:
    given = options(case)
    serves(engine, **given)
    q, k, v = three()
    every = {"engine": engine, "stats": STATISTICS, "sink_keys": 3, **given}
    assert peak(lambda: hw.attention(q, k, v, engine=engine, **given)) < LINEAR
    assert peak(lambda: hw.observe(q, k, v, **every)) < LINEAR
    assert peak(lambda: hw.observe(q, k, v[..., :0], **every)) < LINEAR
    assert peak(lambda: hw.observe(q, k, v, rows=64, **(every | {"engine": "auto"}))) < LINEAR
    # inputs, output and gradients are 384 KiB each; a byte for every pair would be 3 * LINEAR
    assert peak(lambda: trained(engine, **given)) < 3 * LINEAR


@pytest.mark.parametrize("case", MASKS)
def test_a_map_takes_linear_memory(case: str) -> None:
    given = options(case)
    assert peak(lambda: read(**given)) < 3 * LINEAR


@pytest.mark.parametrize("case", MASKS)
def test_the_engine_of_choice_takes_linear_memory(case: str) -> None:
    q, k, v = three()
    given = options(case)
    assert peak(lambda: hw.attention(q, k, v, **given)) < LINEAR
    assert peak(lambda: trained("auto", **given)) < 3 * LINEAR


@pytest.mark.parametrize("bias", ["alibi", "buckets", "keys"])
def test_biases_take_linear_memory(bias: str) -> None:
    made = {
        "alibi": hw.ALiBi(torch.ones(1, device="cuda")),
        "buckets": hw.RelativeBuckets(torch.zeros(8, 1, device="cuda")),
        "keys": torch.zeros(1, 1, 1, N, device="cuda"),
    }[bias]
    given = {"bias": made, "mask": hw.mask.causal(), "sinks": torch.zeros(1, device="cuda")}
    assert peak(lambda: trained("triton", **given)) < 3 * LINEAR
    assert peak(lambda: read(**given)) < 3 * LINEAR
