"""What a head is worth: the measure without it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.models import GPT, GPTConfig

CONFIG = GPTConfig(vocabulary=20, context=32, d_model=16, layers=2, heads=2)


def test_a_head_that_is_switched_off_is_one_that_was_dropped() -> None:
    torch.manual_seed(0)
    model, ids = GPT(CONFIG).eval(), torch.randint(0, 20, (1, 12))

    def measure() -> Tensor:
        return model(ids).square().mean().detach()

    whole = float(measure())
    with hw.watch(model) as seen:
        table = seen.importance(measure)
        assert float(measure()) == pytest.approx(whole)  # all are on again
    for row in table:
        with torch.no_grad(), model.blocks[row["layer"]].attention.drop_heads([row["head"]]):
            assert row["without"] == pytest.approx(float(measure()))
        assert row["importance"] == pytest.approx(row["without"] - whole)


def test_heads_come_back_after_an_error() -> None:
    model, ids = GPT(CONFIG).eval(), torch.randint(0, 20, (1, 12))
    before = model(ids)

    def broken() -> float:
        model(ids)
        raise RuntimeError("out of luck")

    with hw.watch(model) as seen:
        model(ids)
        with pytest.raises(RuntimeError, match="out of luck"):
            seen.importance(broken)
        torch.testing.assert_close(model(ids), before)
    with pytest.raises(ValueError, match=r"attach\(\) first"):
        seen.importance(broken)
