"""Whether what i sees in j is what j sees in i."""

from __future__ import annotations

import pytest
import torch

import headwise as hw
from headwise.nn import Shared


def score(model: hw.nn.MultiHeadAttention) -> list[float]:
    with hw.watch(model) as seen:
        model(torch.randn(1, 5, 32))
    return seen.symmetry()["symmetry"]


def test_equal_weights_are_symmetric_and_unrelated_ones_neither() -> None:
    torch.manual_seed(0)
    model = hw.nn.MultiHeadAttention(32, 4, kv_heads=2)
    assert max(map(abs, score(model))) < 0.5
    shared = hw.nn.MultiHeadAttention(32, 4, projections=Shared())
    assert score(shared) == [1.0] * 4
    with torch.no_grad():
        model = hw.nn.MultiHeadAttention(32, 4)
        model.key.weight.copy_(model.query.weight)
    assert score(model) == pytest.approx([1.0] * 4)


def test_it_is_the_share_of_the_symmetric_part() -> None:
    torch.manual_seed(1)
    model = hw.nn.MultiHeadAttention(32, 4)
    q, k = (x.weight.double().unflatten(0, (4, -1)) for x in (model.query, model.key))
    m = q.mT @ k
    even, odd = (m + m.mT) / 2, (m - m.mT) / 2
    wanted = (even.square().sum((1, 2)) - odd.square().sum((1, 2))) / m.square().sum((1, 2))
    assert score(model) == pytest.approx(wanted.tolist())


def test_norms_and_caps_do_not_matter_to_it() -> None:
    options = {"qk_norm": hw.nn.RMSNorm(), "softcap": 30.0, "position": hw.nn.ALiBi()}
    torch.manual_seed(2)
    model = hw.nn.MultiHeadAttention(32, 4, **options)
    with torch.no_grad():
        model.key.weight.copy_(model.query.weight)
    assert score(model) == pytest.approx([1.0] * 4)


def test_weights_that_are_not_found_are_named_without_a_word_of_clipping() -> None:
    model = hw.nn.MultiHeadAttention(32, 4, projections=hw.nn.Unprojected())
    with pytest.raises(ValueError, match=r"^the model: Unprojected queries and keys have no"):
        score(model)
