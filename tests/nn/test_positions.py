"""Positions: rotary and its scalings against transformers, and what each kind promises."""

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gptj.modeling_gptj import (
    apply_rotary_pos_emb as adjacent_turn,
)
from transformers.models.gptj.modeling_gptj import create_sinusoidal_positions
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as halves_turn

import headwise as hw
from headwise.nn import (
    DynamicNTK,
    LinearScaling,
    Llama3Scaling,
    MultiHeadAttention,
    Rotary,
    YaRN,
)

D, HEADS, B, N, HEAD = 64, 4, 2, 9, 16

SCALINGS = {
    "linear": (LinearScaling(4.0), {"rope_type": "linear", "factor": 4.0}),
    "dynamic": (DynamicNTK(2.0, 64), {"rope_type": "dynamic", "factor": 2.0}),
    "yarn": (
        *(YaRN(8.0, 64),),
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
    ),
    "yarn, with everything": (
        YaRN(8.0, 64, fast=16.0, slow=2.0, attention=1.3, whole=False),
        {
            **{"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
            **{"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.3, "truncate": False},
        },
    ),
    "llama3": (
        Llama3Scaling(8.0, 64, low=1.0, high=4.0),
        {
            **{"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64},
            **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
        },
    ),
}


def config(parameters: dict[str, object]) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=512,
        num_attention_heads=4,
        max_position_embeddings=64,
        rope_parameters={"rope_theta": 10000.0, **parameters},
    )


@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_frequencies_are_those_of_transformers(name: str) -> None:
    scaling, parameters = SCALINGS[name]
    make = ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
    expected, magnitude = make(config(parameters), torch.device("cpu"))
    ours = Rotary(scaling=scaling).build(512, 4, 128)
    torch.testing.assert_close(ours.frequencies, expected, rtol=1e-6, atol=0)
    assert ours.magnitude == pytest.approx(magnitude)


@pytest.mark.parametrize("length", [1, 64, 65, 500])
def test_dynamic_frequencies_follow_the_length(length: int) -> None:
    scaling, parameters = SCALINGS["dynamic"]
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](config(parameters), "cpu", seq_len=length)
    for given in (length, torch.tensor(length)):
        made = scaling.frequencies(10000.0, 128, given)
        torch.testing.assert_close(made, expected, rtol=1e-5, atol=0)


def turned(rotary: Rotary, x: Tensor, positions: Tensor) -> Tensor:
    module = rotary.build(D, HEADS, HEAD)
    return module.rotate(x, module.waves(positions))


def test_both_layouts_turn_as_transformers_does() -> None:
    q, k = torch.randn(2, B, HEADS, N, HEAD).unbind(0)
    at = torch.arange(3, 3 + N)
    frequencies = 1 / 10000 ** (torch.arange(0, HEAD, 2) / HEAD)
    angle = (at[:, None] * frequencies).repeat(1, 2)[None]
    expected = halves_turn(q, k, angle.cos(), angle.sin())
    for x, theirs in zip((q, k), expected, strict=True):
        torch.testing.assert_close(turned(Rotary(), x, at), theirs, rtol=1e-5, atol=1e-5)
    sine, cosine = create_sinusoidal_positions(64, HEAD)[at][None].chunk(2, -1)
    theirs = adjacent_turn(q.transpose(1, 2), sine, cosine).transpose(1, 2)
    ours = turned(Rotary(layout="adjacent"), q, at)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["halves", "adjacent"])
