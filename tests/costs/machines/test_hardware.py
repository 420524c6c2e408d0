"""Devices: the table, the speeds derived from it, and names that drivers give."""

import re

import pytest

from headwise.costs.machines.hardware import DEVICES, device, named
from headwise.costs.machines.speeds import AttentionSpeed, Speeds


@pytest.mark.parametrize("id", DEVICES)
def test_every_device_has_a_source_and_plausible_rates(id: str) -> None:
    found = DEVICES[id]
    assert found.id == id
    assert found.cpu or re.search(r"(sheet|whitepaper|Brief), 20\d\d", found.source)
    assert found.matrix.get("bf16", found.matrix["fp32"]) >= found.matrix["fp32"] / 2
    assert 5e10 <= found.bandwidth <= 1e13
    assert 1e10 <= found.memory <= 1e12
    if found.special is not None:
        # Between 10 and 1,000 matrix FLOPs in the time of an exponential.
        assert 10 < max(found.matrix.values()) / found.special < 1000


def test_a_device_is_found_by_its_name_in_any_spelling() -> None:
    assert device("RTX 4090") is device("rtx_4090") is DEVICES["rtx-4090"]


def test_an_unknown_device_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"there is no device 'z80'; use this.*a100, h100"):
        device("z80")


def test_a_dtype_without_a_rate_is_refused() -> None:
    with pytest.raises(ValueError, match="NVIDIA T4 has no matrix rate for bf16; it has fp16"):
        device("t4").speeds("bf16")


@pytest.mark.parametrize(
    ("driver", "id"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", None),
        ("NVIDIA A100 80GB PCIe", None),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("Tesla T4", "t4"),
        ("AMD Instinct MI300X", "mi300x"),
        ("Intel(R) Xeon(R) CPU @ 2.20GHz", None),
    ],
)
def test_only_the_very_device_is_recognised(driver: str, id: str | None) -> None:
    found = named(driver)
    assert (found.id if found else None) == id


def test_the_assumed_attention_of_a_hopper_is_near_what_was_published() -> None:
    """FlashAttention-3 reports about 650 TFLOP/s for long sequences and heads of 128 on an H100."""
    speed = device("h100").speeds("bf16").of_width(128)
    assert 4 * 128 / speed.pair == pytest.approx(600e12, rel=0.1)


def speeds(*known: AttentionSpeed) -> Speeds:
    return Speeds(1, 1, 1, 1, 1, known, True, (128, 128))


def test_a_width_between_two_known_ones_is_interpolated() -> None:
    both = speeds(AttentionSpeed(32, 1, 2, 3, 4, 5), AttentionSpeed(64, 2, 4, 6, 8, 10))
    assert both.of_width(48) == AttentionSpeed(48, 1.5, 3, 4.5, 6, 7.5)
    assert both.of_width(64) == both.attention[1]


def test_narrow_heads_take_as_long_as_the_narrowest_and_wide_ones_longer() -> None:
    one = speeds(AttentionSpeed(64, 2, 4, 6, 8, 10))
    assert one.of_width(16) == one.attention[0]
    assert one.of_width(128) == AttentionSpeed(128, 4, 8, 12, 8, 20)
    assert one.of_width(192).pair == 6
