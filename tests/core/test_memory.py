"""Memory grows with the length and not with its square: every interval mask on every route."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.core.observation import STATISTICS
from tests.memory import peak_bytes
from tests.problems import small_blocks

N = 3072
LINEAR = 3 << 20  # a boolean for every pair would take 9 MiB

IDS = (torch.arange(N) // 1000)[None]
HALF = torch.tensor([N // 2])
MASKS: dict[str, Callable[[], hw.mask.Mask | None]] = {
    "none": lambda: None,
    "causal": hw.mask.causal,
    "offset": lambda: hw.mask.causal(-5),
    "offsets": lambda: hw.mask.causal(torch.tensor([-5])),
    "window": lambda: hw.mask.causal() & hw.mask.window(500),
    "two-sided window": lambda: hw.mask.window(1500, 1500),
    "lengths": lambda: hw.mask.lengths(torch.tensor([N - 5])),
    "half": lambda: hw.mask.lengths(HALF),
    "prefix": lambda: hw.mask.prefix(N - 5),
    "prefix-lm": lambda: hw.mask.causal() | hw.mask.prefix(1000),
    "documents": lambda: hw.mask.documents(IDS),
    "causal documents": lambda: hw.mask.causal() & hw.mask.documents(IDS),
    "bounds": lambda: hw.mask.between(torch.arange(N) // 2, torch.arange(N) + 1),
    "left padding": lambda: hw.mask.between(torch.tensor([[[7]]]), torch.tensor(N)),
    "sinks and window": lambda: hw.mask.causal() & (hw.mask.window(500) | hw.mask.prefix(4)),
    "causal padding": lambda: hw.mask.causal() & hw.mask.lengths(HALF),
    "a row of booleans": lambda: hw.mask.dense(torch.arange(N)[None, None, None] < N - 5),
}


@pytest.fixture(autouse=True)
def _small_buffers() -> Iterator[None]:
    """Buffers of a block that take 256 KiB and not 2 MiB, so that N may be small."""
    with small_blocks(rows=128, keys=512, block=1 << 16):
        yield


def three(learn: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(1, 1, N, 8).requires_grad_(learn) for _ in range(3))
    return q, k, v


def options(case: str) -> dict[str, object]:
    mask = MASKS[case]()
    return {} if mask is None else {"mask": mask}


def trained(engine: str, **given: object) -> None:
    q, k, v = three(learn=True)
    hw.attention(q, k, v, engine=engine, **given).sum().backward()


def observed(engine: str, **given: object) -> object:
    return hw.observe(*three(), engine=engine, stats=STATISTICS, sink_keys=3, **given)


def read(**given: object) -> object:
    amap = hw.attention_map(*three(), **given)
    return amap.pool(64), amap.pool(64, "max"), amap.received(), amap.top(4), amap[0, 0, 2000:2002]


def merged(**given: object) -> Tensor:
    q, k, v = three()
    parts = [
        hw.partial(q, k[:, :, a : a + N // 2], v[:, :, a : a + N // 2], first_key=a, **given)
        for a in (0, N // 2)
    ]
    return hw.merge(*parts).finish()


@pytest.mark.parametrize("case", MASKS)
def test_attention_takes_linear_memory(case: str) -> None:
    q, k, v = three()
    assert peak_bytes(lambda: hw.attention(q, k, v, **options(case))) < LINEAR
    assert peak_bytes(lambda: trained("auto", **options(case))) < LINEAR


@pytest.mark.parametrize("case", MASKS)
def test_the_streaming_engine_takes_linear_memory(case: str) -> None:
    assert peak_bytes(lambda: trained("streaming", **options(case))) < LINEAR


@pytest.mark.parametrize("case", MASKS)
def test_observing_takes_linear_memory(case: str) -> None:
    assert peak_bytes(lambda: observed("auto", **options(case))) < LINEAR


@pytest.mark.parametrize("case", MASKS)
def test_reading_a_map_takes_linear_memory(case: str) -> None:
    assert peak_bytes(lambda: read(**options(case))) < LINEAR


@pytest.mark.parametrize("case", MASKS)
def test_parts_take_linear_memory(case: str) -> None:
    assert peak_bytes(lambda: merged(**options(case))) < LINEAR


@pytest.mark.parametrize("bias", ["alibi", "buckets", "keys"])
def test_biases_take_linear_memory(bias: str) -> None:
    made = {
        "alibi": hw.ALiBi(torch.ones(1)),
        "buckets": hw.RelativeBuckets(torch.zeros(8, 1)),
        "keys": torch.zeros(1, 1, 1, N),
    }[bias]
    given = {"bias": made, "mask": hw.mask.causal(), "sinks": torch.zeros(1)}
    assert peak_bytes(lambda: trained("auto", **given)) < LINEAR
    assert peak_bytes(lambda: observed("auto", **given)) < LINEAR
    assert peak_bytes(lambda: read(**given)) < LINEAR


def test_the_reference_takes_memory_for_every_pair() -> None:
    q, k, v = (x[:, :, :1024] for x in three())
    assert peak_bytes(lambda: hw.attention(q, k, v, engine="reference")) > 1024 * 1024 * 4


def test_the_bytes_are_those_of_the_tensors() -> None:
    def call() -> Tensor:
        x = torch.zeros(1000, 1000) + 1  # 4 MB, and for a moment 8
        return x[:10].clone()

    assert 8_000_000 <= peak_bytes(call) < 8_200_000
