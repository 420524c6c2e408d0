"""The lab as the page sees it: claims, results with their state, code, and one job at a time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from headwise.apps.lab import record
from headwise.apps.lab.claims import CLAIMS
from headwise.apps.lab.laboratory import Lab
from headwise.apps.lab.page import job_of
from headwise.apps.lab.page_code import code
from headwise.apps.lab.record import Result
from headwise.apps.lab.runner import find, run
from headwise.apps.look.serving.answers import answer, answer_post
from headwise.apps.look.serving.server import application
from headwise.apps.look.session import Session
from headwise.apps.train.data import download_cache
from headwise.apps.train.data.packages import CorpusUnavailableError

PATIENCE = 300


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's results, in a folder of the test's own, and none that come with the package."""
    monkeypatch.setenv("HEADWISE_CACHE", str(tmp_path))
    monkeypatch.setattr(record, "RECORDED", tmp_path / "recorded")
    return record.own_folder()


def get(address: str, session: Session | None = None) -> tuple[int, Any]:
    given = answer(session or Session(), address)
    return given.status, json.loads(given.body)


def post(session: Session, address: str) -> tuple[int, Any]:
    given = answer_post(session, address, None)
    return given.status, json.loads(given.body)


def measured(id: str, folder: Path) -> Result:
    """A real result in a folder."""
    (result,) = run(find([id]), Lab("quick"), folder)
    return result


def test_every_claim_is_listed_under_a_topic_in_both_languages() -> None:
    status, listed = get("/api/lab")
    assert status == 200
    assert [claim["id"] for claim in listed["claims"]] == [claim.id for claim in CLAIMS]
    assert {claim["topic"] for claim in listed["claims"]} == {x["id"] for x in listed["topics"]}
    assert {claim["verdict"] for claim in listed["claims"]} == {None}
    assert all(claim["sentence"] in listed["zh"] for claim in listed["claims"])


def test_a_claim_comes_with_its_result_and_where_it_was_measured(folder: Path) -> None:
    result = measured("scale-overflow", folder)
    _, claim = get("/api/lab/claims/scale-overflow")
    (shown,) = claim["results"]
    assert shown["figures"] == result.figures
    for name in ("verdict", "condition", "because", "command", "machine", "date", "form"):
        assert shown[name] == getattr(result, name)
    assert (shown["own"], shown["stale"], shown["folder"]) == (True, False, str(folder))
    chart, table = shown["shown"]
    assert (chart["kind"], table["kind"]) == ("chart", "table")
    assert [row[0] for row in table["rows"]] == [row["type"] for row in result.figures["single"]]
    assert claim["zh"][shown["because"]] == result.because.zh
    assert claim["derivation"] == find(["scale-overflow"])[0].derivation


def test_a_stale_result_says_so_draws_nothing_and_gives_way_to_a_current_one(
    folder: Path,
) -> None:
    result = measured("paper-heads", folder)
    record.write(folder, replace(result, version="0.0.1", form="full", verdict="right"))
    _, claim = get("/api/lab/claims/paper-heads")
    assert [(x["form"], x["stale"], bool(x["shown"])) for x in claim["results"]] == [
        ("quick", False, True),
        ("full", True, False),
    ]
    record.write(folder, replace(result, version="0.0.1"))
    _, listed = get("/api/lab")
    (shown,) = (x for x in listed["claims"] if x["id"] == "paper-heads")
    assert (shown["verdict"], shown["stale"]) == ("right", True)


def test_a_damaged_result_is_named_and_hides_nothing_else(folder: Path) -> None:
    measured("paper-heads", folder)
    record.file_of(folder, "paper-heads", "full").write_text("{", encoding="utf-8")
    status, claim = get("/api/lab/claims/paper-heads")
    assert status == 200
    assert "paper-heads.full.json is not a result of the lab" in claim["problem"]
    assert [x["form"] for x in claim["results"]] == ["quick"]
    assert get("/api/lab")[0] == 200


@pytest.mark.parametrize(
    ("id", "error", "hint"),
    [
        ("scale-varianse", "there is no claim 'scale-varianse'", "did you mean scale-variance?"),
        ("qk", "qk is a topic", "use one of qk-"),
    ],
)
def test_an_unknown_claim_is_refused_with_the_nearest(id: str, error: str, hint: str) -> None:
    session = Session()
    for status, said in (
        get(f"/api/lab/claims/{id}"),
        post(session, f"/api/lab/claims/{id}/run"),
    ):
        assert (status, said["error"]) == (404, error)
        assert said["hint"].startswith(hint)
        assert {said["error"], said["hint"]} <= set(said["zh"])
    assert job_of(session).state() is None


