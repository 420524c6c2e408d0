"""Decoding step by step equals the whole forward, with every cache, within its limits."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import headwise as hw
from headwise.core.place import Place
from headwise.nn import (
    Cache,
    FixedCache,
    GrowingCache,
    MultiHeadAttention,
    PagedCache,
    PagePool,
    SlidingCache,
)

D, HEADS, B, N, WINDOW = 32, 4, 2, 14, 5
CAUSAL, NEAR = hw.mask.causal(), hw.mask.causal() & hw.mask.window(WINDOW - 1)

CACHES = {
    "growing": (GrowingCache(), CAUSAL),
    "growing, windowed": (GrowingCache(), NEAR),
    "fixed": (FixedCache(20), CAUSAL),
    "fixed, exactly full": (FixedCache(N), CAUSAL),
    "fixed, windowed": (FixedCache(20), NEAR),
    "sliding": (SlidingCache(WINDOW), NEAR),
    "sliding, spare": (SlidingCache(WINDOW, spare=3), NEAR),
    "sliding, wider than the text": (SlidingCache(50), CAUSAL),
    "paged": (PagedCache(PagePool(64, 4)), CAUSAL),
    "paged, windowed": (PagedCache(PagePool(64, 8)), NEAR),
    "sliding, itself only": (SlidingCache(1), hw.mask.causal() & hw.mask.window(0)),
}
POSITIONS = {
    "none": None,
    "rotary": hw.nn.Rotary(),
    "alibi": hw.nn.ALiBi(),
    "buckets": hw.nn.RelativeBuckets(8, 6, bidirectional=False),
    "learned": hw.nn.Learned(N),
    "sinusoidal": hw.nn.Sinusoidal(),
}
caches = pytest.mark.parametrize("kind", CACHES)


def layer(mask: hw.mask.Mask | None, position: str = "rotary") -> MultiHeadAttention:
    attn = MultiHeadAttention(D, HEADS, kv_heads=2, mask=mask, position=POSITIONS[position])
    if isinstance(attn.position, hw.nn.positions.BucketPosition):
        torch.nn.init.normal_(attn.position.table)
    return attn.eval()


def stepped(attn: MultiHeadAttention, x: Tensor, cache: Cache, cuts: list[int]) -> Tensor:
    """The outputs of x (B, N, D), taken in pieces that end at `cuts` and at N."""
    bounds = [0, *sorted(cuts), x.shape[1]]
    parts = [
        attn(x[:, first:last], cache=cache) for first, last in pairwise(bounds) if last > first
    ]
    return torch.cat(parts, 1)


def same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-6)


@caches
@pytest.mark.parametrize("position", POSITIONS)
@torch.no_grad()
def test_token_by_token_equals_the_whole(kind: str, position: str) -> None:
    cache, mask = CACHES[kind]
    attn, x = layer(mask, position), torch.randn(B, N, D)
    cache = cache.fresh()
    same(stepped(attn, x, cache, list(range(1, N))), attn(x))
    assert int(cache.length) == N


@caches
@given(cuts=st.lists(st.integers(0, N), max_size=5), seed=st.integers(0, 99))
@torch.no_grad()
def test_pieces_of_any_size_equal_the_whole(kind: str, cuts: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    cache, mask = CACHES[kind]
    attn, x = layer(mask), torch.randn(B, N, D)
    same(stepped(attn, x, cache.fresh(), cuts), attn(x))


@caches
@given(before=st.integers(1, 8), wrong=st.integers(0, 3), seed=st.integers(0, 99))
@torch.no_grad()
def test_after_a_rollback_the_cache_is_as_before(
    kind: str, before: int, wrong: int, seed: int
) -> None:
    torch.manual_seed(seed)
    cache, mask = CACHES[kind]
    cache = (
        SlidingCache(cache.window, spare=3) if isinstance(cache, SlidingCache) else cache.fresh()
    )
    attn, x = layer(mask), torch.randn(B, N, D)
    parts = [attn(x[:, :before], cache=cache)]
    if wrong:
        attn(torch.randn(B, wrong, D), cache=cache)
    cache.rollback(wrong)
    assert int(cache.length) == before
    parts += [attn(x[:, i : i + 1], cache=cache) for i in range(before, N)]
    same(torch.cat(parts, 1), attn(x))


@caches
@torch.no_grad()
def test_reordered_entries_continue_the_chosen_ones(kind: str) -> None:
    cache, mask = CACHES[kind]
    cache = cache.fresh()
    attn, x = layer(mask), torch.randn(3, N, D)
    attn(x[:, :8], cache=cache)
    index = torch.tensor([2, 2, 0])
    cache.reorder(index)
    rest = torch.randn(3, N - 8, D)
    out = stepped(attn, rest, cache, [2, 3])
    same(out, attn(torch.cat((x[index, :8], rest), 1))[:, 8:])
    cache.reorder(torch.tensor([1]))  # and fewer of them
    assert cache.append(*(torch.zeros(1, 2, 0, D // HEADS) for _ in "kv"))[0].shape[0] == 1


@caches
@torch.no_grad()
def test_padding_masks_and_documents_hold_over_steps(kind: str) -> None:
    cache, mask = CACHES[kind]
    attn, x = layer(mask), torch.randn(B, N, D)
    start = torch.tensor([0, 3])[:, None, None]
    left = hw.mask.between(start, torch.full_like(start, 1000))
    cache = cache.fresh()
    parts = [attn(x[:, i : i + 1], cache=cache, mask=left) for i in range(N)]
    same(torch.cat(parts, 1), attn(x, mask=left))
    dense = torch.rand(B, 1, N, N) > 0.3
    cache = cache.fresh()
    parts = [
        attn(x[:, i : i + 1], cache=cache, mask=hw.mask.dense(dense[..., i : i + 1, : i + 1]))
        for i in range(N)
    ]
    same(torch.cat(parts, 1), attn(x, mask=hw.mask.dense(dense)))
    bias = torch.randn(HEADS, N, N)
    cache = cache.fresh()
    parts = [attn(x[:, i : i + 1], cache=cache, bias=bias[:, i : i + 1, : i + 1]) for i in range(N)]
    same(torch.cat(parts, 1), attn(x, bias=bias))
    ids = torch.tensor([[0] * 6 + [1] * 8])
    cache = cache.fresh()
    if isinstance(cache, FixedCache):
        with pytest.raises(ValueError, match="use a GrowingCache"):
            attn(x[:, :1], cache=cache, mask=hw.mask.documents(ids[:, :1]))
        return
    parts = [
        attn(x[:, i : i + 1], cache=cache, mask=hw.mask.documents(ids[:, : i + 1]))
        for i in range(N)
    ]
    same(torch.cat(parts, 1), attn(x, mask=hw.mask.documents(ids)))


@torch.no_grad()
def test_without_a_causal_mask_a_step_sees_every_token_so_far() -> None:
    attn, x = layer(None), torch.randn(B, N, D)
    for cache in (GrowingCache(), FixedCache(30)):
        attn(x[:, :6], cache=cache)
        same(attn(x[:, 6:], cache=cache), attn(x)[:, 6:])


@torch.no_grad()
def test_unwritten_storage_may_hold_anything() -> None:
    attn, x, cache = layer(CAUSAL), torch.randn(B, N, D), FixedCache(40)
    first = attn(x[:, :6], cache=cache)
    assert cache._keys is not None
    cache._keys[:, :, 6:], cache._values[:, :, 6:] = torch.nan, torch.nan
    rest = [attn(x[:, i : i + 1], cache=cache) for i in range(6, N)]
    same(torch.cat([first, *rest], 1), attn(x))


@torch.no_grad()
def test_observation_sees_the_same_with_a_cache() -> None:
    attn, x = layer(CAUSAL), torch.randn(B, N, D)
    whole = attn.observe(x)[1]
    for cache in (GrowingCache(), FixedCache(20)):
        seen = [attn.observe(x[:, i : i + 1], cache=cache)[1] for i in range(N)]
        for name in ("entropy", "self_mass", "previous_mass", "sink_mass", "distance"):
            parts = torch.cat([getattr(part, name) for part in seen], -1)
            torch.testing.assert_close(parts, getattr(whole, name), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_stretched_frequencies_equal_a_forward_over_the_text_so_far() -> None:
    """Dynamic scaling rotates every key again as the text grows, so a row equals its prefix's."""
    scaling = hw.nn.DynamicNTK(factor=2.0, trained_length=6)
    attn = MultiHeadAttention(D, HEADS, mask=CAUSAL, position=hw.nn.Rotary(scaling=scaling)).eval()
    x = torch.randn(B, N, D)
    for cache in (GrowingCache(), FixedCache(20), SlidingCache(N)):
        for i in range(N):
            step = attn(x[:, i : i + 1], cache=cache)
            same(step, attn(x[:, : i + 1])[:, -1:])


