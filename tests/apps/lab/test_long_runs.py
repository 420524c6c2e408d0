"""Long experiments in sessions: pieces are shared out, kept, resumed, and joined to a table."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headwise.apps.cli.main import app
from headwise.apps.lab import ablations, record
from headwise.apps.lab.claims import (
    CLAIMS,
    dot_quality,
    recalling,
    scale_training,
    translation_quality,
)
from headwise.apps.lab.fingerprint import covered
from headwise.apps.lab.laboratory import Lab
from headwise.apps.lab.sessions import long_runs, pieces, pool
from headwise.apps.lab.sessions.long_runs import LabSession
from headwise.apps.lab.sessions.pool import Ended, Job
from headwise.apps.lab.translation_runs import (
    SIZES,
    VARIANTS,
    packed,
    seeds_of,
    size_of,
    train,
    twins,
    unpacked,
)
from headwise.apps.train.tasks.metrics import bleu_of


@dataclass(frozen=True)
class Script(Job):
    """A job that is a line of Python instead of a command of headwise."""

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-S", "-c", *self.arguments]


def test_jobs_run_side_by_side_and_a_failure_stops_no_other(tmp_path: Path) -> None:
    jobs = [
        Script("good", ("print('done')",)),
        Script("bad", ("raise SystemExit('no such thing')",)),
        Script("after", ("pass",)),
    ]
    told: list[Ended] = []
    ended = pool.work(jobs, workers=2, seconds=60, logs=tmp_path, tell=told.append)
    assert {each.name: each.code for each in ended} == {"good": 0, "bad": 1, "after": 0}
    assert told == ended
    assert {each.name: each.last_line for each in ended}["bad"] == "no such thing"


def test_a_session_stops_what_still_runs_when_its_time_is_over(tmp_path: Path) -> None:
    jobs = [Script("long", ("import time; time.sleep(600)",)), Script("never", ("pass",))]
    assert pool.work(jobs, workers=1, seconds=0.3, logs=tmp_path) == []


def test_a_job_that_measures_time_runs_alone(tmp_path: Path) -> None:
    begin = "import time; open({!r}, 'a').write({!r} + chr(10)); time.sleep(0.2); "
    end = "open({!r}, 'a').write({!r} + chr(10))"
    log = str(tmp_path / "order")

    def job(name: str, alone: bool) -> Script:
        return Script(name, ((begin + end).format(log, f"+{name}", log, f"-{name}"),), alone)

    jobs = [job("a", False), job("b", False), job("timed", True)]
    pool.work(jobs, workers=3, seconds=60, logs=tmp_path)
    assert Path(log).read_text().split()[:2] == ["+timed", "-timed"]


def test_every_row_has_five_seeds_and_rows_of_other_sizes_have_twins() -> None:
    lab = Lab("full")
    rows = ablations.plan(lab)
    assert rows[:14] == list(VARIANTS) == list(ablations.LABELS)
    assert {seeds_of(lab, row) for row in rows[:14]} == {5}
    assert {seeds_of(lab, row) for row in rows[14:]} == {3}
    base, found = size_of(lab, "base"), twins(lab)
    assert set(found.values()) == set(rows[14:])
    for row in VARIANTS:
        size = size_of(lab, row)
        assert (row in found) == (abs(size / base - 1) > SIZES)
        assert abs(size_of(lab, found.get(row, row)) / size - 1) < 1e-3


def test_every_long_training_of_a_claim_is_a_piece(tmp_path: Path) -> None:
    """A claim finds each of its trainings among the pieces: it trains nothing by itself."""
    lab = Lab("tiny", folder=tmp_path)
    known = {piece.name for piece in pieces.every(lab)}
    (claim,) = [each for each in CLAIMS if each.id == "rivals-long-range"]
    assert len(pieces.needed(claim, pieces.every(lab))) == 12
    claim.experiment(lab)
    kept = {path.stem for path in (tmp_path / "kept").glob("*.json")}
    assert kept
    assert kept <= known
    full = {piece.name: piece for piece in pieces.every(Lab("full"))}
    assert len(full) == len(pieces.every(Lab("full")))


@pytest.mark.parametrize("variant", ["fixed", "convolution", "recurrence", "lstm-attention"])
def test_every_rival_learns_to_translate(variant: str) -> None:
    (run,) = train(Lab("tiny"), None, variant, 1)["runs"]
    assert run["curve"][-1][1] < run["curve"][0][1]
    assert run["signature"].startswith("nrefs:")
    assert run["rate"] == 1e-3


def follow_from_sentences(runs: Sequence[Mapping[str, Any]]) -> int:
    """Fail unless every BLEU is that of the run's sentences; how many runs kept theirs."""
    for variant, counts in ablations.counted(runs).items():
        sums = [[sum(each) for each in zip(*run, strict=True)] for run in counts]
        # Another processor's logarithm may differ in its last digit.
        found = [bleu_of(each) for each in sums]
        assert found == pytest.approx(ablations.scores(runs)[variant], rel=1e-12)
    return sum(map(len, ablations.counted(runs).values()))


