"""Every family that transformers builds is counted as PyTorch counts it, or refused in words."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

import headwise as hw
from bench import cost_families
from tests.costs.families import CONFIGS
from tests.thinned import thinned
from tests.watching.test_diffusion import real as models_of_diffusers

transformers = pytest.importorskip("transformers")

FAST = ("OPT", "Llama", "gpt-oss", "Qwen3-Next")
ONE_CHANGE = random.Random(0)


def every_family() -> list[Any]:
    return [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in CONFIGS]


@pytest.mark.parametrize("name", every_family())
def test_a_field_that_is_changed_is_counted_as_pytorch_counts_it_or_refused(name: str) -> None:
    """Parameters of the model that is built, and FLOPs of PyTorch's counter, of fuzzed fields."""
    kind, fields = CONFIGS[name]
    usual = transformers.AutoConfig.for_model(kind, **fields)
    all_of_them = [{}, *cost_families.fields_changed(usual.to_dict())]
    drawn = all_of_them if name not in FAST else [{}, *ONE_CHANGE.sample(all_of_them, 4)]
    compared = 0
    for change in drawn:
        try:
            config = transformers.AutoConfig.for_model(kind, **{**fields, **change})
        except Exception:  # transformers refuses it
            continue
        found = cost_families.compare(config, tokens=12)
        compared += found.verdict == "equal"
        assert found.verdict in ("equal", "refused"), f"{name} with {change}: {found}"
    assert compared > len(drawn) // 3


@pytest.mark.parametrize("kind", thinned(cost_families.SAMPLE))
def test_a_family_of_the_drawn_sample_is_equal(kind: str) -> None:
    found = cost_families.compare(cost_families.small(kind), tokens=12)
    assert found.verdict == "equal", found


@pytest.mark.slow
def test_no_family_is_counted_otherwise_than_by_pytorch() -> None:
    found = cost_families.rows(cost_families.kinds(), changes=2)
    wrong = [row for row in found if row.verdict == "different"]
    assert not wrong, wrong


