"""A run's folder: what is written is read again, whatever happened in between."""

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import headwise as hw
from bench.soak import soaked
from headwise.watching import Alarm, Entry, Table, open_run
from headwise.watching.runs import parts
from headwise.watching.runs import run_writer as writing
from headwise.watching.runs.parts import SeriesPart
from headwise.watching.runs.run_writer import RunWriter

ABOUT = {
    "format": 1,
    "model": {"class": "Module", "parameters": 0},
    "looking": {"rows": None, "every": 1},
}


def entry(step: int, heads: int = 2, value: float = 1.0) -> Entry:
    rows = [
        {"layer": 0, "name": "h.0", "kind": "self", "head": head, "entropy_mean": value + head}
        for head in range(heads)
    ]
    return Entry(step, Table(rows))


def written(folder: Path, numbers: range, **options: Any) -> None:
    with RunWriter(folder, dict(ABOUT), **options) as writer:
        for step in numbers:
            writer.add(entry(step, value=float(step)))


def watched(folder: Path, steps: int = 3, **options: Any) -> tuple[hw.Watch, Any]:
    """A watch of a small layer that was recorded, and its input."""
    model, x = hw.nn.MultiHeadAttention(16, 4, mask=hw.mask.causal()), torch.randn(2, 10, 16)
    watch = hw.watch(model, alarms=True)
    with watch, watch.record(folder, **options):
        for _ in range(steps):
            model(x)
            watch.step()
    return watch, x


def test_what_was_recorded_is_read_again(tmp_path: Path) -> None:
    watch, _ = watched(tmp_path / "run")
    run = open_run(tmp_path / "run")
    assert run.steps == [0, 1, 2]
    for kept, seen in zip(run.series, watch.series, strict=True):
        assert kept.step == seen.step
        assert list(kept.table) == list(seen.table)
    assert list(run.heads()) == list(watch.series[-1].table)
    assert run.scalars() == watch.scalars()
    assert [(x.number, x.name, x.kind, x.heads) for x in run.layers] == [(0, "", "self", 4)]
    assert run.manifest["looking"]["stats"] == list(hw.STATISTICS)
    assert run.manifest["versions"]["torch"] == torch.__version__
    assert run.manifest["model"]["class"] == "MultiHeadAttention"
    assert run.ended


def test_a_figure_s_course_is_there_for_each_head(tmp_path: Path) -> None:
    written(tmp_path, range(5))
    steps, heads = open_run(tmp_path).history("entropy_mean")
    assert steps == [0, 1, 2, 3, 4]
    assert heads == {(0, 0): [0.0, 1.0, 2.0, 3.0, 4.0], (0, 1): [1.0, 2.0, 3.0, 4.0, 5.0]}
    with pytest.raises(ValueError, match="no figure 'nothing'; there are entropy_mean"):
        open_run(tmp_path).history("nothing")


def test_kept_maps_are_the_ones_that_were_seen(tmp_path: Path) -> None:
    watch, x = watched(tmp_path / "run", keep=[(0, 1), (0, 3)], keep_every=2)
    run = open_run(tmp_path / "run")
    assert [(kept.step, kept.head) for kept in run.kept] == [(0, 1), (0, 3), (2, 1), (2, 3)]
    with hw.watch(watch.model) as now:
        watch.model(x)
    amap = run.map(layer=0, head=3, step=2)
    torch.testing.assert_close(amap.to_tensor(), now.map(0, 3).to_tensor())
    torch.testing.assert_close(amap.to_tensor().sum(-1), torch.ones(1, 1, 10))
    assert amap[0, 0, 3, 4:].abs().max() == 0  # the mask is there too
    with pytest.raises(ValueError, match=r"no such map was kept; there are 0\.1 at step 0"):
        run.map(layer=0, head=0)


