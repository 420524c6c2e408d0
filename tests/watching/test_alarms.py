"""Each alarm on heads that really show it, and none on those that don't."""

import logging
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from headwise.models import GPT, GPTConfig
from headwise.nn import SwiGLU
from headwise.watching import Alarm, Table, rules
from headwise.watching.alarms import Alarms
from headwise.watching.rules import (
    RULES,
    DeadHead,
    DuplicatedHeads,
    EntropyCollapse,
    LogitGrowth,
    Rule,
    SinkTakeOver,
    SpanWeight,
)

WIDTH, HEADS, LENGTH = 32, 4, 48


def raised(model: nn.Module, x: Tensor, *rules: Rule) -> list[Alarm]:
    """The alarms of one step of a model."""
    watch = hw.watch(model, alarms=rules)
    with watch:
        model(x)
        watch.step()
    return watch.alarms


def attention(**options: Any) -> Any:
    torch.manual_seed(1)
    return hw.nn.MultiHeadAttention(WIDTH, HEADS, bias=False, mask=hw.mask.causal(), **options)


def inputs() -> Tensor:
    return torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(2))


def test_a_logit_above_the_limit_is_an_alarm_of_its_head() -> None:
    model = attention()
    with torch.no_grad():
        model.query.weight[8:16] *= 400  # head 1
    (alarm,) = raised(model, inputs(), LogitGrowth())
    assert (alarm.step, alarm.rule, alarm.layer, alarm.head) == (0, "logit growth", 0, 1)
    assert "above 100" in alarm.says


def test_logits_that_are_no_numbers_any_more_are_an_alarm() -> None:
    found = raised(attention(), inputs() * float("nan"), LogitGrowth(), DeadHead())
    assert [alarm.head for alarm in found] == [0, 1, 2, 3]
    assert {alarm.says for alarm in found} == {"its largest logit is NaN"}


def test_a_head_that_sees_no_key_has_no_figures_and_raises_no_alarm() -> None:
    model = attention()
    seen = torch.ones(1, 4, LENGTH, LENGTH, dtype=torch.bool)
    seen[:, 1] = False
    with hw.watch(model, alarms=[LogitGrowth(), DeadHead()]) as watch:
        model(inputs(), mask=hw.mask.dense(seen))
    blind, other = watch.heads()[1], watch.heads()[0]
    figures = [name for name in other if name not in ("layer", "name", "kind", "head")]
    assert all(math.isnan(blind[name]) for name in figures)
    assert all(math.isfinite(other[name]) for name in figures)
    assert watch.alarms == []


def test_a_head_without_numbers_is_not_called_dead_and_hides_no_other() -> None:
    model = attention()
    with torch.no_grad():
        model.query.weight[:8] = torch.nan  # head 0
        model.value.weight[24:] *= 0.01  # head 3
    (alarm,) = raised(model, inputs(), DeadHead())
    assert alarm.head == 3


def test_a_head_that_looks_at_one_key_for_no_reason_of_place_has_collapsed() -> None:
    model = attention()
    with torch.no_grad():
        model.query.weight[16:24] *= 400  # head 2
    (alarm,) = raised(model, inputs(), EntropyCollapse())
    assert alarm.head == 2
    assert "keys per row" in alarm.says


def positions() -> Tensor:
    """Inputs that say nothing but where they stand."""
    return F.one_hot(torch.arange(LENGTH)).float()[None]


@pytest.mark.parametrize("back", [0, 1])
def test_a_head_that_looks_at_itself_or_the_token_before_has_not_collapsed(back: int) -> None:
    model = hw.nn.MultiHeadAttention(LENGTH, 1, head_dim=LENGTH, bias=False, mask=hw.mask.causal())
    with torch.no_grad():  # query i is key i - back
        model.query.weight.copy_(torch.eye(LENGTH) * 200)
        model.key.weight.copy_(torch.roll(torch.eye(LENGTH), back, 0))
    with hw.watch(model) as seen:
        model(positions())
    assert seen.heads()["entropy_mean"][0] < 0.1
    assert raised(model, positions(), EntropyCollapse()) == []


