"""FLOPs are those of FlopCounterMode, by the convention that each test names."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import headwise as hw
from tests.costs.modules import BOTH, CASES, PLAIN, A, B, C, H, S, numbers
from tests.costs.test_params import built
from tests.thinned import thinned

DENSE = ("attention: window", "GPT, window", "attention: lengths")
"""Served by PyTorch's kernel with a mask tensor, of which its counter counts every pair."""


def counted(call: Any) -> tuple[int, int]:
    """FLOPs of a forward and of its backward."""
    with FlopCounterMode(display=False) as forward:
        out = call()
    out = out[0] if isinstance(out, tuple) else out
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


def five_products(cost: hw.Cost, name: str = "flops") -> int:
    """The backward with five products for fused attention, which FlopCounterMode counts."""
    again = (k for k in cost.backward if k.kind == "attention")
    more = sum(getattr(kernel, name) * kernel.count for kernel in again)
    return sum(getattr(k, name) * k.count for k in cost.backward) + more // 4


@pytest.mark.parametrize("name", [name for name in CASES if name not in DENSE])
def test_visible_flops_of_a_call_on_a_cpu(name: str) -> None:
    """headwise's operators count visible pairs; the backward of fused attention has five products.

    FlopCounterMode and fused kernels: 5/2 of the forward; model FLOPs: twice.
    """
    case = CASES[name]
    module, inputs = case.build().train(), case.inputs(torch.float32)
    cost = hw.cost(module, batch=B, dtype="fp32", **case.sizes)
    forward, backward = counted(lambda: module(*inputs))
    assert cost.flops == forward
    assert five_products(cost) == backward


@pytest.mark.parametrize("name", CASES)
def test_dense_flops_on_the_meta_device(name: str) -> None:
    """Without data every pair counts, in headwise's operators and in PyTorch's."""
    case = CASES[name]
    module = case.build().to("meta").train()
    inputs = [x.detach().to("meta").requires_grad_(x.is_floating_point()) for x in case.inputs(
        torch.float32)]  # fmt: skip
    if "ViT" in name:
        inputs = [x.requires_grad_(False) for x in inputs]
    cost = hw.cost(module, batch=B, dtype="fp32", **case.sizes)
    forward, backward = counted(lambda: module(*inputs))
    assert cost.flops_dense == forward
    assert five_products(cost, "flops_dense") == backward


TORCH: dict[str, tuple[Any, tuple[int, ...], dict[str, int]]] = {
    "MultiheadAttention": (lambda: nn.MultiheadAttention(H, A, batch_first=True), (S, S, S), PLAIN),
    "added keys": (
        lambda: nn.MultiheadAttention(H, A, batch_first=True, add_bias_kv=True), (S, S, S), PLAIN,
    ),
    "EncoderLayer": (lambda: nn.TransformerEncoderLayer(H, A, 64, batch_first=True), (S,), PLAIN),
    "DecoderLayer": (
        lambda: nn.TransformerDecoderLayer(H, A, 64, batch_first=True), (S, C), BOTH,
    ),
    "Transformer": (lambda: nn.Transformer(H, A, 2, 2, 64, batch_first=True), (C, S), BOTH),
}  # fmt: skip


@pytest.mark.parametrize("name", TORCH)
def test_flops_of_torch_modules(name: str) -> None:
    """With dropout on a CPU they run step by step: four products in the backward."""
    build, lengths, sizes = TORCH[name]
    module = build().train()
    inputs = numbers(*lengths)(torch.float32)
    cost = hw.cost(module, batch=B, **sizes, fused=False)
    forward, backward = counted(lambda: module(*inputs))
    assert (cost.flops, cost.backward_flops) == (forward, backward)


PLAIN_MODELS = (
    "BERT", "DistilBERT", "GPT-2", "OPT", "Llama", "Llama 3", "Qwen3", "Mistral", "Gemma 2",
    "Gemma 3", "Gemma 3n", "Phi", "Cohere", "OLMo 2", "GPT-NeoX", "StarCoder2",
)  # fmt: skip
MIXTURES = ("Mixtral", "Qwen2 MoE", "Qwen3 MoE", "gpt-oss", "DeepSeek-V2", "DeepSeek-V3", "OLMoE")


@pytest.mark.parametrize("name", thinned([*PLAIN_MODELS, *MIXTURES]))
def test_dense_flops_of_transformers_models_on_the_meta_device(name: str) -> None:
    """Step by step on the meta device: every pair counts, four products in the backward."""
    model = built(name)
    model.set_attn_implementation("eager")
    if name in MIXTURES:
        model.set_experts_implementation("batched_mm")  # the others sort tokens, by their numbers
    ids = torch.zeros(2, 48, dtype=torch.int64, device="meta")
    # A decoder without a mask, and an encoder with one, would read numbers that are not there.
    given = {} if "BERT" in name else {"attention_mask": torch.ones_like(ids), "use_cache": False}
    cost = hw.cost(model, batch=2, queries=48, fused=False)
    forward, backward = counted(lambda: model(input_ids=ids, **given)[0])
    assert cost.flops_dense == forward
    pooler = cost.parts.get("pooler")  # its output is not the one whose gradient is taken
    unused = 0 if pooler is None else pooler.backward_flops
    assert cost.backward_flops_dense - unused == backward