@torch.no_grad()
def test_a_remembered_context_equals_the_context_with_stretched_frequencies_too() -> None:
    position = hw.nn.Rotary(scaling=hw.nn.DynamicNTK(factor=2.0, trained_length=6))
    attn = MultiHeadAttention(D, HEADS, position=position).eval()
    x, context = torch.randn(B, 3, D), torch.randn(B, N, D)
    assert torch.equal(attn(x, attn.remember(context)), attn(x, context))


def test_gradients_flow_through_cached_tokens() -> None:
    attn = layer(CAUSAL)
    for cache in (GrowingCache(), FixedCache(20), SlidingCache(20)):
        x = torch.randn(B, N, D, requires_grad=True)
        (whole,) = torch.autograd.grad(attn(x).square().sum(), x)
        out = stepped(attn, x, cache, [3, 4, 9])
        (parts,) = torch.autograd.grad(out.square().sum(), x)
        torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-5)


def test_appending_moves_each_token_a_bounded_number_of_times() -> None:
    """Storage is allocated log2(n) times in n appends, and never when it slides."""
    key = torch.zeros(1, 1, 1, 4)
    cache, storages = GrowingCache(), set()
    for _ in range(1000):
        storages.add(cache.append(key, key)[0].untyped_storage().data_ptr())
    assert len(storages) <= 8  # 16, 32, ..., 1024, of which addresses may come again
    sliding, sizes = SlidingCache(100), []
    for _ in range(1000):
        sliding.append(key, key)
        sizes.append(sliding._keys.shape[2])
    assert max(sizes) <= 4 * 100


