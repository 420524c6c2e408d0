"""Nothing waits for a device while a model trains, and figures that come late are the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import headwise as hw
from headwise.models import GPT, GPTConfig
from headwise.watching.recorder.board import HostCopy
from headwise.watching.rules import DuplicatedHeads, LogitGrowth

WIDTH, HEADS, N = 32, 4, 12
WAITS = ("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2")


class NothingWaits(TorchDispatchMode):
    """Fails at operations whose result a GPU would be waited for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        places = args[1] if name.startswith("index") and isinstance(args[1], list) else ()
        by_mask = any(x is not None and x.dtype == torch.bool for x in places)
        assert name not in WAITS, f"{name} waits for the device"
        assert not by_mask, f"{name} by a mask waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def far_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the CPU like a device that is read only when somebody asks."""
    monkeypatch.setattr(HostCopy, "arrived", property(lambda _: False))
    monkeypatch.setattr("headwise.watching.recorder.proof.waits", lambda _: True)
    # The board adds its figures outside the operator, so that a test sees inside.
    monkeypatch.setattr("headwise.watching.recorder.board.needs_operator", lambda *_: False)


class Layer(nn.Module):
    """Attention by PyTorch's function, or written out with weights times a factor."""

    def __init__(self, factor: float | None = None) -> None:
        super().__init__()
        self.qkv, self.factor = nn.Linear(WIDTH, 3 * WIDTH), factor

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind(0)
        if self.factor is None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            out = (self.factor * (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)) @ v
        return x + out.transpose(1, 2).flatten(2)


def gpt() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """The blocks of our own model: its tokens are checked on a CPU, which reads them."""
    config = GPTConfig(vocabulary=50, context=64, d_model=WIDTH, layers=2, heads=HEADS)
    x = torch.randn(2, N, WIDTH)
    return nn.Sequential(*GPT(config).blocks), lambda blocks: blocks(x)


def llama() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=WIDTH, num_attention_heads=HEADS, num_key_value_heads=2, num_hidden_layers=2,
        intermediate_size=64, vocab_size=50, attn_implementation="sdpa",
    )  # fmt: skip
    ids = torch.randint(0, 50, (2, N))
    return transformers.LlamaForCausalLM(config), lambda model: model(ids).logits


def torch_layers() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 64, dropout=0.0, batch_first=True)
    x = torch.randn(2, N, WIDTH)
    return layer, lambda model: model(x, x)


def sdpa() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    x = torch.randn(2, N, WIDTH)
    return nn.Sequential(Layer(), Layer()), lambda model: model(x)


MODELS = {"headwise": gpt, "transformers": llama, "torch": torch_layers, "sdpa": sdpa}


@pytest.mark.parametrize("rows", [4, None])
@pytest.mark.parametrize("made", MODELS)
def test_a_watched_training_step_waits_for_nothing(
    made: str, rows: int | None, far_away: None
) -> None:
    torch.manual_seed(0)
    model, run = MODELS[made]()
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    watch = hw.watch(model.train(), rows=rows, maps=False, alarms=[LogitGrowth()])
    with watch:
        run(model)  # transformers looks once at what it is given
        with NothingWaits():
            run(model).sum().backward()
            optimiser.step()
        assert watch._series == []
        assert watch.latest is None
    assert [entry.step for entry in watch.series] == [0]
    assert all(row["entropy_mean"] > 0 for row in watch.series[0].table)


def trained(watch: hw.Watch, model: nn.Module, steps: int) -> None:
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        optimiser.zero_grad()
        model(torch.randn(2, N, WIDTH)).square().mean().backward()
        optimiser.step()


def test_figures_that_come_late_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    start = nn.Sequential(Layer(), Layer())
    state = {name: x.clone() for name, x in start.state_dict().items()}
    found = {}
    for late in (False, True):
        if late:
            monkeypatch.setattr(HostCopy, "arrived", property(lambda _: False))
        start.load_state_dict(state)
        torch.manual_seed(1)
        watch = hw.watch(start, maps=False, every=2, alarms=[LogitGrowth(0.01)])
        with watch, watch.record(tmp_path / str(late)):
            trained(watch, start, 5)
            assert len(watch._series) == (2 if late else 3)  # one step late
        run = hw.watching.open_run(tmp_path / str(late))
        found[late] = ([(x.step, list(x.table)) for x in watch.series], watch.alarms, run.steps)
    assert found[True] == found[False]
    assert {alarm.step for alarm in found[True][1]} == {0}
    assert found[True][2] == [0, 2, 4]


def test_asking_reads_what_is_on_its_way(far_away: None) -> None:
    model = Layer()
    with hw.watch(model, maps=False, alarms=[LogitGrowth(0.01)]) as seen:
        trained(seen, model, 1)
        assert seen.last_step == 0
        assert seen._series == []
        assert len(seen.heads()) == HEADS
        assert len(seen._series) == 1
        trained(seen, model, 1)
        assert {alarm.step for alarm in seen.alarms} == {0}
        assert len(seen._series) == 2


