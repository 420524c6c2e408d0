"""What a head is worth: the measure without it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

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


def test_heads_of_a_compiled_model_are_switched_off_too() -> None:
    torch.manual_seed(0)
    model, ids = GPT(CONFIG).eval(), torch.randint(0, 20, (1, 12))
    fast = torch.compile(model, backend="eager")
    tables = []
    for one in (model, fast):
        with hw.watch(one) as seen:
            one(ids)
            tables.append(seen.importance(lambda one=one: one(ids).square().mean()))
    assert all(tables[0]["importance"])
    assert tables[1]["importance"] == pytest.approx(tables[0]["importance"])


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


def test_only_heads_that_are_watched_are_switched_off() -> None:
    model, ids = GPT(CONFIG).eval(), torch.randint(0, 20, (1, 12))
    with hw.watch(model, heads=[1]) as seen:
        table = seen.importance(lambda: model(ids).square().mean())
    assert [(row["layer"], row["head"]) for row in table] == [(0, 1), (1, 1)]


class Twice(nn.Module):
    """One layer at two depths, as in ALBERT."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = hw.nn.MultiHeadAttention(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(self.attention(x))


def test_a_module_at_several_depths_has_one_row_a_head() -> None:
    model, x = Twice().eval(), torch.randn(1, 9, 16)

    def measure() -> Tensor:
        return model(x).square().mean()

    with hw.watch(model) as seen:
        table = seen.importance(measure)
        assert len(seen.layers) == 2
    assert [(row["name"], row["head"]) for row in table] == [("attention", 0), ("attention", 1)]
    for row in table:
        with torch.no_grad(), model.attention.drop_heads([row["head"]]):
            assert row["without"] == pytest.approx(float(measure()))


class Plain(nn.Module):
    """Attention as people write it around PyTorch's function."""

    def __init__(self) -> None:
        super().__init__()
        self.make, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, 8)).transpose(1, 2) for y in self.make(x).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(out.transpose(1, 2).flatten(2))


def llama(x: Tensor) -> tuple[nn.Module, nn.Linear, Callable[[], Tensor]]:
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    model = LlamaModel(config).eval()
    run = partial(model, inputs_embeds=x)
    return model, model.layers[0].self_attn.o_proj, lambda: run().last_hidden_state


@pytest.mark.parametrize("kind", ["transformers", "sdpa", "nn.MultiheadAttention"])
def test_heads_of_other_peoples_attention_are_switched_off_alike(kind: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 9, 16)
    if kind == "transformers":
        model, out, run = llama(x)
    elif kind == "sdpa":
        model = Plain()
        out, run = model.out, partial(model, x)
    else:
        model = nn.MultiheadAttention(16, 2, batch_first=True)
        out, run = model.out_proj, lambda: model(x, x, x)[0]

    def measure() -> Tensor:
        return run().square().mean().detach()

    before = copy.deepcopy(model.state_dict())
    with hw.watch(model) as seen:
        table = seen.importance(measure)
    after = model.state_dict()
    assert all(torch.equal(after[name], x) for name, x in before.items())
    assert len(table) == 2
    for row in table:
        kept = out.weight.detach().clone()
        with torch.no_grad():
            out.weight[:, 8 * row["head"] : 8 * row["head"] + 8] = 0  # the head's part of the sum
        assert row["without"] == pytest.approx(float(measure()), rel=1e-5)
        with torch.no_grad():
            out.weight.copy_(kept)
