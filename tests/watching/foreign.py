"""Small models of transformers, and their attention written out beside them, by hand."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

transformers.logging.set_verbosity_error()  # it has much to say about tiny configurations

_SMALL = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "vocab_size": 99,
}
_GROUPED = {**_SMALL, "num_key_value_heads": 2, "head_dim": 8}
_BART = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in
         (("layers", 2), ("attention_heads", 4), ("ffn_dim", 48))}  # fmt: skip
CONFIGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertModel", "BertConfig", _SMALL),
    "albert": ("AlbertModel", "AlbertConfig", {**_SMALL, "embedding_size": 16}),
    "gpt2": (
        *("GPT2LMHeadModel", "GPT2Config"),
        {"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 99, "n_positions": 64}
        | {"bos_token_id": 1, "eos_token_id": 2},
    ),
    "llama": ("LlamaForCausalLM", "LlamaConfig", _GROUPED),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**_GROUPED, "sliding_window": 4}),
    "gemma2": (
        *("Gemma2ForCausalLM", "Gemma2Config"),
        {**_GROUPED, "sliding_window": 4, "attn_logit_softcapping": 3.0},
    ),
    "gpt_oss": (
        *("GptOssForCausalLM", "GptOssConfig"),
        {**_GROUPED, "sliding_window": 4, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    "t5": (
        *("T5ForConditionalGeneration", "T5Config"),
        {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 99}
        | {"decoder_start_token_id": 0},
    ),
    "bart": (
        *("BartForConditionalGeneration", "BartConfig"),
        {**_BART, "d_model": 32, "vocab_size": 99, "max_position_embeddings": 64},
    ),
    "vit": (
        *("ViTModel", "ViTConfig"),
        {**_SMALL, "image_size": 16, "patch_size": 4},
    ),
    "bloom": (
        *("BloomForCausalLM", "BloomConfig"),
        {"hidden_size": 32, "n_head": 4, "n_layer": 2, "vocab_size": 99},
    ),
    "gptj": (
        *("GPTJForCausalLM", "GPTJConfig"),
        {"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 99, "rotary_dim": 8},
    ),
    "codegen": (
        *("CodeGenForCausalLM", "CodeGenConfig"),
        {"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 99, "rotary_dim": 8},
    ),
    "gpt_neo": (
        *("GPTNeoForCausalLM", "GPTNeoConfig"),
        {"hidden_size": 32, "num_heads": 4, "num_layers": 2, "vocab_size": 99, "window_size": 4}
        | {"attention_types": [[["global", "local"], 1]]},
    ),
    "xlnet": (
        *("XLNetModel", "XLNetConfig"),
        {"d_model": 32, "n_head": 4, "n_layer": 2, "d_inner": 48, "vocab_size": 99},
    ),
}


def uses_interface(family: str) -> bool:
    """Whether this version of transformers has the family's attention behind its interface."""
    made = getattr(transformers, CONFIGS[family][0])
    return hasattr(sys.modules[made.__module__], "ALL_ATTENTION_FUNCTIONS")


INTERFACE = [name for name in CONFIGS if uses_interface(name)]
WRITTEN_OUT = [name for name in CONFIGS if name not in INTERFACE and name != "t5"]
DECODERS = ["gpt2", "llama", "mistral", "gemma2", "gpt_oss"]
PADDINGS = ["whole", "right", "left"]
IMPLEMENTATIONS = ["eager", "sdpa", "headwise"]
UNSUPPORTED = {("gemma2", "sdpa"), ("gpt_oss", "sdpa")}  # by transformers: caps and sinks
B, N = 3, 9


@cache
def model_of(family: str) -> Any:
    """A model of a family, the same for every test, whose weights tell keys apart."""
    made, configured, options = CONFIGS[family]
    torch.manual_seed(0)
    config = getattr(transformers, configured)(**options, attn_implementation="eager")
    model = getattr(transformers, made)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1 and family != "t5":
                parameter.mul_(4)
    return model


@contextmanager
def implementation(model: Any, name: str) -> Iterator[Any]:
    """The model with another attention implementation for a while."""
    model.set_attn_implementation(name)
    try:
        yield model
    finally:
        model.set_attn_implementation("eager")


