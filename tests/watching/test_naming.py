"""The dictionaries that TensorBoard and Weights & Biases take."""

import pytest
import torch

import headwise as hw
from headwise.watching import Table
from headwise.watching.table import per_head, scalars

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


def test_names_do_not_change_with_the_rows_that_are_observed() -> None:
    said = scalars(table(max_logit_max_lower_bound=[5.0, 9.0]), ["max_logit_max"])
    assert said == {
        "attn/layer_11/max_logit_max": 9.0,
        "attn/global/max_logit_max": 9.0,
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


def test_heads_and_alarms_are_scalars_where_asked(caplog: pytest.LogCaptureFixture) -> None:
    model = hw.nn.MultiHeadAttention(16, 4)
    torch.nn.init.normal_(model.query.weight, std=300)
    with hw.watch(model, alarms=True, rows=3) as watch:
        model(torch.randn(1, 9, 16))
        watch.step()
        found = watch.scalars(["max_logit_max"], heads=True)
    names = [f"attn/layer_00/head_{head:02d}/max_logit_max" for head in range(4)]
    assert [name in found for name in names] == [True] * 4
    assert max(found[name] for name in names) == found["attn/global/max_logit_max"]
    assert found["attn/alarms/logit_growth"] == 4
    assert found["attn/alarms"] >= 4
    assert found["attn/alarms/duplicated_heads"] == 0
