"""Bytes saved for the backward are those that autograd keeps, to the byte."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import headwise as hw
from tests.costs.modules import (
    ATTENTION,
    BOTH,
    CASES,
    PLAIN,
    WINDOW,
    A,
    B,
    C,
    H,
    S,
    numbers,
    tokens,
)
from tests.thinned import thinned

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
dtypes = pytest.mark.parametrize("dtype", DTYPES)


def kept(module: nn.Module, call: Callable[[], object], least: int = 0) -> int:
    """The bytes of all storages that a call saves, without parameters and buffers.

    Storages below `least` bytes do not count.
    """
    own = {x.untyped_storage().data_ptr() for x in (*module.parameters(), *module.buffers())}
    found: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        alive = call()  # so that no address is used twice
    del alive
    return sum(size for size in found.values() if size >= least)


@pytest.mark.parametrize(("name", "dtype"), thinned(CASES, DTYPES))
def test_fused_attention_saves_what_is_counted(name: str, dtype: str) -> None:
    case = CASES[name]
    module = case.build().to(DTYPES[dtype]).train()
    inputs = case.inputs(DTYPES[dtype])
    counted = hw.cost(module, batch=B, dtype=dtype, device="cpu", **case.sizes)
    assert counted.activations == kept(module, lambda: module(*inputs))


ON_GPU: dict[str, Callable[[], nn.Module]] = {
    "attention": lambda: hw.nn.MultiHeadAttention(256, 4),
    "causal": lambda: hw.nn.MultiHeadAttention(256, 4, mask=hw.mask.causal()),
    "grouped": lambda: hw.nn.MultiHeadAttention(256, 4, kv_heads=2, position=hw.nn.Rotary()),
    "window": lambda: hw.nn.MultiHeadAttention(256, 4, mask=WINDOW),
    "softcap": lambda: hw.nn.MultiHeadAttention(256, 4, softcap=9.0, mask=hw.mask.causal()),
    "block": lambda: hw.nn.Block(
        256, hw.nn.MultiHeadAttention(256, 4), hw.nn.SwiGLU(512).build(256), norm=hw.nn.RMSNorm()
    ),
    "GELU block": lambda: hw.nn.Block(
        256, hw.nn.MultiHeadAttention(256, 4), hw.nn.GELU(512).build(256), dropout=0.1
    ),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_GPU)
def test_on_a_gpu_attention_saves_what_is_counted(name: str) -> None:
    """PyTorch's kernels also save the state of a random generator, a few bytes in any call."""
    module = ON_GPU[name]().to("cuda", torch.bfloat16).train()
    x = torch.randn(2, 512, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    counted = hw.cost(module, batch=2, queries=512, device="cuda")
    assert counted.activations == kept(module, lambda: module(x), least=64)


PLAINLY = ("plain", "causal", "window", "grouped", "rotary", "rms qk-norm", "shared", "general")


@dtypes
@pytest.mark.parametrize("name", PLAINLY)
def test_attention_step_by_step_saves_what_is_counted(name: str, dtype: str) -> None:
    attn = hw.nn.MultiHeadAttention(H, A, **ATTENTION[name]).to(DTYPES[dtype])
    (x,) = numbers(S)(DTYPES[dtype])
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)  # keeps the dtype of the model
    try:
        with sdpa_kernel(SDPBackend.MATH):
            found = kept(attn, lambda: attn(x))
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)
    counted = hw.cost(attn, batch=B, dtype=dtype, device="cpu", fused=False, **PLAIN)
    assert counted.activations == found


def test_recomputed_layers_save_their_inputs() -> None:
    config = hw.models.GPTConfig(50, d_model=H, layers=3, heads=A)
    model = hw.models.GPT(config).to(torch.bfloat16)
    (ids,) = tokens(S)(torch.bfloat16)

    def call() -> object:
        x = model.embedding(ids)
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return model.logits(model.norm(x))

    counted = hw.cost(model, batch=B, device="cpu", recompute="layers", **PLAIN)
    assert counted.activations == kept(model, call)
    assert counted.activations < hw.cost(model, batch=B, device="cpu", **PLAIN).activations


def test_recomputed_layers_of_a_decoder_save_the_source_once() -> None:
    config = hw.models.TransformerConfig(
        50, d_model=H, encoder_layers=2, decoder_layers=3, heads=A, dropout=0.0
    )
    model = hw.models.Transformer(config).to(torch.bfloat16)
    source, target = tokens(C, S)(torch.bfloat16)

    def call() -> object:
        x = model._embedded(source, model.embedding, 0)
        for layer in model.encoder:
            x = checkpoint(layer, x, use_reentrant=True)
        y = model._embedded(target, model.embedding, 0)
        for layer in model.decoder:
            y = checkpoint(layer, y, x, use_reentrant=True)
        return torch.nn.functional.linear(y, model.embedding.weight)

    counted = hw.cost(model, batch=B, device="cpu", recompute="layers", **BOTH)
    assert counted.activations == kept(model, call)


def test_recomputed_attention_keeps_queries_keys_and_values_only() -> None:
    attn = hw.nn.MultiHeadAttention(H, A).to(torch.bfloat16)
    (x,) = numbers(S)(torch.bfloat16)

    def call() -> object:
        prepared = attn.prepare(x)
        out = checkpoint(hw.attention, prepared.q, prepared.k, prepared.v, use_reentrant=True)
        return attn.join(out)

    for fused in (True, False):
        counted = hw.cost(attn, batch=B, device="cpu", recompute="attention", fused=fused, **PLAIN)
        assert counted.activations == kept(attn, call)


def test_the_textbook_formula_of_a_layer() -> None:
    """34bsh + 5bs²a of Korthikanti and others, and the statistics of two norms in float32."""
    attention = hw.nn.MultiHeadAttention(64, 4, dropout=0.1)
    block = hw.nn.Block(64, attention, hw.nn.GELU(256).build(64), dropout=0.1)
    b, s, h, a = 2, 128, 64, 4
    counted = hw.cost(block, batch=b, queries=s, fused=False)
    assert counted.activations == 34 * b * s * h + 5 * b * s**2 * a + 16 * b * s


@pytest.mark.parametrize(
    "change",
    [
        {"norm": hw.nn.LayerNorm()},
        {"attention_dropout": 0.1},
        {"position": None},
        {"feed_forward": hw.nn.GELU(1024)},
    ],
    ids=str,
)
def test_another_module_saves_something_else(change: dict[str, Any]) -> None:
    """The comparison above can fail: each of these differs by one option only."""
    config = hw.models.GPTConfig(50, d_model=H, layers=2, heads=A)
    other = dataclasses.replace(config, **change)
    model = hw.models.GPT(other).to(torch.bfloat16).train()
    (ids,) = tokens(S)(torch.bfloat16)
    found = kept(model, lambda: model(ids))
    assert hw.cost(other, batch=B, device="cpu", **PLAIN).activations == found
    assert hw.cost(config, batch=B, device="cpu", **PLAIN).activations != found