def test_the_code_of_an_experiment_begins_with_it_and_has_all_it_uses() -> None:
    for claim in CLAIMS:
        for function in (claim.experiment, claim.rule):
            named = getattr(function, "func", function).__name__  # a partial's own function
            assert f"def {named}(" in code(function)[0].source
    pieces = code(find(["scale-sigma"])[0].experiment)
    starts = [piece.source.partition("(")[0] for piece in pieces]
    assert starts == ["def sigmas", "def dots", "SIGMAS = ", "def slope"]
    for piece in pieces:
        lines = (Path(record.__file__).parents[3] / piece.file).read_text(encoding="utf-8")
        assert lines.splitlines()[piece.line - 1] == piece.source.splitlines()[0]


class TestJob:
    def test_a_run_is_saved_where_the_command_line_saves_it(self, folder: Path) -> None:
        session = Session()
        assert get("/api/lab/job", session)[1] == {"id": None}
        status, job = post(session, "/api/lab/claims/scale-overflow/run")
        assert (status, job["id"], job["state"]) == (202, "scale-overflow", "running")
        assert job_of(session).join(PATIENCE)
        assert get("/api/lab/job", session)[1]["state"] == "done"
        result = record.read(folder, "scale-overflow", "quick")
        assert result is not None
        assert result.verdict == "holds when"
        _, claim = get("/api/lab/claims/scale-overflow")
        assert [x["verdict"] for x in claim["results"]] == ["holds when"]

    def test_one_runs_at_a_time_and_stops_when_told(self, folder: Path) -> None:
        session = Session()
        post(session, "/api/lab/claims/scale-variance/run")
        status, said = post(session, "/api/lab/claims/scale-overflow/run")
        assert (status, said["error"]) == (409, "the lab is still running scale-variance")
        assert said["zh"][said["hint"]]
        status, job = post(session, "/api/lab/stop")
        assert (status, job["state"]) == (202, "stopping")
        assert job_of(session).join(PATIENCE)
        assert get("/api/lab/job", session)[1]["state"] == "stopped"
        assert record.read(folder, "scale-variance", "quick") is None
        assert post(session, "/api/lab/stop")[1]["state"] == "stopped"  # once is enough

    def test_a_failure_is_told_and_another_can_run(self, folder: Path) -> None:
        folder.parent.mkdir(exist_ok=True)
        folder.write_text("not a folder", encoding="utf-8")
        session = Session()
        post(session, "/api/lab/claims/paper-heads/run")
        assert job_of(session).join(PATIENCE)
        _, job = get("/api/lab/job", session)
        assert job["state"] == "failed"
        assert str(folder) in job["error"]
        folder.unlink()
        assert post(session, "/api/lab/claims/paper-heads/run")[0] == 202
        assert job_of(session).join(PATIENCE)
        assert get("/api/lab/job", session)[1]["state"] == "done"

    def test_a_corpus_that_can_not_be_had_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def unavailable(corpus: object) -> None:
            raise CorpusUnavailableError("no network here")

        monkeypatch.setattr(download_cache, "fetch", unavailable)
        session = Session()
        post(session, "/api/lab/claims/heads-quality/run")
        assert job_of(session).join(PATIENCE)
        _, job = get("/api/lab/job", session)
        assert (job["state"], job["error"]) == ("failed", "no network here")

    def test_it_ends_with_the_session(self) -> None:
        session = Session()
        post(session, "/api/lab/claims/scale-variance/run")
        assert session.stop(PATIENCE)
        assert get("/api/lab/job", session)[1]["state"] == "stopped"


def test_only_the_page_itself_can_run_something(tmp_path: Path) -> None:
    session = Session()
    run_it = "/api/lab/claims/paper-heads/run"
    with TestClient(application(session, tmp_path), base_url="http://127.0.0.1:8470") as client:
        foreign = {"origin": "http://example.org"}
        assert client.post(run_it, json={}, headers=foreign).status_code == 403
        crossed = {"sec-fetch-site": "cross-site"}
        assert client.post(run_it, json={}, headers=crossed).status_code == 403
        assert client.post(run_it, json={}, headers={"host": "example.org"}).status_code == 421
        form = {"content-type": "application/x-www-form-urlencoded"}
        assert client.post(run_it, content="x=1", headers=form).status_code == 415
        assert client.get(run_it).status_code == 404
        assert client.post("/api/lab/elsewhere", json={}).status_code == 404
        assert job_of(session).state() is None
        assert client.post(run_it, json={}).status_code == 202
        assert job_of(session).join(PATIENCE)


def test_a_result_is_moved_and_an_unknown_one_is_refused(folder: Path) -> None:
    measured("scale-saturation", folder)
    status, found = get("/api/lab/claims/scale-saturation/moved?result=own-quick")
    assert status == 200
    assert found["settings"]["d_k"]["stops"][-1] == found["settings"]["d_k"]["default"]
    assert {cell["verdict"] for cell in found["cells"]} == {"holds", "does not hold"}
    assert all(cell["because"] in found["zh"] for cell in found["cells"])
    assert get("/api/lab/claims/scale-saturation/moved?result=recorded-full")[0] == 404
