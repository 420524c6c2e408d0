"""A run's folder as the page sees it: real runs of a small model, recorded while they go on."""

from __future__ import annotations

import itertools
import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import headwise as hw
from headwise.apps.look import watched_folder as watch_api
from headwise.apps.look.serving.answers import answer
from headwise.apps.look.session import Session
from headwise.apps.look.watched_folder import WatchedFolder, stride


class Training:
    """A model of two layers with three heads each that trains for as long as it is told."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            hw.nn.MultiHeadAttention(24, 3), hw.nn.MultiHeadAttention(24, 3)
        )
        self.watch = hw.watch(self.model, alarms=True)
        self.watch.attach()
        self.writer = self.watch.record(folder, steps=1)

    def go_on(self, steps: int) -> None:
        for _ in range(steps):
            self.model(torch.randn(2, 10, 24))
            self.watch.step()

    def sharpen(self, layer: int, head: int) -> None:
        """Make a head's logits so large that a rule must notice."""
        attn = self.model[layer]
        with torch.no_grad():
            attn.query.weight.view(3, 8, 24)[head] *= 1000

    def close(self) -> None:
        self.writer.close()
        self.watch.detach()


@pytest.fixture
def training(tmp_path: Path) -> Any:
    training = Training(tmp_path / "first-try")
    yield training
    training.close()


@pytest.fixture
def watched(training: Training, monkeypatch: pytest.MonkeyPatch) -> WatchedFolder:
    monkeypatch.setattr(watch_api, "PATIENCE", 0.0)
    folder = WatchedFolder(training.writer.folder)
    monkeypatch.setattr(folder, "took", 0.0)
    return folder


def patiently(watched: WatchedFolder) -> WatchedFolder:
    """As if enough time had passed for the folder to be read again."""
    watched.read_at = -math.inf
    return watched


def test_a_run_says_what_it_is_of_and_how_far_it_is(
    training: Training, watched: WatchedFolder
) -> None:
    training.go_on(3)
    state = watched.state()
    assert (state["run"], state["model"], state["step"]) == ("first-try", "Sequential", 2)
    assert [(layer["layer"], layer["heads"]) for layer in state["layers"]] == [(0, 3), (1, 3)]
    assert {"entropy_mean", "max_logit_max"} <= set(state["statistics"])
    assert 0 <= state["age"] < 60
    assert state["alarms"] == []


def test_the_numbers_are_those_the_watch_saw(training: Training, watched: WatchedFolder) -> None:
    training.go_on(4)
    series = watched.series("entropy_mean")
    assert (series["steps"], series["every"]) == ([0, 1, 2, 3], 1)
    for entry, layers in zip(training.watch.series, series["values"], strict=True):
        seen = entry.table["entropy_mean"]
        assert [*itertools.chain(*layers)] == pytest.approx(seen, rel=1e-5)


def test_a_growing_run_gives_what_is_new(training: Training, watched: WatchedFolder) -> None:
    training.go_on(2)
    assert watched.state()["step"] == 1
    training.go_on(3)
    news = patiently(watched).series("entropy_mean", after=1)
    assert news["steps"] == [2, 3, 4]
    assert len(news["values"]) == 3
    assert watched.series("entropy_mean", after=4)["steps"] == []


def test_an_alarm_comes_with_its_rule_and_the_source(
    training: Training, watched: WatchedFolder
) -> None:
    training.go_on(2)
    training.sharpen(layer=1, head=2)
    training.go_on(1)
    state = watched.state()
    (alarm,) = (alarm for alarm in state["alarms"] if alarm["rule"] == "logit growth")
    assert (alarm["step"], alarm["layer"], alarm["head"]) == (2, 1, 2)
    (rule,) = (rule for rule in state["rules"] if rule["rule"] == "logit growth")
    assert "above 100" in rule["says"]
    assert "Kimi K2" in rule["source"]


def test_a_long_run_gives_every_second_step_and_goes_on_doing_so(
    training: Training, watched: WatchedFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_api, "MOST_NUMBERS", 24)
    training.go_on(6)
    first = watched.series("entropy_mean")
    assert (first["every"], first["steps"]) == (2, [0, 2, 4])
    training.go_on(2)
    news = patiently(watched).series("entropy_mean", after=4)
    assert (news["every"], news["steps"]) == (2, [6])


@pytest.mark.parametrize("steps", [1, 10, 4_166, 4_167, 1_000_000])
def test_no_answer_is_too_large(steps: int) -> None:
    every = stride(steps, heads=48)
    assert -(-steps // every) * 48 <= watch_api.MOST_NUMBERS + 48
    assert every == 1 or steps * 48 > watch_api.MOST_NUMBERS * every / 2


def test_a_folder_is_not_read_again_at_once(training: Training) -> None:
    watched = WatchedFolder(training.writer.folder)
    training.go_on(1)
    assert watched.state()["step"] == 0
    watched.took = 10.0  # it is large: reading it takes ten seconds
    training.go_on(1)
    assert watched.state()["step"] == 0
    watched.read_at = time.monotonic() - 101
    assert watched.state()["step"] == 1


class TestAsking:
    def ask(self, folder: Path | None, address: str) -> tuple[int, Any]:
        run = None if folder is None else WatchedFolder(folder)
        answered = answer(Session(run=run), address)
        return answered.status, json.loads(answered.body)

    def test_a_run_is_asked_for_by_its_addresses(self, training: Training) -> None:
        training.go_on(2)
        folder = training.writer.folder
        assert self.ask(folder, "/api/watch")[1]["step"] == 1
        status, series = self.ask(folder, "/api/watch/series?statistic=entropy_mean&from=0")
        assert (status, series["steps"]) == (200, [1])

    def test_without_a_run_the_answer_says_how_to_get_one(self) -> None:
        status, said = self.ask(None, "/api/watch")
        assert status == 404
        assert said["hint"] == "open one with headwise look RUN_FOLDER"

    def test_what_is_wrong_is_named(self, training: Training, tmp_path: Path) -> None:
        training.go_on(1)
        status, said = self.ask(training.writer.folder, "/api/watch/series?statistic=speed")
        assert (status, said["error"]) == (400, "there is no figure 'speed'")
        assert "entropy_mean" in said["hint"]
        status, said = self.ask(tmp_path, "/api/watch")
        assert status == 400
        assert "holds no watched run" in said["error"]
