"""attn_implementation="headwise" in compiled models: one graph wherever sdpa's is one."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.utils
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

from transformers.masking_utils import sdpa_mask  # noqa: E402

import headwise.transformers  # noqa: E402, F401  registers the implementation
from tests.thinned import thinned  # noqa: E402
from tests.watching.foreign import uses_interface  # noqa: E402

# transformers 4's own masks cause this under a compiler, with sdpa too.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
# Its masks number the queries by a tensor, and not by q_length and q_offset.
BY_TENSOR = "q_length" not in inspect.signature(sdpa_mask).parameters

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "vocab_size": 99,
    "attn_implementation": "headwise",
}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def llama() -> nn.Module:
    config = transformers.LlamaConfig(num_key_value_heads=2, use_cache=False, **SIZES)
    return transformers.LlamaModel(config)


def mistral() -> nn.Module:
    config = transformers.MistralConfig(
        num_key_value_heads=2, use_cache=False, sliding_window=5, **SIZES
    )
    return transformers.MistralModel(config)


def bert() -> nn.Module:
    return transformers.BertModel(transformers.BertConfig(**SIZES))


@pytest.mark.parametrize(("padded", "make"), thinned([False, True], [llama, mistral, bert]))
def test_a_model_compiles_whole_and_computes_the_same(
    make: Callable[[], nn.Module], padded: bool
) -> None:
    if make is bert and not uses_interface("bert"):
        pytest.skip("BERT does not use this transformers' attention interface")
    torch.manual_seed(0)
    model, ids = make().eval(), torch.randint(0, 99, (2, 12))
    mask = torch.ones(2, 12, dtype=torch.long)
    if padded:
        mask[0, :4], mask[1, 5] = 0, 0  # at the start, and one token in the middle
    given = {"input_ids": ids, "attention_mask": mask if padded else None}
    expected = model(**given).last_hidden_state
    found = torch.compile(model, fullgraph=True, backend="aot_eager")(**given).last_hidden_state
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()])
    assert graphs() == 1


def language_model() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.LlamaConfig(num_key_value_heads=2, pad_token_id=0, **SIZES)
    return transformers.LlamaForCausalLM(config), {"input_ids": torch.randint(3, 99, (2, 7))}


def translator() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.T5Config(
        d_model=32, d_kv=8, num_heads=4, num_layers=2, d_ff=64, vocab_size=99,
        decoder_start_token_id=0, attn_implementation="headwise",
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config)
    return model, {"input_ids": torch.randint(3, 99, (2, 7))}


def listener() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.WhisperConfig(
        d_model=32, encoder_attention_heads=4, decoder_attention_heads=4, encoder_layers=1,
        decoder_layers=2, encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=99, num_mel_bins=8,
        max_source_positions=20, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1, attn_implementation="headwise",
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config)
    return model, {"input_features": torch.randn(2, 8, 40)}


@pytest.mark.parametrize("make", thinned([language_model, translator, listener]))
def test_a_static_cache_generates_with_one_graph(
    make: Callable[[], tuple[Any, dict[str, Tensor]]],
) -> None:
    torch.manual_seed(0)
    model, given = make()
    model.eval()
    how = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    expected = model.generate(**given, **how)
    compiled = transformers.CompileConfig(fullgraph=True, dynamic=False, backend="aot_eager")
    compiled._compile_all_devices = True
    found = model.generate(**given, **how, cache_implementation="static", compile_config=compiled)
    assert torch.equal(found, expected)
    if BY_TENSOR and make is language_model:
        pytest.skip(
            "its output is the same, but every token has a graph with transformers 4's masks"
        )
    assert graphs() == 1
