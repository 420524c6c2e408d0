"""What readers move: a part of the recorded figures, judged by the rule that judged all of them."""

from __future__ import annotations

from collections import Counter

import pytest

from headwise.apps.lab import record
from headwise.apps.lab.claim import Claim, Figures, Verdict, both, does_not_hold, holds
from headwise.apps.lab.claims import CLAIMS
from headwise.apps.lab.moves import ALL, SEEDS, Move, grid, moved, settings
from headwise.apps.lab.runner import find

MOVABLE = [claim for claim in CLAIMS if claim.moves]


@pytest.mark.parametrize("claim", MOVABLE, ids=lambda claim: claim.id)
def test_nothing_moved_is_the_recorded_verdict(claim: Claim) -> None:
    result = record.best(claim, [record.RECORDED])
    if result is None or result.stale(claim):
        pytest.skip("not measured yet")
    usual = {name: each["default"] for name, each in settings(claim.moves, result.figures).items()}
    assert moved(claim.moves, result.figures, usual) == result.figures
    (verdict,) = [
        found for at, found in grid(claim.moves, claim.rule, result.figures) if at == usual
    ]
    assert verdict is not None
    assert (verdict.verdict, verdict.because) == (result.verdict, result.because)


def verdicts(id: str) -> Counter[str | None]:
    (claim,) = find([id])
    result = record.best(claim, [record.RECORDED])
    assert result is not None
    return Counter(
        found and found.verdict for _, found in grid(claim.moves, claim.rule, result.figures)
    )


def test_a_reader_finds_where_verdicts_flip() -> None:
    for id in ("scale-saturation", "qkv-parameters", "heads-compute", "qk-self", "scale-exploding"):
        assert len(set(verdicts(id)) - {None}) > 1, id
    assert set(verdicts("heads-parameters")) == {"holds"}  # an identity holds at every size
    assert verdicts("qkv-parameters")[None] > 0  # where the shortest is longer than the longest


def small(figures: Figures) -> Verdict:
    most = max(row["x"] for row in figures["rows"])
    because = both("at most {most}", most=most)
    return holds(because) if most < 3 else does_not_hold(because)


def test_rows_are_kept_up_to_a_value_from_one_on_or_of_one() -> None:
    rows = [{"x": x, "kind": kind, "seed": x - 1} for x in (1, 2, 3) for kind in ("a", "b")]
    moves = (
        Move("most", both("x"), "x", needs=2),
        Move("least", both("x"), "x", how="from"),
        Move("kind", both("kind"), "kind", how="only"),
        SEEDS,
    )
    figures = {"rows": rows, "runs": [{"seed": 0}, {"seed": 5}], "other": 1}
    claim = Claim("my-small", both("Small."), lambda lab: {}, small, moves=moves)
    there = settings(claim.moves, figures)
    assert {name: each["stops"] for name, each in there.items()} == {
        "most": [2, 3],  # the rule needs two of them
        "least": [1, 2, 3],
        "kind": ["a", "b", ALL],
        "seeds": [1, 2, 3, 6],  # of both tables, counted from one
    }
    usual = {name: each["default"] for name, each in there.items()}
    assert moved(claim.moves, figures, usual) == figures
    cut = moved(claim.moves, figures, usual | {"most": 2, "kind": "b"})
    assert cut["rows"] == [rows[1], rows[3]]
    assert moved(claim.moves, figures, usual | {"seeds": 1})["runs"] == [{"seed": 0}]
    found = {tuple(at.values()): verdict for at, verdict in grid(claim.moves, claim.rule, figures)}
    assert len(found) == 2 * 3 * 3 * 4
    assert found[3, 1, ALL, 6] == does_not_hold(both("at most 3"))
    assert found[2, 1, ALL, 6] == holds(both("at most 2"))
    assert found[2, 3, ALL, 6] is None  # nothing is left to judge
