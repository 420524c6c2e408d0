"""The experiments of "Why": their numbers, against theory and against the modules themselves."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

import headwise as hw
from headwise.apps.lab import why_page as why
from headwise.apps.lab.experiments import dot_and_additive as comparing
from headwise.apps.lab.experiments import many_heads as reading
from headwise.apps.lab.experiments import shared_projection as sharing
from headwise.apps.lab.experiments import why_scale as scale
from headwise.apps.look.serving.answers import Answer, answer
from headwise.apps.look.session import Session


def ask(experiment: str, **settings: object) -> dict[str, Any]:
    asked = {name: str(value) for name, value in settings.items()}
    found: dict[str, Any] = json.loads(why.answer(experiment, asked))["found"]
    return found


class TestScale:
    @pytest.mark.parametrize("d", [4, 64, 1024])
    @pytest.mark.parametrize(
        ("scaling", "variance"),
        [("none", lambda d: d), ("root", lambda d: 1), ("width", lambda d: 1 / d)],
    )
    def test_the_logits_vary_as_theory_says(self, d: int, scaling: str, variance: Any) -> None:
        found = ask("scale", d=d, keys=512, scaling=scaling)
        assert found["theory_variance"] == pytest.approx(variance(d))
        # 256 · 512 pairs share 256 queries and 512 keys: of their lengths alone the variance has a
        # relative deviation of about √(2/d · (1/256 + 1/512)); five of them never happen
        error = 5 * math.sqrt(2 / d * (1 / 256 + 1 / 512)) + 0.02
        assert found["logit_variance"] == pytest.approx(variance(d), rel=error)

    def test_the_variance_is_that_of_the_logits_themselves(self) -> None:
        found = scale.measure(d=16, keys=32, scaling="none", seed=3)
        q, k, _ = scale.drawn(16, 32, 3, scale.ROWS)
        logits = q @ k.transpose(-1, -2)
        assert found.logit_variance == pytest.approx(float(logits.var(correction=0)))
        assert found.logit_mean == pytest.approx(float(logits.mean()))
        assert (found.edges[0], found.edges[-1]) == pytest.approx(
            (float(logits.min()), float(logits.max()))
        )
        width = found.edges[1] - found.edges[0]
        assert sum(found.density) * width == pytest.approx(1)

    def test_equal_weights_are_the_limit_of_dividing_by_the_width(self) -> None:
        found = ask("scale", d=1024, keys=64, scaling="width")
        assert found["entropy_limit"] == pytest.approx(math.log(64))
        assert found["entropy"] == pytest.approx(math.log(64), rel=1e-3)
        assert found["jacobian"]["median"] == pytest.approx(math.sqrt(63) / 64, rel=1e-2)

    def test_without_scaling_wide_heads_saturate_and_most_rows_get_no_gradient(self) -> None:
        unscaled, scaled = (ask("scale", d=1024, keys=64, scaling=s) for s in ("none", "root"))
        assert unscaled["top_weight"] > 0.9 > 0.2 > scaled["top_weight"]
        assert unscaled["entropy"] < 0.1 * scaled["entropy"]
        assert unscaled["jacobian"]["median"] < 0.05 * scaled["jacobian"]["median"]
        assert unscaled["query_gradient"]["high"] > 5 * scaled["query_gradient"]["high"]

    def test_weights_come_sorted_and_their_mean_row_sums_to_one(self) -> None:
        found = ask("scale", d=16, keys=8)
        assert found["ranks"] == list(range(1, 9))
        assert found["weights"] == sorted(found["weights"], reverse=True)
        assert sum(found["weights"]) == pytest.approx(1)

    def test_the_jacobian_norm_is_that_of_the_jacobian(self) -> None:
        logits = 3 * torch.randn(7, 9, dtype=torch.float64)
        jacobians = [torch.func.jacrev(lambda s: s.softmax(-1))(row) for row in logits]
        expected = torch.stack([jacobian.norm() for jacobian in jacobians])
        torch.testing.assert_close(scale.jacobian_norm(logits.softmax(-1)), expected)

    def test_the_jacobian_norm_of_a_saturated_row_is_not_rounded_away(self) -> None:
        small = 1e-20
        weights = torch.tensor(
            [[1.0, small]], dtype=torch.float64
        )  # J = small · [[1, −1], [−1, 1]]
        assert float(scale.jacobian_norm(weights)) == pytest.approx(2 * small)

    @pytest.mark.parametrize("scaling", scale.SCALINGS)
    def test_a_point_of_a_curve_is_what_observe_says_of_its_rows(self, scaling: str) -> None:
        found = scale.measure(d=64, keys=32, scaling="none", seed=1)
        (point,) = (point for point in found.curves[scaling] if point.d == 64)
        q, k, v = scale.drawn(64, 32, 1, scale.SWEEP_ROWS)
        _, seen = hw.observe(q, k, v, score=hw.Dot(scale.factor_of(scaling, 64)))
        assert point.entropy == pytest.approx(float(seen.entropy.mean()))


class TestHeads:
    @pytest.mark.parametrize("heads_asked", [1, 8, 64])
    def test_parameters_are_the_modules_and_the_same_for_any_number_of_heads(
        self, heads_asked: int
    ) -> None:
        found = ask("heads", width=128, heads=heads_asked, tokens=32)
        module = hw.nn.MultiHeadAttention(128, heads_asked)
        counted = sum(parameter.numel() for parameter in module.parameters())
        assert {layer["parameters"] for layer in found["layers"]} == {counted}
        assert counted == 4 * 128**2 + 4 * 128

    def test_full_width_heads_cost_as_many_times_as_there_are_heads(self) -> None:
        layers = ask("heads", width=64)["layers"]
        weights = [layer["full_width_parameters"] for layer in layers]
        for layer, count in zip(layers, weights, strict=True):
            assert count == layer["heads"] * (4 * 64**2 + 3 * 64) + 64

    def test_operations_are_those_of_the_products(self) -> None:
        (one, *more) = ask("heads", width=64, tokens=32)["layers"]
        assert one["flops"] == 2 * 4 * 32 * 64**2 + 2 * 2 * 32**2 * 64
        assert {layer["flops"] for layer in more} == {one["flops"]}

    @pytest.mark.parametrize("number", [1, 4, 32])
    def test_a_heads_matrix_has_the_rank_of_its_width(self, number: int) -> None:
        found = ask("heads", width=64, heads=number)
        assert found["rank"] == 64 // number
        assert len(found["singular_values"]) == 64

    @pytest.mark.parametrize(("number", "places"), [(1, 1), (1, 2), (2, 3), (4, 16), (8, 5)])
    def test_a_head_brings_one_thing_of_all_it_was_to_read(self, number: int, places: int) -> None:
        lost = reading.unread(number, places, seed=0)
        assert lost == pytest.approx(1 - min(number, places) / places, abs=1e-9)


class TestScores:
    def test_the_textbook_says_the_same_as_the_library(self) -> None:
        q, k, v = comparing.drawn(16, 32, seed=0)
        for score in (hw.Dot(), comparing.additive(16, seed=0)):
            written_out = comparing.textbook(q, k, v, score)
            torch.testing.assert_close(written_out, hw.attention(q, k, v, score=score))

    def test_written_out_the_additive_score_keeps_a_number_for_each_dimension(self) -> None:
        found = ask("scores", d=32, tokens=256)
        rows = 3 * 32 * 4 / 256  # q, k and v, spread over the pairs
        assert found["dot"]["textbook_bytes"] == pytest.approx(4 + rows, abs=0.1)
        assert found["additive"]["textbook_bytes"] == pytest.approx(4 * 32 + 4, abs=rows)
        for score in ("dot", "additive"):  # q, k, v, the output and lse
            assert found[score]["fused_bytes"] == pytest.approx(4 * 32 * 4 / 256, abs=0.1)

    def test_operations_a_pair_are_as_the_counter_has_them(self) -> None:
        found = ask("scores", d=32, tokens=64)
        assert (found["dot"]["flops"], found["additive"]["flops"]) == (4 * 32, 6 * 32)

    def test_additive_takes_longer_at_equal_size(self) -> None:
        found = ask("scores", d=128, tokens=256)
        assert found["ratio"] > 1.5
        times = found["additive"]["nanoseconds"] / found["dot"]["nanoseconds"]
        assert found["ratio"] == pytest.approx(times)

    @pytest.mark.parametrize("seed", [0, 1, 2])
    def test_both_scores_saturate_with_the_width_unless_they_are_divided(self, seed: int) -> None:
        curves = ask("scores", seed=seed)["curves"]
        narrow, wide = (
            {name: next(p for p in points if p["d"] == d) for name, points in curves.items()}
            for d in (16, 256)
        )
        for name in ("unscaled", "additive_unscaled"):
            assert wide[name]["deviation"] == pytest.approx(4 * narrow[name]["deviation"], rel=0.15)
            assert wide[name]["top_weight"] > 0.7
        for name in ("scaled", "additive"):
            assert wide[name]["deviation"] == pytest.approx(narrow[name]["deviation"], rel=0.15)
            assert wide[name]["top_weight"] < 0.2
        assert wide["scaled"]["deviation"] == pytest.approx(1, rel=0.15)

    def test_additive_logits_vary_less_than_their_weights_squares_add_up_to(self) -> None:
        curves = ask("scores")["curves"]
        for scaled, unscaled in zip(curves["additive"], curves["additive_unscaled"], strict=True):
            weight = comparing.additive(scaled["d"], seed=0, heads=comparing.SWEEP_HEADS).weight
            squares = float(weight.square().sum(-1).mean())
            assert scaled["deviation"] ** 2 < squares <= 1
            ratio = unscaled["deviation"] / scaled["deviation"]
            assert ratio == pytest.approx(math.sqrt(3 * scaled["d"]), rel=1e-3)


class TestSharing:
    @pytest.mark.parametrize("spread", [0, 150])
    def test_one_matrix_makes_the_logits_symmetric(self, spread: int) -> None:
        x = sharing.inputs(24, spread / 100, seed=0)
        call = sharing.layer("shared", 32, seed=0).prepare(x)
        assert torch.equal(call.q, call.k)
        found = ask("sharing", tokens=24, spread=spread)["heads"]
        assert found["shared"]["asymmetry"] < 1e-12
        assert found["separate"]["asymmetry"] > 0.5
        logits = found["shared"]["logits"]
        assert logits == [list(column) for column in zip(*logits, strict=True)]

    def test_the_weights_drawn_are_the_layers_own(self) -> None:
        found = ask("sharing", head_width=16, tokens=12, seed=5)
        layer, x = sharing.layer("separate", 16, seed=5), sharing.inputs(12, 0.0, seed=5)
        weights = torch.tensor(found["heads"]["separate"]["weights"], dtype=torch.float64)
        torch.testing.assert_close(weights, layer.attention_map(x)[0, 0], atol=5e-5, rtol=0)
        assert found["heads"]["separate"]["self_mass"] == pytest.approx(
            float(layer.attention_map(x)[0, 0].diagonal().mean())
        )

    def test_tokens_of_equal_length_look_at_themselves_and_long_ones_take_over(self) -> None:
        equal, spread = (ask("sharing", spread=spread) for spread in (0, 150))
        assert equal["heads"]["shared"]["diagonal_wins"] == 1
        assert equal["heads"]["separate"]["diagonal_wins"] < 0.2
        assert spread["heads"]["shared"]["diagonal_wins"] < 0.5
        received, lengths = spread["heads"]["shared"]["received"], spread["lengths"]
        assert sum(received) == pytest.approx(len(lengths))
        assert (
            received.index(max(received))
            in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)[:3]
        )

    def test_parameters_are_the_layers_own(self) -> None:
        counted = ask("sharing", head_width=16)["parameters"]
        assert counted == {"separate": 4 * 128 * 16, "shared": 3 * 128 * 16}


class TestAsking:
    @staticmethod
    def get(query: str) -> Answer:
        return answer(Session(), f"/api/why/{query}")

    def test_an_answer_brings_its_settings_and_their_bounds(self) -> None:
        answered = json.loads(self.get("scale?d=16&scaling=none").body)
        assert answered["settings"]["d"] == {
            "value": 16, "default": 64, "least": 1, "most": 1024, "doubling": True,
        }  # fmt: skip
        assert answered["settings"]["scaling"]["value"] == "none"
        assert answered["found"]["theory_variance"] == 16

    @pytest.mark.parametrize(
        ("query", "error", "hint"),
        [
            ("scale?d=many", "d='many' is not a whole number", "use a power of two from 1 to 1024"),
            ("scale?d=2048", "d=2048 is out of bounds", "use a power of two from 1 to 1024"),
            ("scale?d=48", "d=48 is out of bounds", "use a power of two from 1 to 1024"),
            (
                "scale?scaling=log",
                "scaling='log' is not one of the options",
                "use root, none, width",
            ),
            ("scale?depth=3", "there is no setting 'depth'", "there are d, keys, scaling, seed"),
            ("sharing?tokens=49", "tokens=49 is out of bounds", "use a whole number from 4 to 48"),
            ("shape", "there is no experiment 'shape'", "there are scale, heads, scores, sharing"),
        ],
    )
    def test_a_bad_value_is_an_error_that_says_what_works(
        self, query: str, error: str, hint: str
    ) -> None:
        refused = self.get(query)
        assert refused.status == 400
        said = json.loads(refused.body)
        assert (said["error"], said["hint"]) == (error, hint)
        assert {said["error"], said["hint"]} == set(said["zh"])

    def test_the_same_question_is_measured_once(self) -> None:
        first, again, other = (
            self.get(f"scores?{query}").body
            for query in ("d=8&seed=77", "seed=77&d=8", "d=8&seed=78")
        )
        assert first == again != other

    @pytest.mark.parametrize(
        ("experiment", "largest"),
        [
            ("scale", "d=1024&keys=1024"),
            ("heads", "width=512&heads=1&tokens=4096&places=16"),
            ("scores", "d=256&tokens=1024"),
            ("sharing", "head_width=128&tokens=48&spread=150"),
        ],
    )
    def test_the_largest_settings_are_answered(self, experiment: str, largest: str) -> None:
        answered = self.get(f"{experiment}?{largest}")
        assert answered.status == 200
        assert len(answered.body) < 100_000
