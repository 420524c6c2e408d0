"""The printed table of translators follows from the recorded runs, computed here a second time."""

from __future__ import annotations

import base64
import json
import math
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwise.apps.lab import ablations, record

stats = pytest.importorskip("scipy.stats")
PAGE = Path(__file__).parents[3] / "docs/handbook/translation.md"
RUNS, RATE, MILLISECONDS, BLEU, GAP, LOSS = 1, 3, 4, 5, 6, 8
"""The columns of the table."""


@pytest.fixture(scope="module")
def table() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((record.RECORDED / ablations.FILE).read_text("utf-8"))
    return found


def printed(title: str) -> dict[str, list[str]]:
    """The rows of a table of the page, by their first cell."""
    text = PAGE.read_text(encoding="utf-8").partition(f"*{title}*\n")[2]
    lines = re.findall(r"^\| (.*) \|$", text.strip().partition("\n\n")[0], re.M)
    cells = [line.split(" | ") for line in lines[2:]]
    return {row[0]: row for row in cells}


def counts(run: dict[str, Any]) -> np.ndarray[Any, Any]:
    """What BLEU counts in each sentence: (sentences, 6)."""
    packed = zlib.decompress(base64.b85decode(run["statistics"]))
    return np.frombuffer(packed, np.uint8).reshape(-1, 6).astype(float)


def bleu(sentences: np.ndarray[Any, Any]) -> float:
    """BLEU of these sentences, by its formula."""
    said, referred, *matches = sentences.sum(0)
    grams = [np.maximum(sentences[:, 0] - n, 0).sum() for n in range(4)]
    logs = [math.log(right / of) for right, of in zip(matches, grams, strict=True)]
    return float(100 * math.exp(min(0.0, 1 - referred / said) + sum(logs) / 4))


def rows(table: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for run in table["runs"]:
        found.setdefault(run["variant"], []).append(run)
    return found


def test_every_number_of_a_trained_row_follows_from_its_runs(table: dict[str, Any]) -> None:
    page, groups = printed("Translators"), rows(table)
    for variant, runs in groups.items():
        row = page[str(ablations.label(variant))]
        scores = [bleu(counts(run)) for run in runs]
        assert row[RUNS] == str(len(runs))
        assert row[BLEU] == f"{np.mean(scores):.2f}"
        assert row[LOSS] == f"{np.mean([run['test_loss'] for run in runs]):.3f}"
        tried = table["rates"][variant]
        best = min(zip(tried["losses"], tried["rates"], strict=True))[1]
        assert float(row[RATE]) == best == runs[0]["rate"]
        if variant != "base":
            base = [bleu(counts(run)) for run in groups["base"]]
            check_interval(row[GAP], scores, base, over_sentences(runs, groups["base"]))


def check_interval(cell: str, mine: list[float], base: list[float], error: float) -> None:
    """Fail unless a cell tells this difference, and about this interval."""
    mean, low, high = map(float, re.findall(r"[-+][\d.]+", cell))
    assert mean == pytest.approx(np.mean(mine) - np.mean(base), abs=0.006)
    welch = stats.ttest_ind(mine, base, equal_var=False)
    ends = welch.confidence_interval()
    seeds = (ends.high - ends.low) / 2 / stats.t.ppf(0.975, welch.df)
    half = stats.t.ppf(0.975, welch.df) * math.hypot(seeds, error)
    assert (low, high) == pytest.approx((mean - half, mean + half), abs=0.1 * half)


def over_sentences(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> float:
    """The standard error over sentences, by other draws than those of the table."""
    random, both = np.random.default_rng(7), [list(map(counts, runs)) for runs in (one, other)]
    size = len(both[0][0])
    gaps = []
    for _ in range(200):
        drawn = random.integers(size, size=size)
        means = [np.mean([bleu(run[drawn]) for run in runs]) for runs in both]
        gaps.append(means[0] - means[1])
    return float(np.std(gaps, ddof=1))


def test_the_scores_by_length_follow_from_the_sentences(table: dict[str, Any]) -> None:
    page = printed("BLEU by length")
    sizes = np.frombuffer(zlib.decompress(base64.b85decode(table["lengths"])), np.uint8)
    ends = (0, *ablations.LONGEST)
    for variant, runs in rows(table).items():
        told = page[str(ablations.label(variant))][1:]
        for cell, least, most in zip(told, ends, ends[1:], strict=False):
            there = (sizes > least) & (sizes <= most)
            assert cell == f"{np.mean([bleu(counts(run)[there]) for run in runs]):.1f}"


def test_rows_that_are_not_trained_say_so(table: dict[str, Any]) -> None:
    page = printed("Translators")
    for variant, label in ablations.LABELS.items():
        assert (page[str(label)][BLEU] == "not trained yet") == (variant not in rows(table))
