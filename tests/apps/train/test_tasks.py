"""Each task can be learnt from a small file and scored by the usual metrics."""

import json
import math
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import headwise as hw
from headwise.apps.cli.main import app
from headwise.apps.train import presets, runs, setups
from headwise.apps.train.data import labelled_images as images
from headwise.apps.train.recipe import Recipe
from headwise.apps.train.runs import train
from headwise.apps.train.setups import LanguageSetup, TranslateSetup, VisionSetup
from headwise.apps.train.tasks import metrics
from headwise.apps.train.tasks.language import text_loss
from headwise.apps.train.tasks.translation import Sentences
from headwise.apps.train.tasks.vision import patched, shifted
from headwise.models import GPTConfig, TransformerConfig, ViTConfig
from headwise.models.trained import Classifier, LanguageModel, Run, Translator
from headwise.nn import GELU, PreNorm, ReLU, SwiGLU

CPU = torch.device("cpu")
RECIPE = Recipe(steps=4, warmup=2, log_every=2, evaluate_every=4, checkpoint_every=2)
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


@pytest.fixture(scope="module")
def pairs_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three numbers, translated by reversing their order."""
    path = tmp_path_factory.mktemp("data") / "pairs.tsv"
    lines = [f"{a} {b} {c}\t{c} {b} {a} !" for a in WORDS for b in WORDS for c in WORDS[:4]]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def translating(data: Path, recipe: Recipe = RECIPE) -> TranslateSetup:
    model = TransformerConfig(
        300, d_model=32, encoder_layers=1, decoder_layers=1, heads=2, feed_forward=ReLU(64),
        arrangement=PreNorm(), dropout=0.1,
    )  # fmt: skip
    return TranslateSetup(str(data), 300, model, recipe, tokens=600, longest=32)


def continuing(data: Path, recipe: Recipe = RECIPE) -> LanguageSetup:
    model = GPTConfig(300, context=32, d_model=32, layers=1, heads=2, feed_forward=SwiGLU(64))
    return LanguageSetup(str(data), 300, model, recipe, batch=4)


@pytest.fixture
def noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of two kinds, dark and bright, in place of a corpus."""
    labels = torch.arange(6000) % 2
    pixels = torch.randint(100, (6000, 1, 8, 8), dtype=torch.uint8)
    pixels += (labels * 120).to(torch.uint8)[:, None, None, None]
    found = images.parts((pixels, labels), (pixels[:200], labels[:200]))
    monkeypatch.setattr(images, "read_images", lambda source: found)


SEEING = VisionSetup(
    "noise",
    ViTConfig(
        image=8, patch=4, channels=1, classes=2, d_model=16, layers=1, heads=2,
        feed_forward=GELU(16),
    ),
    replace(RECIPE, steps=40, learning_rate=3e-3),
    batch=32,
)  # fmt: skip


def test_a_translator_is_trained_resumed_and_loaded(pairs_file: Path, tmp_path: Path) -> None:
    whole = train(translating(pairs_file), tmp_path / "whole", device="cpu")
    assert whole is not None
    seen = iter(range(1, 99))
    stopped = train(
        translating(pairs_file),
        tmp_path / "parts",
        device="cpu",
        should_stop=lambda: next(seen) == 3,
    )
    assert stopped is None
    early = hw.load(tmp_path / "parts")  # from its last checkpoint
    assert isinstance(early, Translator)
    assert train(None, tmp_path / "parts", device="cpu") is not None
    states = [(tmp_path / name / "last.safetensors").read_bytes() for name in ("whole", "parts")]
    assert states[0] == states[1]
    loaded = hw.load(tmp_path / "whole")
    assert isinstance(loaded, Translator)
    assert len(loaded.translate(["one two", "three"])) == 2
    last = list(Run(tmp_path / "whole").measured())[-1]["test"]
    assert last["bleu_signature"].startswith("nrefs:")
    assert last["perplexity"] == pytest.approx(math.exp(last["loss"]))


def test_a_translator_learns_the_language_of_turned_numbers(
    pairs_file: Path, tmp_path: Path
) -> None:
    recipe = replace(
        RECIPE, steps=150, warmup=20, learning_rate=5e-3, evaluate_every=150, checkpoint_every=150
    )
    assert train(translating(pairs_file, recipe), tmp_path, device="cpu") is not None
    losses = [line["loss"] for line in Run(tmp_path).measured() if "loss" in line]
    assert losses[-1] < losses[0] / 2
    assert list(Run(tmp_path).measured())[-1]["test"]["bleu"] > 10


