"""Long experiments in sessions: pieces are shared out, kept, resumed, and joined to a table."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from headwise.apps.cli.main import app
from headwise.apps.lab import ablations, session_list
from headwise.apps.lab.claims import (
    CLAIMS,
    dot_quality,
    heads_patterns,
    recalling,
    scale_training,
    translation_quality,
)
from headwise.apps.lab.fingerprint import covered
from headwise.apps.lab.laboratory import Lab
from headwise.apps.lab.sessions import long_runs, pieces, pool
from headwise.apps.lab.sessions.long_runs import LabSession
from headwise.apps.lab.sessions.pool import Ended, Job
from headwise.apps.lab.sessions.side_by_side import SideBySide
from headwise.apps.lab.translation_rivals import MaskedLSTM, SlidingWindow
from headwise.apps.lab.translation_runs import NARROWER, RIVALS, VARIANTS, Training, train
from headwise.mask import lengths
from headwise.models import LSTM, LSTMConfig
from headwise.nn import Bahdanau


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


def test_the_plan_has_enough_seeds_for_the_close_comparisons() -> None:
    runs = ablations.plan(Lab("full"))
    seeds = {variant: sum(each == variant for each, _ in runs) for variant in ablations.LABELS}
    assert {name for name, count in seeds.items() if count >= 8} == {"base", "heads-1", "shared"}
    assert min(seeds.values()) == 2
    assert set(seeds) == {*VARIANTS, *NARROWER, *RIVALS} - {"heads-8"}
    assert {variant for variant, _ in runs[: len(seeds)]} == set(seeds)  # each has a first seed
    later = [variant for variant, _ in runs[len(seeds) :]]
    assert set(later[:21]) == {"base", "heads-1", "shared"}


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


@pytest.mark.parametrize("variant", ["fixed", "convolution", "lstm", "lstm-attention"])
def test_every_rival_learns_to_translate(variant: str) -> None:
    figures = train(Lab("tiny"), None, variant, 0)
    assert figures["curve"][-1][1] < figures["curve"][0][1]
    assert figures["signature"].startswith("nrefs:")


def test_a_window_does_not_see_padding() -> None:
    torch.manual_seed(0)
    window, x = SlidingWindow(8, ahead=1), torch.randn(1, 6, 8)
    alone = window(x[:, :4])
    padded = window(x, mask=lengths(torch.tensor([4])))
    torch.testing.assert_close(padded[:, :4], alone)
    with pytest.raises(ValueError, match="cache=None"):
        window(x, cache=object())


def test_an_lstm_that_masks_reads_as_one_that_packs() -> None:
    torch.manual_seed(0)
    config = LSTMConfig(50, d_model=16, layers=2, attention=Bahdanau(16))
    masked, packed = MaskedLSTM(config).eval(), LSTM(config).eval()
    packed.load_state_dict(masked.state_dict())
    source, target = torch.randint(3, 50, (3, 6)), torch.randint(3, 50, (3, 4))
    lengths_of = torch.tensor([6, 1, 3])
    torch.testing.assert_close(
        masked(source, target, source_lengths=lengths_of),
        packed(source, target, source_lengths=lengths_of),
    )
    torch.testing.assert_close(masked(source, target), packed(source, target))


def test_the_table_is_collected_from_pieces(tmp_path: Path) -> None:
    lab = Lab("tiny", folder=tmp_path)
    for piece in pieces.translators(lab)[:2]:
        piece.make(lab)
    session_list.note(tmp_path, ablations.COMMAND, lab.device, 12.0, ["translate-base-0"])
    assert ablations.collect(lab, tmp_path / ablations.FILE) == 2
    written = json.loads((tmp_path / ablations.FILE).read_text())
    assert written["planned"] == 4
    found = ablations.recorded([tmp_path], [])
    assert found.seconds == 12.0
    assert [run["variant"] for run in found.runs] == ["base", "heads-1"]
    assert all(run["curve"] and "without_head" not in run for run in found.runs)


def test_what_is_stopped_is_saved_and_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    whole = train(Lab("tiny"), None, "base", 0)
    lab, told = Lab("tiny", folder=tmp_path), list[str]()
    chosen = [x for x in pieces.translators(lab) if x.name == "translate-base-0"]
    asked = iter((False, True))
    SideBySide(lab, 2, 60.0, lambda: next(asked), told.append).make(chosen)
    (state,) = tmp_path.glob("kept/*/state.safetensors")
    assert not chosen[0].done(lab)
    assert "translate-base-0 1" in told[-1]  # stopped after the first step
    held = SideBySide(lab, 2, 60.0, lambda: False, told.append)
    held.make(chosen)
    assert held.steps == 1
    assert not state.exists()
    found = lab.kept("translate-base-0", train, variant="base", seed=0)
    assert found == json.loads(json.dumps(whole))


def test_a_failed_training_stops_no_other(tmp_path: Path) -> None:
    lab, told = Lab("tiny", folder=tmp_path), list[str]()

    def fail(*_: object, **__: object) -> Training:
        yield 1
        raise RuntimeError("out of memory")

    good, bad = pieces.translators(lab)[:2]
    held = SideBySide(lab, 2, 60.0, lambda: False, told.append)
    held.make([replace(bad, in_steps=fail), good])
    assert held.failed == [bad.name]
    assert good.done(lab)
    assert any("out of memory" in line for line in told)


def test_work_is_dealt_out_to_the_workers(tmp_path: Path) -> None:
    session = LabSession(Lab("full", folder=tmp_path), 16, 540.0, lambda ended: None)
    jobs = session.piece_jobs(pieces.translators(session.lab), 540.0)
    assert len(jobs) == 16
    alone = [job for job in jobs if "lstm" in job.name]
    assert len(alone) == 4
    assert all(job.arguments[1:3] == ("piece", job.name) for job in alone)
    named = [each for job in jobs for each in job.arguments if each.startswith("translate-")]
    assert sorted(named) == sorted(piece.name for piece in pieces.translators(session.lab))


def test_a_session_without_time_reports_what_is_left(tmp_path: Path) -> None:
    session = LabSession(Lab("tiny", folder=tmp_path), 1, 0.0, lambda ended: None)
    assert long_runs.train_table(session) == (0, 4)
    claims = [claim for claim in CLAIMS if claim.topic == "scale"][:2]
    assert long_runs.run_claims(session, claims) == claims


def test_claims_need_the_translators_that_they_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[str] = set()
    trained = "headwise.apps.lab.translation_runs.train"
    claims = [claim for claim in CLAIMS if trained in covered(claim.experiment)]

    def note(lab: Lab, variant: str, seed: int) -> dict[str, object]:
        asked.add(variant)
        return {"variant": variant, "seed": seed, "effective_keys": 1.0}

    monkeypatch.setattr(translation_quality, "translated", note)
    monkeypatch.setattr(heads_patterns, "translated", note)
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
    assert "4 of 4 translators are trained" in done.output, done.output
    again = CliRunner().invoke(app, ["lab", "table", "--minutes", "5", *place])
    assert "translate-" not in again.output  # nothing was left to train
    chosen = ["heads-parameters", "rivals-long-range", "dot-cost"]
    ran = CliRunner().invoke(app, ["lab", "run", *chosen, "--minutes", "5", *place])
    assert "3 of 3 claims have results" in ran.output, ran.output
