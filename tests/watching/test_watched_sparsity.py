"""Per-head figures of what sparse attention would lose, in every way that a model is watched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from tests.watching.stacks import Stack, by_torch

POLICIES = [
    hw.sparse.TopK(3), hw.sparse.TopK((1, 2, 3, 4)), hw.sparse.Window(2, sinks=1),
    hw.sparse.Blocks(3, 2),
]  # fmt: skip
NAMES = ["top_3", "top_1_to_4", "window_2_sinks_1", "blocks_2x3_mean"]


def by_hand(seen: hw.Watch, layer: int, policy: hw.sparse.Policy) -> tuple[Tensor, Tensor]:
    """The weight kept and the output's error of a layer, (B, H, N), by its call."""
    call = seen.layer(layer)._calls[-1].call
    assert call is not None
    amap = hw.attention_map(call.q, call.k, **call.given.of_weights())
    v = VALUES[layer]
    out = hw.sparse.attention(call.q, call.k, v, policy, **call.given.of_weights())
    own = hw.attention(call.q, call.k, v, **call.given.of_weights())
    return amap.kept(policy), (out - own).norm(dim=-1) / own.norm(dim=-1)


VALUES: list[Tensor] = []


def keeping_values(layer: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    VALUES.append(v.detach())
    return by_torch(layer, q, k, v)


@pytest.mark.parametrize("rows", [None, 5])
def test_heads_have_the_weight_kept_the_error_and_the_keys_needed(rows: int | None) -> None:
    torch.manual_seed(0)
    model, x = Stack(keeping_values), torch.randn(2, 12, 32)
    VALUES.clear()
    with torch.no_grad(), hw.watch(model, sparse=POLICIES, rows=rows) as seen:
        model(x)
    table = seen.heads()
    for layer in range(2):
        here = seen.layer(layer).observation
        some = slice(None) if here.rows is None else here.rows
        rows_of = table.where(layer=layer)
        call = seen.layer(layer)._calls[-1].call
        amap = hw.attention_map(call.q, call.k, **call.given.of_weights())
        needed = amap.needed(0.95)[:, :, some].double()
        torch.testing.assert_close(here.values["needed_95"].double(), needed)
        assert rows_of["needed_95_mean"] == pytest.approx(needed.mean((0, 2)).tolist())
        for policy, name in zip(POLICIES, NAMES, strict=True):
            kept, error = (x[:, :, some] for x in by_hand(seen, layer, policy))
            torch.testing.assert_close(here.values[f"kept_{name}"], kept, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(here.values[f"error_{name}"], error, atol=1e-5, rtol=1e-3)
            for part, value in (("kept", kept), ("error", error)):
                means = value.double().mean((0, 2)).tolist()
                assert rows_of[f"{part}_{name}_mean"] == pytest.approx(means, rel=1e-4, abs=1e-6)


def test_sinks_take_their_share_of_what_is_kept() -> None:
    torch.manual_seed(0)
    attn = hw.nn.MultiHeadAttention(32, 4, kv_heads=2, mask=hw.mask.causal(), sinks=True)
    x, policy = torch.randn(2, 12, 32), hw.sparse.TopK(2)
    with torch.no_grad():
        attn.sinks.normal_()  # type: ignore[union-attr, operator]
        with hw.watch(attn, sparse=policy) as seen:
            attn(x)
        call = attn.prepare(x)
        options = call.given.of_weights()
        out = hw.sparse.attention(call.q, call.k, call.v, policy, **options)
        own = hw.attention(call.q, call.k, call.v, **options)
        error = (out - own).norm(dim=-1) / own.norm(dim=-1)
        kept = hw.attention_map(call.q, call.k, **options).kept(policy)
    found = seen.layer(0).observation.values
    torch.testing.assert_close(found["error_top_2"], error, atol=1e-5, rtol=1e-3)
    torch.testing.assert_close(found["kept_top_2"], kept, atol=1e-5, rtol=1e-4)


def test_everything_kept_loses_nothing() -> None:
    gpt = hw.load("gpt")
    ids = gpt.encode("to be or not to be, that is the question")
    with torch.no_grad(), hw.watch(gpt.model, sparse=hw.sparse.TopK(1000)) as seen:
        gpt.model(ids)
    table = seen.heads()
    assert table["kept_top_1000_mean"] == pytest.approx([1] * len(table), abs=1e-5)
    assert table["error_top_1000_mean"] == pytest.approx([0] * len(table), abs=1e-5)
    assert all(1 <= needed <= 16 for needed in table["needed_95_mean"])


@pytest.mark.parametrize("rows", [None, 4])
def test_compiled_models_have_the_same_figures(rows: int | None) -> None:
    torch.manual_seed(0)
    model, x = Stack(by_torch), torch.randn(2, 12, 32)
    options: dict[str, Any] = {"sparse": POLICIES, "rows": rows}
    with torch.no_grad():
        with hw.watch(model, **options) as eager:
            model(x)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        with hw.watch(compiled, **options) as seen:
            compiled(x)
            compiled(x)
    assert not seen.unread
    for name in (
        *(f"{part}_{x}_mean" for part in ("kept", "error") for x in NAMES),
        "needed_95_mean",
    ):
        assert seen.heads()[name] == pytest.approx(eager.heads()[name], rel=1e-4, abs=1e-6)


def test_a_training_keeps_series_scalars_alarms_and_folders(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, data = Stack(by_torch), torch.randn(4, 9, 32)
    plain = Stack(by_torch)
    plain.load_state_dict(model.state_dict())
    optimizers = [torch.optim.SGD(x.parameters(), 0.1) for x in (model, plain)]
    watch = hw.watch(model, sparse=[hw.sparse.TopK(2)], rows=4, alarms=True)
    with watch, watch.record(tmp_path):
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            for _ in range(3):
                optimizer.zero_grad()
                F.mse_loss(each(data), data.roll(1, 1)).backward()
                optimizer.step()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert len(watch.series) == 3
    assert "attn/layer_01/kept_top_2_mean" in watch.scalars()
    run = hw.watching.open_run(tmp_path)
    assert len(run.series) == 3
    assert run.series[-1].table["error_top_2_mean"] == watch.series[-1].table["error_top_2_mean"]


def test_steered_and_sparse_calls_are_those_that_are_recorded() -> None:
    torch.manual_seed(0)
    model, x = Stack(by_torch), torch.randn(2, 12, 32)
    steers = [(1, 2, (2, 5), 30.0), (1, 1, 0, 0.1, (4, 9))]
    with torch.no_grad(), hw.watch(model, sparse=hw.sparse.TopK(2)) as seen:
        with hw.steer(model, steers):
            model(x)
        p = torch.cat([seen.map(1, head).to_tensor() for head in range(4)], 1)
        best = p.topk(2).values.sum(-1)
        found = seen.layer(1).observation.values["kept_top_2"][:1]
        torch.testing.assert_close(found, best, atol=1e-5, rtol=1e-4)
        with hw.sparsify(model, hw.sparse.TopK(4)):
            model(x)
        p = torch.cat([seen.map(1, head).to_tensor() for head in range(4)], 1)
        best = p.topk(2).values.sum(-1)
        found = seen.layer(1).observation.values["kept_top_2"][:1]
        torch.testing.assert_close(found, best, atol=1e-5, rtol=1e-4)
        with hw.sparsify(model, hw.sparse.TopK(2)):
            model(x)
        error = seen.layer(1).observation.values["error_top_2"]
        torch.testing.assert_close(error, torch.zeros_like(error), atol=1e-5, rtol=0)


def test_layers_that_look_elsewhere_have_no_window() -> None:
    loaded = hw.load("translate")
    given = torch.randint(5, 40, (1, 7)), torch.randint(5, 40, (1, 5))
    policies = [hw.sparse.Window(2), hw.sparse.TopK(2)]
    with torch.no_grad(), hw.watch(loaded.model, sparse=policies) as seen:
        loaded.model(*given)
    for layer in seen.layers:
        figures = layer.figures()
        assert "kept_top_2_mean" in figures
        assert ("kept_window_2_mean" in figures) == (layer.kind == "self")


def test_a_policy_of_another_call_is_reported_and_the_model_runs_on() -> None:
    model, x = Stack(by_torch), torch.randn(2, 12, 32)
    wrong = hw.sparse.TopK((1, 2))
    says = "has 2 numbers, and this call 4 heads"
    with pytest.warns(UserWarning, match=says), hw.watch(model, sparse=wrong) as seen:
        model(x)
    assert "entropy_mean" in seen.heads().columns
    with (
        pytest.raises(ValueError, match="has 2 numbers"),
        hw.watch(model, sparse=wrong, strict=True),
    ):
        model(x)
    with pytest.raises(ValueError, match="give policies such as"):
        hw.watch(model, sparse=[64])  # type: ignore[list-item]
