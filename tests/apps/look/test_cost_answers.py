"""The answers behind the page's "Cost"."""

import json
from typing import Any

import pytest

import headwise as hw
from headwise.apps.look.serving import cost_answers
from headwise.apps.look.serving.answers import answer
from headwise.apps.look.session import Session
from headwise.costs.calculate import cost
from headwise.models import GPT, GPTConfig, ViT, ViTConfig


def get(query: str) -> Any:
    given = answer(Session(), f"/api/cost?{query}")
    assert given.status == 200, given.body
    return json.loads(given.body)


def test_figures_are_those_of_hw_cost() -> None:
    found = get("layers=2&width=256&heads=4&kv_heads=2&length=512&batch=2")["found"]
    config = GPTConfig(
        vocabulary=32768, d_model=256, layers=2, heads=4, kv_heads=2, tied=False,
        feed_forward=hw.nn.SwiGLU(704),
    )  # fmt: skip
    exact = cost(config, batch=2, queries=512)
    for name in ("params", "weights", "kv_cache", "flops", "flops_dense", "bytes_moved"):
        assert found["figures"][name] == getattr(exact, name), name
    assert found["curve"][2]["length"] == 512
    assert found["curve"][2]["flops"] == exact.flops
    assert found["explanation"]["en"] == exact.explain("en")


def test_shares_of_the_parts_add_up_and_attention_grows_with_the_length() -> None:
    curve = get("layers=2&width=256&heads=4")["found"]["curve"]
    for point in curve:
        assert sum(point["shares"].values()) == pytest.approx(1)
    shares = [point["shares"]["pairs"] for point in curve]
    assert shares == sorted(shares)
    assert shares[-1] > 0.9


def test_key_heads_never_exceed_the_heads() -> None:
    assert (
        get("layers=9&width=4096&heads=2&kv_heads=64")["found"]["figures"]["params"]
        == (get("layers=9&width=4096&heads=2&kv_heads=2")["found"]["figures"]["params"])
    )


def test_a_model_that_does_not_fit_has_no_longest_context() -> None:
    assert get("layers=128&width=16384&heads=128&device=t4&dtype=fp32")["found"]["longest"] is None


def test_without_an_opened_model_a_described_one_is_counted() -> None:
    assert get("model=opened&layers=9")["opened"] is False


def test_the_opened_model_is_counted_unless_another_is_described() -> None:
    model = GPT(GPTConfig(vocabulary=100, context=300))
    for asked, counted in (
        ({}, "opened"),
        ({"layers": "9"}, "sketch"),
        ({"model": "sketch"}, "sketch"),
    ):
        settings = json.loads(cost_answers.answer(asked, model))["settings"]
        assert settings["model"]["value"] == counted


def test_the_curve_of_a_model_ends_where_its_positions_do() -> None:
    model = GPT(GPTConfig(vocabulary=100, context=300, position=hw.nn.Learned(300)))
    found = json.loads(cost_answers.answer({"model": "opened", "length": "256"}, model))["found"]
    assert [point["length"] for point in found["curve"]] == [128, 256]


def test_a_model_with_tokens_of_its_own_has_figures_and_no_curve() -> None:
    model = ViT(ViTConfig(image=32, patch=8, classes=10))
    found = json.loads(cost_answers.answer({"model": "opened"}, model))["found"]
    assert found["curve"] == []
    assert found["figures"]["flops"] == cost(model).flops


@pytest.mark.parametrize(
    ("query", "error", "hint"),
    [
        ("length=1000", "length=1000 is out of bounds", "use a power of two from 128 to 1048576"),
        ("depth=1", "there is no setting 'depth'", "there are model, layers"),
        ("device=t4", "NVIDIA T4 has no matrix rate for bf16", "it has fp16, fp32, int8"),
        ("width=256&heads=128&device=z80", "device='z80' is not one of the options", "use this"),
    ],
)
def test_a_bad_question_is_refused_in_both_languages(query: str, error: str, hint: str) -> None:
    refused = answer(Session(), f"/api/cost?{query}")
    assert refused.status == 400
    said = json.loads(refused.body)
    assert said["error"] == error
    assert said["hint"].startswith(hint)
    assert set(said["zh"]) == {said["error"], said["hint"]}


def test_an_opened_model_of_transformers_has_its_kinds_of_work_and_its_own_positions() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
             "intermediate_size": 96, "vocab_size": 100}  # fmt: skip
    config = transformers.LlamaConfig(**sizes, max_position_embeddings=512)
    opened = transformers.LlamaForCausalLM(config)
    found = json.loads(cost_answers.answer({}, opened))["found"]
    shares = found["curve"][-1]["shares"]
    assert [point["length"] for point in found["curve"]] == [128, 256, 512]
    assert min(shares["pairs"], shares["projections"], shares["feed_forward"]) > 0.1
    assert found["longest"] == found["positions"] == 512
