"""Model FLOPs utilisation: reported where the peak is known, and exact."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import headwise as hw
from headwise.apps.cli.watch_view import on_a_line
from headwise.apps.train.meter import Meter
from headwise.apps.train.presets import preset
from headwise.apps.train.runs import train
from headwise.apps.train.trainer import known_utilisation
from headwise.costs.calculate import cost
from headwise.costs.machines import this_machine
from headwise.costs.machines.hardware import Device
from headwise.costs.uses.utilisation import Utilisation
from headwise.models import GPT, GPTConfig
from headwise.models.trained import Run
from headwise.watching.runs.run_reader import open_run

CPU = torch.device("cpu")
TINY = GPTConfig(vocabulary=50, d_model=32, layers=2, heads=2, feed_forward=hw.nn.SwiGLU(64))


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Device:
    """This CPU, as if it were measured at 10¹¹ FLOPs per second."""
    monkeypatch.setenv("HEADWISE_CACHE", str(tmp_path / "cache"))
    found = Device("this", "a CPU", {"fp32": 1e11}, 1e10, 1e9, "made up", cpu=True)
    this_machine.save_device(found, CPU, {})
    return found


def test_model_flops_over_time_and_peak(known: Device) -> None:
    used = Utilisation.of(GPT(TINY), CPU, "fp32")
    used.add({"batch": 4, "queries": 16})
    used.add({"batch": 4, "queries": 16})
    used.add({"batch": 2, "queries": 8})
    large = cost(TINY, batch=4, queries=16, dtype="fp32").training_flops
    small = cost(TINY, batch=2, queries=8, dtype="fp32").training_flops
    assert used.read(2.0) == (2 * large + small) / 2.0 / 1e11
    assert used.read(2.0) == 0  # the next reading starts anew


def test_an_unknown_device_or_model_says_why(
    known: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="LSTM can't be read"):
        Utilisation.of(nn.LSTM(3, 3), CPU, "fp32")
    split = GPT(TINY)
    split.norm.to("meta")
    with pytest.raises(ValueError, match="its parameters are on several devices"):
        Utilisation.of(split, CPU, "fp32")
    with pytest.raises(ValueError, match=r"the peak of .* in bf16 is not known; headwise cost"):
        Utilisation.of(GPT(TINY), CPU, "bf16")
    monkeypatch.setenv("HEADWISE_CACHE", str(tmp_path / "empty"))
    assert known_utilisation(GPT(TINY), CPU, 1) is None


def test_what_is_frozen_has_no_backward(known: Device) -> None:
    """Frozen weights have no gradient, nor has what lies before the first that learn."""
    model = GPT(TINY)
    flops = []
    for frozen in (None, model.blocks[0], model.embedding):
        if frozen is not None:
            frozen.requires_grad_(False)
        used = Utilisation.of(model, CPU, "fp32")
        used.add({"batch": 1, "queries": 8})
        flops.append(used.read(1.0) * known.matrix["fp32"])
    block = sum(x.numel() for x in model.blocks[0].parameters() if x.ndim == 2)
    assert flops[0] - flops[1] == pytest.approx(2 * 8 * block)
    inside = hw.cost(model.blocks[0].requires_grad_(True), queries=8, dtype="fp32")
    head = 2 * 8 * model.embedding.weight.numel()
    inputs = inside.backward_flops - 2 * 8 * block
    assert flops[1] - flops[2] == pytest.approx(inputs + head)


def test_a_meter_without_a_known_peak_leaves_it_out() -> None:
    meter = Meter(CPU)
    meter.add(torch.tensor(1.0), torch.tensor(1.0), 5)
    assert set(meter.read(0)) == {"loss", "gradient_norm", "per_second"}


def test_a_run_records_it_and_its_watch_shows_it(known: Device, tmp_path: Path) -> None:
    text = tmp_path / "book.txt"
    text.write_text("the cat sat on the mat and the dog sat on the cat. " * 400)
    setup = preset("language", "tiny")
    setup = replace(setup, data=str(text), recipe=replace(setup.recipe, steps=2, log_every=1))
    heard: list[dict[str, object]] = []
    train(setup, tmp_path / "run", device="cpu", report=heard.append, watch_every=1)
    shares = [line["mfu"] for line in heard if "mfu" in line]
    assert len(shares) == 2
    assert all(isinstance(share, float) and share > 0 for share in shares)
    last = [x for x in Run(tmp_path / "run").measured() if "loss" in x][-1]
    trained = open_run(tmp_path / "run" / "watch").training()
    assert trained == {name: last[name] for name in ("loss", "per_second", "mfu")}
    assert f"MFU {100 * last['mfu']:.3g} %" in on_a_line(trained)
    json.dumps(trained)
