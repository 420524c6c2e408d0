"""Layers whose linear layers somebody replaced are read; qk_clip says why it can't scale them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import headwise as hw

pytest.importorskip("headwise.transformers")  # registers the implementation


class Int8(nn.Module):
    """A linear layer of whole numbers, one scale per output, as weight-only quantisation makes."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.scale = layer.weight.detach().abs().amax(1) / 127
        self.register_buffer("weight", (layer.weight.detach() / self.scale[:, None]).round().char())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.float()) * self.scale


def with_whole_numbers(model: Any) -> Any:
    for layer in model.model.layers:
        layer.self_attn.q_proj = Int8(layer.self_attn.q_proj)
        layer.self_attn.k_proj = Int8(layer.self_attn.k_proj)
    return model


def by_torchao(model: Any) -> Any:
    quantization = pytest.importorskip("torchao.quantization", reason="it prints when imported")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return model


def adapted(model: Any, dora: bool) -> Any:
    peft = pytest.importorskip("peft")
    changed = {"target_modules": ["q_proj", "k_proj"], "r": 3, "init_lora_weights": False}
    return peft.get_peft_model(model, peft.LoraConfig(**changed, use_dora=dora)).eval()


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "LoRA": (lambda model: adapted(model, False), r"peft\..*Linear is not a plain linear layer"),
    "DoRA": (lambda model: adapted(model, True), r"peft\..*Linear is not a plain linear layer"),
    "int8": (with_whole_numbers, "Int8 is not a plain linear layer"),
    "torchao": (by_torchao, "its weights are quantised"),
}


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "headwise"])
@pytest.mark.parametrize("change", CHANGES)
def test_heads_with_replaced_linear_layers_are_read(change: str, implementation: str) -> None:
    make, refusal = CHANGES[change]
    config = transformers.LlamaConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2,
        intermediate_size=32, vocab_size=50,
    )  # fmt: skip
    llama = transformers.LlamaForCausalLM(config).eval()
    model = make(llama)
    llama.set_attn_implementation(implementation)
    tokens = torch.randint(1, 50, (2, 9))
    with torch.no_grad(), hw.watch(model, strict=True) as seen:
        model(tokens)
    llama.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(tokens, output_attentions=True).attentions
    for layer, p in zip(seen.layers, weights, strict=True):
        entropy = torch.special.entr(p).sum(-1)
        torch.testing.assert_close(layer.observation.entropy, entropy, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=refusal):
        hw.qk_clip(model, seen, limit=1e-3)


class Tuned(nn.Module):
    """Attention as torchtune writes it: projections by name, rotary elsewhere, PyTorch's kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim, self.is_causal = 4, 2, 8, True
        self.q_proj, self.output_proj = (nn.Linear(32, 32, bias=False) for _ in range(2))
        self.k_proj, self.v_proj = (nn.Linear(32, 16, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = (
            layer(x).view(b, n, -1, self.head_dim).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        k, v = (
            y[:, :, None].expand(b, 2, 2, n, 8).flatten(1, 2) for y in (k, v)
        )  # every query head has keys of its own
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output_proj(out.transpose(1, 2).reshape(b, n, -1))


def test_attention_as_torchtune_writes_it_is_read_and_clipped() -> None:
    torch.manual_seed(0)
    model, x = Tuned(), torch.randn(2, 9, 32)
    nn.init.normal_(model.q_proj.weight, std=2.0)
    with hw.watch(model) as seen:
        model(x)
    q, k = (layer(x).view(2, 9, -1, 8).transpose(1, 2) for layer in (model.q_proj, model.k_proj))
    _, expected = hw.observe(q, k, k, mask=hw.mask.causal())
    torch.testing.assert_close(seen.layers[0].observation.entropy, expected.entropy)
    hw.qk_clip(model, seen, limit=2.0)
    with hw.watch(model) as after:
        model(x)
    assert max(seen.heads()["max_logit_max"]) > 4
    assert max(after.heads()["max_logit_max"]) == pytest.approx(2.0, rel=1e-4)
