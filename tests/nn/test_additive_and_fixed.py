"""Additive attention as Bahdanau wrote it, and attention that never looks at its input."""

import pytest
import torch

import headwise as hw

B, N, M = 2, 5, 7


def test_additive_attention_is_bahdanaus_formula() -> None:
    attn = hw.nn.AdditiveAttention(12, 20, 16).double()
    queries, keys = torch.randn(B, N, 12).double(), torch.randn(B, M, 20).double()
    lengths = torch.tensor([7, 3])
    both = attn.query(queries)[:, :, None] + attn.key(keys)[:, None]  # (B, N, M, 16)
    s = torch.tanh(both) @ attn.weight
    s = s.masked_fill(torch.arange(M) >= lengths[:, None, None], -torch.inf)
    expected = s.softmax(-1) @ keys
    mask = hw.mask.lengths(lengths)
    torch.testing.assert_close(attn(queries, keys, mask=mask), expected)
    torch.testing.assert_close(attn(queries, attn.remember(keys), mask=mask), expected)
    values = torch.randn(B, M, 3).double()
    torch.testing.assert_close(attn(queries, keys, values, mask=mask), s.softmax(-1) @ values)
    out, seen = attn.observe(queries, keys, mask=mask)
    torch.testing.assert_close(out, expected)
    assert seen.entropy.shape == (B, 1, N)


@pytest.mark.parametrize(("query", "key", "width"), [(12, 20, 16), (8, 8, 8), (512, 512, 256)])
def test_additive_parameters(query: int, key: int, width: int) -> None:
    attn = hw.nn.AdditiveAttention(query, key, width)
    assert sum(p.numel() for p in attn.parameters()) == query * width + key * width + width


def test_additive_gradients_reach_every_parameter() -> None:
    attn = hw.nn.AdditiveAttention(12, 20, 16)
    attn(torch.randn(B, N, 12), torch.randn(B, M, 20)).square().sum().backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in attn.parameters())


@pytest.mark.parametrize("bias", [True, False])
def test_fixed_parameters(bias: bool) -> None:
    attn = hw.nn.FixedAttention(32, 4, 16, bias=bias)
    expected = 2 * 32**2 + 4 * 16**2 + (2 * 32 if bias else 0)
    assert sum(p.numel() for p in attn.parameters()) == expected


def fixed(**options: object) -> hw.nn.FixedAttention:
    attn = hw.nn.FixedAttention(32, 4, 16, **options)
    torch.nn.init.normal_(attn.logits)
    return attn


def test_fixed_weights_are_the_same_for_every_input() -> None:
    attn = fixed(mask=hw.mask.causal())
    logits = attn.logits[:, :N, :N].masked_fill(~torch.ones(N, N).bool().tril(), -torch.inf)
    x = torch.randn(B, N, 32)
    heads = attn.value(x).unflatten(-1, (4, 8)).transpose(1, 2)
    expected = attn.out((logits.softmax(-1) @ heads).transpose(1, 2).flatten(2))
    torch.testing.assert_close(attn(x), expected, rtol=1e-5, atol=1e-5)
    one, other = (attn.observe(torch.randn(B, N, 32))[1].entropy for _ in range(2))
    torch.testing.assert_close(one, other)


def test_fixed_weights_learn() -> None:
    attn = fixed()
    attn(torch.randn(B, N, 32)).square().sum().backward()
    grad = attn.logits.grad
    assert grad[:, :N, :N].abs().max() > 0
    assert grad[:, N:].abs().max() == 0


CACHES = [hw.nn.GrowingCache(), hw.nn.FixedCache(12), hw.nn.FixedCache(20), hw.nn.SlidingCache(16)]


@pytest.mark.parametrize("cache", CACHES, ids=str)
@torch.no_grad()
def test_fixed_weights_decode_step_by_step(cache: hw.nn.Cache) -> None:
    attn, x, cache = fixed(mask=hw.mask.causal()), torch.randn(B, 10, 32), cache.fresh()
    parts = [attn(x[:, :4], cache=cache)]
    parts += [attn(x[:, i : i + 1], cache=cache) for i in range(4, 10)]
    torch.testing.assert_close(torch.cat(parts, 1), attn(x), rtol=1e-5, atol=1e-5)


def test_positions_without_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="17 positions are more than the 16 that have"):
        fixed()(torch.randn(B, 17, 32))
    with pytest.raises(ValueError, match="does not divide into 5 heads"):
        hw.nn.FixedAttention(32, 5, 16)
