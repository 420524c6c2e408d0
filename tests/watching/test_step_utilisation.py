"""The model FLOPs utilisation of watched steps: exact FLOPs, the step's own time, or why not."""

import gc
from pathlib import Path
from types import TracebackType

import pytest
import torch
from torch import nn

import headwise as hw
from headwise.apps.cli.watch_view import on_a_line
from headwise.costs.machines import this_machine
from headwise.costs.machines.hardware import Device
from headwise.models import GPT, GPTConfig
from headwise.watching.callbacks import LoopFollower
from headwise.watching.runs.run_reader import open_run

TINY = GPTConfig(vocabulary=50, d_model=32, layers=2, heads=2, feed_forward=hw.nn.SwiGLU(64))
PEAKS = {"fp32": 1e11, "bf16": 2e11}
STEP = 3 * hw.cost(TINY, batch=4, queries=16).flops  # a forward and a backward


@pytest.fixture(autouse=True)
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This CPU, as if it were measured."""
    monkeypatch.setenv("HEADWISE_CACHE", str(tmp_path / "cache"))
    found = Device("this", "a CPU", PEAKS, 1e10, 1e9, "made up", cpu=True)
    this_machine.save_device(found, torch.device("cpu"), {})


def learn(model: nn.Module, *batches: torch.Tensor, steps: int = 1) -> None:
    optimiser = torch.optim.SGD(model.parameters(), 1e-3)
    for _ in range(steps):
        for batch in batches:
            model(batch).sum().backward()
        optimiser.step()


def ids(batch: int = 4, length: int = 16) -> torch.Tensor:
    return torch.randint(50, (batch, length))


def flops(seen: hw.watching.Watch) -> float:
    """The FLOPs that the last utilisation stands for."""
    used = seen.utilisation
    assert used is not None
    assert used.mfu is not None, used.why
    return used.mfu * used.seconds * PEAKS[used.dtype]


def test_a_step_has_the_flops_of_its_passes_over_its_time() -> None:
    model = GPT(TINY)
    with hw.watch(model, every=2) as seen:
        learn(model, ids(), steps=3)
    assert flops(seen) == pytest.approx(STEP)
    assert [entry.step for entry in seen.series if entry.mfu] == [0, 2]
    note = seen.heads().note
    assert note is not None
    assert note.startswith("(MFU ")
    assert "% of a CPU in fp32" in note


def test_accumulated_batches_and_passes_without_gradients_count() -> None:
    model = GPT(TINY)
    with hw.watch(model) as seen:
        with torch.no_grad():
            model(ids())
        learn(model, ids(), ids())
    assert flops(seen) == pytest.approx(2 * STEP + STEP / 3)


def test_under_autocast_the_peak_is_that_of_its_dtype() -> None:
    model = GPT(TINY)
    with hw.watch(model) as seen, torch.autocast("cpu", torch.bfloat16):
        learn(model, ids())
    assert seen.utilisation is not None
    assert seen.utilisation.dtype == "bf16"
    assert flops(seen) == pytest.approx(STEP)


def test_a_pass_without_learning_has_none() -> None:
    model = GPT(TINY)
    with hw.watch(model) as seen, torch.no_grad():
        model(ids())
        seen.step()
    assert seen.utilisation is None
    assert seen.heads().note is None


def test_a_step_without_an_optimiser_is_no_training() -> None:
    model = GPT(TINY)
    with hw.watch(model) as seen:
        model(ids())  # with gradients, and no backward
        seen.step()
    assert seen.utilisation is None


def test_steps_that_are_ended_by_hand_have_it_too() -> None:
    model = GPT(TINY)
    with hw.watch(model) as seen:
        for _ in range(3):
            learn(model, ids())
            seen.step()
    assert flops(seen) == pytest.approx(STEP)


def test_an_encoder_and_a_decoder_have_two_lengths() -> None:
    model = hw.models.Transformer(
        hw.models.TransformerConfig(50, d_model=32, encoder_layers=1, decoder_layers=1, heads=2)
    )
    with hw.watch(model) as seen:
        optimiser = torch.optim.SGD(model.parameters(), 1e-3)
        model(ids(2, 9) + 0, ids(2, 5)).sum().backward()
        optimiser.step()
    whole = hw.cost(model, batch=2, queries=5, context=9).training_flops
    assert flops(seen) == pytest.approx(whole)


def test_where_it_is_not_known_the_reason_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unknown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(32, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.layer(x)
            return found

    model = Unknown()
    with hw.watch(model) as seen:
        learn(model, torch.randn(2, 8, 32))
    assert str(seen.utilisation).startswith("no MFU: Unknown can't be read")
    assert seen.heads().note is None
    assert seen.series[0].mfu is None
    monkeypatch.setenv("HEADWISE_CACHE", str(tmp_path / "empty"))
    gpt = GPT(TINY)
    with hw.watch(gpt) as other:
        learn(gpt, ids())
    assert "headwise cost --measure measures it" in str(other.utilisation)


def test_a_folder_and_loggers_get_it(tmp_path: Path) -> None:
    model = GPT(TINY)
    follower = LoopFollower(1, tmp_path / "run")
    follower.begin(model, 0)
    follower.before_step()
    learn(model, ids())
    told = follower.after_step()
    follower.end()
    assert 0 < told["attn/mfu"] < 1
    run = open_run(tmp_path / "run")
    assert run.training() == {"mfu": told["attn/mfu"]}
    assert on_a_line(run.training() or {}) == f"MFU {100 * told['attn/mfu']:.3g} %"


def test_a_state_keeps_it() -> None:
    model = GPT(TINY)
    with hw.watch(model) as seen:
        learn(model, ids())
    again = hw.watch(model)
    again.load_state_dict(seen.state_dict())
    assert again.series[0].mfu == seen.series[0].mfu


@pytest.mark.gpu
def test_a_gpu_is_timed_by_its_own_clock() -> None:
    model = GPT(TINY).cuda()
    with hw.watch(model) as seen:
        learn(model, ids().cuda(), steps=3)
    assert seen.utilisation is not None
    assert 0 < seen.utilisation.seconds < 10


def test_a_step_that_is_not_known_leaves_the_next_one_alone() -> None:
    model = GPT(TINY)
    with hw.watch(model, maps=False) as seen:
        learn(model, ids(batch=0), ids())
        assert seen.utilisation is not None
        assert "batch=0" in str(seen.utilisation.why)
        learn(model, ids())
        assert flops(seen) == pytest.approx(STEP)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_nested_tensor_ends_nothing() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 1).eval()
    given = torch.nested.nested_tensor([torch.randn(3, 16), torch.randn(5, 16)])
    with torch.no_grad(), hw.watch(model) as seen:
        assert model(given).size(0) == 2
    assert len(seen.layers) == 1


def test_steps_without_a_known_peak_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWISE_CACHE", str(tmp_path / "unmeasured"))
    model = GPT(TINY)
    with hw.watch(model) as seen:
        learn(model, ids(), steps=5)
        gc.freeze()  # what there is, other tests' leftovers among it, is not looked at
        before = kept_tracebacks()
        learn(model, ids(), steps=20)
        assert seen.utilisation is not None
        assert "is not known" in seen.utilisation.why
        assert kept_tracebacks() <= before
    gc.unfreeze()


def kept_tracebacks() -> int:
    gc.collect()
    return sum(type(each) is TracebackType for each in gc.get_objects())