def inputs(family: str, padding: str) -> dict[str, Tensor]:
    """A batch of three, two of them padded, if so asked."""
    torch.manual_seed(1)
    if family == "vit":
        return {"pixel_values": torch.randn(B, 3, 16, 16)}
    given = {"input_ids": torch.randint(3, 99, (B, N))}
    if padding != "whole":
        given["attention_mask"] = shown(padding, (N, 5, 7), N)
    if family in ("t5", "bart"):
        given["decoder_input_ids"] = torch.randint(3, 99, (B, 6))
        if padding != "whole":
            given["decoder_attention_mask"] = shown("right", (6, 6, 4), 6)
    return given


def shown(padding: str, lengths: tuple[int, ...], tokens: int) -> Tensor:
    """(B, tokens): 1 for a token, 0 for padding."""
    place, length = torch.arange(tokens), torch.tensor(lengths)[:, None]
    return (place < length if padding == "right" else place >= tokens - length).long()


@dataclass
class Written:
    """One attention, written out: its logits, -inf where hidden, and all that follows."""

    logits: Tensor  # (B, H, N, M)
    sinks: Tensor | None
    out: Tensor  # (B, H, N, D)
    stands: int  # the first query's own key

    @property
    def weights(self) -> Tensor:
        return torch.exp(self.logits - self.lse[..., None]).nan_to_num()

    @property
    def lse(self) -> Tensor:
        s = self.logits
        if self.sinks is not None:
            s = torch.cat([s, self.sinks.reshape(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)
        return s.logsumexp(-1)

    def statistics(self, begins: Tensor, across: bool) -> dict[str, Tensor]:
        """By their definitions; `begins` (B,) is each sequence's first key."""
        s, p = self.logits, self.weights
        hidden = s == -torch.inf
        count = (~hidden).sum(-1).clamp_min(1)
        mean = s.masked_fill(hidden, 0).sum(-1) / count
        entropy = -torch.special.xlogy(p, p).sum(-1)
        i = torch.arange(s.shape[2]) + self.stands
        j = torch.arange(s.shape[3])
        found = {
            "lse": self.lse,
            "max_logit": s.amax(-1),
            "top_prob": p.amax(-1),
            "entropy": entropy,
            "effective_keys": entropy.exp(),
            "participation": p.sum(-1).square() / p.square().sum(-1).masked_fill(hidden.all(-1), 1),
            "logit_mean": mean,
            "logit_var": (s - mean[..., None]).masked_fill(hidden, 0).square().sum(-1) / count,
            "sink_mass": (p * (j == begins[:, None])[:, None, None]).sum(-1),
            "output_norm": self.out.norm(dim=-1),
        }
        if not across:
            found["self_mass"] = (p * (j == i[:, None])).sum(-1)
            found["previous_mass"] = (p * (j == i[:, None] - 1)).sum(-1)
            found["distance"] = (p * (i[:, None] - j)).sum(-1)
        return found


class WrittenOut:
    """An attention function for transformers that keeps every number on its way."""

    def __init__(self) -> None:
        self.calls: list[Written] = []
        AttentionInterface.register("written-out", self)
        AttentionMaskInterface.register("written-out", eager_mask)

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        position_bias: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        group = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(group, 1) for x in (key, value))
        s = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        s = s if softcap is None else softcap * torch.tanh(s / softcap)
        s = s if position_bias is None else s + position_bias
        s = s if attention_mask is None else s + attention_mask
        s = s.masked_fill(s < torch.finfo(s.dtype).min / 2, -torch.inf)
        sinks = None if s_aux is None else s_aux.detach()
        call = Written(s, sinks, query[..., :0], key.shape[2] - query.shape[2])
        call.out = call.weights @ value
        self.calls.append(call)
        return call.out.transpose(1, 2).contiguous(), call.weights


def written_out(model: Any, given: dict[str, Tensor]) -> list[Written]:
    """Every attention of a pass, written out, in the order of execution."""
    if not hasattr(sys.modules[type(model).__module__], "ALL_ATTENTION_FUNCTIONS"):
        pytest.skip(f"{type(model).__name__} does not use this transformers' attention interface")
    function = WrittenOut()
    try:
        with implementation(model, "written-out"), torch.no_grad():
            model(**given)
    finally:
        del AttentionInterface._global_mapping["written-out"]
        del AttentionMaskInterface._global_mapping["written-out"]
    return function.calls
