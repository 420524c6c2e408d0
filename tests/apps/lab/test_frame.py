"""The frame of the lab: results are written, resumed, marked stale, and never invented."""

import importlib
import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headwise.apps.lab import record, runner
from headwise.apps.lab.charts import Chart, Listing, Series, WeightMap, cells
from headwise.apps.lab.claim import Claim, Figures, Verdict, both, does_not_hold, holds
from headwise.apps.lab.drawing import draw
from headwise.apps.lab.fingerprint import HERE, fingerprint
from headwise.apps.lab.laboratory import Lab, plain
from headwise.apps.train.data.packages import CorpusUnavailableError

runs: list[str] = []
numbers = itertools.count()


def two(lab: Lab) -> Figures:
    runs.append("two")
    return {"value": 1 + 1, "form": lab.form}


def another(lab: Lab) -> Figures:
    runs.append("another")
    return {"value": 3 - 1}


def judge(figures: Figures) -> Verdict:
    because = both("the value is {value}", "值是 {value}", value=figures["value"])
    return holds(because) if figures["value"] == 2 else does_not_hold(because)


def show(figures: Figures) -> tuple[Listing, ...]:
    return (Listing(both("values", "值"), (both("value", "值"),), ((figures["value"],),)),)


def claim(id: str = "scale-two", experiment: Callable[[Lab], Figures] = two) -> Claim:
    return Claim(id, both("One and one is two.", "一加一等于二。"), experiment, judge, show, "A")


@pytest.fixture(autouse=True)
def no_runs() -> None:
    runs.clear()


def test_a_result_has_the_verdict_of_its_figures_and_says_where_it_comes_from(
    tmp_path: Path,
) -> None:
    (result,) = runner.run([claim()], Lab(), tmp_path)
    assert (result.verdict, result.because, result.because.zh) == (
        "holds",
        "the value is 2",
        "值是 2",
    )
    assert result.command == "headwise lab run scale-two"
    assert "torch" in result.machine
    read = record.read(tmp_path, "scale-two", "quick")
    assert read == result
    assert read is not None
    assert read.because.zh == "值是 2"
    assert (tmp_path / "scale-two.quick.svg").exists()
    assert "值" in (tmp_path / "scale-two.quick.zh.svg").read_text()
    assert set(record.described(claim(), result)) >= {
        *("id", "verdict", "condition", "figures", "form", "stale", "command", "machine", "date")
    }


def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path) -> None:
    def broken(lab: Lab) -> Figures:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(runner.run([claim("scale-one"), claim("scale-two", broken)], Lab(), tmp_path))
    assert runs == ["two"]
    claims = [claim("scale-one"), claim("scale-two", another)]
    assert len(list(runner.run(claims, Lab(), tmp_path))) == 2
    assert runs == ["two", "another"]  # the first one was not run again
    list(runner.run(claims, Lab(), tmp_path, again=True))
    assert runs == ["two", "another"] * 2


@pytest.mark.parametrize("again", [False, True])
def test_claims_that_share_an_experiment_share_its_run(tmp_path: Path, again: bool) -> None:
    claims = [claim("scale-one"), claim("scale-two")]
    results = list(runner.run(claims, Lab(), tmp_path, again=again))
    assert runs == ["two"]
    assert [result.id for result in results] == ["scale-one", "scale-two"]
    assert results[1].command == "headwise lab run scale-two"


def test_a_claim_without_its_corpus_is_reported_and_left_out(tmp_path: Path) -> None:
    def offline(lab: Lab) -> Figures:
        raise CorpusUnavailableError("no connection")

    told: list[runner.RunProgress] = []
    claims = [claim("scale-one", offline), claim("scale-two")]
    results = list(runner.run(claims, Lab(), tmp_path, tell=told.append))
    assert [result.id for result in results] == ["scale-two"]
    assert [each.missing for each in told if each.missing] == ["no connection"]


def test_quick_and_full_results_stand_beside_each_other(tmp_path: Path) -> None:
    list(runner.run([claim()], Lab(), tmp_path))
    list(runner.run([claim()], Lab("full"), tmp_path))
    assert len(runs) == 2
    shown = record.best(claim(), [tmp_path])
    assert shown is not None
    assert (shown.form, shown.command) == ("full", "headwise lab run scale-two --full")


@pytest.mark.parametrize("changed", [{"version": "0.0.1"}, {"code": "0123456789abcdef"}])
def test_a_result_of_other_code_is_stale_and_run_again(
    tmp_path: Path, changed: dict[str, str]
) -> None:
    (result,) = runner.run([claim()], Lab(), tmp_path)
    assert not result.stale(claim())
    record.write(tmp_path, replace(result, **changed))  # type: ignore[arg-type]
    old = record.read(tmp_path, "scale-two", "quick")
    assert old is not None
    assert old.stale(claim())
    assert record.described(claim(), old)["stale"] is True
    list(runner.run([claim()], Lab(), tmp_path))
    assert len(runs) == 2


def test_a_current_result_is_shown_before_a_stale_one(tmp_path: Path) -> None:
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    (result,) = runner.run([claim()], Lab(), theirs)
    record.write(mine, replace(result, form="full", version="0.0.1"))
    assert record.best(claim(), [mine, theirs]) == result
    assert record.best(claim("scale-other"), [mine, theirs]) is None


def test_a_new_rule_judges_figures_that_are_there(tmp_path: Path) -> None:
    list(runner.run([claim()], Lab(), tmp_path))
    stricter = replace(claim(), rule=lambda figures: does_not_hold(both("never", "从不")))
    (result,) = runner.run([stricter], Lab(), tmp_path)
    assert (result.verdict, runs) == ("does not hold", ["two"])


