"""Latent attention (MLA), absorbed or not: its heads are read, and clipped as MuonClip does."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import headwise as hw

HEADS, PLAIN, ROTARY, VALUE, RANK, WIDTH, LIMIT = 4, 6, 4, 5, 8, 32, 10.0
SIZES: dict[str, Any] = {
    "hidden_size": WIDTH, "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
    "num_hidden_layers": 2, "intermediate_size": 32, "vocab_size": 50, "kv_lora_rank": RANK,
    "qk_nope_head_dim": PLAIN, "qk_rope_head_dim": ROTARY, "v_head_dim": VALUE,
    "first_k_dense_replace": 2, "pad_token_id": 0,
}  # fmt: skip


class Latent(nn.Module):
    """MLA with q_b_proj and kv_b_proj; absorbed, queries meet the latent keys themselves."""

    def __init__(self, absorbed: bool) -> None:
        super().__init__()
        self.absorbed, self.num_heads = absorbed, HEADS
        self.qk_nope_head_dim, self.qk_rope_head_dim = PLAIN, ROTARY
        self.q_a_proj = nn.Linear(WIDTH, RANK, bias=False)
        self.q_a_layernorm = nn.RMSNorm(RANK)
        self.q_b_proj = nn.Linear(RANK, HEADS * (PLAIN + ROTARY), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(WIDTH, RANK + ROTARY, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(RANK)
        self.kv_b_proj = nn.Linear(RANK, HEADS * (PLAIN + VALUE), bias=False)

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[1])[:, None] / 10.0 ** torch.arange(ROTARY // 2)
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q, q_turned = q.unflatten(-1, (HEADS, -1)).transpose(1, 2).split([PLAIN, ROTARY], -1)
        latent, k_turned = self.kv_a_proj_with_mqa(x)[:, None].split([RANK, ROTARY], -1)
        latent, scale = self.kv_a_layernorm(latent), (PLAIN + ROTARY) ** -0.5
        q_turned, k_turned = (torch.cat((y[..., :2] * angles.cos() - y[..., 2:] * angles.sin(),
                                         y[..., :2] * angles.sin() + y[..., 2:] * angles.cos()), -1)
                              for y in (q_turned, k_turned))  # fmt: skip
        to_keys, to_values = self.kv_b_proj.weight.view(HEADS, -1, RANK).split([PLAIN, VALUE], 1)
        if self.absorbed:
            q = torch.cat((q @ to_keys, q_turned), -1)
            k = torch.cat((latent, k_turned), -1)
            out = F.scaled_dot_product_attention(
                q, k, latent, is_causal=True, scale=scale, enable_gqa=True
            )
            return out @ to_values.mT
        q = torch.cat((q, q_turned), -1)
        k = torch.cat((latent @ to_keys.mT, k_turned.expand(-1, HEADS, -1, -1)), -1)
        return F.scaled_dot_product_attention(
            q, k, latent @ to_values.mT, is_causal=True, scale=scale
        )


def test_absorbed_or_not_every_statistic_of_a_head_is_the_same() -> None:
    one, other = (Latent(absorbed).double() for absorbed in (False, True))
    other.load_state_dict(one.state_dict())
    x = torch.randn(2, 12, WIDTH, dtype=torch.float64)
    with hw.watch(one) as seen, hw.watch(other) as absorbed:
        torch.testing.assert_close(one(x), other(x))
    a, b = seen.layers[0].observation.values, absorbed.layers[0].observation.values
    assert seen.layers[0].heads == absorbed.layers[0].heads == HEADS
    for name in a.keys() - {"output_norm"}:  # absorbed, outputs are latent
        torch.testing.assert_close(a[name], b[name], rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("absorbed", [False, True])
def test_a_clip_shrinks_each_part_as_muonclip_does(absorbed: bool) -> None:
    torch.manual_seed(0)
    model = Latent(absorbed)
    with torch.no_grad():
        model.q_b_proj.weight.view(HEADS, -1, RANK)[:2] *= 60
    x = torch.randn(2, 12, WIDTH)
    before = {name: y.detach().clone() for name, y in model.named_parameters()}
    with hw.watch(model) as seen:
        model(x)
    values = torch.tensor(seen.heads()["max_logit_max"])
    assert (values > LIMIT).tolist() == [True, True, False, False]
    hw.qk_clip(model, seen, LIMIT)
    with hw.watch(model) as seen:
        model(x)
    after = torch.tensor(seen.heads()["max_logit_max"])
    torch.testing.assert_close(after, values.clamp_max(LIMIT), rtol=1e-4, atol=1e-4)
    factor = (LIMIT / values).clamp_max(1)[:, None, None].float()
    for name, now in model.named_parameters():
        was = before[name]
        if name in ("q_b_proj.weight", "kv_b_proj.weight"):
            now, was = now.view(HEADS, -1, RANK), was.view(HEADS, -1, RANK)
            torch.testing.assert_close(now[:, :PLAIN], was[:, :PLAIN] * factor.sqrt())
            rest = factor if name == "q_b_proj.weight" else torch.ones(1)
            torch.testing.assert_close(now[:, PLAIN:], was[:, PLAIN:] * rest)
            assert torch.equal(now[2:], was[2:])
        else:
            assert torch.equal(now, was)


@pytest.mark.parametrize("rank", [None, RANK])
@pytest.mark.parametrize("family", ["DeepseekV2", "DeepseekV3", "MiniCPM3"])
def test_transformers_models_are_clipped_to_the_limit(family: str, rank: int | None) -> None:
    config = getattr(transformers, f"{family}Config")(q_lora_rank=rank, **SIZES)
    model = transformers.AutoModel.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_b_proj" in name or "q_proj" in name:
                parameter.normal_(std=4)
    tokens = torch.randint(1, 50, (2, 12))
    with hw.watch(model) as seen:
        model(tokens)
    values = [row["max_logit_max"] for row in seen.heads() if row["layer"] == 0]
    limit = sorted(values)[HEADS // 2]
    clips = hw.qk_clip(model, seen, limit)
    with hw.watch(model) as seen:
        model(tokens)
    after = [row["max_logit_max"] for row in seen.heads() if row["layer"] == 0]
    assert any(clip.layer == 0 for clip in clips)
    expected = [min(value, limit) for value in values]
    torch.testing.assert_close(after, expected, rtol=1e-4, atol=1e-4)
