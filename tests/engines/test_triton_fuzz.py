"""The generated problems of `tests.gpu_fuzz`, small and under the interpreter, and its reports."""

from __future__ import annotations

import json

import pytest
import torch

from bench import flex
from tests import gpu_fuzz, gpu_race
from tests.engines import agreement, kernel_calls
from tests.engines.agreement import Outcome

pytest.importorskip("triton", reason="the kernels are written in Triton")

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("seed", [0, 2, 9, 14, 24, 31, 39])
def test_a_problem_agrees_with_the_reference(seed: int) -> None:
    gpu_fuzz.check(seed, "cpu", longest=20)


def test_a_number_stands_for_one_problem() -> None:
    for seed in (3, 3 + gpu_fuzz.FORMS):
        one, again = (gpu_fuzz.problem(seed) for _ in range(2))
        assert one == again
        assert torch.equal(one.recipe.call().q, again.recipe.call().q)
    alike, other = gpu_fuzz.problem(3), gpu_fuzz.problem(3 + gpu_fuzz.FORMS)
    assert alike.recipe.seed != other.recipe.seed
    same = ("mask", "dtype", "width", "value_width", "bias", "lengths")
    assert all(getattr(alike.recipe, x) == getattr(other.recipe, x) for x in same)
    assert (alike.stats, alike.learn, alike.engines) == (other.stats, other.learn, other.engines)


def test_lengths_cross_the_edges_of_tiles() -> None:
    sizes = [gpu_fuzz.problem(seed).recipe.call().sizes for seed in range(60)]
    lengths = {x.queries for x in sizes} | {x.keys for x in sizes}
    assert {127, 128, 129} & lengths
    assert max(lengths) > 256


def test_a_wrong_answer_is_reported_with_its_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = agreement.outcome

    def wrong(call: object, engine: str, *given: object) -> Outcome:
        found = right(call, engine, *given)
        if engine != "reference":
            found.values["out"][..., -1] += 1
        return found

    monkeypatch.setattr(agreement, "outcome", wrong)
    given = gpu_fuzz.asked("--first", "2", "--count", "1", "--workers", "1", "--longest", "12")
    given.share = (0, 1)
    gpu_fuzz.work(given)
    line = capsys.readouterr().out
    monkeypatch.setattr(gpu_fuzz, "in_turn", lambda *_: [tuple(json.loads(line))])
    assert gpu_fuzz.fuzz(given)["failed"][0][0] == 2
    told = capsys.readouterr().out
    assert "python -m tests.gpu_fuzz --first 2 --count 1" in told
    assert "out: " in told or "'out'" in told


def test_every_call_of_the_race_check_exists() -> None:
    for part in gpu_race.SECONDS:
        for call in gpu_race.calls(part):
            kind = call.split(" ", 2)[2].rsplit(" ", 2)[0]
            assert kind in kernel_calls.OTHERS or kernel_calls.options(kind) is not None


def test_repeats_notice_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    def unsteady(call: str) -> list[torch.Tensor]:
        x = torch.zeros(4)
        x[0] = -0.0 if call == "once" and len(made) == 5 else 0.0
        made.append(x)
        return [x]

    made: list[torch.Tensor] = []
    monkeypatch.setattr(gpu_race, "make", unsteady)
    found = gpu_race.repeated("once", float("inf"), count=4)
    assert found.error == "1 of 4 inputs gave other bits, the first with seed 2"
    assert gpu_race.repeated("steady", float("inf"), count=4).error is None


def test_results_become_a_table() -> None:
    row = {"calls": 3, "failed": ["a: off"], "not reached": ["b"], "seconds": 5}
    about = {"device": "GPU", "machine": {"torch": "2"}, "triton": "3"}
    text = gpu_race.table(about | {"run": row, "memcheck": {"missing": "none here"}})
    assert "| run | 3 | 1 | 1 | 5 |" in text
    assert "- run: a: off" in text
    times = {"headwise": 1.0, "five": 2.0, "flex, triton": 1.5, "flex, flash": 1.2}
    cases = {"sinks and window": {"forward": times, "both": times}, "causal": {"error": "none"}}
    text = flex.table(about | {"cases": cases})
    assert "**1.20** missed" in text  # of 1.4, to the faster backend
    assert [x.met for x in flex.figures({"cases": cases})] == [False, False]
