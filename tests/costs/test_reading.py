"""Reading: every form in which a model is given, and refusals that say what is wrong."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import headwise as hw

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 100, "hidden_act": "silu",
    "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
}  # fmt: skip


def test_a_dictionary_a_file_a_folder_and_an_object_are_the_same(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA), encoding="utf-8")
    config = transformers.LlamaConfig(**{k: v for k, v in LLAMA.items() if k != "model_type"})
    forms = (LLAMA, path, str(path), str(tmp_path), config)
    assert len({hw.cost(form, queries=16).params for form in forms}) == 1


def test_a_config_json_has_the_defaults_of_its_class() -> None:
    """A file leaves out what its class has by default, such as key heads."""
    pytest.importorskip("transformers")
    fields = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}
    assert hw.cost(fields, queries=16).params > hw.cost(LLAMA, queries=16).params


def test_a_config_of_headwise_is_its_model() -> None:
    config = hw.models.GPTConfig(50, d_model=32, layers=2, heads=4)
    model = hw.models.GPT(config)
    assert hw.cost(config, queries=8).to_dict() == hw.cost(model, queries=8).to_dict()


def test_architectures_say_which_head_a_config_has() -> None:
    bare = hw.cost({**LLAMA, "architectures": ["LlamaModel"]}, queries=8)
    assert hw.cost(LLAMA, queries=8).params - bare.params == 100 * 64
    bert = {"model_type": "bert", "num_hidden_layers": 1}
    masked = hw.cost({**bert, "architectures": ["BertForMaskedLM"]}, queries=8)
    assert "cls" in masked.parts
    assert "cls" not in hw.cost(bert, queries=8).parts


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.mark.usefixtures("offline")
def test_a_name_that_is_nowhere_is_refused() -> None:
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE is set"):
        hw.cost("nobody/nothing-at-all")
    with pytest.raises(ValueError, match="nor a model's name"):
        hw.cost("a b/c/d")


@pytest.mark.usefixtures("offline")
def test_a_name_in_the_local_cache_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA), encoding="utf-8")
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *given: str(path))
    assert hw.cost("some/name", queries=8).params == hw.cost(LLAMA, queries=8).params


WRONG: dict[str, tuple[Any, str]] = {
    "no model type": ({"hidden_size": 4}, "no field 'model_type'"),
    "unknown": ({"model_type": "mamba9"}, "refuses this configuration of 'mamba9': Unrecognized"),
    "no head": ({**LLAMA, "architectures": ["LlamaForAudio"]}, "no class 'LlamaForAudio'"),
    "key heads": ({**LLAMA, "num_key_value_heads": 3}, "4 heads can't share 3 key heads"),
    "width": ({**LLAMA, "hidden_size": 66, "head_dim": None}, "66. is not a multiple"),
    "layer types": (
        {**LLAMA, "model_type": "qwen2", "layer_types": ["full_attention"]},
        "must be equal to the number of `layer_types`",
    ),
    "window": (
        {**LLAMA, "model_type": "qwen2", "layer_types": ["sliding_attention"] * 2,
         "sliding_window": None},
        "can't be traced without its numbers",
    ),
    "experts": (
        {**LLAMA, "model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 4},
        "can't be traced without its numbers: k not in range",
    ),
    "Mamba heads": (
        {**LLAMA, "model_type": "bamba", "mamba_n_heads": 3, "mamba_d_head": 64,
         "mamba_expand": 2, "mamba_d_state": 4},
        "mamba_n_heads must divide",
    ),
    "no head width": ({**LLAMA, "head_dim": 0}, "can't build this configuration of 'llama'"),
    "many layers": ({**LLAMA, "num_hidden_layers": 10**9}, "1,000,000,000 layers; at most 1,000"),
    "negative window": (
        {**LLAMA, "model_type": "mistral", "sliding_window": -5},
        "sliding_window=-5 must be a positive integer",
    ),
    "layers of an unknown type": (
        {**LLAMA, "model_type": "qwen2", "layer_types": ["full_attention", "wobbly"],
         "sliding_window": None},
        "`layer_types` entries must be in",
    ),
    "another class": (
        {**LLAMA, "architectures": ["GPT2LMHeadModel"]}, "not a class of model_type='llama'",
    ),
    "attention layers": (
        {**LLAMA, "model_type": "bamba", "mamba_n_heads": 2, "mamba_d_head": 64, "mamba_expand": 2,
         "mamba_d_state": 4, "mamba_d_conv": 4, "mamba_n_groups": 1, "mamba_proj_bias": False,
         "mamba_conv_bias": True, "attn_layer_indices": [7]},
        "only be called on Attention layers",
    ),
    "a list": ([1, 2], "has no cost"),
    "a module": (nn.GRU(3, 3), "GRU can't be read"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_configuration_is_refused_in_words(name: str) -> None:
    """By transformers, whose classes check their fields, or because such a model can't run."""
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match=WRONG[name][1]):
        hw.cost(WRONG[name][0], queries=8)


