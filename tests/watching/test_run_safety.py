"""Run folders that two recorders want, that are resumed from the start, damaged or hostile."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import headwise as hw
from headwise.apps.cli import watch_view
from headwise.apps.cli.main import app
from headwise.apps.look.watched_folder import WatchedFolder
from headwise.watching import open_run
from headwise.watching.runs.parts import columns
from headwise.watching.runs.run_writer import RunWriter

HOSTILE = "\x1b]0;owned\x07\x9b31m\u202e\u2066red"


def recorded(folder: Path, steps: int = 3, start: int = 0, **options: Any) -> hw.watching.Watch:
    """A run of two layers with maps of one head, and an alarm in its second step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(hw.nn.MultiHeadAttention(16, 4), hw.nn.MultiHeadAttention(16, 4))
    watch = hw.watch(model, alarms=True)
    watch.steps = start
    logging.getLogger("headwise").setLevel(logging.CRITICAL)
    with watch, watch.record(folder, keep=[(0, 1)], keep_every=1, **options):
        for step in range(start, start + steps):
            if step == 1 or start:
                torch.nn.init.normal_(model[1].query.weight[4:8], std=300)
            model(torch.randn(1, 6, 16))
            watch.step()
    logging.getLogger("headwise").setLevel(logging.NOTSET)
    return watch


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    recorded(folder)
    return folder


