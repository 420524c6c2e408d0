"""Stories of runs: alarms in groups, from the first on, beside a loss that turns."""

import logging
from pathlib import Path

import pytest
import torch

import headwise as hw
from headwise.watching import Alarm, Story, WatchedRun, open_run
from headwise.watching.rules import LogitGrowth
from headwise.watching.runs.story import finding, turning


@pytest.fixture
def run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> WatchedRun:
    """A run whose heads sharpen at step 2, before the loss turns at step 4."""
    caplog.set_level(logging.CRITICAL, "headwise")
    torch.manual_seed(0)
    model = hw.nn.MultiHeadAttention(24, 3)
    watch = hw.watch(model, alarms=LogitGrowth(limit=50.0))
    with watch, watch.record(tmp_path / "run"):
        for step, loss in enumerate((4.0, 3.0, 2.0, 1.0, 3.5, 4.0)):
            if step == 2:
                with torch.no_grad():
                    model.query.weight *= 3000
            model(torch.randn(2, 10, 24))
            watch.log(loss=loss)
            watch.step()
    return open_run(tmp_path / "run")


def test_alarms_of_a_rule_in_a_layer_are_one_chapter_with_its_threshold(run: WatchedRun) -> None:
    (chapter,) = Story.of(run).chapters
    assert (chapter.rule, chapter.layer, chapter.step) == ("logit growth", 0, 2)
    assert chapter.heads == ["0.0", "0.1", "0.2"]
    assert (chapter.figure, chapter.limit) == ("max_logit_max", 50.0)  # of this run, not the usual
    largest = [row["max_logit_max"] for row in run.heads(2)]
    assert chapter.values == largest
    assert chapter.says == (
        f"their largest logits are {min(largest):.3g} to {max(largest):.3g}, above 50"
    )
    assert chapter.compared["max_logit_max"][1] == pytest.approx(sum(largest) / 3)
    assert chapter.compared["max_logit_max"][0] < 50 < chapter.compared["max_logit_max"][2]


def test_the_headline_counts_from_the_first_alarm_to_the_turn_of_the_loss(run: WatchedRun) -> None:
    headline = Story.of(run).headline
    assert headline == (
        "the first alarm came at step 2: logit growth, 3 heads (0.0, 0.1, 0.2); the loss turned 2 "
        "steps later, at step 4"
    )
    assert "2 步之后，损失在第 4 步开始回升" in headline.zh


def test_a_run_without_alarms_or_loss_has_a_story_too(tmp_path: Path) -> None:
    model = hw.nn.MultiHeadAttention(24, 3)
    with hw.watch(model) as seen:
        model(torch.randn(1, 5, 24))
    seen.save(tmp_path / "run")
    told = Story.of(open_run(tmp_path / "run"))
    assert told.headline == "no alarm in 1 recorded steps"
    assert told.to_dict()["loss"] is None


def test_a_loss_that_only_falls_does_not_turn() -> None:
    assert turning(range(100), [100.0 - x for x in range(100)]) is None
    assert turning(range(3), [float("nan")] * 3) is None
    assert turning(range(5), [4.0, 1.0, float("nan"), 5.0, 5.0]) == 2
    assert turning(range(4), [5.0, 1.0, 1.5, 1.5]) is None  # little, of what it has fallen
    assert turning(range(3), [10.0, 0.0, 2.0]) is None  # a fifth is little


def test_without_figures_a_finding_is_what_the_alarm_says() -> None:
    alarm = Alarm(3, "dead head", 0, 1, "it gives next to nothing")
    assert finding("dead head", [alarm], [], None) == "it gives next to nothing"
    assert finding("dead head", [], [], None) == ""
    assert "NaN" in finding("logit growth", [alarm], [float("nan")], 100.0)
