"""Every mode of training shows the figures that `reference` computes from the same tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import headwise as hw
from headwise.core.observation import STATISTICS, Observation

WIDTH, HEADS, N, BATCH = 32, 4, 16, 4
CAUSAL = hw.mask.causal(offset=0)


class Sdpa(nn.Module):
    """Attention by PyTorch's own function; it notes what it was computed from."""

    def __init__(self, ours: bool = False) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.calls: list[tuple[Tensor, Tensor, Tensor]] = []
        self.ours = ours

    def forward(self, x: Tensor) -> Tensor:
        parts = (made(x) for made in (self.query, self.key, self.value))
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in parts)
        if torch._C._current_graph_task_id() == -1:  # a backward computes it once more
            self.calls.append((q.detach(), k.detach(), v.detach()))
        if self.ours:
            out = hw.attention(q, k, v, mask=CAUSAL)
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + out.transpose(1, 2).flatten(2)


class Model(nn.Module):
    """Two layers, with or without activation checkpointing."""

    def __init__(self, reentrant: bool | None = None, ours: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Sdpa(ours), Sdpa(ours)])
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.reentrant is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.reentrant)  # type: ignore[assignment]
        return x


def wanted(layer: Sdpa) -> dict[str, Tensor]:
    """The figures of all the layer's calls by `reference`, in float64; the calls are forgotten."""
    seen: list[Observation] = []
    for q, k, v in layer.calls:
        exact = (x.double() for x in (q, k, v))
        seen.append(hw.observe(*exact, mask=CAUSAL, engine="reference")[1])
    layer.calls.clear()
    flat = [
        {name: x.transpose(0, 1).flatten(1)[None] for name, x in s.values.items()} for s in seen
    ]
    values = {name: torch.cat([x[name] for x in flat], 2) for name in STATISTICS}
    return Observation(values, values["max_logit"]).heads()


def check(table: hw.watching.Table, model: Model, tolerance: float = 1e-4) -> None:
    for number, layer in enumerate(model.layers):
        rows = table.where(layer=number)
        for name, value in wanted(layer).items():  # type: ignore[arg-type]
            found = torch.tensor(rows[name], dtype=torch.float64)
            torch.testing.assert_close(found, value, rtol=tolerance, atol=tolerance, msg=name)


def given(batch: int = BATCH) -> Tensor:
    return torch.randn(batch, N, WIDTH, requires_grad=True)


def plain(model: Model, optimiser: torch.optim.Optimizer) -> None:
    optimiser.zero_grad()
    model(given()).square().mean().backward()
    optimiser.step()


def accumulated(model: Model, optimiser: torch.optim.Optimizer) -> None:
    for batch in (3, 1, 2):
        model(given(batch)).square().mean().backward()
    optimiser.step()


def several_forwards(model: Model, optimiser: torch.optim.Optimizer) -> None:
    (model(given(1)) - model(model(given(1)))).square().mean().backward()
    optimiser.step()


def with_closure(model: Model, optimiser: torch.optim.Optimizer) -> None:
    lbfgs = torch.optim.LBFGS(model.parameters(), lr=1e-3, max_iter=3)

    def closure() -> Tensor:
        lbfgs.zero_grad()
        loss: Tensor = model(given(1)).square().mean()
        loss.backward()
        return loss

    lbfgs.step(closure)


def two_optimisers(model: Model, optimiser: torch.optim.Optimizer) -> None:
    others = torch.optim.AdamW(model.layers[1].parameters())
    model(given()).square().mean().backward()
    optimiser.step()
    others.step()


def frozen(model: Model, optimiser: torch.optim.Optimizer) -> None:
    model.layers[0].requires_grad_(False)
    plain(model, optimiser)