def readings(folder: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """Everything that reads a run's folder."""
    yield "all", lambda: open_run(folder).series
    yield "alarms", lambda: [str(alarm) for alarm in open_run(folder).alarms]
    yield "types", lambda: repr(open_run(folder))
    yield "history", lambda: open_run(folder).history("entropy_mean")
    yield "map", lambda: open_run(folder).map(0, 1)[0, 0]
    yield "state", lambda: json.dumps(WatchedFolder(folder).state())
    yield "series", lambda: WatchedFolder(folder).series("entropy_mean")
    yield "told", lambda: json.dumps(WatchedFolder(folder).story())
    yield "story", lambda: watch_view.story(open_run(folder), 80)
    yield "view", lambda: watch_view.view(open_run(folder), "entropy", 80)
    yield "json", lambda: watch_view.as_dictionary(open_run(folder), "entropy")


def test_a_second_recorder_is_kept_out_and_loses_nothing(tmp_path: Path) -> None:
    with RunWriter(tmp_path, {"format": 1, "model": {}, "looking": {}}) as writer:
        live = tmp_path / f".series-rank0-000001.parquet-{os.getpid()}"
        live.touch()  # as if it were being written
        code = f"from headwise.watching.runs.run_writer import RunWriter as R; R({str(tmp_path)!r}"
        command = [sys.executable, "-c", code + ", {}, resume=True)"]
        other = subprocess.run(command, capture_output=True, text=True, check=False)
        said = other.stderr.splitlines()[-1]
        assert said == (
            f"ValueError: process {os.getpid()} is writing into {tmp_path}; "
            "wait until it ends, or choose another folder"
        )
        assert live.exists()
        with pytest.raises(ValueError, match=f"process {os.getpid()} is writing into"):
            RunWriter(tmp_path, {}, resume=True)
    assert writer.closed


def test_the_lock_of_a_killed_recorder_keeps_nobody_out(tmp_path: Path) -> None:
    code = (
        "import os, signal; from headwise.watching.runs.run_writer import RunWriter\n"
        f"RunWriter({str(tmp_path)!r}, dict(format=1, model={{'class': 'A', 'parameters': 1}}, "
        "looking=dict(rows=None, every=1)))\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode < 0
    assert (tmp_path / ".lock-rank0").exists()
    RunWriter(tmp_path, {}, resume=True).close()
    assert open_run(tmp_path).ended


def test_a_run_that_resumes_at_its_first_step_can_be_read_at_once(tmp_path: Path) -> None:
    recorded(tmp_path / "run")
    model = hw.nn.MultiHeadAttention(16, 4)
    watch = hw.watch(model)
    with watch, watch.record(tmp_path / "run", resume=True):
        model(torch.randn(1, 6, 16))
        watch.step()
        for name, read in readings(tmp_path / "run"):
            if name not in ("map", "history"):
                read()
        output = CliRunner().invoke(app, ["watch", str(tmp_path / "run"), "--json"])
        assert output.exit_code == 0, output.output
        assert json.loads(output.output)["steps"] == []
    assert open_run(tmp_path / "run").steps == [0]


def test_a_part_without_rows_can_be_read(tmp_path: Path) -> None:
    recorded(tmp_path)
    empty = columns([{"step": 1, "rank": 0, "layer": 0, "name": "", "kind": "self", "head": 0}])
    for path in tmp_path.glob("series-*"):
        hw.watching.runs.parts.arrow().parquet.write_table(empty.slice(1), path)
    for name, read in readings(tmp_path):
        if name != "map":
            read()
    assert open_run(tmp_path).damaged == []


def test_a_run_whose_watch_lost_its_state_repeats_no_alarm(tmp_path: Path) -> None:
    recorded(tmp_path)
    before = (tmp_path / "alarms-rank0.jsonl").read_text("utf-8")
    assert "logit growth" in before
    again = recorded(tmp_path, start=3, resume=True)
    raw = [json.loads(x) for x in (tmp_path / "alarms-rank0.jsonl").read_text("utf-8").splitlines()]
    heads = [(x["rule"], x["layer"], x["head"]) for x in raw]
    assert len(set(heads)) == len(heads)
    assert [alarm.to_dict() for alarm in again.alarms] == raw


def damages(content: bytes, chance: random.Random) -> Iterator[tuple[str, bytes]]:
    """A file's content, damaged in many ways."""
    for _ in range(6):
        at = chance.randrange(len(content))
        flipped = bytes([content[at] ^ (1 << chance.randrange(8))])
        yield f"bit at {at}", content[:at] + flipped + content[at + 1 :]
    for _ in range(3):
        at = chance.randrange(len(content))
        yield f"cut at {at}", content[:at]
    for text in (
        "",
        "null",
        "3",
        '"x"',
        "[]",
        "{}",
        "[" * 100_000,
        '{"a":' * 500 + "1" + "}" * 500,
    ):
        yield f"{text[:10]!r} instead", text.encode()
    yield "zeros", bytes(len(content))


def wrong_types(content: Any) -> Iterator[tuple[str, Any]]:
    """A JSON dictionary with each of its values replaced by others."""
    deep: Any = 1
    for _ in range(200):
        deep = [deep]
    for name, inside in content.items():
        for other in (None, -1, 1e400, "x", [], [None], {}, {"a": [1]}, deep):
            yield f"{name}={str(other)[:12]}", {**content, name: other}
        if isinstance(inside, dict) and name != "zh":
            for path, changed in wrong_types(inside):
                yield f"{name}.{path}", {**content, name: changed}
        yield f"no {name}", {key: x for key, x in content.items() if key != name}


def test_damaged_run_folders_are_refused_in_one_line(whole: Path, tmp_path: Path) -> None:
    chance, count = random.Random(0), 0
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    for file in sorted(x for x in folder.rglob("*") if x.is_file() and "lock" not in x.name):
        content = file.read_bytes()
        cases = list(damages(content, chance))
        if file.suffix == ".json":
            some = [(name, json.dumps(x).encode()) for name, x in wrong_types(json.loads(content))]
            cases += chance.sample(some, 120)
        elif file.suffix == ".jsonl":
            line = json.loads(content.splitlines()[0])
            some = [(name, json.dumps(x).encode()) for name, x in wrong_types(line)]
            cases += chance.sample(some, 30)
        for name, damaged in cases:
            file.write_bytes(damaged)
            count += 1
            check_readings(folder, f"{file.name}, {name}")
        file.unlink()
        check_readings(folder, f"no {file.name}")
        file.write_bytes(content)
    assert count > 200


def check_readings(folder: Path, case: str) -> None:
    for name, read in readings(folder):
        try:
            read()
        except (ValueError, OSError) as error:
            said = str(error)
            assert "\n" not in said, (case, name)
            assert len(said) < 1000, (case, name)
        except BaseException as error:
            raise AssertionError(f"{case}: {name} raised {error!r}") from error


def test_a_damaged_map_is_named(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    file = sorted((tmp_path / "run/maps").iterdir())[-1]
    file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(ValueError, match=rf"{file.name} is damaged: .*; delete it"):
        open_run(tmp_path / "run").map(0, 1)


def test_damaged_alarms_are_counted(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    file = tmp_path / "run/alarms-rank0.jsonl"
    file.write_bytes(file.read_bytes() + b'{"step": 3, "rule"')
    assert open_run(tmp_path / "run").damaged == [file.name]
    output = CliRunner().invoke(app, ["watch", str(tmp_path / "run"), "--once"]).output
    assert "1 damaged files are left out, whole or in part" in output


@pytest.mark.parametrize(
    "options",
    [
        ["--once"], ["--json"], ["--once", "--statistic", "nothing"], ["--statistic", "x"],
        ["--story"], ["--story", "--json"],
    ],
)  # fmt: skip
def test_texts_of_a_run_control_no_terminal(
    whole: Path, tmp_path: Path, options: list[str]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    about = json.loads((folder / "manifest.json").read_text("utf-8"))
    about["model"]["class"] = HOSTILE
    about |= {"unread": [HOSTILE], "begun": HOSTILE, HOSTILE: HOSTILE}
    about["rules"] = [{"rule": HOSTILE, "says": HOSTILE, "source": HOSTILE}]
    (folder / "manifest.json").write_text(json.dumps(about), "utf-8")
    alarm = {"step": 1, "rule": HOSTILE, "layer": 0, "head": 0, "says": HOSTILE}
    (folder / "alarms-rank0.jsonl").write_text(json.dumps(alarm), "utf-8")
    for path in folder.glob("series-*"):
        parquet = hw.watching.runs.parts.arrow().parquet
        table = parquet.read_table(path).to_pylist()
        wrong = {"name": HOSTILE, "kind": HOSTILE, HOSTILE: 1.0, "logged": None}
        rows = [{**row, **wrong} for row in table]
        rows.append({**rows[0], "kind": "logged", "logged": 1.0})
        parquet.write_table(columns(rows), path)
    check_output(["watch", str(folder), *options])
    check_output(["watch", str(folder), "--once", "--statistic", HOSTILE])
    for file in ("manifest.json", "alarms-rank0.jsonl"):
        (folder / file).write_text(json.dumps({"format": HOSTILE, HOSTILE: 1}), "utf-8")
        check_output(["watch", str(folder), *options])


def check_output(words: list[str]) -> None:
    result = CliRunner().invoke(app, words)
    assert result.exit_code in (0, 2), result.output
    written = result.output + (result.stderr if result.stderr_bytes is not None else "")
    assert written
    assert not set(written) & set("\x1b\x07\x9b\u202e\u2066"), words
