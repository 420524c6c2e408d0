"""What someone sees of a run at a terminal."""

import json
import logging
from pathlib import Path

import pytest
import torch
from rich.cells import cell_len
from rich.console import Console

import headwise as hw
from headwise.apps.cli import watch as commands
from headwise.apps.cli import watch_view as terminal
from headwise.watching import open_run
from headwise.watching.runs.run_reader import WatchedRun
from tests.command_line import refused, run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of two layers of which one head goes wrong in the third step."""
    model = torch.nn.Sequential(hw.nn.MultiHeadAttention(16, 4), hw.nn.MultiHeadAttention(16, 4))
    watch = hw.watch(model, alarms=True)
    logging.getLogger("headwise").setLevel(logging.CRITICAL)
    with watch, watch.record(tmp_path / "run"):
        for step in range(4):
            if step == 2:
                torch.nn.init.normal_(model[1].query.weight[4:8], std=300)
            model(torch.randn(1, 20, 16))
            watch.step()
    logging.getLogger("headwise").setLevel(logging.NOTSET)
    return tmp_path / "run"


def test_watch_shows_layers_heads_courses_and_alarms(folder: Path) -> None:
    output = run("watch", str(folder), "--once", "--statistic", "max_logit")
    assert "step 3  4 steps recorded, all rows" in output
    assert "max_logit_max" in output
    layers = [line.split() for line in output.splitlines() if line.strip()[:2] in ("0 ", "1 ")]
    assert [len(line) for line in layers] == [6, 6]  # the number, four heads, the course
    assert set(layers[1][-1]) <= set(terminal.BARS)
    assert layers[1][-1][0] < layers[1][-1][-1]  # it grew
    assert "step 2: logit growth: head 1.1: its largest logit is" in " ".join(output.split())
    assert "\x1b" not in output
    assert max(cell_len(line) for line in output.splitlines()) <= 80


def test_many_heads_fit_a_line_as_shades(tmp_path: Path) -> None:
    model = hw.nn.MultiHeadAttention(64, 16)
    with hw.watch(model) as seen:
        model(torch.randn(1, 12, 64))
    seen.save(tmp_path / "run")
    output = run("watch", str(tmp_path / "run"), "--once")
    assert "██" in output
    assert max(cell_len(line) for line in output.splitlines()) <= 80


def test_chosen_heads_keep_their_numbers(tmp_path: Path) -> None:
    model = hw.nn.MultiHeadAttention(64, 16)
    with hw.watch(model, heads=[5, 11]) as seen:
        model(torch.randn(1, 12, 64))
    seen.save(tmp_path / "run")
    output = run("watch", str(tmp_path / "run"), "--once")
    (line,) = (line for line in output.splitlines() if "layer" in line and "steps" in line)
    assert line.split()[:3] == ["layer", "5", "11"]


def test_figures_that_are_no_numbers_are_marked(tmp_path: Path) -> None:
    model = hw.nn.MultiHeadAttention(16, 4)
    with hw.watch(model) as seen:
        model(torch.full((1, 6, 16), torch.nan))
    seen.save(tmp_path / "run")
    assert run("watch", str(tmp_path / "run"), "--once", "--statistic", "max_logit").count("×") > 3


def test_programs_get_the_last_step_the_course_and_the_alarms(folder: Path) -> None:
    said = json.loads(run("watch", str(folder), "--json", "--statistic", "entropy"))
    assert said["statistic"] == "entropy_mean"
    assert said["steps"] == [0, 1, 2, 3]
    assert [len(course) for course in said["courses"].values()] == [4, 4]
    assert len(said["heads"]) == 8
    assert said["alarms"][0]["rule"] == "logit growth"
    assert said["scalars"]["attn/layer_01/entropy_mean"] == pytest.approx(said["courses"]["1"][-1])
    assert said["manifest"]["format"] == 1


def test_an_unknown_statistic_names_those_there_are(folder: Path) -> None:
    said = refused("watch", str(folder), "--once", "--statistic", "beauty")
    assert "no statistic 'beauty'; there are" in said
    assert "entropy_mean" in said


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    assert "holds no watched run" in refused("watch", str(tmp_path), "--once")
    (tmp_path / "file.py").write_text("")
    assert "can't be read as a watched run" in refused("watch", str(tmp_path / "file.py"), "--once")


def test_a_live_view_ends_with_its_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(force_terminal=True, width=80)
    commands.follow(console, open_run(folder), "entropy", seconds=0.1)
    assert "entropy_mean" in capsys.readouterr().out


def test_a_live_view_follows_a_run_that_grows(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter([False, False, True])
    monkeypatch.setattr(WatchedRun, "ended", property(lambda _: next(looks)))
    commands.follow(Console(quiet=True, width=80), open_run(folder), "entropy", seconds=0.01)
    assert list(looks) == []  # it looked three times


def test_a_run_that_has_written_nothing_says_so(tmp_path: Path) -> None:
    watch = hw.watch(hw.nn.MultiHeadAttention(16, 4))
    watch.record(tmp_path / "run")
    output = run("watch", str(tmp_path / "run"), "--once")
    assert "nothing has been written yet" in " ".join(output.split())


@pytest.mark.parametrize(
    ("values", "drawn"),
    [([1.0], "▁"), ([1.0, 1.0], "▁▁"), ([0.0, float("nan"), 1.0], "▁×█"), ([float("nan")], "×")],
)
def test_sparks_are_drawn_for_any_figures(values: list[float], drawn: str) -> None:
    assert terminal.spark(values) == drawn


def test_a_long_course_is_pooled() -> None:
    assert terminal.spark([float(n) for n in range(1000)], width=8) == terminal.BARS


def test_a_run_with_nan_explains_the_cross_groups_alarms_and_says_what_to_do(
    tmp_path: Path,
) -> None:
    model = hw.nn.MultiHeadAttention(16, 4)
    torch.nn.init.constant_(model.query.weight, float("nan"))
    watch = hw.watch(model, alarms=True)
    logging.getLogger("headwise").setLevel(logging.CRITICAL)
    with watch, watch.record(tmp_path / "run"):
        model(torch.randn(1, 20, 16))
        watch.step()
    logging.getLogger("headwise").setLevel(logging.NOTSET)
    output = " ".join(run("watch", str(tmp_path / "run"), "--once").split())
    assert "1 step recorded" in output
    assert "× NaN or infinite" in output
    assert "logit growth: 4 heads (0.0, 0.1, 0.2, 0.3): their largest logits are NaN" in output
    assert "→ try a lower learning rate" in output
    assert "hw.qk_clip" in output


def test_a_story_begins_with_the_first_alarm_and_what_to_do(folder: Path, tmp_path: Path) -> None:
    output = " ".join(run("watch", str(folder), "--story").split())
    assert "the first alarm came at step" in output
    assert output.index("1 step") < output.index("first step") < output.index("last step")
    assert "try a lower learning rate" in output
    told = json.loads(run("watch", str(folder), "--story", "--json"))["story"]
    steps = [chapter["step"] for chapter in told["chapters"]]
    assert steps == sorted(steps)
    assert "--beside belongs to --story" in refused("watch", str(folder), "--beside", str(folder))
    page = tmp_path / "story.html"
    assert "MB" in run("look", str(folder), "--beside", str(folder), "--out", str(page))
    assert "the first alarm came" in page.read_text(encoding="utf-8")
