"""Whole models on split sequences give what one process gives, and are watched all the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import headwise as hw
from headwise.distributed.ranges import positions
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


def texts() -> dict[str, Tensor]:
    """Two sequences, padded on the left and on the right, and the labels of what is not padding."""
    ids = torch.stack([torch.arange(LENGTH) * 7 % 99, torch.arange(LENGTH) * 5 % 99])
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    mask[0, :3], mask[1, -5:] = 0, 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def reads(model: nn.Module, given: dict[str, Tensor], **watching: object) -> dict[str, object]:
    with hw.watch(model, maps=False, **watching) as seen:
        found = model(**given)
        if watching:
            seen.step()
    found.loss.backward()
    grads = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    heads = list(seen.heads())
    return {"logits": found.logits.detach(), "loss": found.loss.detach(), "grads": grads} | {
        name: [row[name] for row in heads] for name in ("entropy_mean", "max_logit_max")
    }


def read(mesh: DeviceMesh, name: str, layout: str) -> dict[str, object]:
    made = getattr(hw.distributed, layout)()
    model = family(name)
    hw.distributed.context_parallel(model, mesh, layout=made)
    given = texts()
    part = {
        key: hw.distributed.shard(x, mesh, dim=1, layout=made).clone() for key, x in given.items()
    }
    found = reads(model, part, mesh=mesh)
    refused, alone = [], mesh.get_local_rank() == 1
    for wrong in ({"past_key_values": object()}, {"logits_to_keep": 1}, {"attention_mask": whole}):
        try:
            model(part["input_ids"], **wrong)
        except ValueError as error:
            refused.append(str(error))
    for one in ({"labels": part["labels"]}, {"logits_to_keep": 1}):  # on one rank
        try:
            model(part["input_ids"], **(one if alone else {}))
        except (ValueError, hw.distributed.RankError) as error:
            refused.append(str(error))
    return found | {"refused": refused}


whole = torch.ones(2, LENGTH)


CASES = [
    (name, layout, 4)  # windows of 7, parts of 5 and 6
    for name in ("Mistral", "Gemma3Text", "GptOss")
    for layout in ("contiguous", "head_tail")
]


@pytest.mark.parametrize(
    ("name", "layout", "ranks"),
    [
        ("Mistral", "head_tail", 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow) for case in CASES
        ),  # four import transformers
    ],
)
def test_models_that_others_refuse(
    processes: Processes, name: str, layout: str, ranks: int
) -> None:
    """With padding on both sides, labels, and windows longer than a rank's part."""
    found = processes.run(read, ranks, name, layout)
    alone = reads(family(name), texts())
    pieces = getattr(hw.distributed, layout)().pieces(LENGTH, ranks)
    order = torch.cat([positions(ranges) for ranges in pieces]).argsort()
    joined = torch.cat([part["logits"] for part in found], 1)[:, order]
    real = texts()["attention_mask"].bool()
    torch.testing.assert_close(joined[real], alone["logits"][real], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(sum(part["loss"] for part in found), alone["loss"])
    for parameter, grad in alone["grads"].items():
        total = sum(part["grads"].get(parameter, 0) for part in found)
        torch.testing.assert_close(total, grad, rtol=1e-3, atol=1e-4 * float(grad.abs().max()))
    for part in found:
        assert part["entropy_mean"] == pytest.approx(alone["entropy_mean"], rel=1e-4)  # no padding
        assert part["max_logit_max"] == pytest.approx(alone["max_logit_max"], rel=1e-4)
        cache, kept, mask, labels, failed = part["refused"]
        assert "takes no past_key_values" in cache
        assert "takes no logits_to_keep" in kept
        assert "it is this rank's part (2, " in mask
        assert "rank 1 differs in labels: given there, None elsewhere" in labels
        assert "takes no logits_to_keep" in failed


class Convolved(nn.Module):
    """Attention after a convolution, which sees the neighbours of a position."""

    def __init__(self) -> None:
        super().__init__()
        self.around, self.attention = nn.Conv1d(32, 32, 3), layer()


def convolved(mesh: DeviceMesh) -> str:
    try:
        hw.distributed.context_parallel(Convolved(), mesh)
    except ValueError as error:
        return str(error)
    return ""


def test_a_model_that_mixes_positions_elsewhere_is_refused(processes: Processes) -> None:
    (said, _) = processes.run(convolved, 2)
    assert "around of this Convolved is a Conv1d, which would mix the positions" in said


def cached(mesh: DeviceMesh) -> str:
    attn = layer()
    hw.distributed.context_parallel(attn, mesh)
    with pytest.raises(ValueError) as error:
        attn(inputs(), cache=hw.nn.GrowingCache())
    return str(error.value)


def test_a_cache_of_one_ranks_part_is_refused(processes: Processes) -> None:
    for said in processes.run(cached, 2):
        assert "a cache would hold this rank's part" in said
        assert "undo context_parallel to generate" in said


def two_dimensions(mesh: DeviceMesh) -> dict[str, object]:
    """Heads over one dimension of a mesh, the sequence over the other."""
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "cp"))
    q, k, v = whole_call()
    heads = both["tp"].get_local_rank()
    own = q.chunk(2, 1)[heads], k.chunk(2, 1)[heads], v.chunk(2, 1)[heads]
    part = [hw.distributed.shard(x, both["cp"], dim=2) for x in own]
    out, seen = hw.distributed.observe(*part, mesh=both["cp"], mask=hw.mask.causal())
    return {"out": hw.distributed.unshard(out, both["cp"], dim=2), "entropy": seen.entropy}


