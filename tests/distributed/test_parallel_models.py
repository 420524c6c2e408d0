"""`hw.models` and `hw.nn` under FSDP2, tensor-parallel plans and context parallelism."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import headwise as hw
from headwise.models import (
    GPT,
    Bert,
    BertConfig,
    FixedGPT,
    FixedGPTConfig,
    GPTConfig,
    Transformer,
    TransformerConfig,
    ViT,
    ViTConfig,
)
from headwise.nn import GELU, DynamicNTK, Learned, ReLU, Rotary, SwiGLU
from tests.distributed.processes import Processes

pytestmark = pytest.mark.xdist_group("ranks")  # one worker, one set of processes

SIZES = {"d_model": 32, "heads": 4}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": lambda: GPT(
        GPTConfig(99, layers=2, kv_heads=2, window=7, feed_forward=SwiGLU(48), **SIZES)
    ),
    "learned positions": lambda: GPT(
        GPTConfig(99, layers=1, position=Learned(40), feed_forward=GELU(48), tied=False, **SIZES)
    ),
    "dynamic rotary": lambda: GPT(
        GPTConfig(
            99, layers=1, position=Rotary(scaling=DynamicNTK(2.0, 10)), sinks=True,
            feed_forward=GELU(48), **SIZES,
        )
    ),
    "fixed gpt": lambda: FixedGPT(
        FixedGPTConfig(99, context=30, layers=1, feed_forward=GELU(48), **SIZES)
    ),
    "bert": lambda: Bert(
        BertConfig(99, context=40, layers=2, feed_forward=GELU(48), dropout=0.0, **SIZES)
    ),
    "transformer": lambda: Transformer(
        TransformerConfig(
            99, encoder_layers=1, decoder_layers=1, feed_forward=ReLU(48), dropout=0.0, **SIZES
        )
    ),
    "vit": lambda: ViT(ViTConfig(image=16, layers=2, feed_forward=GELU(48), **SIZES)),
}  # fmt: skip
SPLIT = [name for name in MODELS if name != "vit"]


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name]().double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def inputs(name: str) -> tuple[Tensor, ...]:
    numbers = torch.Generator().manual_seed(1)
    if name == "vit":
        return (torch.randn(4, 3, 16, 16, generator=numbers, dtype=torch.float64),)
    tokens = torch.randint(3, 99, (4, 22), generator=numbers)
    if name == "transformer":
        return tokens, torch.randint(3, 99, (4, 13), generator=numbers)
    return (tokens,)


def padding(name: str, rows: slice = slice(None)) -> dict[str, object]:
    """Padding of some sequences, which is told as that of the whole sequence."""
    ends = torch.tensor([22, 9, 17, 1])[rows]
    told = {"bert": {"lengths": ends}, "transformer": {"source_lengths": ends}, "vit": {}}
    return told.get(name, {"mask": hw.mask.lengths(ends)})


def loss(out: Tensor) -> Tensor:
    return out.square().mean(-1).sum()


def grads(model: nn.Module) -> dict[str, Tensor]:
    found = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in found.items()}


def alone(name: str) -> tuple[Tensor, dict[str, Tensor]]:
    model = built(name)
    out = model(*inputs(name), **padding(name))
    loss(out).backward()
    return out.detach(), grads(model)


def fully_sharded(mesh: DeviceMesh, name: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Each rank has a part of the batch, and of every parameter."""
    model = built(name)
    for layers in model.modules():
        if isinstance(layers, nn.ModuleList):
            for layer in layers:
                fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    first = 2 * mesh.get_local_rank()
    rows = slice(first, first + 2)
    out = model(*(x[rows] for x in inputs(name)), **padding(name, rows))
    (mesh.size() * loss(out)).backward()  # FSDP averages over ranks what is a sum here
    return out.detach(), grads(model)


@pytest.mark.parametrize("name", MODELS)
def test_parameters_may_be_sharded(processes: Processes, name: str) -> None:
    whole, wanted = alone(name)
    found = processes.run(fully_sharded, 2, name)
    close(torch.cat([out for out, _ in found]), whole)
    for parameter, grad in wanted.items():
        close(found[0][1][parameter], grad)


def tensor_parallel(mesh: DeviceMesh, name: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Each rank has some of the heads, and a part of every feed-forward layer."""
    model = built(name)
    colwise = ("query", "key", "value", "gate", "up", "feed_forward.0")
    plan = {}
    for module, kind in model.named_modules():
        if isinstance(kind, nn.Linear) and module.endswith(colwise):
            plan[module] = ColwiseParallel()
        elif isinstance(kind, nn.Linear) and module.endswith((".out", "down", "feed_forward.2")):
            plan[module] = RowwiseParallel()
    parallelize_module(model, mesh, plan)
    out = model(*inputs(name), **padding(name))
    loss(out).backward()
    return out.detach(), grads(model)


@pytest.mark.parametrize("name", ["gpt", "learned positions", "bert", "transformer", "vit"])
def test_heads_may_be_spread_by_a_tensor_parallel_plan(processes: Processes, name: str) -> None:
    whole, wanted = alone(name)
    for out, found in processes.run(tensor_parallel, 2, name):
        close(out, whole)
        for parameter, grad in wanted.items():
            close(found[parameter], grad)


def rotated(mesh: DeviceMesh) -> Tensor:
    """Queries that `ColwiseParallel(use_local_output=False)` gives: DTensors of some heads."""
    position = Rotary().build(32, 4, 8)
    heads = distribute_tensor(queries(), mesh, [Shard(1)])
    return position.rotate(heads, position.waves(torch.arange(5))).full_tensor()


def queries() -> Tensor:
    return torch.randn(2, 4, 5, 8, generator=torch.Generator().manual_seed(2))


def test_sharded_heads_are_rotated(processes: Processes) -> None:
    position = Rotary().build(32, 4, 8)
    whole = position.rotate(queries(), position.waves(torch.arange(5)))
    for found in processes.run(rotated, 2):
        torch.testing.assert_close(found, whole)


def context_parallel(mesh: DeviceMesh, name: str, layout: str) -> object:
    """Each rank has some of the positions of every sequence."""
    made = getattr(hw.distributed, layout)()
    model = built(name)
    hw.distributed.context_parallel(model, mesh, layout=made)
    part = [hw.distributed.shard(x, mesh, dim=1, layout=made) for x in inputs(name)]
    out = model(*part, **padding(name))
    loss(out).backward()
    return hw.distributed.unshard(out.detach(), mesh, dim=1, layout=made), grads(model)


@pytest.mark.parametrize("layout", ["contiguous", "head_tail"])
@pytest.mark.parametrize("name", SPLIT)
def test_sequences_may_be_split(processes: Processes, name: str, layout: str) -> None:
    whole, wanted = alone(name)
    found = processes.run(context_parallel, 3, name, layout)
    for out, _ in found:
        close(out, whole)
    for parameter, grad in wanted.items():
        close(sum(part[parameter] for _, part in found if parameter in part), grad)


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


def refused(mesh: DeviceMesh) -> str:
    try:
        hw.distributed.context_parallel(built("vit"), mesh)
    except ValueError as error:
        return str(error)
    return ""


def test_images_are_not_split(processes: Processes) -> None:
    assert "patches of this ViT is a Conv2d" in processes.run(refused, 2)[0]
