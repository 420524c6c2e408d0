"""Caches of pages and of int8: their contents, their memory, and their rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.nn import Int8Cache, MultiHeadAttention, PagedCache, PagePool

D, HEADS, B, N = 32, 4, 2, 14
CAUSAL = hw.mask.causal()


def layer() -> MultiHeadAttention:
    return MultiHeadAttention(D, HEADS, kv_heads=2, mask=CAUSAL, position=hw.nn.Rotary()).eval()


def some(tokens: int, batch: int = B) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 2, tokens, 8), torch.randn(batch, 2, tokens, 8)


@torch.no_grad()
def test_a_number_kept_in_int8_is_off_by_half_a_step_at_most() -> None:
    cache = Int8Cache()
    keys, values = some(50)
    keys[:, :, 7] = 0  # a key of zeros has no step
    held = cache.append(keys * 1e3, values * 1e-3)
    for kept, x in zip(held, (keys * 1e3, values * 1e-3), strict=True):
        step = x.abs().amax(-1, keepdim=True) / 127
        assert ((kept - x).abs() <= step * 0.5001).all()


@torch.no_grad()
def test_int8_takes_a_quarter_of_the_memory_and_a_scale_for_each_token_and_head() -> None:
    cache = Int8Cache()
    keys, values = some(64)
    cache.append(keys, values)
    held = cache.held()
    assert held.keys.nbytes * 4 == keys.nbytes
    assert held.key_scales.shape == (*keys.shape[:3], 1)


@torch.no_grad()
def test_steps_with_int8_are_close_to_the_whole_and_roll_back_exactly() -> None:
    attn, x, cache = layer(), torch.randn(B, N, D), Int8Cache()
    steps = [attn(x[:, i : i + 1], cache=cache) for i in range(N)]
    torch.testing.assert_close(torch.cat(steps, 1), attn(x), rtol=0, atol=0.02)
    attn(torch.randn(B, 3, D), cache=cache)
    cache.rollback(4)
    assert torch.equal(attn(x[:, -1:], cache=cache), steps[-1])
    cache.reorder(torch.tensor([1, 1, 0]))
    assert cache.append(*(torch.zeros(3, 2, 0, 8) for _ in "kv"))[0].shape == (3, 2, N, 8)


@torch.no_grad()
def test_pages_go_back_to_the_pool_when_a_sequence_ends() -> None:
    pool = PagePool(pages=20, page=4)
    cache, other = PagedCache(pool), PagedCache(pool)
    cache.append(*some(9))
    other.append(*some(4, batch=1))
    assert pool.free == 20 - 2 * 3 - 1
    cache.reorder(torch.tensor([1]))  # entry 0 has ended
    assert pool.free == 20 - 3 - 1
    cache.rollback(5)
    assert pool.free == 20 - 1 - 1
    other.release()
    del cache
    assert pool.free == 20


@torch.no_grad()
def test_beams_share_pages_until_one_of_them_writes() -> None:
    pool = PagePool(pages=20, page=4)
    cache = PagedCache(pool)
    keys, values = some(6, batch=1)
    cache.append(keys, values)
    cache.reorder(torch.tensor([0, 0, 0]))
    assert pool.free == 18
    more = some(1, batch=3)
    held = cache.append(*more)
    assert pool.free == 16  # two of the three wrote into copies of the half-filled page
    assert torch.equal(held[0], torch.cat((keys.expand(3, -1, -1, -1), more[0]), 2))
    assert torch.equal(held[1], torch.cat((values.expand(3, -1, -1, -1), more[1]), 2))


@torch.no_grad()
def test_an_empty_pool_says_so_and_nothing_is_lost() -> None:
    pool = PagePool(pages=4, page=4)
    cache = PagedCache(pool)
    first = cache.append(*some(8))
    with pytest.raises(
        ValueError, match=r"free=0\) does not have 2 free pages; release\(\) a cache"
    ):
        cache.append(*some(1))
    assert cache.length == 8
    assert torch.equal(cache.read()[0], first[0])


def test_bad_pools_and_gradients_are_refused_in_words() -> None:
    with pytest.raises(ValueError, match="a power of two"):
        PagePool(4, page=12)
    pool = PagePool(4)
    learned = [x.requires_grad_() for x in some(2)]
    for cache in (PagedCache(pool), Int8Cache()):
        with pytest.raises(ValueError, match="keeps no gradients"):
            cache.append(*learned)
        with pytest.raises(ValueError, match="is empty"):
            cache.read()
    PagedCache(pool).append(*some(2))
    with pytest.raises(ValueError, match="a pool each"):
        PagedCache(pool).append(*torch.zeros(2, 1, 3, 2, 8))


@torch.no_grad()
def test_options_that_no_kernel_takes_are_served_from_ordinary_tensors() -> None:
    pool = PagePool(8)
    cache, keys, q = PagedCache(pool), torch.randn(B, 2, 20, 8), torch.randn(B, 4, 3, 8)
    cache.append(keys, keys)
    options = {"mask": CAUSAL & hw.mask.window(5), "bias": hw.ALiBi(torch.rand(4)), "softcap": 3.0}
    assert torch.equal(cache.attend(q, **options), hw.attention(q, keys, keys, **options))


@torch.no_grad()
@pytest.mark.parametrize("cache", [PagedCache(PagePool(8, 64)), Int8Cache()], ids=["pages", "int8"])
def test_a_cache_keeps_no_reference_to_the_prompt(cache: hw.nn.Packed) -> None:
    cache = cache.fresh()
    k, v = torch.randn(2, 1, 2, 100, 16).unbind(0)
    cache.write(k, v)
    assert cache._keys.untyped_storage().nbytes() == 0
    assert cache._values.untyped_storage().nbytes() == 0


@torch.no_grad()
def test_a_smaller_batch_fits_after_a_larger_one_was_refused() -> None:
    cache = PagedCache(PagePool(2, 16))
    with pytest.raises(ValueError, match="pages"):
        cache.append(*torch.randn(2, 4, 2, 5, 8).unbind(0))
    keys, _ = cache.append(*torch.randn(2, 1, 2, 5, 8).unbind(0))
    assert keys.shape == (1, 2, 5, 8)
    assert cache.pool.free == 1


@torch.no_grad()
@pytest.mark.parametrize("cache", [PagedCache(PagePool(8, 64)), Int8Cache()], ids=["pages", "int8"])
def test_queries_of_another_dtype_are_refused(cache: hw.nn.Packed) -> None:
    cache = cache.fresh()
    cache.append(*torch.randn(2, 1, 2, 100, 64).unbind(0))
    with pytest.raises(ValueError, match="different dtypes"):
        cache.attend(torch.randn(1, 2, 1, 64).half())