@pytest.mark.parametrize("name", ["Llama", "Gemma 2", "Gemma 3n", "Whisper", "Falcon-H1", "T5"])
def test_repeated_layers_cost_what_each_of_them_would(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer that is like an earlier one is not run again: the same figures if it is."""
    from headwise.costs.tracing import layers

    kind, fields = CONFIGS[name]
    asked = {"batch": 2, "queries": 8}
    once = hw.cost({"model_type": kind, **fields}, **asked)
    described = layers.described
    calls = iter(range(10**6))
    monkeypatch.setattr(
        layers, "described", lambda *given: (next(calls), *described(*given))
    )  # no two calls are alike
    each = hw.cost({"model_type": kind, **fields}, **asked)
    figures = ("params", "flops", "flops_dense", "backward_flops", "kv_cache", "state",
               "activations", "bytes_moved", "special")  # fmt: skip
    assert [getattr(once, x) for x in figures] == [getattr(each, x) for x in figures]


SAVED = {
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 100, "n_positions": 64},
    "llama": {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
              "intermediate_size": 96, "vocab_size": 100},
    "opt": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 96,
            "vocab_size": 100, "word_embed_proj_dim": 64, "max_position_embeddings": 64},
    "bert": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
             "intermediate_size": 96, "vocab_size": 100, "hidden_act": "gelu_new"},
    "phi3": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
             "intermediate_size": 96, "vocab_size": 100, "pad_token_id": 0},
}  # fmt: skip


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", SAVED)
def test_a_model_on_a_cpu_saves_what_is_counted(kind: str, dtype: str, fused: bool) -> None:
    """A real run of transformers' own code, by the storages that autograd keeps."""
    from tests.costs.test_saved import DTYPES, kept

    config = transformers.AutoConfig.for_model(kind, **SAVED[kind])
    counted = hw.cost(config, batch=2, queries=16, dtype=dtype, device="cpu", fused=fused)
    own = copy.deepcopy(config)
    own._attn_implementation = "sdpa" if fused else "eager"
    factory = transformers.AutoModel if kind == "bert" else transformers.AutoModelForCausalLM
    model = factory.from_config(own).to(DTYPES[dtype]).train()
    ids = torch.randint(0, 100, (2, 16))
    given = {} if kind == "bert" else {"use_cache": True}
    assert counted.activations == kept(model, lambda: model(input_ids=ids, **given))


def test_a_count_leaves_random_numbers_as_they_were() -> None:
    before = torch.get_rng_state()
    hw.cost({"model_type": "llama", "num_hidden_layers": 1}, queries=8)
    assert torch.equal(before, torch.get_rng_state())


def test_a_model_with_parameters_of_its_own_is_counted_with_them() -> None:
    config = transformers.LlamaConfig(num_hidden_layers=1, hidden_size=64, vocab_size=100,
                                      intermediate_size=96, num_attention_heads=4)  # fmt: skip
    plain = transformers.LlamaForCausalLM(config)
    extra = copy.deepcopy(plain)
    extra.extra = torch.nn.Linear(5, 5)
    found = hw.cost(extra, queries=8)
    assert found.params == hw.cost(plain, queries=8).params + 30
    assert "extra, which these inputs do not run" in found.to_dict()["left_out"]
    assert extra.training
    assert next(extra.parameters()).device.type == "cpu", "the model itself is left alone"
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        extra(input_ids=torch.zeros(1, 8, dtype=torch.int64))
    assert 0 < found.flops <= counter.get_total_flops()


HUGE = (10**9, 10**18, 10**30, 10**400)


@pytest.mark.parametrize(
    ("name", "size"),
    thinned(["Llama", "BERT", "ViT", "T5", "Whisper", "Jamba"], [HUGE[0], HUGE[-1]]),
    ids=lambda x: x if isinstance(x, str) else f"1e{len(str(x)) - 1}",
)
def test_absurd_sizes_are_counted_or_refused_at_once(name: str, size: int) -> None:
    kind, fields = CONFIGS[name]
    fields = {"model_type": kind, **fields}
    usual = transformers.AutoConfig.for_model(**fields).to_dict()
    for field, value in usual.items():
        if type(value) is int and field not in cost_families.NOT_SIZES:
            try:
                asked = {} if name == "ViT" else {"queries": 8}
                found = hw.cost({**fields, field: size}, **asked)
            except ValueError:
                continue
            assert found.params > 0


@pytest.mark.parametrize("size", HUGE, ids=["1e9", "1e18", "1e30", "1e400"])
@pytest.mark.parametrize("name", ["vocabulary", "d_model", "layers", "heads", "context", "window"])
def test_absurd_sizes_of_own_configs_are_counted_or_refused_at_once(name: str, size: int) -> None:
    try:
        config = hw.models.GPTConfig(**{"vocabulary": 50, "d_model": 32, "layers": 2, "heads": 4,
                                        name: size})  # fmt: skip
        found = hw.cost(config, queries=8)
    except (ValueError, TypeError):
        return
    assert found.params > 0


class Somebodys(torch.nn.Module):
    """Attention as anyone writes it, with PyTorch's function or with headwise's."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self.qkv, self.out, self.call = torch.nn.Linear(64, 192), torch.nn.Linear(64, 64), call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(x).view(*x.shape[:2], 3, 4, 16).permute(2, 0, 3, 1, 4)
        return self.out(self.call(*parts.unbind()).transpose(1, 2).flatten(2))


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def imported(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def named(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(query=q, key=k, value=v, is_causal=True)


def own_named(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return hw.attention(q=q, k=k, v=v, mask=hw.mask.causal())


def own(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return hw.attention(q, k, v, mask=hw.mask.causal())


@pytest.mark.parametrize("call", [plain, imported, named, own, own_named])
def test_anybodys_module_is_counted_with_its_fused_attention(call: Any) -> None:
    from tests.costs.test_saved import kept

    module, x = Somebodys(call), torch.randn(2, 128, 64)
    found = hw.cost(module, inputs=x, dtype="fp32", device="cpu")
    assert found.flops == 2 * 2 * 128 * 64 * 4 * 64 + 4 * 2 * (128 * 129 // 2) * 64
    assert found.flops_dense == 2 * 2 * 128 * 64 * 4 * 64 + 4 * 2 * 128 * 128 * 64
    assert found.activations == kept(module, lambda: module(x))
    steps = hw.cost(module, inputs=x, fused=False) if call not in (own, own_named) else found
    assert steps.flops == found.flops


def test_a_count_replaces_nothing_that_others_see() -> None:
    found = []

    def finding(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        found.append(torch.nn.functional.scaled_dot_product_attention)
        return plain(q, k, v)

    hw.cost(Somebodys(finding), inputs=torch.randn(2, 8, 64))
    assert set(found) == {scaled_dot_product_attention}


def test_layers_of_pytorch_inside_a_module_are_counted_with_their_fused_attention() -> None:
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0)
    alone = hw.cost(layer, batch=2, queries=32, dtype="fp32", device="cpu")
    inside = hw.cost(torch.nn.Sequential(layer), inputs=torch.randn(2, 32, 64), dtype="fp32",
                     device="cpu")  # fmt: skip
    assert (inside.params, inside.flops) == (alone.params, alone.flops)


def test_layers_that_run_what_they_are_given_are_not_taken_for_equal() -> None:
    """A layer may call a function, or a module elsewhere: what that does is its own work."""
    model = hw.models.Conv(hw.models.ConvConfig(vocabulary=50, d_model=32, layers=3))
    read = hw.cost(model, batch=2, queries=32, dtype="fp32", device="cpu")
    ids = torch.zeros(2, 32, dtype=torch.int64)
    traced = hw.cost(model, inputs=ids, dtype="fp32", device="cpu")
    figures = ("params", "flops", "backward_flops", "activations")
    assert [getattr(traced, x) for x in figures] == [getattr(read, x) for x in figures]


@pytest.mark.filterwarnings("ignore")  # of diffusers, as it is imported
def test_models_of_diffusers_are_counted_as_pytorch_counts_them() -> None:
    pytest.importorskip("diffusers")
    for name, (model, given) in models_of_diffusers().items():
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model.eval()(**given)
        found = hw.cost(model, inputs=given)
        assert found.params == sum(x.numel() for x in model.parameters()), name
        assert found.flops_dense == counter.get_total_flops(), name