@pytest.mark.parametrize(
    "change",
    [{"hidden_size": "wide"}, {"num_hidden_layers": -1}, {"vocab_size": None}, {"hidden_act": 3},
     {"num_attention_heads": 2.5}, {"layer_types": "full"}, {"architectures": 7}],
    ids=str,
)  # fmt: skip
def test_fields_of_wrong_kinds_are_refused(change: dict[str, Any]) -> None:
    for kind in ("llama", "qwen2"):
        with pytest.raises(ValueError, match=r"\w"):
            hw.cost({**LLAMA, "model_type": kind, **change}, queries=8)


def test_a_class_derived_from_one_of_transformers_is_read() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**{k: v for k, v in LLAMA.items() if k != "model_type"})

    class Mine(transformers.LlamaForCausalLM):  # type: ignore[misc, name-defined]
        pass

    with torch.device("meta"):
        model = Mine(config)
    assert hw.cost(model, queries=8).params == hw.cost(LLAMA, queries=8).params


def test_files_that_hold_no_configuration(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="is not JSON"):
        hw.cost(path)
    path.write_text("[1]", encoding="utf-8")
    with pytest.raises(ValueError, match="holds no configuration"):
        hw.cost(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "batch=0 must be a positive integer"),
        ({"batch": 10**400}, "batch=1000.* is too large; at most 1,099,511,627,776 sequences"),
        ({"queries": 1.5}, "queries=1.5 must be a positive integer"),
        ({"queries": 1 << 40}, "is too long; at most 16,777,216 tokens are counted"),
        ({"queries": 8, "keys": 4}, "keys=4 are fewer than queries=8"),
        ({"dtype": "bf17"}, "dtype='bf17' is not a dtype"),
        ({"dtype": "int8"}, "activations are computed in"),
        ({"device": "tpu"}, "device='tpu'"),
        ({"recompute": "all"}, "recompute='all'"),
        ({"layout": "ring"}, "layout='ring'"),
        ({"tile": (0, 4)}, "tile=.* must be two positive integers"),
        ({"mask": "causal"}, "is not a mask"),
    ],
    ids=str,
)
def test_wrong_sizes_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hw.cost(LLAMA, **{"queries": 8, **options})


def test_lengths_beyond_the_positions_are_refused() -> None:
    with pytest.raises(ValueError, match="2000 tokens are more than gpt2 has positions for"):
        hw.cost({"model_type": "gpt2"}, queries=2000)
    with pytest.raises(ValueError, match="vit always reads as much; leave the length out"):
        hw.cost({"model_type": "vit"}, queries=100)
    assert hw.cost({"model_type": "gpt2"}).work.queries is None
    assert (
        hw.cost({"model_type": "gpt2"}).flops == hw.cost({"model_type": "gpt2"}, queries=1024).flops
    )


def test_wrapped_modules_are_unwrapped() -> None:
    model = hw.models.GPT(hw.models.GPTConfig(50, d_model=32, layers=2, heads=4))
    wrapped = (torch.compile(model), nn.DataParallel(model))
    for each in wrapped:
        assert hw.cost(each, queries=8).to_dict() == hw.cost(model, queries=8).to_dict()


def test_sizes_that_are_left_out() -> None:
    """keys alone are a whole prompt; a source is as long as its target."""
    assert hw.cost(LLAMA, keys=50).flops == hw.cost(LLAMA, queries=50).flops
    config = hw.models.TransformerConfig(50, d_model=32, heads=4)
    assert hw.cost(config, queries=9).flops == hw.cost(config, queries=9, context=9).flops
    step = hw.cost(config, queries=1, keys=9)
    assert step.flops == hw.cost(config, queries=1, keys=9, context=9).flops


def test_dtypes_are_given_by_any_name() -> None:
    names = ("bf16", "bfloat16", torch.bfloat16, "torch.bfloat16")
    assert len({hw.cost(LLAMA, queries=8, dtype=name).weights for name in names}) == 1
    assert hw.cost(LLAMA, queries=8, dtype="fp32").weights == 2 * hw.cost(LLAMA, queries=8).weights


def test_without_transformers_modules_are_counted_and_configs_say_what_they_need() -> None:
    script = (
        "import sys; sys.modules['transformers'] = None\n"
        "import torch, headwise as hw\n"
        "print(hw.cost(torch.nn.TransformerEncoderLayer(32, 4), queries=8).params)\n"
        "for what in ({'model_type': 'llama'}, 'some/name'):\n"
        "    try:\n        hw.cost(what)\n"
        "    except ValueError as error:\n        print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, second, third = done.stdout.splitlines()
    layer = nn.TransformerEncoderLayer(32, 4)
    assert first == str(sum(p.numel() for p in layer.parameters()))
    assert "needs transformers: pip install headwise[transformers]" in second
    assert "needs transformers" in third


def test_any_module_is_counted_for_its_inputs() -> None:
    """Nothing of it is known but what PyTorch does."""
    gru = nn.GRU(8, 16, batch_first=True)
    x = torch.randn(2, 5, 8)
    found = hw.cost(gru, inputs=x, dtype="fp32")
    assert found.params == sum(p.numel() for p in gru.parameters())
    assert found.flops == 2 * 2 * 5 * (8 + 16) * 3 * 16
    both = hw.cost(nn.Bilinear(4, 4, 3), inputs=(torch.randn(6, 4), torch.randn(6, 4)))
    assert both.params == 4 * 4 * 3 + 3
