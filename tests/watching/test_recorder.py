"""A step that learns is observed in the pass that computes it; a sample beside it, bit by bit."""

from typing import Any

import pytest
import torch

import headwise as hw
from headwise.watching.table import figure_names


@pytest.mark.parametrize(
    "options",
    [{}, {"sinks": True, "softcap": 5.0}, {"kv_heads": 2, "position": hw.nn.Rotary()}],
    ids=["plain", "sinks and cap", "grouped"],
)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_step_that_learns_has_the_figures_of_one_that_does_not(
    options: dict[str, Any], dropout: float
) -> None:
    model = hw.nn.MultiHeadAttention(32, 4, mask=hw.mask.causal(), dropout=dropout, **options)
    x = torch.randn(2, 20, 32)
    torch.manual_seed(5)
    plain = model(x)
    torch.manual_seed(5)
    with hw.watch(model, rows=7):
        assert torch.equal(model(x), plain)
    torch.manual_seed(5)
    with hw.watch(model) as learning:
        out = model(x)
    torch.testing.assert_close(out, plain)
    wanted = torch.autograd.grad(plain.sum(), model.parameters())
    torch.testing.assert_close(torch.autograd.grad(out.sum(), model.parameters()), wanted)
    with hw.watch(model.eval()) as alone, torch.no_grad():
        model(x)
    seen, expected = learning.heads(), alone.heads()
    assert seen.columns == expected.columns
    for name in figure_names(expected):
        assert seen[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name
