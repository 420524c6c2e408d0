"""Designs are registered before figures; a result carries the proof, and git checks it."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from headwise.apps.cli.main import app
from headwise.apps.lab import ablations, design, own_claims, record, runner
from headwise.apps.lab.claim import Claim, Figures, Verdict, both, does_not_hold, holds
from headwise.apps.lab.claims import CLAIMS
from headwise.apps.lab.command import begun_names, begun_settings
from headwise.apps.lab.laboratory import Lab
from headwise.apps.lab.revisions import REVISIONS
from headwise.apps.lab.runner import find

ROOT = Path(__file__).parents[3]
BEFORE = "2026-11-16"
"""The last day of figures that were measured before designs were registered."""
DESIGNS = "headwise/apps/lab/designs.json"


def git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


def test_the_register_holds_the_designs_that_stand() -> None:
    now = {claim.id: design.design_hash(claim) for claim in CLAIMS}
    now |= {"table": ablations.design_hash()}
    assert design.registered() == now, "register a new design before it runs: headwise lab register"


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.id)
def test_no_recorded_result_is_older_than_its_design(claim: Claim) -> None:
    for form in ("quick", "full"):
        result = record.read(record.RECORDED, claim.id, form)
        if result is None:
            continue
        if result.design_hash is None or result.commit is None:
            assert result.date <= BEFORE, "measured without a registered design"
            continue
        if not (ROOT / ".git").exists() or "true" in git("rev-parse", "--is-shallow-repository"):
            pytest.skip("needs the full history")
        refuse(result.commit, claim.id, result.design_hash, result.date)


def test_the_recorded_table_is_no_older_than_its_design() -> None:
    table = json.loads((record.RECORDED / ablations.FILE).read_text(encoding="utf-8"))
    if "design_hash" not in table:
        assert all(session["date"] <= BEFORE for session in table["sessions"])
        return
    if not (ROOT / ".git").exists() or "true" in git("rev-parse", "--is-shallow-repository"):
        pytest.skip("needs the full history")
    first = min(session["date"] for session in table["sessions"])
    refuse(table["commit"], "table", table["design_hash"], first)


def refuse(commit: str, id: str, hashed: str, date: str) -> None:
    """Fail unless this design was registered in this commit of the history, by this day."""
    subprocess.run(["git", "merge-base", "--is-ancestor", commit, "HEAD"], cwd=ROOT, check=True)
    assert json.loads(git("show", f"{commit}:{DESIGNS}"))[id] == hashed
    assert git("show", "-s", "--format=%cs", commit).strip() <= date


def test_a_design_that_was_committed_after_the_run_is_refused() -> None:
    if not (ROOT / ".git").exists() or "true" in git("rev-parse", "--is-shallow-repository"):
        pytest.skip("needs the full history")
    first, *_ = git("log", "--format=%H", "--reverse", "-n", "1000", "--", "pyproject.toml").split()
    hashed = design.registered()["scale-sigma"]
    with pytest.raises((AssertionError, subprocess.CalledProcessError)):
        refuse(first, "scale-sigma", hashed, "2026-11-18")  # it registers nothing yet


SOURCE = """
from headwise.apps.lab.claim import Claim, both, does_not_hold, holds


def experiment(lab):
    steps = lab.pick("steps", tiny=1, quick=20)
    return {"value": 2, "steps": steps}


def rule(figures):
    because = both("it is {value}", value=figures["value"])
    return holds(because) if figures["value"] < 3 else does_not_hold(because)