@pytest.mark.parametrize(
    "options",
    [
        {"mask": hw.mask.causal() & (hw.mask.window(3) | hw.mask.prefix(2)), "sinks": True},
        {"position": hw.nn.ALiBi(), "softcap": 20.0},
        {"position": hw.nn.RelativeBuckets()},
        {"score": hw.nn.Additive()},
        {"mask": hw.mask.dense(torch.eye(10, dtype=torch.bool).roll(1, 0))},
        {"kv_heads": 2, "position": hw.nn.Rotary()},
    ],
    ids=["window and sinks", "alibi and cap", "buckets", "additive", "dense", "grouped"],
)
def test_a_map_comes_back_with_all_that_made_its_weights(
    options: dict[str, Any], tmp_path: Path
) -> None:
    model, x = hw.nn.MultiHeadAttention(16, 4, **options), torch.randn(1, 10, 16)
    for name, parameter in model.named_parameters():
        if "table" in name or name == "sinks":
            torch.nn.init.normal_(parameter)
    with hw.watch(model) as seen:
        model(x)
    seen.save(tmp_path / "run", maps=[(0, 3)])
    again = open_run(tmp_path / "run").map(0, 3)
    torch.testing.assert_close(again.to_tensor(), seen.map(0, 3).to_tensor())


def test_what_was_seen_at_inference_is_a_run_of_one_step(tmp_path: Path) -> None:
    gpt = hw.load("gpt")
    with hw.watch(gpt.model) as seen:
        gpt.model(gpt.encode("to be or not to be"))
    seen.save(tmp_path / "run", maps=[(5, 1)])
    run = open_run(tmp_path / "run")
    assert repr(run) == "<WatchedRun of 6 layers, 48 heads, 1 steps>"
    assert list(run.heads()) == list(seen.heads())
    with pytest.raises(ValueError, match="holds a watched run already; choose another folder"):
        seen.save(tmp_path / "run")


def test_saving_keeps_the_series_what_came_after_it_the_alarms_and_the_maps(tmp_path: Path) -> None:
    model, x = hw.nn.MultiHeadAttention(16, 4), torch.randn(1, 20, 16)
    torch.nn.init.normal_(model.query.weight, std=200)
    watch = hw.watch(model, alarms=True, heads=[1, 2]).attach()
    for _ in range(2):
        model(x)
        watch.step()
    watch.save(tmp_path / "closed", maps=[(0, 1)])
    model(x * 0.1)
    watch.detach()
    watch.save(tmp_path / "open", maps=[(-1, -3)])
    closed, still = open_run(tmp_path / "closed"), open_run(tmp_path / "open")
    assert (closed.steps, still.steps) == ([0, 1], [0, 1, 2])
    assert list(still.heads()) == list(watch.heads())
    assert [row["head"] for row in closed.heads()] == [1, 2]
    assert watch.alarms
    assert closed.alarms == still.alarms == watch.alarms
    assert [(kept.step, kept.layer, kept.head) for kept in closed.kept] == [(1, 0, 1)]
    assert [(kept.step, kept.layer, kept.head) for kept in still.kept] == [(2, 0, 1)]


def test_maps_that_are_not_there_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    model = hw.nn.MultiHeadAttention(16, 4)
    with hw.watch(model, maps=False) as seen:
        model(torch.randn(1, 5, 16))
    for maps, said in (([(9, 0)], "there is no layer 9"), ([(0, 4)], "there is no head 4"),
                       ([(0, 0)], "no map of the model was kept")):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            seen.save(tmp_path / "run", maps=maps)
    with pytest.raises(ValueError, match=r"keep=\[\(0, 1\)\]: the watch has maps=False"):
        seen.record(tmp_path / "run", keep=[(0, 1)])
    with pytest.raises(ValueError, match="keep_every=0: it must be at least 1"):
        seen.record(tmp_path / "run", keep_every=0)
    assert not (tmp_path / "run").exists()


def test_nan_is_null_in_the_file_and_nan_again_when_read(tmp_path: Path) -> None:
    written(tmp_path, range(1))
    with RunWriter(tmp_path, dict(ABOUT), resume=True) as writer:
        writer.add(entry(1, heads=1, value=float("nan")))
    assert str(open_run(tmp_path).heads()["entropy_mean"]) == "[nan]"


# What may go wrong