def test_dense_flops_of_images_and_sound() -> None:
    model = built("ViT")
    images = torch.zeros(2, 3, 224, 224, device="meta")
    with FlopCounterMode(display=False) as forward:
        model(pixel_values=images)
    assert hw.cost(model, batch=2).flops_dense == forward.get_total_flops()
    model = built("Whisper")
    model.set_attn_implementation("eager")
    sound = torch.zeros(2, 80, 3000, device="meta")
    ids = torch.zeros(2, 20, dtype=torch.int64, device="meta")
    with FlopCounterMode(display=False) as forward:
        model(
            input_features=sound,
            decoder_input_ids=ids,
            decoder_attention_mask=torch.ones_like(ids),
            use_cache=False,
        )
    assert hw.cost(model, batch=2, queries=20).flops_dense == forward.get_total_flops()


def test_dense_flops_of_t5() -> None:
    model = built("T5")
    source = torch.zeros(2, 30, dtype=torch.int64, device="meta")
    target = torch.zeros(2, 20, dtype=torch.int64, device="meta")
    with FlopCounterMode(display=False) as forward:
        model(input_ids=source, decoder_input_ids=target, use_cache=False)
    cost = hw.cost(model, batch=2, queries=20, context=30)
    assert cost.flops_dense == forward.get_total_flops()


def test_flops_of_an_lstm_are_those_of_its_matrices() -> None:
    config = hw.models.LSTMConfig(50, d_model=H, attention=hw.nn.Bahdanau(24))
    b, t, s = 2, 5, 7
    half, read, written = H // 2, b * s, b * t
    matrices = 2 * 2 * read * 4 * half * (H + half)  # two directions of the reader
    matrices += 2 * 2 * b * H * H  # its first states
    matrices += 2 * written * 4 * H * (2 * H + H)  # the writer's cell
    matrices += 2 * written * (3 * H * H + H * 50)  # readout and head
    matrices += 2 * (written + read) * H * 24  # the projections of its attention
    matrices += b * t * s * (4 * 24 + 2 * H)
    assert hw.cost(config, batch=b, queries=t, context=s).flops == matrices


def test_decoding_is_one_row_of_every_layer() -> None:
    fields = {"model_type": "llama", "num_hidden_layers": 2, "num_key_value_heads": 8}
    one = hw.cost(fields, queries=1, keys=1000)
    h, kv, f, v = 4096, 1024, 11008, 32000
    layer = 2 * (2 * h * h + 2 * h * kv) + 6 * h * f + 4 * h * 1000
    assert one.flops == 2 * layer + 2 * h * v
    attention = next(kernel for kernel in one.forward if kernel.kind == "attention")
    read = 2 * 1000 * kv * 2
    assert attention.bytes_read == read + 2 * h
    assert attention.flops / read == 32 / 8, "a / g FLOPs per byte of the cache"


def test_decoding_after_an_encoder_does_not_run_it_again() -> None:
    config = hw.models.TransformerConfig(50, d_model=H, heads=A)
    step = hw.cost(config, queries=1, keys=9, context=C)
    encoder = [part for name, part in step.parts.items() if name.startswith("encoder")]
    assert sum(part.flops for part in encoder) == 0
    whole = hw.cost(config, queries=9).parts["encoder"].params
    assert sum(part.params for part in encoder) == whole
    cross = step.parts["decoder"].parts["cross_attention"]
    assert cross.flops == 6 * (2 * 2 * H * H + 4 * C * H), "query and out only, and the pairs"


def test_latents_are_expanded_in_decoding_as_transformers_does() -> None:
    """Its DeepSeek keeps latents in the cache, and makes keys and values of all of them."""
    fields = {"model_type": "deepseek_v3", "num_hidden_layers": 1, "first_k_dense_replace": 1}
    step = hw.cost(fields, queries=1, keys=1000)
    a, r, rope, nope, v = 128, 512, 64, 128, 128
    (attention,) = (kernel for kernel in step.forward if kernel.kind == "attention")
    assert attention.flops == 2 * a * 1000 * (nope + rope + v)
    (up,) = (kernel for kernel in step.forward if "kv_b_proj" in kernel.name and kernel.flops)
    assert up.flops == 2 * 1000 * r * a * (nope + v)


def test_training_is_three_forwards_and_four_with_recomputation() -> None:
    config = hw.models.GPTConfig(50, d_model=H, layers=3, heads=A)
    cost = hw.cost(config, **PLAIN, fused=False, tile=(1, 1))
    assert cost.training_flops == 3 * cost.flops
    again = hw.cost(config, **PLAIN, fused=False, tile=(1, 1), recompute="layers")
    assert again.training_flops == cost.training_flops, "model FLOPs do not count it"
    layers = again.parts["blocks"].flops_executed
    assert again.backward_flops_executed == 2 * cost.flops_executed + layers


def test_a_projection_as_wide_as_the_sequence_is_no_product_of_pairs() -> None:
    """Llama is 4096 wide and asked about 4096 tokens: no projection is causal for that."""
    fields = {"model_type": "llama", "num_hidden_layers": 1, "vocab_size": 10}
    small = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
    cost = hw.cost({**fields, **small, "num_key_value_heads": 2}, queries=64)
    products = 2 * 64 * (7 * 64 * 64 + 64 * 10)
    assert cost.flops == products + 4 * 64 * (64 * 65 // 2)


def test_special_functions_are_counted_apart() -> None:
    attn = hw.nn.MultiHeadAttention(H, A, mask=hw.mask.causal(), softcap=5.0)
    pairs = B * A * S * (S + 1) // 2
    assert hw.cost(attn, batch=B, **PLAIN).special == 2 * pairs, "an exponential and a tanh"
    additive = hw.nn.MultiHeadAttention(H, A, score=hw.nn.Additive())
    assert hw.cost(additive, batch=B, **PLAIN).special == B * A * S * S * (1 + H // A)