def test_a_head_that_gives_next_to_nothing_beside_the_others_is_dead() -> None:
    model = attention()
    with torch.no_grad():
        model.value.weight[24:] *= 0.01  # head 3
    (alarm,) = raised(model, inputs(), DeadHead())
    assert alarm.head == 3
    assert "of its layer's mean" in alarm.says


def test_a_layer_of_zeros_is_dead_in_every_head() -> None:
    model = attention()
    nn.init.zeros_(model.value.weight)
    assert [alarm.head for alarm in raised(model, inputs(), DeadHead())] == [0, 1, 2, 3]


def sinking(heads: int) -> tuple[nn.Module, Tensor]:
    """A layer of which some heads look at the first token, which is unlike the others."""
    model, x = attention(), inputs()
    x[:, :, 0] = 1.0  # what every query has
    x[:, :, 1] = 0.0
    x[:, 0] = 0.0
    x[:, 0, :2] = 1.0  # what the first key has alone
    with torch.no_grad():
        for head in range(heads):
            model.query.weight[8 * head] = 10 * F.one_hot(torch.tensor(0), WIDTH)
            model.key.weight[8 * head] = 10 * F.one_hot(torch.tensor(1), WIDTH)
    return model, x


def test_most_heads_on_the_first_token_are_a_take_over_of_the_model() -> None:
    (alarm,) = raised(*sinking(3), SinkTakeOver())
    assert (alarm.layer, alarm.head, alarm.where) == (None, None, "the model")
    assert alarm.says == "3 of 4 heads rest on the first token"
    assert raised(*sinking(2), SinkTakeOver()) == []
    assert raised(*sinking(3), SinkTakeOver(heads=0.75)) == []  # it takes more than these


def test_a_head_at_the_limit_does_not_rest_on_the_first_token() -> None:
    model, x = sinking(4)
    with hw.watch(model, alarms=[]) as seen:
        model(x)
    least = min(seen.heads()["sink_mass_mean"])
    assert raised(model, x, SinkTakeOver(mass=least, heads=0.8)) == []
    (alarm,) = raised(model, x, SinkTakeOver(mass=least - 1e-6, heads=0.8))
    assert alarm.says == "4 of 4 heads rest on the first token"


def test_weight_at_the_limit_of_a_span_is_no_alarm() -> None:
    table = Table([{"layer": 0, "kind": "self", "head": 0, "span_text_mean": 0.25}])
    for limit in ({"above": 0.25}, {"below": 0.25}):
        assert not list(SpanWeight("text", **limit).check(table, []))
    assert list(SpanWeight("text", above=0.2).check(table, []))
    assert list(SpanWeight("text", below=0.3).check(table, []))


def test_short_rows_that_see_little_else_than_the_first_token_are_no_take_over() -> None:
    assert raised(attention(), inputs()[:, :4], SinkTakeOver()) == []


def test_two_heads_that_weight_alike_are_an_alarm_of_the_later_one() -> None:
    model = attention()
    with torch.no_grad():
        model.query.weight *= 3
        for part in (model.query, model.key):
            part.weight[24:] = part.weight[8:16]  # head 3 is head 1
    (alarm,) = raised(model, inputs(), DuplicatedHeads(every=1))
    assert (alarm.head, alarm.says) == (3, "it weights the keys as head 1 does")


def test_heads_that_have_learnt_nothing_yet_are_no_copies_of_each_other() -> None:
    model = attention()
    with torch.no_grad():
        model.query.weight *= 0.01
    assert raised(model, inputs(), DuplicatedHeads(every=1)) == []


def test_the_distance_from_even_weights_is_half_of_the_sum_of_differences() -> None:
    weights = torch.tensor([[[0.5, 0.5, 0.0], [0.9, 0.1, 0.0]], [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]])
    assert rules._from_even(weights).tolist() == pytest.approx([0.5, 0.7])  # one key is decided


