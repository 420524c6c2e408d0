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


EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GROUPS = EXPERTS | {"n_group": 1, "topk_group": 1}
INDEXER = {"index_head_dim": 8, "index_n_heads": 2, "index_topk": 4}
MORE: dict[str, dict[str, Any]] = {
    "DeepseekV2": {}, "DeepseekV3": {}, "MiniCPM3": {}, "Glm4MoeLite": GROUPS,
    "DeepseekV32": INDEXER, "GlmMoeDsa": GROUPS | INDEXER | {"qk_head_dim": PLAIN + ROTARY},
    "LongcatFlash": {
        "ffn_hidden_size": 32, "expert_ffn_hidden_size": 16, "n_routed_experts": 4, "moe_topk": 2,
        "zero_expert_num": 1, "num_layers": 2, "head_dim": ROTARY, "bos_token_id": 1,
        "qk_head_dim": PLAIN + ROTARY, "eos_token_id": 2,
    },
}  # fmt: skip
"""Kimi K2 is DeepseekV3 by its configuration; those with an indexer hide all but a few keys."""
FULL = ("DeepseekV2", "DeepseekV3", "MiniCPM3", "Glm4MoeLite")  # queries need no latent


@pytest.mark.parametrize(
    ("family", "rank"), [*((x, RANK) for x in MORE), *((x, None) for x in FULL)]
)
def test_transformers_models_are_read_and_clipped(family: str, rank: int | None) -> None:
    kind = getattr(transformers, f"{family}Config")
    config = kind(q_lora_rank=rank, **SIZES | MORE[family])
    config._attn_implementation = "eager"
    model = transformers.AutoModel.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ("q_b_proj" in name or "q_proj" in name) and "index" not in name:
                parameter.normal_(std=4)
    tokens = torch.randint(1, 50, (2, 12))
    with hw.watch(model, strict=True) as seen:
        weights = model(tokens, output_attentions=True).attentions
    for layer, p in zip(seen.layers, weights, strict=True):
        entropy = torch.special.entr(p).sum(-1)
        torch.testing.assert_close(layer.observation.entropy, entropy, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(layer.map().to_tensor(), p, rtol=1e-4, atol=1e-5)
    values = [row["max_logit_max"] for row in seen.heads() if row["layer"] == 0]
    limit = sorted(values)[HEADS // 2]
    clips = hw.qk_clip(model, seen, limit)
    with hw.watch(model) as seen:
        model(tokens)
    after = [row["max_logit_max"] for row in seen.heads() if row["layer"] == 0]
    assert any(clip.layer == 0 for clip in clips)
    expected = [min(value, limit) for value in values]
    torch.testing.assert_close(after, expected, rtol=1e-4, atol=1e-4)