def test_a_killed_run_keeps_all_it_had_flushed(tmp_path: Path) -> None:
    code = f"""
import sys, torch, headwise as hw
model = hw.nn.MultiHeadAttention(16, 4)
watch = hw.watch(model).attach()
watch.record({str(tmp_path / "run")!r}, steps=2)
for step in range(10_000):
    model(torch.randn(1, 8, 16))
    watch.step()
    print(step, flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) == 20:
            process.send_signal(signal.SIGKILL)
            break
    process.wait()
    process.stdout.close()
    run = open_run(tmp_path / "run")
    assert run.steps[:20] == list(range(20))  # two steps a part: all but the last odd one
    assert run.damaged == []
    assert not run.ended


def test_half_written_and_damaged_parts_are_passed_over(tmp_path: Path) -> None:
    written(tmp_path, range(3), steps=1)
    whole = (tmp_path / "series-rank0-000001-000003.parquet").read_bytes()
    (tmp_path / ".series-rank0-000004.parquet-1234").write_bytes(whole[: len(whole) // 2])
    assert open_run(tmp_path).steps == [0, 1, 2]
    (tmp_path / "series-rank0-000005.parquet").write_bytes(whole[: len(whole) // 2])
    run = open_run(tmp_path)
    assert run.steps == [0, 1, 2]
    assert run.damaged == ["series-rank0-000005.parquet"]


def test_a_kill_while_parts_are_joined_counts_no_row_twice(tmp_path: Path) -> None:
    with RunWriter(tmp_path, dict(ABOUT), steps=1) as writer:
        for step in range(4):
            writer.add(entry(step))
        alone = {path: path.read_bytes() for path in tmp_path.glob("series-*")}
        assert len(alone) == 4
    for path, content in alone.items():  # as if they had not been deleted yet
        path.write_bytes(content)
    assert len(open_run(tmp_path).series) == 4
    assert parts.parts_in(tmp_path) == [SeriesPart(0, 1, 4)]


def test_many_small_parts_are_joined_while_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "JOINED", 4)
    writer = RunWriter(tmp_path, dict(ABOUT), steps=1)
    for step in range(11):
        writer.add(entry(step))
    small = [SeriesPart(0, number, number) for number in (9, 10, 11)]
    assert parts.parts_in(tmp_path) == [SeriesPart(0, 1, 4), SeriesPart(0, 5, 8), *small]
    assert open_run(tmp_path).steps == list(range(11))
    writer.close()
    assert parts.parts_in(tmp_path) == [SeriesPart(0, 1, 11)]
    assert open_run(tmp_path).steps == list(range(11))


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_told_once_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writer = RunWriter(tmp_path, dict(ABOUT), steps=1)
    writer.add(entry(0))
    monkeypatch.setattr(os, "fsync", full)
    with caplog.at_level(logging.ERROR, "headwise"):
        for step in range(1, 5):
            writer.add(entry(step))
    (line,) = caplog.messages
    assert "the disk is full; what was written before is untouched" in line
    assert open_run(tmp_path).steps == [0]
    assert not list(tmp_path.glob(".series*"))  # nothing is left half-written
    monkeypatch.undo()
    writer.close()  # room again: nothing is lost
    assert open_run(tmp_path).steps == [0, 1, 2, 3, 4]


def test_alarms_that_found_no_room_are_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alarms = [Alarm(step, "logit growth", 0, step, "its largest logit is 120") for step in range(3)]
    writer = RunWriter(tmp_path, dict(ABOUT))
    writer.add(entry(0), alarms[:1])
    monkeypatch.setattr(os, "fsync", full)
    writer.add(entry(1), alarms[1:2])
    assert open_run(tmp_path).alarms == alarms[:1]
    monkeypatch.undo()
    writer.flush()
    assert open_run(tmp_path).alarms == alarms[:2]
    writer.add(entry(2), alarms[2:])
    assert open_run(tmp_path).alarms == alarms


def test_what_a_killed_process_left_half_written_goes_when_it_resumes(tmp_path: Path) -> None:
    written(tmp_path, range(2))
    (tmp_path / "maps").mkdir()
    names = (
        ".series-rank0-000004.parquet-1234",
        ".manifest.json-1234",
        ".alarms-rank0.jsonl-1234",
        "maps/.step-00000000-layer-000-head-001-rank0.safetensors-1234",
    )
    others = (".series-rank1-000004.parquet-1234", ".series-rank10-000004.parquet-9", ".gitignore")
    for name in (*names, *others):
        (tmp_path / name).write_text("half")
    with RunWriter(tmp_path, dict(ABOUT), resume=True):
        pass
    assert not any((tmp_path / name).exists() for name in names)
    assert all((tmp_path / name).exists() for name in others)


def test_a_full_disk_stops_the_run_where_that_was_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = RunWriter(tmp_path, dict(ABOUT), steps=1, on_error="stop")
    writer.add(entry(0))
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="the disk is full") as refusal:
        writer.add(entry(1))
    assert refusal.value.errno == errno.ENOSPC
    assert open_run(tmp_path).steps == [0]


def test_a_really_full_disk_corrupts_nothing(tmp_path: Path) -> None:
    place = Path("/dev/full")
    if not place.exists():
        pytest.skip("this system has no device that is always full")
    writer = RunWriter(tmp_path, dict(ABOUT), steps=1)
    writer.add(entry(0))
    (tmp_path / f".series-rank0-000002.parquet-{os.getpid()}").symlink_to(place)
    writer.add(entry(1))  # its temporary file is the full device
    assert open_run(tmp_path).steps == [0]
    writer.close()
    assert open_run(tmp_path).steps == [0, 1]


def test_a_run_of_a_newer_headwise_is_refused(tmp_path: Path) -> None:
    written(tmp_path, range(1))
    said = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps({**said, "format": 2}))
    for refused in (lambda: open_run(tmp_path), lambda: RunWriter(tmp_path, ABOUT, resume=True)):
        with pytest.raises(ValueError, match=r"written by a newer headwise: its format is 2, and"):
            refused()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "holds no watched run"),
        ("{", "is damaged"),
        ("[]", "was not written by headwise"),
        ("{}", "was not written by headwise"),
        ('{"format": 1}', "is damaged: model has no class and no parameters"),
        ('{"format": 1, "model": {"class": "A", "parameters": 1}, "looking": 3}', "looking has no"),
    ],
)
def test_a_folder_that_is_no_run_is_refused(content: str | None, said: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(ValueError, match=said):
        open_run(tmp_path)


def test_a_file_is_no_run(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.write_text("")
    with pytest.raises(ValueError, match=r"file\.py can't be read as a watched run: Not a dir"):
        open_run(file)


def test_a_run_that_resumes_forgets_what_it_will_see_again(tmp_path: Path) -> None:
    watched(tmp_path, steps=5, keep=[(0, 1)], keep_every=2)
    with pytest.raises(ValueError, match="holds a watched run already; resume=True continues"):
        watched(tmp_path)
    model = hw.nn.MultiHeadAttention(16, 4)
    watch = hw.watch(model)
    watch.steps = 3
    with watch, watch.record(tmp_path, resume=True):
        for _ in range(4):
            model(torch.randn(1, 6, 16))
            watch.step()
    run = open_run(tmp_path)
    assert run.steps == [0, 1, 2, 3, 4, 5, 6]
    assert len(run.heads(4)) == 4
    assert [kept.step for kept in run.kept] == [0, 2]


def test_alarms_are_kept_with_the_run(tmp_path: Path) -> None:
    model, x = hw.nn.MultiHeadAttention(16, 4), torch.randn(1, 40, 16)
    torch.nn.init.normal_(model.query.weight, std=200)
    watch = hw.watch(model, alarms=True)
    with watch, watch.record(tmp_path):
        model(x)
        watch.step()
    assert watch.alarms
    assert open_run(tmp_path).alarms == watch.alarms
    with (tmp_path / "alarms-rank0.jsonl").open("a") as file:
        file.write('{"step": 3, "rule": "lo')  # what a kill leaves
    assert open_run(tmp_path).alarms == watch.alarms


def test_a_reader_sees_a_run_grow(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, dict(ABOUT), steps=1)
    run = open_run(tmp_path)
    assert run.steps == []
    assert len(run.heads()) == 0
    writer.add(entry(0))
    assert run.refresh()
    assert run.steps == [0]
    assert not run.refresh()
    writer.add(entry(1))
    run.refresh()
    assert [each.step for each in run.series] == [0, 1]
    writer.close()
    run.refresh()
    assert run.ended


def test_time_flushes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    writer = RunWriter(tmp_path, dict(ABOUT), steps=1000, seconds=10)
    now += 9.9
    writer.add(entry(0))
    assert open_run(tmp_path).steps == []
    now += 0.1
    writer.add(entry(1))
    assert open_run(tmp_path).steps == [0, 1]
    now += 9.9
    writer.add(entry(2))
    assert open_run(tmp_path).steps == [0, 1]


def test_a_recorded_series_stays_small_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["headwise.watching.training_steps"], "IN_MEMORY", 2)
    watch, _ = watched(tmp_path, steps=5)
    assert [each.step for each in watch.series] == [3, 4]
    assert open_run(tmp_path).steps == [0, 1, 2, 3, 4]


def test_a_recorded_step_of_a_training_leaves_no_object_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["headwise.watching.training_steps"], "IN_MEMORY", 5)
    monkeypatch.setenv("HEADWISE_CACHE", str(tmp_path / "unmeasured"))
    _, before, after = soaked(30, 10, tmp_path)
    assert after.objects - before.objects < 10


PROCESS = """
import sys, torch, torch.distributed as dist, headwise as hw
from torch.nn.parallel import DistributedDataParallel
rank, folder, meeting = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
torch.manual_seed(0)
model = DistributedDataParallel(hw.nn.MultiHeadAttention(16, 4))
torch.nn.init.normal_(model.module.query.weight, std=30)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
torch.manual_seed(rank + 1)
watch = hw.watch(model, alarms=True)
with watch, watch.record(folder):
    for step in range(3 + rank):  # one of them sees a step more: nobody waits for anybody
        if step == 3:
            model.module(torch.randn(1, 8, 16))
            watch.step()
            break
        model(torch.randn(1, 8, 16)).square().sum().backward()
        optimizer.step()
        watch.step()
        if step == 2:
            hw.qk_clip(model, watch, limit=5.0)
