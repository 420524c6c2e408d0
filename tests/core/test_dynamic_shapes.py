"""Calls are checked, masked and summed up in one graph, whatever lengths it is compiled for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import headwise as hw

CASES: dict[str, Callable[[], dict[str, object]]] = {
    "lengths made inside": lambda: {"mask": hw.mask.lengths(torch.tensor([5, 9]))},
    "lengths in a list": lambda: {"mask": hw.mask.causal() & hw.mask.lengths([5, 9])},
    "an additive score": lambda: {"score": hw.Additive(torch.ones(2, 4))},
    "a temperature for each head": lambda: {"score": hw.Cosine(torch.ones(2))},
}


@pytest.mark.parametrize("case", CASES)
def test_a_graph_of_any_length_holds_a_call_and_the_values_of_its_heads(case: str) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        out, seen = hw.observe(q, k, v, stats=("entropy", "max_logit"), **CASES[case]())
        return out, seen.heads()

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="eager")
    for length in (16, 24):
        three = torch.randn(3, 2, 2, length, 4).unbind(0)
        (out, figures), (wanted, truth) = compiled(*three), call(*three)
        torch.testing.assert_close(out, wanted)
        torch.testing.assert_close(figures, truth)
