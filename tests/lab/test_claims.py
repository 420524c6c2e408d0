"""Every claim: its experiment runs, its verdict follows the figures, both languages agree."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from headwise.lab import record
from headwise.lab.charts import Chart, Listing, WeightMap
from headwise.lab.claim import NOTES, TOPICS, VERDICTS, Claim
from headwise.lab.claims import (
    CLAIMS,
    cost_layer,
    heads_counted,
    qk_symmetry,
    rivals_reach,
    rivals_sharing,
    rivals_time,
    scale_depth,
    scale_overflow,
    scale_softmax,
    scale_variance,
)
from headwise.lab.laboratory import Lab, plain
from headwise.lab.runner import find
from headwise.nn import Learned, SwiGLU

each = pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.id)
Edit = Callable[[dict[str, Any]], None]
_measured: dict[Any, dict[str, Any]] = {}


def tiny(claim: Claim) -> dict[str, Any]:
    """The figures of the smallest form; claims that share an experiment share them."""
    if claim.experiment not in _measured:
        _measured[claim.experiment] = plain(claim.experiment(Lab("tiny")))
    return copy.deepcopy(_measured[claim.experiment])


def numbers(text: str) -> set[str]:
    return set(re.findall(r"\d[\d,.]*\d|\d", text))


def has_chinese(text: str) -> bool:
    return any("\u4e00" <= letter <= "\u9fff" for letter in text)


@each
def test_the_experiment_gives_figures_a_verdict_and_something_to_show(claim: Claim) -> None:
    figures = tiny(claim)
    judged = claim.rule(figures)
    assert judged.verdict in VERDICTS
    assert has_chinese(judged.because.zh)
    assert numbers(judged.because) == numbers(judged.because.zh)
    if judged.condition is not None:
        assert has_chinese(judged.condition.zh)
    shown = claim.shows(figures)
    assert shown
    for part in shown:
        if isinstance(part, Chart):
            assert part.series
            assert all(len(line.x) == len(line.y) > 0 for line in part.series)
        elif isinstance(part, Listing):
            assert part.rows
            assert all(len(row) == len(part.headings) for row in part.rows)
        else:
            assert isinstance(part, WeightMap)
            assert all(len(row) == len(part.columns) for row in part.weights)


@each
def test_its_texts_are_in_both_languages_and_name_its_source(claim: Claim) -> None:
    for sentence in (claim.sentence, claim.derivation):
        if sentence is not None:
            assert has_chinese(sentence.zh)
            assert sentence.endswith(".")
            assert sentence.zh.endswith("。")
    assert claim.notes
    assert set(claim.notes) <= set(NOTES)
    assert claim.topic in TOPICS


@each
def test_the_recorded_results_have_the_verdict_that_the_rule_gives(claim: Claim) -> None:
    for form in ("quick", "full"):
        result = record.read(record.RECORDED, claim.id, form)
        if result is not None and not result.stale(claim):
            judged = claim.rule(result.figures)
            assert (result.verdict, result.because) == (judged.verdict, judged.because)
            assert result.condition == judged.condition
            assert {"command", "machine", "date"} <= set(record.described(claim, result))


def test_ids_are_unique_and_no_result_is_recorded_for_an_unknown_claim() -> None:
    ids = [claim.id for claim in CLAIMS]
    assert len(set(ids)) == len(ids)
    assert {path.name.split(".")[0] for path in record.RECORDED.glob("*.json")} <= set(ids)


def change(name: str, value: Any) -> Edit:
    """Replace a figure, or that figure in each of the rows."""

    def edit(figures: dict[str, Any]) -> None:
        path, _, last = name.rpartition(".")
        places = figures if not path else figures[path]
        for place in places if isinstance(places, list) else [places]:
            place[last] = value(place) if callable(value) else value

    return edit


def sharing_heads_only(figures: dict[str, Any]) -> None:
    """Positions with parameters of their own, and heads with common ones."""
    figures["permutation_error"] = 0.5
    figures["touched"] = [[1.0] * 3] * 3


FLIPS: list[tuple[str, Edit, str]] = [
    ("scale-variance", change("rows.variance", lambda row: 2 * row["d"]), "does not hold"),
    ("scale-variance", change("rows.mean", lambda row: float(row["d"])), "does not hold"),
    ("scale-sigma", change("both_power", 2.0), "holds"),
    ("scale-sigma", change("one_power", 1.0), "does not hold"),
    ("scale-magnitude", change("root_mean_square", 500.0), "holds"),
    ("scale-saturation", change("rows.top", 0.1), "does not hold"),
    ("scale-gradient", change("rows.jacobian_unscaled", 1.0), "does not hold"),
    ("scale-gradient", change("rows.query_unscaled", 1e-9), "holds"),
    ("scale-range", change("shift_changes", [0.5, 0.5]), "holds"),
    ("scale-overflow", change("single.naive", None), "does not hold"),
    ("scale-overflow", change("single.stable", 90.0), "holds"),
    ("scale-exploding", change("rows.unscaled", 1e9), "holds"),
    ("scale-layernorm", change("rows.constant_deviation", 1.0), "holds"),
    ("heads-parameters", change("rows.narrow", lambda row: row["heads"]), "does not hold"),
    ("heads-full-width", change("rows.full", 7), "does not hold"),
    ("heads-concat", change("rows.fits", lambda row: row["width"] == 16), "holds"),
    ("heads-compute", change("rows.flops", lambda row: row["said"]), "holds"),
    ("heads-diversity", change("trained.distance", 0.0), "does not hold"),
    ("heads-blur", change("lost", [0.9, 0.9, 0.9, 0.9, 0.9]), "does not hold"),
    ("qk-symmetric", change("rows.logits_most", 0.1), "does not hold"),
    ("qk-self", change("rows.shared", 1.0), "holds"),
    ("qk-self", change("rows.longest", 0.5), "does not hold"),
    ("qk-parameters", change("rows.separate", 5), "does not hold"),
    ("dot-cost", change("rows.additive_flops", lambda row: row["n"] ** 3), "does not hold"),
    ("dot-cost", change("rows.additive_seconds", lambda row: row["dot_seconds"]), "undecided"),
    ("dot-parameters", change("additive_layer", 10**9), "holds"),
    ("qkv-parameters", change("rows.fixed", 1), "does not hold"),
    ("qkv-parameters", change("rows.fixed", 10**12), "holds"),
    ("qkv-compute", change("rows.fixed_flops", 10**12), "holds"),
    ("rivals-path", change("rows.attention_path", lambda row: row["n"]), "does not hold"),
    ("rivals-path", change("rows.plain_layers", 1), "does not hold"),
    ("rivals-constant", change("rows.flops", 5), "holds"),
    ("rivals-constant", change("rows.path", lambda row: row["n"]), "does not hold"),
    ("rivals-compute", change("rows.attention", lambda row: row["n"]), "does not hold"),
    ("rivals-parallel", change("chains.recurrent", 3), "does not hold"),
    ("rivals-parallel", change("on_gpu", True), "undecided"),
    ("rivals-cnn-parallel", change("chains.convolution", lambda row: row["n"]), "holds"),
    ("rivals-sharing", sharing_heads_only, "holds"),
    ("cost-layer", change("rows.flops", 1), "does not hold"),
    ("cost-layer", change("rows.bytes", 1), "does not hold"),
    ("cost-layer", change("rows.bytes_fused", lambda row: row["bytes"]), "holds"),
    ("paper-heads", change("rows.bleu", 25.4), "right"),
    ("paper-roles", change("passages.phrase", "heads for tense and for agreement"), "right"),
    ("paper-additive", change("varied", {"F": "additive scores"}), "right"),
    ("paper-unscaled", change("varied", {"F": "no scaling"}), "right"),
    ("paper-shared-qk", change("varied", {"F": "shared Q and K"}), "right"),
    ("example-cat", change("rows.share", 0.0), "does not hold"),
]


@pytest.mark.parametrize(
    ("id", "edit", "verdict"), FLIPS, ids=[f"{id}-{verdict}" for id, _, verdict in FLIPS]
)
def test_other_figures_give_another_verdict(id: str, edit: Edit, verdict: str) -> None:
    (claim,) = find([id])
    figures = tiny(claim)
    if id in ("dot-cost", "qkv-compute", "rivals-parallel", "rivals-cnn-parallel"):
        steady(figures)
    before = claim.rule(figures).verdict
    edit(figures)
    assert claim.rule(figures).verdict == verdict
    assert before != verdict


def steady(figures: dict[str, Any]) -> None:
    """Replace times by what a quiet machine measures: no test depends on the clock."""
    for row in figures["rows"]:
        for name in row:
            if name.endswith("_seconds"):
                row[name] = 1.0 if "additive" in name else 0.1
            elif name in ("attention", "recurrent", "convolution"):
                row[name] = 1e9


def test_every_claim_has_figures_that_change_its_verdict() -> None:
    assert {id for id, _, _ in FLIPS} == {claim.id for claim in CLAIMS}


class TestBrokenFormulas:
    """If the mathematics were different, the experiments would say so."""

    def verdict(self, id: str) -> str:
        (claim,) = find([id])
        return claim.rule(plain(claim.experiment(Lab("tiny")))).verdict

    def test_a_dot_product_of_equal_vectors(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def equal(lab: Lab, d: int, pairs: int, *sigmas: float) -> torch.Tensor:
            return lab.normal(pairs, d).square().sum(-1) * (sigmas[0] if sigmas else 1)

        monkeypatch.setattr(scale_variance, "dots", equal)
        assert self.verdict("scale-variance") == "does not hold"
        assert self.verdict("scale-sigma") == "holds"  # σ enters once: its square in the variance

    def test_a_softmax_that_cares_for_no_scale(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def flat(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
            return (q @ k.T / q.shape[-1]).softmax(-1)

        monkeypatch.setattr(scale_softmax, "weights_of", flat)
        assert self.verdict("scale-saturation") == "does not hold"
        assert self.verdict("scale-gradient") == "does not hold"

    def test_an_exponential_that_never_overflows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(scale_overflow, "naive_softmax", lambda s: s.softmax(-1))
        assert self.verdict("scale-overflow") == "does not hold"

    def test_a_constant_that_measures(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(scale_depth.Lab, "normal", lambda lab, *shape, stream=0: Normed(shape))
        assert self.verdict("scale-layernorm") == "holds"

    def test_heads_with_fewer_keys(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def grouped(heads: int, head_dim: int | None = None, bias: bool = False) -> Any:
            with torch.device("meta"):
                return heads_counted.MultiHeadAttention(
                    512, heads, kv_heads=1, head_dim=head_dim, bias=bias
                )

        monkeypatch.setattr(heads_counted, "layer", grouped)
        assert self.verdict("heads-parameters") == "does not hold"
        assert self.verdict("heads-full-width") == "does not hold"

    def test_a_layer_that_concatenates_in_another_order(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(heads_counted, "written_out", lambda attn, x: attn(x) + 1)
        assert self.verdict("heads-concat") == "holds"  # no width works

    def test_scores_that_are_not_symmetric(self, monkeypatch: pytest.MonkeyPatch) -> None:
        sharing = qk_symmetry.sharing
        layer = sharing.layer
        monkeypatch.setattr(
            sharing, "layer", lambda kind, width, seed: layer("separate", width, seed)
        )
        assert self.verdict("qk-symmetric") == "does not hold"
        assert self.verdict("qk-self") == "does not hold"

    def test_a_convolution_of_another_kernel(self, monkeypatch: pytest.MonkeyPatch) -> None:
        conv = rivals_reach.GatedConvolution
        monkeypatch.setattr(rivals_reach, "GatedConvolution", lambda d, k, gap: conv(d, k + 2, gap))
        assert self.verdict("rivals-path") == "does not hold"

    def test_attention_in_linear_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        flops_of = rivals_time.flops_of
        monkeypatch.setattr(
            rivals_time, "flops_of", lambda name, *sizes, **more: flops_of("convolution", *sizes)
        )
        assert self.verdict("rivals-compute") == "does not hold"

    def test_positions_that_are_not_alike(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plain_layer = rivals_sharing.MultiHeadAttention
        monkeypatch.setattr(
            rivals_sharing,
            "MultiHeadAttention",
            lambda d, heads: plain_layer(d, heads, position=Learned(128)),
        )
        (claim,) = find(["rivals-sharing"])
        assert claim.experiment(Lab("tiny"))["permutation_error"] > 1e-3

    def test_a_layer_with_another_feed_forward(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cost_layer, "GELU", SwiGLU)
        assert self.verdict("cost-layer") == "does not hold"


class Normed:
    """Numbers that no factor changes, as if √d_k were measured."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.values = torch.randn(shape, dtype=torch.float64)

    def __rmul__(self, factor: float) -> torch.Tensor:
        return self.values
