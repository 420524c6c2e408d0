"""Layers without a softmax: listed by what they are, their states in figures, their maps exact."""

import functools
import inspect
from importlib import import_module
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import headwise as hw
from headwise.watching.recorder.other_layers import Recurrence
from tests.watching import tiny_models

GENERAL: dict[str, Any] = {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50,
    "intermediate_size": 32, "pad_token_id": 0, "num_hidden_layers": 2,
}  # fmt: skip
HYBRID = GENERAL | {"layer_types": ["linear_attention", "full_attention"]}


def model_of(family: str) -> nn.Module:
    """A small model whose first layer has no softmax."""
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    linear = {f"linear_{x}": 4 for x in ("num_key_heads", "key_head_dim", "value_head_dim")}
    configs: dict[str, Any] = {
        "qwen3_next": lambda: transformers.Qwen3NextConfig(
            **HYBRID, **experts, **linear, linear_num_value_heads=8, head_dim=8,
            shared_expert_intermediate_size=16,
        ),
        "kimi_linear": lambda: transformers.KimiLinearConfig(
            **HYBRID | {"num_key_value_heads": 4}, **experts, mlp_layer_types=["dense", "dense"],
            kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8,
            linear_num_attention_heads=4, linear_head_dim=8,
        ),
        "mamba2": lambda: transformers.Mamba2Config(
            hidden_size=32, num_heads=8, head_dim=8, state_size=8, n_groups=2, vocab_size=50,
            num_hidden_layers=1, chunk_size=8,
        ),
    }  # fmt: skip
    torch.manual_seed(0)
    return transformers.AutoModel.from_config(configs[family]()).eval()