mine = Claim(id="mine", sentence="Two is small.", experiment=experiment, rule=rule)
"""


def read_one(tmp_path: Path, source: str, name: str) -> Claim:
    file = tmp_path / f"{name}.py"
    file.write_text(source)
    (claim,) = own_claims.claims_in(file, ())
    return claim


def test_wording_and_place_leave_the_hash_and_sizes_and_rules_change_it(tmp_path: Path) -> None:
    before = design.design_hash(read_one(tmp_path, SOURCE, "one"))
    reworded = SOURCE.replace("it is {value}", "its value: {value}").replace("Two is", "Two was")
    assert design.design_hash(read_one(tmp_path, reworded, "elsewhere")) == before
    for edit in (("quick=20", "quick=30"), ("< 3", "< 4")):
        changed = read_one(tmp_path, SOURCE.replace(*edit), f"changed_{len(edit[1])}")
        assert design.design_hash(changed) != before


def test_a_result_carries_its_design_and_another_rule_takes_it_away(tmp_path: Path) -> None:
    claim = read_one(tmp_path, SOURCE, "carried")
    (result,) = runner.run([claim], Lab(), tmp_path / "out")
    assert result.design_hash == design.design_hash(claim)

    def stricter(figures: Figures) -> Verdict:
        return holds(both("a")) if figures["value"] < 1 else does_not_hold(both("b"))

    other = replace(claim, rule=stricter)
    assert runner.judged(other, result).design_hash is None


def test_settings_replace_sizes_and_unknown_ones_are_refused(tmp_path: Path) -> None:
    claim = read_one(tmp_path, SOURCE, "settable")
    chosen = design.read_settings([claim], {"steps": "7"})
    (result,) = runner.run([claim], Lab(settings=chosen), tmp_path / "out")
    assert result.figures["steps"] == 7
    assert result.command.endswith("--set steps=7")
    assert dict(result.settings) == {"steps": 7}
    with pytest.raises(ValueError, match="mine has no setting d_k; it has steps=20"):
        design.read_settings([claim], {"d_k": "256"})
    with pytest.raises(ValueError, match="not a setting like steps=20"):
        design.read_settings([claim], {"steps": "-1"})


def test_a_file_without_claims_or_with_a_taken_id_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("x = 1")
    with pytest.raises(ValueError, match="defines no claim"):
        find([str(tmp_path / "empty.py")], files=True)
    (tmp_path / "taken.py").write_text(SOURCE.replace('id="mine"', 'id="scale-sigma"'))
    with pytest.raises(ValueError, match="give yours another id"):
        find([str(tmp_path / "taken.py")], files=True)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (("def rule", "def rule("), "line 10: SyntaxError"),
        (("mine = Claim", "mine = 1 / 0, Claim"), "line 15: ZeroDivisionError"),
        (('id="mine"', 'id="../mine"'), "'../mine' is not an id"),
    ],
)
def test_what_is_wrong_in_a_file_is_said_with_its_line(
    tmp_path: Path, edit: tuple[str, str], said: str
) -> None:
    file = tmp_path / "wrong.py"
    file.write_text(SOURCE.replace(*edit))
    with pytest.raises(ValueError, match=said):
        find([str(file)], files=True)


def test_a_rule_has_to_give_a_verdict(tmp_path: Path) -> None:
    claim = read_one(tmp_path, SOURCE.replace("return holds(because) if", "return 1 if"), "numeric")
    with pytest.raises(ValueError, match=r"the rule of mine returned 1; return holds"):
        claim.rule({"value": 2})
    assert claim.command == "headwise lab run numeric.py"  # its id would find nothing


def test_sizes_of_yours_are_told_beside_the_recorded_verdict_or_refused_with_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWISE_CACHE", str(tmp_path))

    def run(*words: str) -> str:
        return CliRunner().invoke(app, ["lab", "run", "scale-saturation", *words]).output

    assert "the verdict has changed: recorded is ✓ holds" in run("--set", "d_k=1,4")
    assert "the verdict is the recorded one" in run("--set", "rows=4")
    assert "scale_softmax.py, line" in run("--set", "keys=1")  # log(1) = 0


def test_a_shell_completes_claims_and_their_settings() -> None:
    context: Any = SimpleNamespace(params={"ids": ["dot-small"]})
    assert "scale-sigma" in dict(begun_names("scale-s"))
    assert dict(begun_settings(context, "s")) == {"seeds=": "3", "steps=": "120"}


def test_a_request_can_t_name_a_file_that_would_be_run(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(SOURCE + f"open({str(tmp_path / 'ran')!r}, 'w').close()")
    with pytest.raises(ValueError, match="there is no claim"):
        find([str(file)])
    assert not (tmp_path / "ran").exists()


def test_every_contested_verdict_is_kept_with_the_reason_of_its_change() -> None:
    assert len(REVISIONS) == 18
    assert set(REVISIONS) <= {claim.id for claim in CLAIMS}
    for id, old in REVISIONS.items():
        (claim,) = find([id])
        entry: dict[str, Any] = record.described(claim, None)
        assert entry["history"][0]["verdict"] == old[0].verdict
        assert re.search("[一-鿿]", old[0].reason.zh)