def test_a_long_prompt_does_not_stay_in_a_sliding_cache() -> None:
    cache = SlidingCache(16)
    cache.append(*torch.zeros(2, 1, 1, 5000, 4))
    for _ in range(3):
        cache.append(*torch.zeros(2, 1, 1, 1, 4))
    assert cache._keys.untyped_storage().nbytes() <= 64 * 4 * 4


@torch.no_grad()
def test_a_compiled_step_is_compiled_once_and_equals_eager() -> None:
    torch._dynamo.reset()
    attn, x, cache = layer(CAUSAL), torch.randn(B, N, D), FixedCache(20)
    cache.reserve(torch.zeros(B, 2, 0, D // HEADS), torch.zeros(B, 2, 0, D // HEADS))
    compiles = 0

    def counting(graph: torch.fx.GraphModule, _: list[Tensor]) -> object:
        nonlocal compiles
        compiles += 1
        return graph.forward

    step = torch.compile(lambda y: attn(y, cache=cache), backend=counting, fullgraph=True)
    out = torch.cat([step(x[:, i : i + 1]) for i in range(N)], 1)
    same(out, attn(x))
    assert compiles == 1


def test_a_full_cache_says_so_and_keeps_what_it_has() -> None:
    attn, x, cache = layer(CAUSAL), torch.randn(B, N, D), FixedCache(10)
    attn(x[:, :9], cache=cache)
    with pytest.raises(ValueError, match=r"length=9\) is full: 2 more tokens .* capacity of 10"):
        attn(x[:, 9:11], cache=cache)
    assert int(cache.length) == 9
    same(attn(x[:, 9:10], cache=cache), attn(x)[:, 9:10])


REFUSED: dict[str, Callable[[MultiHeadAttention, Tensor, Cache], object]] = {
    "a tensor for a mask": lambda attn, x, cache: attn(x, mask=torch.ones(1), cache=cache),
    "a mask of another length": lambda attn, x, cache: attn(
        x, mask=hw.mask.dense(torch.ones(3, 33, dtype=torch.bool)), cache=cache
    ),
    "a bias of another length": lambda attn, x, cache: attn(
        x, bias=torch.zeros(3, 33), cache=cache
    ),
    "an unknown statistic": lambda attn, x, cache: attn.observe(x, cache=cache, stats="entropi"),
}


@caches
@pytest.mark.parametrize("case", REFUSED)
@torch.no_grad()
def test_a_refused_call_leaves_the_cache_as_it_was(kind: str, case: str) -> None:
    cache, mask = CACHES[kind]
    cache, attn, x = cache.fresh(), layer(mask), torch.randn(B, N, D)
    parts = [attn(x[:, :6], cache=cache)]
    for first, last in ((6, 10), (10, N)):
        with pytest.raises(ValueError):
            REFUSED[case](attn, x[:, first:last], cache)
        assert int(cache.length) == first
        parts.append(attn(x[:, first:last], cache=cache))
    same(torch.cat(parts, 1), attn(x))


@torch.no_grad()
def test_unsupported_masks_are_refused_and_nothing_is_cached() -> None:
    attn, x, cache = layer(CAUSAL), torch.randn(B, N, D), FixedCache(20)
    with pytest.raises(ValueError, match="a FixedCache does not support"):
        attn(x, mask=hw.mask.documents(torch.zeros(1, N, dtype=torch.int64)), cache=cache)
    assert int(cache.length) == 0
    fixed, held = hw.nn.FixedAttention(D, HEADS, length=N).eval(), GrowingCache()
    with pytest.raises(ValueError, match="does not broadcast"):
        fixed(x, mask=hw.mask.dense(torch.ones(3, 3, dtype=torch.bool)), cache=held)
    assert held.length == 0


@torch.no_grad()
def test_a_later_step_does_not_change_an_earlier_mask() -> None:
    attn, x, cache = layer(None), torch.randn(B, N, D), FixedCache(20)
    call = attn.prepare(x[:, :5], cache=cache)
    attn(x[:, 5:], cache=cache)
    place = Place.of(call.q, call.k)
    assert call.mask.to_dense(place).expand(B, 1, 5, 20).sum(-1).eq(5).all()


@caches
@torch.no_grad()
def test_a_cache_of_another_shape_says_so(kind: str) -> None:
    cache = CACHES[kind][0].fresh()
    attn, x = layer(CAUSAL), torch.randn(B, N, D)
    attn(x[:, :3], cache=cache)
    with pytest.raises(ValueError, match=r"\(2, 2, 8, float32\), not \(3, 2, 8, fl"):
        attn(torch.randn(3, 1, D), cache=cache)
    with pytest.raises(ValueError, match=r"not \(2, 4, 8, float32\)"):
        MultiHeadAttention(D, HEADS).eval()(x[:, :1], cache=cache)
    with pytest.raises(ValueError, match="float64"):
        MultiHeadAttention(D, HEADS, kv_heads=2).double().eval()(x[:, :1].double(), cache=cache)
    assert int(cache.length) == 3


def test_bad_rollbacks_and_sizes_say_so() -> None:
    cache = GrowingCache()
    cache.append(*torch.zeros(2, 1, 1, 4, 8))
    with pytest.raises(ValueError, match="can't roll back 5 tokens; it has 4"):
        cache.rollback(5)
    sliding = SlidingCache(4)
    for _ in range(20):
        sliding.append(*torch.zeros(2, 1, 1, 1, 8))
    with pytest.raises(ValueError, match=r"use SlidingCache\(4, spare=9\)"):
        sliding.rollback(9)
    for make in (lambda: FixedCache(0), lambda: SlidingCache(0), lambda: SlidingCache(3, -1)):
        with pytest.raises(ValueError, match="must be"):
            make()
    with pytest.raises(ValueError, match=r"\(batch, heads, length, width\)"):
        GrowingCache().append(torch.zeros(2, 3), torch.zeros(2, 3))


@torch.no_grad()
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_full_cache_says_so_in_compiled_code(backend: str) -> None:
    torch._dynamo.reset()
    attn, x, cache = layer(CAUSAL), torch.randn(B, N, D), FixedCache(2)
    cache.reserve(torch.zeros(B, 2, 0, D // HEADS), torch.zeros(B, 2, 0, D // HEADS))
    step = torch.compile(lambda y: attn(y, cache=cache), backend=backend, fullgraph=True)
    steps = [step(x[:, i : i + 1]) for i in range(2)]
    with pytest.raises(ValueError, match=r"length=2\) is full: 1 more tokens .* capacity of 2"):
        step(x[:, 2:3])
    assert int(cache.length) == 2
    same(torch.cat(steps, 1), attn(x)[:, :2])


@caches
@torch.no_grad()
def test_masks_and_biases_for_other_numbers_of_keys_are_refused(kind: str) -> None:
    cache, mask = CACHES[kind]
    cache, attn, x = cache.fresh(), layer(mask), torch.randn(B, N, D)
    attn(x[:, :10], cache=cache)
    for keys in (2, 9, 11, 19, 33):  # there are 12
        given: list[dict[str, object]] = [
            {"bias": torch.zeros(2, keys)},
            {"mask": hw.mask.dense(torch.ones(2, keys, dtype=torch.bool))},
        ]
        if not isinstance(cache, FixedCache):
            given.append({"mask": hw.mask.documents(torch.zeros(1, keys, dtype=torch.int64))})
        for options in given:
            with pytest.raises(ValueError, match=rf"{keys}\)"):
                attn(x[:, 10:12], cache=cache, **options)
    one = torch.randn(())
    same(attn(x[:, 10:12], cache=cache, bias=one), attn(x)[:, 10:12])
