"""Scores and likeness of heads, from weights that are written down."""

import pytest
import torch

import headwise as hw
from headwise.watching import head_types
from headwise.watching.rules import EntropyCollapse
from headwise.watching.table import Table
from tests.watching.foreign import model_of


def test_likeness_is_the_mean_over_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    weights = torch.stack((one, other))  # the heads agree in one row and in no key of the other
    monkeypatch.setattr(head_types, "sampled_weights", lambda layer: (weights, torch.arange(2)))
    assert head_types.similarity(None).tolist() == [[1.0, 0.5], [0.5, 1.0]]


def test_the_keys_that_a_row_does_not_see_leave_it_uniform() -> None:
    even = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]])
    narrow = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
    spread = head_types._spread(torch.stack((even, narrow)))
    torch.testing.assert_close(spread, torch.tensor([1.0, 0.375], dtype=torch.float64))


def test_a_head_has_collapsed_unless_its_place_explains_half_of_its_weight() -> None:
    row = {"layer": 0, "head": 0, "entropy_mean": 0.05, "self_mass_mean": 0.2}
    rows = [row | {"head": head, "sink_mass_mean": mass} for head, mass in enumerate((0.2, 0.5))]
    found = EntropyCollapse().check(Table(rows), ())
    assert [finding.head for finding in found] == [0]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_type(side: str) -> None:
    model, count, more = model_of("llama"), 60, 40
    tokens = torch.randint(3, 20, (2, count), generator=torch.Generator().manual_seed(0))
    padding = torch.full((2, more), 1)
    both = [padding, tokens] if side == "left" else [tokens, padding]
    shown = torch.cat([torch.full_like(x, int(x is tokens)) for x in both], 1)
    places = (shown.cumsum(1) - 1).clamp_min(0)
    with torch.no_grad(), hw.watch(model) as alone:
        model(tokens)
    with torch.no_grad(), hw.watch(model) as seen:
        model(torch.cat(both, 1), attention_mask=shown, position_ids=places)
    for name in ("dormant", "induction", "previous", "self", "sink"):
        assert seen.types()[name] == pytest.approx(alone.types()[name], rel=1e-4), name