def test_a_damaged_result_is_named(tmp_path: Path) -> None:
    (tmp_path / "scale-two.quick.json").write_text('{"id": "scale-two"}')
    with pytest.raises(ValueError, match=r"scale-two\.quick\.json is not a result"):
        record.read(tmp_path, "scale-two", "quick")


def test_figures_are_what_json_can_hold() -> None:
    assert plain({"rows": ({"d": 4},)}) == {"rows": [{"d": 4}]}
    with pytest.raises(ValueError, match="finite numbers"):
        plain({"value": float("inf")})


def test_pieces_are_kept_until_their_settings_change(tmp_path: Path) -> None:
    made: list[int] = []

    def piece(lab: Lab, folder: Path | None, size: int) -> Figures:
        made.append(size)
        assert folder is not None
        assert folder.is_dir()
        return {"size": size}

    lab = Lab(folder=tmp_path)
    assert [lab.keep("piece", piece, size=3)["size"] for _ in range(3)] == [3, 3, 3]
    assert lab.keep("piece", piece, size=4) == {"size": 4}
    assert made == [3, 4]


def test_nothing_is_kept_without_a_folder() -> None:
    def piece(lab: Lab, folder: Path | None) -> Figures:
        return {"folder": folder}

    assert Lab().keep("piece", piece) == {"folder": None}


def test_a_verdict_has_a_condition_if_and_only_if_it_holds_when() -> None:
    with pytest.raises(ValueError, match="condition"):
        Verdict("holds when", both("a", "甲"))
    with pytest.raises(ValueError, match="condition"):
        Verdict("holds", both("a", "甲"), both("b", "乙"))
    with pytest.raises(ValueError, match="not a verdict"):
        Verdict("maybe", both("a", "甲"))


class TestFingerprint:
    @pytest.fixture
    def changed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
        """The fingerprint of `experiment` in a module of the lab with this source and name."""
        monkeypatch.syspath_prepend(str(tmp_path))

        def of(source: str, place: str = "trial") -> str:
            name = f"lab_code_{next(numbers)}"
            (tmp_path / f"{name}.py").write_text(source)
            module: Any = importlib.import_module(name)
            monkeypatch.setitem(sys.modules, f"{HERE}{place}", module)
            for value in vars(module).values():
                if getattr(value, "__module__", "") == name:
                    value.__module__ = f"{HERE}{place}"
            return fingerprint(module.experiment)

        return of

    START = (
        "WIDTH = 4\n\ndef part():\n    return WIDTH\n\ndef experiment(lab):\n    return part()\n"
    )

    def test_comments_docstrings_and_unused_names_do_not_change_it(
        self, changed: Callable[..., str]
    ) -> None:
        again = self.START.replace("return part()", '"""Measure."""\n    return part()  # now')
        assert changed(self.START) == changed(again + "\n\ndef judge(figures):\n    return 3\n")

    def test_code_that_moves_is_the_same_code(self, changed: Callable[..., str]) -> None:
        source = "class Part:\n    WIDTH = 4\n\nPARTS = {'a': Part}\n\n" + self.START.replace(
            "return part()", "return PARTS['a'], part()"
        )
        assert changed(source) == changed(source, "folder.of.another_name")

    @pytest.mark.parametrize(
        "edit", [("WIDTH = 4", "WIDTH = 5"), ("return WIDTH", "return -WIDTH")]
    )
    def test_a_constant_or_a_function_that_is_used_changes_it(
        self, changed: Callable[..., str], edit: tuple[str, str]
    ) -> None:
        assert changed(self.START) != changed(self.START.replace(*edit))


def test_an_unknown_claim_is_completed_before_it_is_guessed() -> None:
    with pytest.raises(ValueError, match=r"did you mean scale-saturation\?"):
        runner.find(["scale-sat"])
    with pytest.raises(ValueError, match=r"did you mean scale-sigma\?"):
        runner.find(["scale-sigm4"])


def test_what_rounding_leaves_of_a_zero_is_shown_as_zero() -> None:
    curve = Series(both("lost", "损失"), [1, 2], [0.875, 8.356e-32])
    _, rows = cells(Chart(both("a", "甲"), both("x", "横"), both("y", "纵"), (curve,)))
    assert rows == [["1", "0.875"], ["2", "0"]]


def test_everything_that_a_claim_can_show_is_drawn(tmp_path: Path) -> None:
    curve = Series(both("a", "甲"), [1, 2, 4], [1.0, 2.0, 3.0], [0.5, 1.0, 2.0], [2.0, 3.0, 4.0])
    shown = (
        Chart(both("curve", "曲线"), both("x", "横"), both("y", "纵"), (curve,), log_x=True),
        WeightMap(both("map", "图"), ["一", "b"], ["c", "d"], [[0.5, 0.5], [1.0, 0.0]]),
        *show({"value": 2}),
    )
    english, chinese = draw(shown, tmp_path / "all.svg")
    assert chinese.name == "all.zh.svg"
    assert "curve" in english.read_text()
    assert "曲线" in chinese.read_text()


def test_only_claims_that_train_or_measure_time_run_on_a_gpu(tmp_path: Path) -> None:
    used: list[str] = []

    def place(lab: Lab) -> Figures:
        used.append(lab.device.type)
        return {"value": 2}

    lab = Lab(device=torch.device("meta"))  # stands for a GPU
    counted, trained = claim("scale-one", place), replace(claim("scale-two", place), gpu=True)
    list(runner.run([counted], lab, tmp_path / "counted"))
    list(runner.run([trained], lab, tmp_path / "trained"))
    assert used == ["cpu", "meta"]