def test_every_recorded_bleu_follows_from_the_sentences_that_were_kept() -> None:
    table = ablations.recorded([record.RECORDED], [])
    follow_from_sentences(table.runs)
    assert table.by_length == table.bleu_by_length()
    for claim in CLAIMS:
        for form in ("quick", "full"):
            result = record.read(record.RECORDED, claim.id, form)
            runs = result.figures.get("runs", []) if result else []
            follow_from_sentences([run for run in runs if "bleu" in run])


def test_the_table_is_collected_from_pieces(tmp_path: Path) -> None:
    lab = Lab("tiny", folder=tmp_path)
    for piece in pieces.translators(lab)[:2]:
        piece.make(lab)
    record.note_session(tmp_path, ablations.COMMAND, lab.device, 12.0, ["translate-base"])
    assert ablations.collect(lab, tmp_path / ablations.FILE) == 2
    written = json.loads((tmp_path / ablations.FILE).read_text())
    assert written["planned"] == 4
    assert written["design_hash"] == ablations.design_hash()
    found = ablations.recorded([tmp_path], [])
    assert found.seconds == 12.0
    assert [run["variant"] for run in found.runs] == ["base", "heads-1"]
    assert all(run["curve"] and "without_head" not in run for run in found.runs)
    assert follow_from_sentences(found.runs) == 2
    assert found.bleu_by_length() == written["by_length"]
    assert translation_quality.runs(lab, "base")[0]["bleu"] == found.runs[0]["bleu"]


def test_the_rate_is_chosen_on_validation_data(tmp_path: Path) -> None:
    lab = Lab("tiny", folder=tmp_path, settings={"rates": (1e-5, 1e-2), "steps": 40})
    (run,) = train(lab, None, "base", 1)["runs"]
    chosen = json.loads((tmp_path / "kept" / "rate-base.json").read_text())["figures"]
    assert run["rate"] == chosen["rate"] == 1e-2
    assert chosen["losses"][1] < chosen["losses"][0]


def test_counts_of_sentences_are_kept_in_few_letters() -> None:
    counts = [[8, 9, 7, 4, 2, 1]] * 2000
    assert unpacked(packed(counts), 6) == counts
    assert len(packed(counts)) < 100


def test_translators_are_jobs_of_their_own_and_readers_are_dealt_out(tmp_path: Path) -> None:
    session = LabSession(Lab("full", folder=tmp_path), 3, 540.0, lambda ended: None)
    left = [x for x in pieces.every(session.lab) if not x.name.startswith("chinese")]
    jobs = session.piece_jobs(left)
    assert [x.name for x in jobs[-3:]] == ["worker-0", "worker-1", "worker-2"]
    assert [job.name for job in jobs[:-3]] == [x.name for x in left if x.alone]
    assert all(job.arguments[1:3] == ("piece", job.name) for job in jobs[:-3])


def test_a_session_without_time_reports_what_is_left(tmp_path: Path) -> None:
    session = LabSession(Lab("tiny", folder=tmp_path), 1, 0.0, lambda ended: None)
    assert long_runs.train_table(session) == (0, 4)
    claims = [claim for claim in CLAIMS if claim.topic == "scale"][:2]
    assert long_runs.run_claims(session, claims) == claims


def test_claims_need_the_translators_that_they_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[str] = set()
    trained = "headwise.apps.lab.translation_runs.train"
    claims = [claim for claim in CLAIMS if trained in covered(claim.experiment)]

    def note(lab: Lab, variant: str) -> list[dict[str, object]]:
        asked.add(variant)
        return [{"variant": variant, "seed": 0}]

    monkeypatch.setattr(translation_quality, "translated", note)
    monkeypatch.setattr(dot_quality, "recalling", lambda lab: {})
    no_readers = [("none", lambda lab, folder: {"steps": 1, "rows": []}, {})]
    monkeypatch.setattr(scale_training, "cells", lambda lab: no_readers)
    monkeypatch.setattr(recalling, "by_content", lambda lab: no_readers)
    for claim in claims:
        claim.experiment(Lab("tiny" if claim.id == "qk-none" else "full"))
    assert asked == set(translation_quality.CLAIMED)


def test_a_claim_that_lacks_a_piece_is_left_for_later(tmp_path: Path) -> None:
    lab = Lab("tiny", folder=tmp_path, only_reads=True)
    (claim,) = [each for each in CLAIMS if each.id == "qk-gradient"]
    with pytest.raises(ValueError, match="gradients-separate is not there yet"):
        claim.experiment(lab)


@pytest.mark.slow
def test_the_commands_take_the_next_pieces_and_resume(tmp_path: Path) -> None:
    place = ["--form", "tiny", "--device", "cpu", "--out", str(tmp_path), "--workers", "2"]
    done = CliRunner().invoke(app, ["lab", "table", "--minutes", "5", *place])
    assert "4 of 4 rows are trained" in done.output, done.output
    again = CliRunner().invoke(app, ["lab", "table", "--minutes", "5", *place])
    assert "translate-" not in again.output  # nothing was left to train
    chosen = ["heads-parameters", "rivals-long-range", "dot-cost"]
    ran = CliRunner().invoke(app, ["lab", "run", *chosen, "--minutes", "5", *place])
    assert "3 of 3 claims have results" in ran.output, ran.output