def test_a_language_model_is_trained_and_loaded(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat. " * 2000, encoding="utf-8")
    assert train(continuing(text), tmp_path / "run", device="cpu") is not None
    loaded = hw.load(str(tmp_path / "run"))
    assert isinstance(loaded, LanguageModel)
    assert isinstance(loaded.complete("the cat", 3), str)
    assert loaded.pieces("the")[0] == "⟨start⟩"
    assert list(Run(tmp_path / "run").measured())[-1]["test"]["bits_per_byte"] > 0
    text.write_text("too short for anything like this context", encoding="utf-8")
    with pytest.raises(ValueError, match="too few for two windows of 32"):
        train(continuing(text), tmp_path / "other", device="cpu")
    assert not (tmp_path / "other/config.json").exists()


@pytest.mark.usefixtures("noise")
def test_a_classifier_is_trained_and_loaded(tmp_path: Path) -> None:
    assert train(SEEING, tmp_path, device="cpu") is not None
    loaded = hw.load(tmp_path)
    assert isinstance(loaded, Classifier)
    assert list(Run(tmp_path).measured())[-1]["test"]["accuracy"] > 0.9
    task = SEEING.prepare(Run(tmp_path))
    assert loaded.mean == tuple(task.mean.flatten().tolist())
    assert loaded.deviation == tuple(task.deviation.flatten().tolist())


def test_half_a_model_is_as_good(pairs_file: Path, tmp_path: Path) -> None:
    train(translating(pairs_file), tmp_path / "run", device="cpu")
    size = runs.export(tmp_path / "run", tmp_path / "half")
    assert size < (tmp_path / "run/model.safetensors").stat().st_size
    whole, half = (hw.load(tmp_path / name) for name in ("run", "half"))
    for name, tensor in whole.model.state_dict().items():
        torch.testing.assert_close(half.model.state_dict()[name], tensor, atol=1e-3, rtol=1e-3)
    figures = runs.judge(tmp_path / "half", "cpu")
    assert figures["sentences"] > 0
    with pytest.raises(ValueError, match="already holds a model"):
        runs.export(tmp_path / "run", tmp_path / "half")


class Counting(nn.Module):
    """Predicts nothing in particular, so that every prediction costs log 7."""

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.zeros(*tokens.shape, 7)


@pytest.mark.parametrize("length", [2, 5, 8, 9, 10, 23, 64, 65])
@pytest.mark.parametrize("stride", [1, 4, 8])
def test_every_token_is_judged_once(length: int, stride: int) -> None:
    nats = text_loss(Counting(), torch.randint(7, (length,)), context=8, stride=stride, together=3)
    assert nats == pytest.approx((length - 1) * math.log(7), rel=1e-6)


def test_batches_of_sentences_are_padded_and_counted(pairs_file: Path, tmp_path: Path) -> None:
    task = translating(pairs_file).prepare(Run(tmp_path))
    batch = task.batch(0, CPU)
    real = batch.target[:, 1:] != task.tokeniser.pad
    assert int(real.sum()) == batch.predictions
    assert batch.source.gather(1, batch.lengths[:, None] - 1).eq(task.tokeniser.end).all()
    assert batch.target[:, 0].eq(task.tokeniser.start).all()
    with pytest.raises(ValueError, match="none of the 1 pairs is shorter than 2 tokens"):
        Sentences([("one two three", "x")], task.tokeniser, longest=2)


def test_images_are_moved_and_mixed_with_their_names() -> None:
    image = torch.arange(64.0).reshape(1, 1, 8, 8)
    assert torch.equal(shifted(image, torch.tensor([[1, 1]])), image)
    assert torch.equal(shifted(image, torch.tensor([[1, 2]]))[..., :-1], image[..., 1:])
    images_, shares = torch.rand(2, 1, 8, 8), torch.eye(2)
    assert patched(images_, shares, [0.1, 0.5, 0, 0])[0] is images_
    mixed, named = patched(images_, shares, [0.9, 0.25, 0.0, 0.0])
    assert torch.equal(mixed[0, 0, :4, :4], images_[1, 0, :4, :4])
    assert torch.equal(mixed[0, 0, 4:], images_[0, 0, 4:])
    torch.testing.assert_close(named[0], torch.tensor([0.75, 0.25]))


def test_setups_survive_json() -> None:
    for task, named in presets.PRESETS.items():
        for setup in named.values():
            assert setup.task == task
            assert setups.from_dict(json.loads(json.dumps(setups.to_dict(setup)))) == setup
    with pytest.raises(ValueError, match="has no preset 'huge'; it has tiny, small"):
        presets.preset("translate", "huge")
    with pytest.raises(ValueError, match="there is no task 'sing'"):
        setups.from_dict({"task": "sing"})


def test_bleu_takes_sentences_with_different_numbers_of_references() -> None:
    said = ["va t'en tout de suite", "bonjour à tous les amis"]
    figures = metrics.bleu(said, [["x", "va t'en tout de suite"], ["bonjour à tous les amis"]])
    assert figures["bleu"] == pytest.approx(100)
    assert figures["single"] < 100


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["train", *words])


