"""The work that watching adds to a compiled graph, counted in nodes."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch._dynamo.utils
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule, Node

import headwise as hw

transformers = pytest.importorskip("transformers")

tells_positions = pytest.mark.skipif(
    "q_length" not in inspect.signature(transformers.masking_utils.sdpa_mask).parameters,
    reason="this transformers tells a mask's positions in a tensor, so masks are read",
)

LAYERS, LENGTH = 2, 100
FIVE = ("max_logit", "entropy", "top_prob", "sink_mass", "logit_var")


def nodes(options: dict[str, Any] | None, padded: bool = False) -> list[Node]:
    """The nodes of a Llama's forward, watched with these options or not at all."""
    torch._dynamo.reset()
    found: list[Node] = []

    def compiler(graph: GraphModule, _: list[Tensor]) -> Any:
        found.extend(node for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    config = transformers.LlamaConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=LAYERS,
        intermediate_size=64, vocab_size=99, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    model: nn.Module = transformers.LlamaModel(config).requires_grad_(False)
    backend = aot_autograd(fw_compiler=compiler)
    fast: Any = torch.compile(model, fullgraph=True, backend=backend)
    ids = torch.randint(0, 99, (2, LENGTH))
    given = {"attention_mask": torch.ones(2, LENGTH, dtype=torch.long)} if padded else {}
    if options is None:
        fast(ids, **given)
    else:
        with hw.watch(fast, maps=False, **options):
            fast(ids, **given)
    return found


def square(found: list[Node]) -> int:
    """How many nodes make something with one entry per query and key."""
    values = (node.meta.get("val") for node in found)
    return sum(isinstance(x, Tensor) and x.shape[-2:] == (LENGTH, LENGTH) for x in values)


@pytest.fixture(scope="module")
def plain() -> list[Node]:
    return nodes(None)


@tells_positions
@pytest.mark.parametrize(
    ("options", "most"),
    [
        pytest.param({"rows": 64}, 165, marks=pytest.mark.slow),
        ({"stats": FIVE}, 85),
        pytest.param({}, 165, marks=pytest.mark.slow),
    ],
    ids=("rows", "five", "all"),
)
def test_a_watched_layer_adds_few_nodes_and_reads_no_mask(
    plain: list[Node], options: dict[str, Any], most: int
) -> None:
    watched = nodes(options)
    assert (len(watched) - len(plain)) / LAYERS < most
    assert square(watched) == square(plain)
    assert not any("searchsorted" in str(node.target) for node in watched)  # one sequence, causal


class Numbered(nn.Module):
    """A model whose positions are an arange; written to `in_place`, they number two sequences."""

    def __init__(self, model: nn.Module, in_place: bool) -> None:
        super().__init__()
        self.model, self.in_place = model, in_place

    def forward(self, input_ids: Tensor) -> Any:
        places = torch.arange(input_ids.shape[1])
        if self.in_place:
            places[12:] -= 12
        return self.model(input_ids, position_ids=places[None])


@tells_positions
def test_positions_from_outside_may_number_packed_sequences() -> None:
    config = transformers.LlamaConfig(
        hidden_size=32, num_attention_heads=4, num_hidden_layers=1, intermediate_size=64,
        vocab_size=99, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    model: nn.Module = transformers.LlamaModel(config).requires_grad_(False)
    ids = torch.randint(0, 99, (1, 30))
    whole, written = Numbered(model, in_place=False), Numbered(model, in_place=True)
    for one, places in (
        (model, {"position_ids": torch.cat((torch.arange(12), torch.arange(18)))[None]}),
        (whole, {}),
        (written, {}),
    ):
        fast: Any = torch.compile(one, fullgraph=True, backend="aot_eager")
        with hw.watch(one, maps=False) as expected:
            one(input_ids=ids, **places)
        with hw.watch(fast, maps=False) as found:
            fast(input_ids=ids, **places)
        for name in expected.heads().columns[4:]:
            assert found.heads()[name] == pytest.approx(expected.heads()[name], rel=1e-4, abs=1e-5)
