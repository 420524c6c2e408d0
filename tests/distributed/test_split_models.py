"""Whole models on split sequences give what one process gives, and are watched all the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import headwise as hw
from headwise.distributed.ranges import numbers
from tests.distributed.processes import Processes

pytestmark = pytest.mark.xdist_group("ranks")  # one worker, one set of processes

LENGTH = 22


def layer() -> nn.Module:
    torch.manual_seed(0)
    mask = hw.mask.causal() & (hw.mask.window(5) | hw.mask.prefix(2))
    return hw.nn.MultiHeadAttention(
        32, 4, kv_heads=2, mask=mask, position=hw.nn.Rotary(), sinks=True
    ).double()


def inputs() -> Tensor:
    return torch.randn(
        2, LENGTH, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )


def attend(mesh: DeviceMesh, name: str) -> dict[str, object]:
    layout = getattr(hw.distributed, name)()
    attn, x = layer(), inputs()
    undo = hw.distributed.context_parallel(attn, mesh, layout=layout)
    part = hw.distributed.shard(x, mesh, dim=1, layout=layout).clone().requires_grad_()
    positions = hw.distributed.shard(torch.arange(LENGTH), mesh, dim=0, layout=layout)
    with hw.watch(attn) as seen:
        out = attn(part, positions=positions)
    out.square().sum().backward()
    undo()
    grads = {name: x.grad for name, x in attn.named_parameters()}
    return {
        "out": out.detach(), "x": part.grad, "grads": grads, "positions": positions,
        "entropy": seen.heads()["entropy_mean"], "max": seen.heads()["max_logit_max"],
        "again": attn(x).detach(),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["contiguous", "head_tail"])
def test_a_layer_of_headwise(processes: Processes, name: str) -> None:
    found = processes.run(attend, 3, name)
    attn, x = layer(), inputs().requires_grad_()
    with hw.watch(attn) as seen:
        out = attn(x)
    out.square().sum().backward()
    order = torch.cat([part["positions"] for part in found]).argsort()
    for part, whole in (("out", out.detach()), ("x", x.grad)):
        joined = torch.cat([each[part] for each in found], 1)[:, order]
        torch.testing.assert_close(joined, whole, rtol=1e-9, atol=1e-9)
    for parameter, whole in attn.named_parameters():
        total = sum(each["grads"][parameter] for each in found)
        torch.testing.assert_close(total, whole.grad, rtol=1e-9, atol=1e-9)
    largest = [max(each) for each in zip(*(part["max"] for part in found), strict=True)]
    assert largest == pytest.approx(seen.heads()["max_logit_max"])
    for part in found:
        torch.testing.assert_close(part["again"], out.detach())  # undone


def family(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    import headwise.transformers  # noqa: F401 (registers the implementation)

    sizes = {
        "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 99,
        "attn_implementation": "headwise", "sliding_window": 7,
    }  # fmt: skip
    more = {
        "Mistral": {},
        "Gemma3Text": {"layer_types": ["sliding_attention", "full_attention"]},
        "GptOss": {
            "layer_types": ["sliding_attention", "full_attention"], "num_local_experts": 2,
            "num_experts_per_tok": 1,
        },
    }  # fmt: skip
    kind = {"Gemma3Text": "Gemma3"}.get(name, name)
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**sizes | more[name])
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def read(mesh: DeviceMesh, name: str, layout: str) -> dict[str, object]:
    made = getattr(hw.distributed, layout)()
    model = family(name)
    hw.distributed.context_parallel(model, mesh, layout=made)
    ids = torch.arange(LENGTH)[None] * 7 % 99
    positions = hw.distributed.shard(torch.arange(LENGTH)[None], mesh, dim=1, layout=made)
    part = hw.distributed.shard(ids, mesh, dim=1, layout=made)
    logits = model(part, position_ids=positions).logits
    logits.square().mean(-1).sum().backward()
    grad = sum(x.grad.double().square().sum() for x in model.parameters() if x.grad is not None)
    refused = []
    for wrong in ({}, {"position_ids": positions, "attention_mask": torch.ones_like(part)}):
        try:
            model(part, **wrong)
        except ValueError as error:
            refused.append(str(error))
    embedding = model.get_input_embeddings().weight.grad
    return {
        "logits": logits.detach(), "embedding": embedding, "refused": refused, "some": float(grad)
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Mistral", "Gemma3Text", "GptOss"])
@pytest.mark.parametrize("layout", ["contiguous", "head_tail"])
def test_models_that_others_refuse(processes: Processes, name: str, layout: str) -> None:
    found = processes.run(read, 2, name, layout)
    model = family(name)
    logits = model(torch.arange(LENGTH)[None] * 7 % 99).logits
    logits.square().mean(-1).sum().backward()
    pieces = getattr(hw.distributed, layout)().pieces(LENGTH, 2)
    order = torch.cat([numbers(ranges) for ranges in pieces]).argsort()
    joined = torch.cat([part["logits"] for part in found], 1)[:, order]
    torch.testing.assert_close(joined, logits.detach(), rtol=1e-4, atol=1e-4)
    total = sum(part["embedding"] for part in found)
    whole = model.get_input_embeddings().weight.grad
    torch.testing.assert_close(total, whole, rtol=1e-3, atol=1e-3 * float(whole.abs().max()))
    assert "needs position_ids" in found[0]["refused"][0]
    assert "takes no attention_mask" in found[0]["refused"][1]