def test_scores_depend_on_distance_alone(layout: str) -> None:
    rotary = Rotary(layout=layout)
    q, k = torch.randn(2, 1, HEADS, 1, HEAD, dtype=torch.float64).unbind(0)
    near = turned(rotary, q, torch.tensor([7])) * turned(rotary, k, torch.tensor([4]))
    far = turned(rotary, q, torch.tensor([1007])) * turned(rotary, k, torch.tensor([1004]))
    torch.testing.assert_close(near.sum(-1), far.sum(-1), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(  # and a turn keeps lengths
        turned(rotary, q, torch.tensor([7])).norm(dim=-1), q.norm(dim=-1)
    )


def test_part_of_a_head_may_turn() -> None:
    x = torch.randn(B, HEADS, N, HEAD)
    out = turned(Rotary(width=6), x, torch.arange(N))
    assert torch.equal(out[..., 6:], x[..., 6:])
    expected = Rotary().build(D, HEADS, 6)
    expected = expected.rotate(x[..., :6], expected.waves(torch.arange(N)))
    torch.testing.assert_close(out[..., :6], expected)


def test_positions_may_differ_between_batch_entries() -> None:
    attn = MultiHeadAttention(D, HEADS, position=Rotary())
    x = torch.randn(B, N, D)
    at = torch.stack((torch.arange(N), torch.arange(N) * 3))
    out = attn(x, positions=at)
    for entry in range(B):
        alone = attn(x[entry : entry + 1], positions=at[entry])
        torch.testing.assert_close(out[entry : entry + 1], alone, rtol=1e-5, atol=1e-5)


def test_a_model_in_half_precision_keeps_its_angles() -> None:
    rotary = Rotary(base=500000.0).build(D, HEADS, HEAD)
    half = copy.deepcopy(rotary).bfloat16()
    assert torch.equal(half.frequencies, rotary.frequencies)
    x = torch.zeros(1, 1, 1, HEAD, dtype=torch.bfloat16)
    assert half.rotate(x, half.waves(torch.arange(1))).dtype == torch.bfloat16


def test_alibi_and_buckets_are_those_of_the_core() -> None:
    x = torch.randn(B, N, D)
    slopes = MultiHeadAttention(D, HEADS, position=hw.nn.ALiBi())
    plain = MultiHeadAttention(D, HEADS)
    plain.load_state_dict(slopes.state_dict())
    torch.testing.assert_close(slopes(x), plain(x, bias=hw.ALiBi(HEADS)))
    buckets = MultiHeadAttention(D, HEADS, position=hw.nn.RelativeBuckets(8, 6))
    table = nn.init.normal_(buckets.position.table)
    plain.load_state_dict(buckets.state_dict(), strict=False)
    torch.testing.assert_close(buckets(x), plain(x, bias=hw.RelativeBuckets(table, max_distance=6)))


@pytest.mark.parametrize("position", [hw.nn.Learned(N), hw.nn.Sinusoidal()])
def test_input_positions_are_added_before_the_projections(position: object) -> None:
    attn, x = MultiHeadAttention(D, HEADS, position=position), torch.randn(B, N, D)
    plain = MultiHeadAttention(D, HEADS)
    plain.load_state_dict(attn.state_dict(), strict=False)
    placed = attn.position.add(x, torch.arange(N))
    assert not torch.allclose(placed, x)
    torch.testing.assert_close(attn(x), plain(placed))


def test_sinusoids_are_the_papers() -> None:
    made = hw.nn.Sinusoidal().build(8, 1, 8).add(torch.zeros(1, 50, 8), torch.arange(50))[0]
    for position in (0, 1, 49):
        for i in range(4):
            angle = torch.tensor(position / 10000 ** (2 * i / 8))
            torch.testing.assert_close(made[position, 2 * i], angle.sin(), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(made[position, 2 * i + 1], angle.cos(), rtol=1e-4, atol=1e-5)


def test_positions_beyond_those_learned_are_refused() -> None:
    attn = MultiHeadAttention(D, HEADS, position=hw.nn.Learned(N))
    with pytest.raises(ValueError, match=r"position 9 has no learned vector: Learned\(9\)"):
        attn(torch.randn(B, N + 1, D))
    with pytest.raises(ValueError, match="d_model must be even; it is 7"):
        hw.nn.Sinusoidal().build(7, 1, 7)
    with pytest.raises(ValueError, match="more than one rotating pair"):
        Rotary(width=2, scaling=DynamicNTK(2.0, 10)).build(D, HEADS, HEAD)
