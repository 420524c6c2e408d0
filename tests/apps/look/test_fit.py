"""Remarks on models that do not fit what they read."""

import torch

import headwise as hw
from headwise.apps.look.fit import remarks
from headwise.apps.look.head_groups import groups
from headwise.apps.look.readers.builtin import TextReader
from headwise.apps.look.scene import Input


def test_a_text_in_a_script_that_the_model_does_not_know_is_remarked_on() -> None:
    reader = TextReader("gpt", hw.load("gpt"))
    assert remarks(reader.read("My dog chased the ball.")) == ()
    (said,) = remarks(reader.read("我们第一次见面"))
    assert "about 3 pieces" in said
    assert "切成约 3 段" in said.zh


def test_a_model_that_was_never_trained_is_remarked_on() -> None:
    torch.manual_seed(0)
    size = hw.models.GPTConfig(vocabulary=64, context=64, d_model=32, layers=2, heads=4)
    model = hw.models.GPT(size)
    with hw.watch(model) as seen:
        model(torch.randint(64, (1, 40)))
    tokens = [str(number) for number in range(40)]
    read = Input("numbers", "text", groups(seen, {"self": (tokens, tokens)}))
    assert ["looks untrained" in said for said in remarks(read)] == [True]
