"""Tuned tile shapes: stored for each GPU, found again, and ignored if unreadable."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the engine's kernels are written in Triton")

from headwise.engines.triton.host import cards
from headwise.engines.triton.host import tile_shapes as shapes


def test_tuned_shapes_are_kept_for_each_gpu_and_preferred(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(shapes, "_CHOSEN", {})
    one, other = cards.Card("one", 8, 0, 166912), cards.Card("other", 8, 6, 101376)
    best = shapes.Shape(64, 16, 2, 5)
    file = shapes.remember(one, {("forward", 64, 2): best})
    assert file.is_relative_to(tmp_path)
    shapes.remember(other, {("keys", 64, 2): best})
    assert shapes.shape("forward", 64, 2, one) == best
    assert shapes.shape("forward", 64, 2, other) == shapes.default("forward", 64, 2, other) != best
    assert shapes.shape("keys", 64, 2, other) == best


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", '{"one": {"forward 64 2": {"rows": 64}}}', "\x00"]
)
def test_an_unreadable_file_of_shapes_is_ignored(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(shapes, "_CHOSEN", {})
    one, best = cards.Card("one", 8, 0, 166912), shapes.Shape(64, 16, 2, 5)
    shapes.remember(one, {("keys", 64, 2): best})
    shapes.tuned_file().write_text(text)
    assert shapes.shape("keys", 64, 2, one) == shapes.default("keys", 64, 2, one)
    shapes.remember(one, {("keys", 64, 2): best})
    shapes.remember(one, {("keys", 128, 2): best})
    assert shapes.shape("keys", 64, 2, one) == shapes.shape("keys", 128, 2, one) == best


@pytest.mark.gpu
def test_tuning_tries_the_usual_shape_and_keeps_what_it_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headwise.engines.triton import tuning

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(shapes, "_CHOSEN", {})
    device = torch.device("cuda", 0)
    found = list(tuning.tune(device, widths=(64,), tokens=2048))
    assert [x.kernel for x in found] == list(shapes.KERNELS)
    assert all(0 < x.best <= x.usual < 1000 for x in found)  # milliseconds, both measured
    tuning.keep(device, found)
    chosen = [shapes.shape(x.kernel, 64, 2, cards.card(device)) for x in found]
    assert chosen == [x.chosen for x in found]