def whole_call() -> tuple[Tensor, Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(3)
    shapes = [(1, heads, 13, 8) for heads in (8, 4, 4)]
    q, k, v = (torch.randn(shape, generator=numbers, dtype=torch.float64) for shape in shapes)
    return q, k, v


def test_heads_and_sequence_on_a_mesh_of_two_dimensions(processes: Processes) -> None:
    found = processes.run(two_dimensions, 4)  # ranks 0, 1 have the first heads; 2, 3 the others
    out, seen = hw.observe(*whole_call(), mask=hw.mask.causal())
    assert torch.equal(found[0]["out"], found[1]["out"])
    torch.testing.assert_close(torch.cat([found[0]["out"], found[2]["out"]], 1), out)
    rows = [torch.cat([found[i]["entropy"], found[i + 1]["entropy"]], 2) for i in (0, 2)]
    torch.testing.assert_close(torch.cat(rows, 1), seen.entropy)


def sharded(mesh: DeviceMesh) -> dict[str, object]:
    """FSDP2 over the ranks that share a sequence."""
    attn = layer()
    fully_shard(attn, mesh=mesh)
    hw.distributed.context_parallel(attn, mesh)
    positions = hw.distributed.shard(torch.arange(LENGTH), mesh, dim=0)
    with hw.watch(attn, mesh=mesh) as seen:
        out = attn(hw.distributed.shard(inputs(), mesh, dim=1), positions=positions)
        seen.step()
    out.square().sum().backward()
    grads = {name: x.grad.full_tensor() for name, x in attn.named_parameters()}
    return {"grads": grads, "entropy": seen.heads()["entropy_mean"]}


def test_parameters_may_be_sharded_over_the_same_ranks(processes: Processes) -> None:
    found = processes.run(sharded, 2)
    attn = layer()
    with hw.watch(attn) as seen:
        attn(inputs()).square().sum().backward()
    for name, whole in attn.named_parameters():
        mean = found[0]["grads"][name]  # FSDP averages over ranks what is a sum here
        torch.testing.assert_close(2 * mean, whole.grad, rtol=1e-9, atol=1e-9)
    assert found[0]["entropy"] == pytest.approx(seen.heads()["entropy_mean"])