def test_heads_that_all_rest_on_the_first_token_are_no_copies() -> None:
    model, x = sinking(4)
    assert raised(model, x, DuplicatedHeads(every=1)) == []


def test_copies_are_looked_for_now_and_then() -> None:
    model = attention()
    with torch.no_grad():
        model.query.weight *= 3
        for part in (model.query, model.key):
            part.weight[24:] = part.weight[8:16]
    watch = hw.watch(model, alarms=DuplicatedHeads(every=3)).attach()
    for _ in range(4):
        model(inputs())
        watch.step()
    watch.detach()
    assert [alarm.step for alarm in watch.alarms] == [2]


def test_an_alarm_is_raised_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    model = attention()
    with torch.no_grad():
        model.query.weight *= 400
    watch = hw.watch(model, alarms=LogitGrowth()).attach()
    with caplog.at_level(logging.WARNING, "headwise"):
        for _ in range(3):
            model(inputs())
            watch.step()
    watch.detach()
    assert [(alarm.step, alarm.head) for alarm in watch.alarms] == [(0, head) for head in range(4)]
    (line,) = caplog.messages
    assert line.startswith("step 0: logit growth: head 0.0: its largest logit is")
    assert line.endswith("(and 3 more heads)")


@pytest.mark.parametrize(("heads", "end"), [(1, "above 100"), (2, "(and 1 more head)")])
def test_a_warning_counts_the_heads_that_it_does_not_name(
    heads: int, end: str, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"layer": 0, "kind": "self", "head": x, "max_logit_max": 120.0} for x in range(heads)]
    with caplog.at_level(logging.WARNING, "headwise"):
        Alarms().look(7, Table(rows), [])
    assert [line.endswith(end) for line in caplog.messages] == [True]


def test_sampled_rows_raise_alarms_too() -> None:
    model = attention()
    with torch.no_grad():
        model.query.weight *= 400
    watch = hw.watch(model, rows=8, alarms=True)
    with watch:
        model(inputs())
        watch.step()
    assert {"logit growth", "entropy collapse"} <= {alarm.rule for alarm in watch.alarms}


def test_the_built_in_gpt_is_well() -> None:
    gpt = hw.load("gpt")
    text = "Anarchism is a political philosophy. Many anarchists say that anarchism is " * 8
    everything = tuple(rule for rule in RULES if rule.name != "duplicated heads")
    assert raised(gpt.model, gpt.encode(text), *everything, DuplicatedHeads(every=1)) == []


def test_a_run_that_learns_raises_no_alarm() -> None:
    torch.manual_seed(0)
    model = GPT(
        GPTConfig(vocabulary=32, context=32, d_model=32, layers=2, heads=4, feed_forward=SwiGLU(64))
    )
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    watch = hw.watch(model, every=10, alarms=True).attach()
    for _ in range(60):
        x = torch.randint(32, (16, 32))
        loss = F.cross_entropy(model(x)[:, 1:].flatten(0, 1), x[:, :-1].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        watch.step()
    watch.detach()
    assert watch.alarms == []


def test_an_alarm_whose_statistic_is_left_out_is_refused() -> None:
    model = attention()
    with pytest.raises(ValueError, match="the alarm for logit growth reads max_logit"):
        hw.watch(model, stats=("entropy",), alarms=True)
    with pytest.raises(ValueError, match="duplicated heads compares weights, and maps=False"):
        hw.watch(model, maps=False, alarms=True)
    hw.watch(model, stats=("max_logit",), maps=False, alarms=[LogitGrowth(50)])


def test_every_rule_says_what_it_is_and_where_it_comes_from() -> None:
    for rule in RULES:
        assert rule.says
        assert any(mark in rule.source for mark in ("(2", "others"))
    assert len({rule.name for rule in RULES}) == len(RULES)