def without_gradient(model: Model, optimiser: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        model(given())
    with torch.inference_mode():
        model(given())
    plain(model, optimiser)


STEPS: dict[str, Callable[[Model, torch.optim.Optimizer], None]] = {
    step.__name__: step
    for step in (
        plain, accumulated, several_forwards, with_closure, two_optimisers, frozen, without_gradient
    )
}  # fmt: skip


@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_every_way_to_make_a_step_counts_its_rows_once(step: str, ours: bool) -> None:
    torch.manual_seed(0)
    model = Model(ours=ours)
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    with hw.watch(model, maps=False) as seen:
        for number in range(2):
            STEPS[step](model, optimiser)
            assert seen.steps == number + 1
            check(seen.series[-1].table, model)


@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_forward_adds_nothing(reentrant: bool, ours: bool) -> None:
    torch.manual_seed(0)
    model, twin = Model(reentrant, ours), Model(None, ours)
    twin.load_state_dict(model.state_dict())
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    x = given()
    with hw.watch(model, maps=False) as seen:
        model(x).square().mean().backward()
        assert seen.layers[0].counted().tolist() == [BATCH * N] * HEADS
        optimiser.step()
    check(seen.series[0].table, model)
    with hw.watch(twin, maps=False):
        twin(x).square().mean().backward()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_low_precision_are_read_as_they_are_computed(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, low = Model(), Model().to(dtype)
    with hw.watch(model, maps=False) as seen, torch.autocast("cpu", dtype):
        model(given())
    assert model.layers[0].calls[0][0].dtype == dtype  # type: ignore[union-attr,index]
    check(seen.heads(), model, 0.01)
    with hw.watch(low, maps=False) as seen:
        low(given().to(dtype))
    check(seen.heads(), low, 0.01)


def test_a_step_that_the_scaler_skips_joins_the_next() -> None:
    torch.manual_seed(0)
    model, scaler = Model(), torch.amp.GradScaler("cpu", init_scale=4.0)
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    with hw.watch(model, maps=False) as seen:
        for factor in (1.0, torch.inf, 1.0):
            optimiser.zero_grad()
            scaler.scale(model(given()).square().mean() * factor).backward()
            scaler.step(optimiser)
            scaler.update()
            if factor == 1.0:
                check(seen.series[-1].table, model)
    assert [entry.step for entry in seen.series] == [0, 1]


class Adapted(nn.Module):
    """A linear layer with a low-rank update, as LoRA puts one in its place."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x) + 8 * self.up(self.down(x))
        return out


def test_adapted_layers_show_what_they_compute() -> None:
    torch.manual_seed(0)
    model = Model()
    for layer in model.layers:
        layer.query, layer.value = Adapted(layer.query), Adapted(layer.value)
    wrapped = nn.Sequential(model)  # the model inside a wrapper's own
    learning = [x for x in model.parameters() if x.requires_grad]
    optimiser = torch.optim.AdamW(learning)
    with hw.watch(wrapped, maps=False) as seen:
        for _ in range(2):
            wrapped(given()).square().mean().backward()
            optimiser.step()
            check(seen.series[-1].table, model)


def test_what_runs_between_steps_counts_until_the_watch_is_detached() -> None:
    torch.manual_seed(0)
    model = Model()
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    watch = hw.watch(model, maps=False).attach()
    plain(model, optimiser)
    check(watch.series[0].table, model)
    with torch.no_grad():
        model.eval()(given())  # evaluated, and part of the next step
    plain(model.train(), optimiser)
    check(watch.series[1].table, model)
    watch.detach()
    model.eval()(given())
    for layer in model.layers:
        layer.calls.clear()
    watch.attach()
    plain(model.train(), optimiser)
    check(watch.series[2].table, model)
    watch.detach()


def test_a_step_that_is_passed_over_leaves_the_model_alone() -> None:
    model, looked = Model(), []
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    forwards, sdpa = {kind: kind.forward for kind in (Model, Sdpa)}, F.scaled_dot_product_attention

    def touched() -> bool:
        hooked = any(x._forward_hooks or x._forward_pre_hooks for x in model.modules())
        replaced = any(kind.forward is not forward for kind, forward in forwards.items())
        return hooked or replaced or F.scaled_dot_product_attention is not sdpa

    with hw.watch(model, every=3, maps=False) as seen:
        for _ in range(5):
            looked.append(touched())
            plain(model, optimiser)
    assert looked == [True, False, False, True, False]
    assert not touched()
    assert [entry.step for entry in seen.series] == [0, 3]
    assert seen.steps == 5
    assert int(seen.layers[0].slot.ended()[0, 0]) == BATCH * N  # type: ignore[union-attr]


def test_of_two_optimisers_one_ends_the_steps_that_are_passed_over() -> None:
    model = Model()
    optimisers = [torch.optim.SGD(layer.parameters(), 0.1) for layer in model.layers]
    with hw.watch(model, every=2, maps=False) as seen:
        for _ in range(4):
            model(given()).square().mean().backward()
            for optimiser in optimisers:
                optimiser.step()
    assert seen.steps == 4
    assert [entry.step for entry in seen.series] == [0, 2]


def test_a_forward_that_raises_leaves_exact_figures() -> None:
    class Fails(Model):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            x = self.layers[0](x)
            if self.fails:
                raise RuntimeError("out of memory")
            out: Tensor = self.layers[1](x)
            return out

    torch.manual_seed(0)
    model = Fails()
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    with hw.watch(model, maps=False) as seen:
        model.fails = True
        with pytest.raises(RuntimeError, match="out of memory"):
            model(given())
        model.fails = False
        plain(model, optimiser)  # the same step, tried again
        counted = [int(x) for x in seen.series[0].table["layer"]]
        assert counted == [0] * HEADS + [1] * HEADS
        assert seen.layers[0].slot.ended()[0, 0] == 2 * BATCH * N  # type: ignore[union-attr]
        assert seen.layers[1].slot.ended()[0, 0] == BATCH * N  # type: ignore[union-attr]
        check(seen.series[0].table, model)  # each layer shows all of its own calls
        plain(model, optimiser)
        check(seen.series[1].table, model)


def test_no_memory_for_the_board_leaves_the_model_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory left")

    model = Model()
    before = [dict(vars(x)) for x in model.modules()]
    monkeypatch.setattr("headwise.watching.recorder.board.Board.reserve", full)
    watch = hw.watch(model)
    with pytest.raises(torch.OutOfMemoryError):
        watch.attach()
    assert not watch.attached
    assert [dict(vars(x)) for x in model.modules()] == before
    assert not any(x._forward_hooks or x._forward_pre_hooks for x in model.modules())
    monkeypatch.undo()
    with watch:
        model(given())
    check(watch.heads(), model)


def test_figures_that_overflow_say_so() -> None:
    model = Model()
    with torch.no_grad():
        model.layers[0].query.weight.mul_(1e20)  # type: ignore[union-attr]
    with hw.watch(model, maps=False) as seen:
        model(given())
    table = seen.heads()
    assert torch.inf in table.where(layer=0)["logit_var_max"]
    assert "(infinite, beyond the range of its numbers: logit_var" in str(table)
    assert all(x < 10 for x in table.where(layer=1)["logit_var_max"])


class Counting:
    """A rule with a memory."""

    name = source = says = "counting"
    needs = ("entropy",)
    every = 1

    def __init__(self) -> None:
        self.looks = 0

    def check(self, table: Any, layers: Any) -> list[Any]:
        self.looks += 1
        return []

    def state_dict(self) -> dict[str, int]:
        return {"looks": self.looks}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.looks = state["looks"]


def test_a_resumed_training_goes_on_with_its_series_and_alarms(tmp_path: Any) -> None:
    from headwise.watching.rules import DuplicatedHeads, LogitGrowth

    torch.manual_seed(0)
    model = Model()
    optimiser = torch.optim.SGD(model.parameters(), 0.1)

    def watched(model: Model) -> hw.Watch:
        rules = [LogitGrowth(1e-3), DuplicatedHeads(every=2), Counting()]
        return hw.watch(model, every=2, alarms=rules)

    whole = watched(model)
    saved: dict[str, Any] = {}
    with whole, whole.record(tmp_path / "whole"):
        for number in range(7):
            if number == 3:
                saved = {"model": copy.deepcopy(model.state_dict()), "watch": whole.state_dict()}
                saved["seed"] = torch.get_rng_state()
            plain(model, optimiser)
    torch.save(saved, tmp_path / "checkpoint.pt")
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    again = Model()
    again.load_state_dict(saved["model"])
    torch.set_rng_state(saved["seed"])
    watch = watched(again)
    watch.load_state_dict(saved["watch"])
    assert watch.steps == 3
    assert [alarm.step for alarm in watch.alarms] == [0] * len(whole.alarms)
    optimiser = torch.optim.SGD(again.parameters(), 0.1)
    with watch, watch.record(tmp_path / "whole", resume=True):
        for _ in range(4):
            plain(again, optimiser)
    assert [entry.step for entry in watch.series] == [0, 2, 4, 6]
    for mine, theirs in zip(watch.series, whole.series, strict=True):
        assert list(mine.table) == list(theirs.table)
    assert watch.alarms == whole.alarms
    assert watch._alarms.looked == whole._alarms.looked == 4
    assert watch._alarms.rules[2].looks == 4  # type: ignore[attr-defined]
    assert hw.watching.open_run(tmp_path / "whole").steps == [0, 2, 4, 6]


@pytest.mark.parametrize("state", [{}, {"format": 2}, None, {"steps": 3}])
def test_a_state_that_is_none_is_refused(state: Any) -> None:
    with pytest.raises(ValueError, match="give load_state_dict what state_dict\\(\\) returned"):
        hw.watch(Model()).load_state_dict(state)
