"""`headwise lab` as a user sees it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from headwise.apps.cli.main import app
from headwise.apps.lab import record
from headwise.apps.lab.claims import CLAIMS
from headwise.apps.lab.laboratory import Lab
from headwise.apps.lab.runner import find, run


def lab(*words: str) -> Result:
    return CliRunner().invoke(app, ["lab", *words])


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A folder with one result, of the smallest size and marked as a quick one."""
    (claim,) = find(["scale-sigma"])
    (result,) = run([claim], Lab("tiny"), tmp_path / "tiny")
    record.write(tmp_path, replace(result, form="quick"))
    return tmp_path


def test_the_list_names_every_claim_and_its_verdict(out: Path) -> None:
    shown = lab("--out", str(out)).output
    assert all(claim.id in shown for claim in CLAIMS)
    assert "◐ holds when" in shown


def test_json_lists_every_claim_with_the_fields_a_program_reads(out: Path) -> None:
    entries = json.loads(lab("--json", "--out", str(out)).output)
    assert [entry["id"] for entry in entries] == [claim.id for claim in CLAIMS]
    (sigma,) = [entry for entry in entries if entry["id"] == "scale-sigma"]
    assert (sigma["verdict"], sigma["form"], sigma["stale"]) == ("holds when", "full", False)
    assert sigma["condition"].startswith("only one of q and k")
    assert sigma["zh"][sigma["condition"]].startswith("q 与 k 只有一方")


def test_a_claim_is_shown_in_both_languages(out: Path) -> None:
    english = lab("show", "scale-sigma", "--out", str(out)).output
    assert "If the inputs have variance σ²" in english
    assert "headwise lab run scale-sigma" in english
    assert "若输入的方差为 σ²" in lab("show", "scale-sigma", "--out", str(out), "--zh").output


def test_a_run_writes_results_and_a_second_one_takes_them_up(out: Path) -> None:
    shown = json.loads(lab("run", "scale-sigma", "--json", "--out", str(out)).output)
    assert shown[0]["verdict"] == "holds when"
    assert "holds when" in lab("run", "scale-sigma", "--out", str(out)).output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "scale-varience"], "did you mean scale-variance?"),
        (["show", "scale-varience"], "did you mean scale-variance?"),
        (["show", "my-sum"], "a claim of your own is named by its file"),
        (["show", "scale-varience", "--zh"], "是不是 scale-variance"),
        (["show", "scale"], "scale is a topic"),
        (["run"], "or use --all"),
        (["run", "scale-sigma", "--all"], "or use --all"),
        (["run", "scale-sigma", "--device", "meta"], "there is no device 'meta'"),
    ],
)
def test_what_can_t_be_run_is_explained(words: list[str], message: str, tmp_path: Path) -> None:
    result = lab(*words, *(["--out", str(tmp_path)]))
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_a_claim_is_shown_with_its_verdict_before_its_figures(out: Path) -> None:
    shown = lab("show", "heads-diversity").output
    assert (
        shown.index("holds when · measured") < shown.index("experiment:") < shown.index("Heads of")
    )
    assert "until 2026-11-18: ✓ holds;" in " ".join(shown.split())


def test_settings_that_a_claim_lacks_are_refused_with_those_it_has(out: Path) -> None:
    result = lab("run", "dot-small", "--set", "width=3", "--out", str(out))
    assert result.exit_code == 2
    assert "dot-small has no setting width; it has d_k=4,8,32,128" in " ".join(
        result.output.replace("│", " ").split()
    )


def test_settings_of_yours_make_a_result_of_its_own(out: Path) -> None:
    words = ("run", "scale-sigma", "--set", "pairs=3000", "--json", "--out", str(out))
    (entry,) = json.loads(lab(*words).output)
    assert entry["settings"] == {"pairs": 3000}
    assert entry["command"] == "headwise lab run scale-sigma --set pairs=3000"
    assert (out / "pairs=3000" / "scale-sigma.quick.json").exists()


def test_a_claim_in_a_file_runs_and_is_shown(tmp_path: Path) -> None:
    file = tmp_path / "my_claim.py"
    file.write_text(
        "from headwise.apps.lab.claim import Claim, both, holds\n\n\n"
        "def experiment(lab):\n    return {'value': lab.pick('size', tiny=1, quick=2)}\n\n\n"
        "def rule(figures):\n    return holds(both('it is {x}', x=figures['value']))\n\n\n"
        "mine = Claim(id='mine', sentence='It is so.', experiment=experiment, rule=rule)\n"
    )
    (entry,) = json.loads(lab("run", str(file), "--json", "--out", str(tmp_path)).output)
    assert (entry["verdict"], entry["because"], entry["kind"]) == ("holds", "it is 2", "measured")
    assert "It is so." in lab("show", str(file), "--out", str(tmp_path)).output


def test_every_entry_says_what_kind_it_is_and_where_its_design_stands() -> None:
    entries = json.loads(lab("--json").output)
    assert {entry["kind"] for entry in entries} == {"derived", "read", "measured"}
    wanted = {"interval", "power", "design_hash", "design", "history", "registered", "commit"}
    assert all(wanted <= set(entry) for entry in entries)
    assert sum(bool(entry["history"]) for entry in entries) == 18
