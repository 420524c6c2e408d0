"""The dictionaries that TensorBoard and Weights & Biases take."""

import pytest

from headwise.watching import Table
from headwise.watching.figure_names import per_head, scalars

NAN = float("nan")


def table(**figures: list[float]) -> Table:
    count = len(next(iter(figures.values())))
    return Table(
        [
            {"layer": 11, "name": "h.11", "kind": "self", "head": head}
            | {name: values[head] for name, values in figures.items()}
            for head in range(count)
        ]
    )


def test_heads_are_reduced_as_a_figure_s_name_ends() -> None:
    said = scalars(
        table(entropy_mean=[1.0, 3.0], max_logit_max=[5.0, 9.0], entropy_min=[0.5, 0.1]),
        ["entropy_mean", "max_logit_max", "entropy_min"],
    )
    assert said["attn/layer_11/entropy_mean"] == 2.0
    assert said["attn/layer_11/max_logit_max"] == 9.0
    assert said["attn/layer_11/entropy_min"] == 0.1
    assert said["attn/global/max_logit_max"] == 9.0


def test_a_sampled_maximum_keeps_saying_that_it_is_a_bound() -> None:
    said = scalars(table(max_logit_max_lower_bound=[5.0, 9.0]), ["max_logit_max"])
    assert said == {
        "attn/layer_11/max_logit_max_lower_bound": 9.0,
        "attn/global/max_logit_max_lower_bound": 9.0,
    }


def test_few_figures_are_written_unless_more_are_asked_for() -> None:
    full = table(entropy_mean=[1.0], top_prob_mean=[0.5], distance_mean=[3.0])
    assert set(scalars(full)) == {"attn/layer_11/entropy_mean", "attn/global/entropy_mean"}
    assert "attn/layer_11/distance_mean" in scalars(full, ["distance_mean"])


def test_what_is_no_number_is_left_out() -> None:
    assert scalars(table(entropy_mean=[NAN, 3.0]))["attn/layer_11/entropy_mean"] == 3.0
    assert scalars(table(entropy_mean=[NAN, NAN])) == {}
    assert per_head(table(entropy_mean=[NAN, 3.0])) == {"attn/layer_11/entropy_mean": [3.0]}


def test_an_unknown_figure_names_those_there_are() -> None:
    with pytest.raises(ValueError, match="no figure 'beauty'; there are entropy_mean"):
        scalars(table(entropy_mean=[1.0]), ["beauty"])
