"""The Hopper kernel on a CPU, by `gluon_on_cpu`: every kind of mask and width, and no race."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernel is written in Gluon, a part of Triton")
pytest.importorskip("greenlet", reason="the emulator's partitions are greenlets")

import headwise as hw
from headwise.core.options import Options
from headwise.core.problem import pose
from headwise.core.row_sums import EVERYTHING, RowResults
from headwise.engines.triton.host import hopper_call
from headwise.engines.triton.host.launches import Launches
from tests.engines import test_triton as kernels
from tests.engines.gluon_on_cpu import emulated
from tests.engines.interval_masks import MASKS, B, H, hide
from tests.thinned import thinned

NAMES = (*("lse", "max_logit", "entropy", "distance", "participation", "logit_mean", "logit_var"),)


def run(q: Tensor, k: Tensor, v: Tensor, seed: int, **options: object) -> RowResults:
    problem = pose("attention", q, k, v, Options(**options))  # type: ignore[arg-type]
    with emulated(seed):
        return hopper_call.run_hopper_forward(
            Launches(), q, k, v, problem.terms(banded=True), EVERYTHING
        )


def agrees(
    mask: str, n: int, m: int, widths: tuple[int, int], seed: int, **options: object
) -> None:
    """Compare the kernel with the reference."""
    torch.manual_seed(seed)
    made = MASKS[mask](n, m)
    q = torch.randn(B, H, n, widths[0]).half()
    k, v = (torch.randn(B, 1, m, width).half() for width in widths)
    found = run(q, hide(k, made, n), hide(v, made, n), seed, mask=made, **options)
    wide = (x.double() for x in (q, k, v))
    out, seen = hw.observe(*wide, mask=made, **options, stats=NAMES, engine="reference")
    kernels.compare({"out": found.out}, {"out": out}, 4e-3)
    kernels.compare({name: getattr(found, name) for name in NAMES}, seen.values, 2e-4)


@pytest.fixture(autouse=True)
def three_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_call, "multiprocessors", lambda device: 3)


def tile(monkeypatch: pytest.MonkeyPatch, widths: tuple[int, int], **changes: object) -> None:
    """Use another tile for the padded widths."""
    monkeypatch.setitem(hopper_call.TILES, widths, replace(hopper_call.TILES[widths], **changes))


@pytest.mark.parametrize(("keys", "mask"), thinned([32, 128], MASKS))
def test_every_mask_agrees_and_keys_that_no_row_sees_may_be_nan(
    mask: str, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tile(monkeypatch, (64, 64), keys=keys)
    agrees(mask, 150, 200, (24, 40), keys)


@pytest.mark.parametrize(
    ("direct", "groups", "mask"),
    thinned([False, True], [2, 3], ["causal", "causal documents", "sinks and window", "any"]),
)
def test_every_form_of_the_kernel_agrees(
    mask: str, groups: int, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tile(monkeypatch, (64, 64), keys=32, groups=groups, direct=direct)
    agrees(mask, 270, 270, (64, 64), groups, softcap=2.0, sinks=torch.randn(H))


@pytest.mark.parametrize("widths", [(16, 200), (72, 128), (136, 8), (192, 128), (200, 256)])
@pytest.mark.parametrize("mask", ["none", "sinks and window"])
def test_every_width_agrees(mask: str, widths: tuple[int, int]) -> None:
    agrees(mask, 130, 150, widths, sum(widths))


@pytest.mark.parametrize("mask", ["causal", "first rows see nothing", "window"])
def test_programs_share_the_items_of_uneven_masks(
    mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tile(monkeypatch, (64, 64), keys=32)
    monkeypatch.setattr(hopper_call, "LEAST_BLOCKS", 1)
    agrees(mask, 400, 400, (64, 64), 1)


@pytest.mark.parametrize("seed", range(3))
def test_results_do_not_depend_on_the_order_of_partitions(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tile(monkeypatch, (64, 64), keys=32)
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, H, 300, 16).half() for _ in range(3))
    mask = MASKS["causal documents"](300, 300)
    first, other = (run(q, k, v, each, mask=mask) for each in (7, seed))
    assert all(torch.equal(x, y) for x, y in zip(first, other, strict=True))


def test_statistics_alone_need_no_values() -> None:
    q, k = torch.randn(B, H, 150, 16).half(), torch.randn(B, H, 200, 16).half()
    mask = MASKS["sinks and window"](150, 200)
    found = run(q, k, k[..., :0], 0, mask=mask)
    _, seen = hw.observe(q.double(), k.double(), k.double(), mask=mask, engine="reference")
    kernels.compare({name: getattr(found, name) for name in NAMES}, seen.values, 2e-4)