def test_the_command_trains_tells_and_resumes(
    pairs_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(presets.PRESETS["translate"], "tiny", translating(pairs_file))
    out = str(tmp_path / "run")
    lines = run("translate", "--out", out, "--device", "cpu", "--json").output.splitlines()
    assert json.loads(lines[-1])["test"]["sentences"] > 0
    refused = run("translate", "--out", out)
    assert refused.exit_code == 2
    assert "already holds a run" in refused.output
    assert "leave out --steps" in run("translate", "--out", out, "--resume", "--steps", "9").output
    assert "a run of translate" in run("vision", "--out", out, "--resume").output
    again = run("translate", "--out", out, "--device", "cpu", "--resume")
    assert again.exit_code == 0, again.output
    assert "bleu" in again.output
    assert "sentences" in run("score", out, "--device", "cpu").output
    assert "no device 'meta' to compute on" in run("score", out, "--device", "meta").output
    assert "MB" in run("export", out, "--out", str(tmp_path / "half")).output


def test_a_log_file_gets_the_size_the_data_units_and_the_time_left(
    pairs_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = translating(pairs_file, replace(RECIPE, steps=6))
    monkeypatch.setitem(presets.PRESETS["translate"], "tiny", setup)
    out = tmp_path / "run"
    first, *lines = run("translate", "--out", str(out), "--device", "cpu").output.splitlines()
    assert re.fullmatch(rf"translate: [\d,]+ parameters, {pairs_file}, on cpu, in {out}", first)
    assert re.search(r"2/6  loss [\d.]+ · [\d,]+ tokens/s · \d:\d\d:\d\d left", lines[0])
    assert "left" not in next(line for line in lines if "6/6" in line)
    assert lines[-1] == f"finished; to see its heads: headwise look {out}"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["translate", "--preset", "huge"], "has no preset 'huge'"),
        (["translate", "--data", "no-such-corpus"], "there are no pairs 'no-such-corpus'"),
        (["language", "--data", "no-such-corpus"], "there is no text"),
        (["vision", "--data", "no-such-corpus"], "there are no images"),
        (["translate", "--resume"], "does not hold a run"),
        (["translate", "--minutes", "0"], "minutes=0 must be positive"),
        (["translate", "--minutes", "-3"], "minutes=-3 must be positive"),
        (["language", "--device", "toaster"], "no device 'toaster' to compute on here; use cpu"),
    ],
)
def test_the_command_refuses_in_a_sentence(tmp_path: Path, words: list[str], message: str) -> None:
    result = run(*words, "--out", str(tmp_path / "run"))
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output
    assert not (tmp_path / "run/config.json").exists()


def test_the_command_lists_corpora_with_their_licences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWISE_CACHE", str(tmp_path))
    listed = json.loads(run("corpora", "--json").output)
    assert {each["name"] for each in listed} >= {"enwik8", "tatoeba-en-fr", "cifar-10"}
    assert all(each["licence"] and not each["cached"] for each in listed)
    assert "CC-BY-SA" in run("corpora").output
    assert "there is no corpus 'nothing'" in run("corpora", "nothing").output


@pytest.mark.slow
def test_two_processes_train_side_by_side_and_one_can_be_interrupted(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat, and the dog did not. " * 3000, encoding="utf-8")
    words = [sys.executable, "-m", "headwise", "train", "language", "--data", str(text)]
    words += ["--device", "cpu", "--json", "--steps"]
    ends, goes_on = tmp_path / "a", tmp_path / "b"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    first, second = (
        subprocess.Popen(
            [*words, steps, "--out", str(out)], stdout=subprocess.PIPE, text=True, env=environment
        )
        for steps, out in (("2", ends), ("100000", goes_on))
    )
    assert second.stdout is not None
    second.stdout.readline()  # it is training
    second.send_signal(signal.SIGINT)
    assert second.wait(300) == 130
    assert first.wait(300) == 0
    assert (ends / "model.safetensors").exists()
    assert (goes_on / "last.safetensors").exists()
    assert not (goes_on / "model.safetensors").exists()
    for process in (first, second):
        assert process.stdout is not None
        process.stdout.close()