torch.save(model.module.state_dict(), folder + f"/weights-{rank}.pt")
with hw.watch(model.module) as seen:
    model.module(torch.full((1, 8, 16), float("nan") if rank else 1.0))
try:
    hw.qk_clip(model.module, seen)  # one has no numbers any more: no other waits for it
except ValueError as error:
    assert "infinite or NaN" in str(error)
else:
    raise AssertionError("both refuse")
largest = [max(row["max_logit_max"] for row in entry.table) for entry in watch.series]
print(largest[:3])
dist.destroy_process_group()
"""


def test_processes_write_side_by_side_and_are_read_as_one(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(rank), str(folder), str(tmp_path / "meeting")],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    found = [json.loads(process.communicate(timeout=120)[0]) for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert [part.rank for part in parts.parts_in(folder)] == [0, 1]
    run = open_run(folder)
    assert run.manifest["processes"] == 2
    assert run.steps == [0, 1, 2, 3]
    _, heads = run.history("max_logit_max")
    assert len(heads) == 4
    for step in range(3):  # the largest of both
        merged = max(line[step] for line in heads.values())
        assert merged == pytest.approx(max(found[0][step], found[1][step]))
    weights = [torch.load(folder / f"weights-{rank}.pt") for rank in range(2)]
    for name in weights[0]:  # both clipped by the same factors
        torch.testing.assert_close(weights[0][name], weights[1][name], rtol=0, atol=0)


def test_a_run_of_the_first_format_still_opens() -> None:
    """Three steps of two heads, written on 2026-11-18."""
    run = open_run(Path(__file__).parent / "run_of_format_1")
    assert (run.steps, run.ended, run.damaged) == ([0, 1, 2], True, [])
    assert run.logged == {"loss": ([0, 1, 2], [3.0, 2.0, 1.0])}
    assert [(x.step, x.rule, x.layer, x.head) for x in run.alarms] == [
        (0, "logit growth", 0, 0),
        (0, "logit growth", 0, 1),
    ]
    assert run.heads(step=2)["span_start_mean"] == pytest.approx([5 / 6, 1 / 3], abs=1e-6)
    assert run.map(layer=0, head=1)[0, 0].sum(1).tolist() == pytest.approx([1.0] * 6, abs=1e-4)
