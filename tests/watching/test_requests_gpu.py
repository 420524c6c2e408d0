"""Continuous batching that is watched on a GPU, where CUDA graphs repeat its steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import headwise as hw

pytestmark = pytest.mark.gpu
pytest.importorskip("transformers", minversion="5.22", reason="whose paged cache is read")

from tests.watching.test_continuous_batching import (  # noqa: E402  (after what it imports)
    PROMPTS,
    built,
    check,
    quick,
    served,
)

__all__ = ["quick"]  # a fixture

OFF = 1e-3  # the kernels compute in three products of TF32
GRAPHS = {"use_cuda_graph": True, "max_batch_tokens": 16}
KINDS = ["sliding_attention", "full_attention"]


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with every graph that is replayed."""
    found: list[int] = []
    replay = torch.cuda.CUDAGraph.replay

    def counted(self: Any) -> None:
        found.append(1)
        replay(self)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted)
    return found


def on_gpu(family: str = "Llama", implementation: str = "headwise") -> Any:
    more = {"sliding_window": 6, "layer_types": KINDS} if family == "Gemma2" else {}
    model = built(family, torch.float32, **more).cuda()
    model.set_attn_implementation(implementation)
    return model


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("implementation", "family"), [("headwise", "Llama"), ("sdpa", "Llama"), ("headwise", "Gemma2")]
)
def test_cuda_graphs_stay_on(
    implementation: str, family: str, asynchronous: bool, replays: list[int]
) -> None:
    model = on_gpu(family, implementation)
    before = served(model, **GRAPHS, use_async_batching=asynchronous)
    bare, graphs = len(replays), replays.clear()
    assert graphs is None
    with hw.watch(model) as seen:
        tokens = served(model, **GRAPHS, use_async_batching=asynchronous)
    assert tokens == before
    assert len(replays) == bare > 0
    assert not seen.unread
    # The next step of an asynchronous batch is under way when a request turns out to have ended.
    check(model, seen, tokens, off=OFF, beyond=int(asynchronous))
    if not asynchronous:
        counted = int(seen.layer(0).counted()[0])
        assert counted == sum(map(len, seen.requests.values()))


def test_requests_that_share_pages_are_read() -> None:
    model, begin = on_gpu(), [7, 8, 9, 10, 11, 12, 13, 14, 15]
    prompts = [[*begin, 3], [*begin, 4, 5], [5, 5, 6], begin]
    with hw.watch(model) as seen:
        tokens = served(model, prompts, **GRAPHS, allow_block_sharing=True)
    check(model, seen, tokens, prompts, off=OFF)


@pytest.mark.filterwarnings("ignore")  # of transformers, about a manager that stays
def test_graphs_of_a_manager_that_stays_are_not_shared_between_watches(replays: list[int]) -> None:
    model = on_gpu()

    def texts() -> list[list[int]]:
        return [*served(model, keep={"persistent_manager": True}, **GRAPHS).values()]

    try:
        before = texts()
        with hw.watch(model) as seen:
            for _ in range(2):
                assert texts() == before
                seen.step()
        assert [len(entry.table) for entry in seen.series] == [8, 8]
        first, second = (entry.table["entropy_mean"] for entry in seen.series)
        assert first == pytest.approx(second, rel=1e-3)
        taken = [torch.full((1 << 20,), torch.nan, device="cuda") for _ in range(8)]
        replays.clear()
        assert texts() == before
        assert replays
        assert all(bool(x.isnan().all()) for x in taken)  # nobody wrote to what the watch had
    finally:
        model.destroy_cached_continuous_batching_manager()


def test_requests_can_be_read_while_they_run() -> None:
    model = on_gpu()
    found: list[int] = []
    with hw.watch(model) as seen:

        def look(*_: object) -> None:
            for request in seen.requests.values():
                found.append(len(request))
                sums, whole = request.received(1), request.layer(1).map().received()[0]
                torch.testing.assert_close(sums, whole, atol=OFF, rtol=OFF)

        handle = model.lm_head.register_forward_hook(look)
        served(model, PROMPTS[:1], use_cuda_graph=False)
        handle.remove()
    assert found == [5, 6, 7, 8, 9]
