"""Measuring this machine, on small sizes: the fit, the file, and the name `this`."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headwise.costs.machines import measure, this_machine
from headwise.costs.machines.hardware import Device

CPU = torch.device("cpu")
SMALL = replace(
    measure.CPU,
    square=64,
    products=((48, 64, 32), (1, 256, 256)),
    tokens=128,
    model=64,
    widths=(16, 32),
    lengths=(32, 128),
    cache=1 << 14,
    stream=1 << 16,
    rounds=2,
    slice=0.0002,
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADWISE_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def found() -> Device:
    return measure.measure_device(CPU, ("fp32",), sizes=SMALL)


def test_a_measurement_knows_every_speed(found: Device) -> None:
    assert found.matrix["fp32"] > 0
    assert found.bandwidth > 0
    assert found.special
    speeds = found.speeds("fp32")
    assert [each.width for each in speeds.attention] == [16, 32]
    assert all(each.pair >= 0 and each.backward_pair > 0 for each in speeds.attention)
    assert not speeds.overlap


def test_a_saved_measurement_is_the_device_this(found: Device, cache: Path) -> None:
    path = this_machine.save_device(found, CPU, measure.about_this_machine())
    assert path.parent.parent == cache
    assert this_machine.find_device("this:cpu") == found
    assert this_machine.peak(CPU, "fp32") == (found.matrix["fp32"], found.name)


def test_a_machine_that_was_not_measured_says_how(cache: Path) -> None:
    with pytest.raises(ValueError, match="not measured; run headwise cost --measure"):
        this_machine.find_device("this:cpu")
    assert this_machine.peak(CPU, "fp32") is None


def test_a_damaged_or_older_file_counts_as_no_measurement(found: Device, cache: Path) -> None:
    path = this_machine.save_device(found, CPU, {})
    path.write_text(path.read_text().replace('"format": 1', '"format": 0'))
    assert this_machine.load(CPU) is None
    path.write_text("{")
    assert this_machine.load(CPU) is None


def test_a_fit_has_no_negative_speed() -> None:
    # The second count would be negative without the bound.
    one, other = measure.fit([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]], [0.1, 2.0, 4.0])
    assert one > 0
    assert other == 0


def test_a_fit_weighs_relative_errors() -> None:
    (found,) = measure.fit([[1.0, 1000.0]], [1.0, 2000.0])
    assert 1.0 < found < 2.0