def test_maps_of_a_step_are_kept_in_that_step(tmp_path: Path, far_away: None) -> None:
    model = Layer()
    watch = hw.watch(model, alarms=[DuplicatedHeads(every=2)])
    with watch, watch.record(tmp_path / "run", keep=[(0, 1)], keep_every=3):
        trained(watch, model, 1)
        assert len(watch._series) == 1  # its map is kept
        trained(watch, model, 1)
        assert len(watch._series) == 2  # its heads are compared
        trained(watch, model, 1)
        assert len(watch._series) == 2
    assert [kept.step for kept in hw.watching.open_run(tmp_path / "run").kept] == [0]


@pytest.mark.parametrize("late", [False, True])
def test_a_layer_that_was_misread_leaves_the_tables(late: bool, request: Any) -> None:
    if late:
        request.getfixturevalue("far_away")
    model = nn.Sequential(Layer(), Layer(2.0), Layer(1.0))
    watch = hw.watch(model, maps=False)
    with pytest.warns(UserWarning, match=r"1: its output is not softmax.* off by .* times"), watch:
        trained(watch, model, 2)
    assert watch.unread == ["1"]
    assert [layer.name for layer in watch.layers] == ["0", "2"]
    assert len(watch.series) == 2
    for entry in watch.series:
        assert set(entry.table["name"]) == {"0", "2"}
    refused = pytest.raises(ValueError, match="1 can't be watched: its output is not softmax")
    with refused, hw.watch(model, strict=True):
        model(torch.randn(2, N, WIDTH))


def test_large_logits_excuse_rounding_and_no_misreading() -> None:
    model = nn.Sequential(Layer(1.0), Layer(2.0))
    with torch.no_grad():
        for layer in model:
            layer.qkv.weight[: 2 * WIDTH] *= 200
    watch = hw.watch(model)
    with pytest.warns(UserWarning, match="1: its output is not softmax"), watch:
        model(torch.randn(2, N, WIDTH))
    assert watch.unread == ["1"]
    assert max(watch.heads()["max_logit_max"]) > 5000


def test_a_misread_layer_that_was_asked_for_by_its_number_is_named(far_away: None) -> None:
    model = nn.Sequential(Layer(), Layer(2.0))
    watch = hw.watch(model, maps=False, layers=1).attach()

    def run() -> None:
        model(torch.randn(2, N, WIDTH))
        watch.step()
        watch.detach()

    with pytest.warns(UserWarning, match="1: its output is not softmax"):
        run()
    assert watch.unread == ["1"]


@pytest.mark.parametrize("late", [False, True])
def test_a_call_that_proves_nothing_is_compared_again(late: bool, request: Any) -> None:
    if late:
        request.getfixturevalue("far_away")
    model = Layer(2.0)
    watch = hw.watch(model).attach()
    model(torch.full((1, N, WIDTH), torch.nan))
    assert len(watch.heads()) == HEADS
    assert watch.unread == []
    watch.step()

    def further() -> None:
        model(torch.randn(1, N, WIDTH))
        watch.step()
        watch.detach()

    with pytest.warns(UserWarning, match="its output is not softmax"):
        further()
    assert watch.unread == [""]


def test_clipping_waits_for_nothing_and_says_later_what_it_did(far_away: None) -> None:
    torch.manual_seed(0)
    model, x = hw.nn.MultiHeadAttention(WIDTH, HEADS, kv_heads=2), torch.randn(2, N, WIDTH)
    nn.init.normal_(model.query.weight, std=30)
    with hw.watch(model, maps=False) as seen:
        model(x)
        seen.step()
        with NothingWaits():
            clipped = hw.qk_clip(model, seen, 50)
        model(x)
    assert {clip.factor < 1 for clip in clipped} == {True}
    assert max(seen.heads()["max_logit_max"]) == pytest.approx(50, rel=1e-3)


def test_a_logit_that_can_t_be_clipped_is_said_one_step_later(far_away: None) -> None:
    model = hw.nn.MultiHeadAttention(WIDTH, HEADS)
    weights = [x.clone() for x in model.parameters()]
    with hw.watch(model, maps=False) as seen:
        model(torch.full((1, N, WIDTH), torch.nan))
        seen.step()
        first = hw.qk_clip(model, seen, 1e-6)
        model(torch.randn(1, N, WIDTH))
        seen.step()
        said = r"head 0\.0 has a logit that is infinite or NaN at step 0"
        with pytest.raises(ValueError, match=said):
            hw.qk_clip(model, seen, 1e-6)
        assert all(map(torch.equal, weights, model.parameters()))
        assert hw.qk_clip(model, seen, 1e-6)  # it was said once
    assert not torch.equal(weights[0], next(model.parameters()))
    with pytest.raises(ValueError, match=said):
        len(first)
