"""The built-in models are what their cards say."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import headwise as hw
from headwise.apps.train.tasks.language import numbers, text_loss
from headwise.apps.train.tasks.metrics import bits_per_byte, bleu
from headwise.models.trained import ASSETS, built_in


def sample(name: str) -> Any:
    return json.loads((ASSETS / name / "sample.json").read_text(encoding="utf-8"))


def test_the_models_inside_are_small_and_have_cards() -> None:
    assert built_in() == ["gpt", "translate"]
    for name in built_in():
        assert sum(path.stat().st_size for path in (ASSETS / name).iterdir()) < 12_000_000
        card = hw.load(name).card
        for part in ("data", "licence", "command", "time", "## Result", "## What its heads do"):
            assert part in card


def test_the_translator_gives_its_recorded_score() -> None:
    recorded = sample("translate")
    translator = hw.load("translate")
    sources, references = zip(*recorded["pairs"], strict=True)
    figures = bleu(translator.translate(sources), references)
    assert figures["bleu"] == pytest.approx(recorded["bleu"], abs=1.0)
    assert figures["bleu_signature"].split("|version")[0] in recorded["signature"]


def test_the_language_model_gives_its_recorded_score() -> None:
    recorded = sample("gpt")
    gpt = hw.load("gpt")
    assert gpt.model.config.context == 4096
    tokens = numbers(recorded["text"], gpt.tokeniser)
    assert len(tokens) > 4097
    with torch.no_grad():
        nats = text_loss(gpt.model, tokens, context=4096, stride=2048)
    found = bits_per_byte(nats, recorded["text"])
    assert found == pytest.approx(recorded["bits_per_byte"], abs=2e-3)


def test_the_language_model_continues_a_text() -> None:
    gpt = hw.load("gpt")
    assert gpt.complete("The [[United", 1) == " States"
    assert gpt.pieces("The cat")[:2] == ["⟨start⟩", "The"]


def test_its_induction_heads_are_those_of_the_card() -> None:
    gpt = hw.load("gpt")
    half = torch.randint(gpt.tokeniser.pad, (1, 64), generator=torch.Generator().manual_seed(0))
    tokens = torch.cat((half, half), 1)
    found = []
    layer = gpt.model.blocks[5]
    layer.attention.register_forward_pre_hook(
        lambda module, given, options: found.append(module.attention_map(*given)),
        with_kwargs=True,
    )
    with torch.no_grad():
        gpt.model(tokens)
        weights = found[0][0, :, 64:, :64]
    induction = weights.diagonal(1, -2, -1).mean(-1)
    assert sorted(induction.topk(2).indices.tolist()) == [1, 3]
    assert induction[1] > 0.3


def test_a_sentence_too_long_and_a_model_that_is_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tokens can't be translated"):
        hw.load("translate").translate("word " * 2000)
    with pytest.raises(ValueError, match="the built-in models are gpt, translate"):
        hw.load("bert")
    with pytest.raises(ValueError, match="does not hold a run"):
        hw.load(tmp_path)
    (tmp_path / "config.json").write_text('{"task": "sing"}')
    with pytest.raises(ValueError, match="unknown task 'sing'"):
        hw.load(tmp_path)