def looped(call: Recurrence, v: Tensor) -> Tensor:
    """The outputs (N, V) of the recurrence, token by token."""
    q, k, g = (x[0, :, 0] for x in (call.queries, call.keys, call.decay))
    state, out = torch.zeros(q.shape[1], v.shape[1], dtype=v.dtype), []
    for i in range(len(q)):
        state = state * g[i].exp()[:, None]
        held = k[i] @ state if call.delta else 0
        state = state + k[i][:, None] * call.write[0, i, 0] * (v[i] - held)
        out.append(q[i] @ state)
    return torch.stack(out)


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("channels", [1, 6])
def test_the_implied_map_is_the_recurrence(delta: bool, channels: int) -> None:
    q, k = (torch.randn(1, 40, 1, 6, dtype=torch.float64) * 0.4 for _ in range(2))
    decay = -torch.rand(1, 40, 1, channels, dtype=torch.float64)
    write = torch.rand(1, 40, 1, dtype=torch.float64)
    call = Recurrence(q, k, decay, write, delta, None, False)
    v = torch.randn(40, 3, dtype=torch.float64)
    torch.testing.assert_close(call.implied_map(0, 0) @ v, looped(call, v), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("family", "function", "values", "name", "kind"),
    [
        ("qwen3_next", "torch_chunk_gated_delta_rule", 2, "linear_attn", "gated delta rule"),
        ("kimi_linear", "chunk_kimi_delta_attention", 2, "self_attn", "Kimi delta attention"),
        ("mamba2", "mamba2_chunk_scan", 0, "mixer", "Mamba-2"),
    ],
)  # fmt: skip
def test_a_model_s_recurrence_is_its_implied_map(
    family: str, function: str, values: int, name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, kept = model_of(family), []
    file = import_module(f"transformers.models.{family}.modeling_{family}")
    original = getattr(file, function)

    @functools.wraps(original)
    def keeping(*given: Any, **options: Any) -> Any:
        out = original(*given, **options)
        kept.append((given[values], out[0] if isinstance(out, tuple) else out, options.get("D")))
        return out

    monkeypatch.setattr(file, function, keeping)
    tokens = torch.randint(1, 50, (2, 20))
    before = model(tokens).last_hidden_state
    with hw.watch(model) as seen:
        assert torch.equal(model(tokens).last_hidden_state, before)
    assert getattr(file, function) is keeping
    assert not seen.unread
    assert {(row["name"], row["kind"]) for row in seen.others} == {(f"layers.0.{name}", kind)}
    v, out, skip = kept[-1]
    heads = len(seen.others)
    for head in range(heads):
        found = seen.implied_map(f"layers.0.{name}", head, batch=1)
        mine = v[1, :, head]
        expected = out[1, :, head] - (0 if skip is None else skip[head] * mine)
        torch.testing.assert_close(found @ mine.double(), expected.double(), rtol=1e-4, atol=1e-5)
    alone = []
    for text in tokens:
        with hw.watch(model) as one:
            model(text[None])
        alone.append(torch.tensor(one.others["state_norm"]))
    mean = torch.stack(alone).mean(0).tolist()
    assert seen.others["state_norm"] == pytest.approx(mean, rel=1e-4)
    for row in seen.others:
        assert 0 < row["decay_mean"] < 1
        assert row["memory"] > 0
        assert row["state_norm"] > 0


def test_heads_are_those_with_a_softmax_and_generation_has_no_implied_map() -> None:
    config = transformers.Qwen3NextConfig(
        **HYBRID, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16, head_dim=8,
        shared_expert_intermediate_size=16, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=4, linear_value_head_dim=4,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    tokens = torch.randint(1, 50, (1, 6))
    with hw.watch(model) as seen:
        model.generate(tokens, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert {row["name"] for row in seen.heads()} == {"model.layers.1.self_attn"}
    assert seen.others["head"] == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="held earlier tokens"):
        seen.implied_map("model.layers.0.linear_attn", 0)
    with pytest.raises(ValueError, match=r"not one of seen\.others"):
        seen.implied_map("model.layers.1.self_attn", 0)


HYBRIDS = (
    "bamba", "falcon_h1", "granitemoehybrid", "jamba", "mamba", "minimax", "nemotron_h",
    "olmo_hybrid", "recurrent_gemma", "rwkv", "zamba2",
)  # fmt: skip


@pytest.mark.parametrize("family", HYBRIDS)
def test_every_hybrid_has_figures(family: str) -> None:
    model, given = tiny_models.ready(family)
    with torch.no_grad(), hw.watch(model) as seen:
        model(**given)
    assert not seen.unread
    named = {layer.name for layer in seen.layers}
    for row in seen.others:
        assert row["name"] not in named
        assert 0 < row["decay_mean"] < 1
        assert row["memory"] > 0
        known = row["kind"] in ("Mamba", "Mamba-2", "gated delta rule", "RG-LRU")
        assert (row["state_norm"] > 0) == known


def test_mamba_s_decays_are_those_of_its_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.mamba import modeling_mamba

    model, given = tiny_models.ready("mamba")
    kept, scan = [], modeling_mamba.mamba_selective_scan

    def mamba_selective_scan(*values: Any, **options: Any) -> Any:
        found = inspect.signature(scan).bind(*values, **options).arguments
        step = torch.nn.functional.softplus(found["dt"] + found["delta_bias"][:, None])
        kept.append(found["A"][:, None] * step[..., None])
        return scan(*values, **options)

    mamba_selective_scan.__signature__ = inspect.signature(scan)  # type: ignore[attr-defined]
    monkeypatch.setattr(modeling_mamba, "mamba_selective_scan", mamba_selective_scan)
    with torch.no_grad(), hw.watch(model) as seen:
        model(**given)
    for row, decay in zip(seen.others, kept, strict=True):
        assert row["decay_mean"] == pytest.approx(float(decay.exp().mean()), rel=1e-4)
        assert row["memory"] == pytest.approx(-1 / float(decay.mean()), rel=1e-4)
    with pytest.raises(ValueError, match="it has none"):
        seen.implied_map(seen.others[0]["name"], 0)


def test_decays_that_no_token_changes_are_those_of_the_weights() -> None:
    config = transformers.RwkvConfig(
        hidden_size=16, vocab_size=50, num_hidden_layers=2, attention_hidden_size=16
    )
    model = transformers.AutoModel.from_config(config).eval()
    with hw.watch(model) as seen:
        model(torch.randint(1, 50, (1, 6)))
    assert seen.others["kind"] == ["RWKV", "RWKV"]
    for block, row in zip(model.blocks, seen.others, strict=True):
        rates = block.attention.time_decay.detach().exp()
        assert row["decay_mean"] == pytest.approx(float((-rates).exp().mean()), rel=1e-5)
        assert row["memory"] == pytest.approx(1 / float(rates.mean()), rel=1e-5)
    assert len(seen.heads()) == 0
    with pytest.raises(ValueError, match="its calls were not seen"):
        seen.implied_map("blocks.0.attention", 0)


def test_a_gated_linear_unit_has_the_decays_of_its_gates() -> None:
    model, given = tiny_models.ready("recurrent_gemma")
    (unit,) = (x for x in model.modules() if type(x).__name__ == "RecurrentGemmaRglru")
    heads, width = unit.num_attention_heads, unit.block_width
    entered: list[Tensor] = []
    handle = unit.register_forward_pre_hook(lambda _, given: entered.append(given[0]))
    with torch.no_grad(), hw.watch(model) as seen:
        model(**given)
    handle.remove()
    x = entered[0].unflatten(2, (heads, width))
    gate = torch.einsum("bnhi,hij->bnhj", x, unit.recurrent_gate_weight) + unit.recurrent_gate_bias
    rate = torch.nn.functional.softplus(unit.recurrent_param).unflatten(0, (heads, width))
    decay = -8 * gate.sigmoid() * rate  # its logarithm
    norms = unit.recurrent_states.unflatten(1, (heads, width)).norm(dim=-1).mean(0)
    assert seen.others["head"] == [*range(heads)]
    for head, row in enumerate(seen.others):
        mine = decay[:, :, head].detach()
        assert row["decay_mean"] == pytest.approx(float(mine.exp().mean()), rel=1e-4)
        assert row["memory"] == pytest.approx(-1 / float(mine.mean()), rel=1e-4)
        assert row["state_norm"] == pytest.approx(float(norms[head].detach()), rel=1e-4)


def test_layers_whose_recurrence_is_not_read_are_listed() -> None:
    model, given = tiny_models.ready("fnet")
    with torch.no_grad(), hw.watch(model) as seen:
        model(**given)
    assert {row["kind"] for row in seen.others} == {"Fourier transform"}
    assert all(row["decay_mean"] != row["decay_mean"] for row in seen.others)
