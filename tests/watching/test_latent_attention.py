"""Latent attention (MLA), absorbed or not: its heads are read, and clipped as MuonClip does."""

from typing import Any

import pytest
import torch
import transformers

import headwise as hw
from tests.watching.latent import HEADS, PLAIN, RANK, ROTARY, VALUE, WIDTH, Latent

LIMIT = 10.0
SIZES: dict[str, Any] = {
    "hidden_size": WIDTH, "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
    "num_hidden_layers": 2, "intermediate_size": 32, "vocab_size": 50, "kv_lora_rank": RANK,
    "qk_nope_head_dim": PLAIN, "qk_rope_head_dim": ROTARY, "v_head_dim": VALUE,
    "first_k_dense_replace": 2, "pad_token_id": 0,
}  # fmt: skip


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
