"""On a GPU the layers and models give what they give on a CPU."""

import copy

import pytest
import torch
from torch import nn

import headwise as hw
from headwise.models import GPT, Beam, GPTConfig, Greedy, Transformer, TransformerConfig

pytestmark = pytest.mark.gpu
D, HEADS, B, N, V = 64, 4, 2, 12, 40
LENGTHS = torch.tensor([12, 5])

VARIANTS = {
    "plain": {},
    "rotary, grouped": {"position": hw.nn.Rotary(), "kv_heads": 2, "qk_norm": hw.nn.RMSNorm()},
    "stretched": {"position": hw.nn.Rotary(scaling=hw.nn.DynamicNTK(2.0, 8))},
    "alibi": {"position": hw.nn.ALiBi(), "softcap": 5.0, "sinks": True},
    "buckets": {"position": hw.nn.RelativeBuckets(8, 16)},
    "learned": {"position": hw.nn.Learned(N)},
    "additive": {"score": hw.nn.Additive()},
}


def randomised(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model.eval()


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_and_its_gradients(variant: str) -> None:
    here = randomised(
        hw.nn.MultiHeadAttention(D, HEADS, mask=hw.mask.causal(), **VARIANTS[variant])
    )
    there, x = copy.deepcopy(here).cuda(), torch.randn(B, N, D)
    expected, made = here(x), there(x.cuda())
    torch.testing.assert_close(made.cpu(), expected, rtol=1e-3, atol=1e-3)
    expected.square().sum().backward()
    made.square().sum().backward()
    for (name, one), other in zip(here.named_parameters(), there.parameters(), strict=True):
        assert torch.allclose(other.grad.cpu(), one.grad, rtol=1e-2, atol=1e-2), name


@pytest.mark.parametrize(
    "cache", [hw.nn.GrowingCache(), hw.nn.FixedCache(N), hw.nn.SlidingCache(N)], ids=str
)
@torch.no_grad()
def test_every_cache(cache: hw.nn.Cache) -> None:
    attn = hw.nn.MultiHeadAttention(D, HEADS, mask=hw.mask.causal(), position=hw.nn.Rotary())
    attn, x, cache = attn.cuda().eval(), torch.randn(B, N, D, device="cuda"), cache.fresh()
    steps = [attn(x[:, i : i + 1], cache=cache) for i in range(N)]
    torch.testing.assert_close(torch.cat(steps, 1), attn(x), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("strategy", [Greedy(), Beam(3)], ids=str)
def test_generation(strategy: Greedy | Beam) -> None:
    gpt = randomised(GPT(GPTConfig(V, d_model=D, layers=2, heads=HEADS))).double()
    tokens = torch.randint(V, (B, N))
    expected = gpt.generate(tokens, 8, lengths=LENGTHS, strategy=strategy)
    made = gpt.cuda().generate(tokens.cuda(), 8, lengths=LENGTHS.cuda(), strategy=strategy)
    assert torch.equal(made.cpu(), expected)
    small = {"encoder_layers": 1, "decoder_layers": 1}
    model = randomised(Transformer(TransformerConfig(V, d_model=D, heads=HEADS, **small))).double()
    expected = model.generate(tokens, 8, source_lengths=LENGTHS, strategy=strategy)
    there = model.cuda()
    made = there.generate(tokens.cuda(), 8, source_lengths=LENGTHS.cuda(), strategy=strategy)
    assert torch.equal(made.cpu(), expected)
