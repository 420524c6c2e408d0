"""Damaged model folders are refused in one line that names the folder."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import headwise as hw
from headwise.apps.cli.main import app
from headwise.apps.look.readers import opening
from headwise.models import GPT, GPTConfig
from headwise.models.trained import ASSETS, checkpoints

CONFIG = GPTConfig(vocabulary=4096, context=16, d_model=8, layers=1, heads=2)
ODD: tuple[object, ...] = (None, -1, 0, 1.5, "x", [], {}, [[]], True, 1e308, 10**30, 10**9)
NESTED = "[" * 100_000


def own_model(folder: Path) -> Path:
    """A folder as `headwise train language` leaves it."""
    folder.mkdir()
    settings = {"task": "language", "model": CONFIG.to_dict()}
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "tokenizer.json").write_bytes((ASSETS / "gpt/tokenizer.json").read_bytes())
    about = {"step": 1, "asked": {}}
    checkpoints.save(folder / "model.safetensors", checkpoints.weights(GPT(CONFIG)), about)
    return folder


def transformers_model(folder: Path) -> Path:
    """A folder as transformers' save_pretrained leaves it."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=4096, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(ASSETS / "gpt/tokenizer.json")
    ).save_pretrained(folder)
    return folder


def changed(content: bytes, numbers: random.Random) -> Iterator[bytes]:
    """The content of a file, cut short, with flipped bits, and replaced by something else."""
    yield from (b"", b"null", b"[]", b"3", b'"text"', b"{}", NESTED.encode(), b"\xff\xfe\x00")
    for _ in range(4):
        yield content[: numbers.randrange(len(content))]
    for _ in range(6):
        other = bytearray(content)
        other[numbers.randrange(min(len(other), 2000))] ^= 1 << numbers.randrange(8)
        yield bytes(other)


def with_odd_values(config: dict[str, Any]) -> Iterator[bytes]:
    """A configuration with one value replaced, or left out."""
    for place in (config, config.get("model", {})):
        for name, value in list(place.items()):
            for odd in ODD:
                place[name] = odd
                yield json.dumps(config).encode()
            del place[name]
            yield json.dumps(config).encode()
            place[name] = value


def refused_in_words(load: Callable[[], object], folder: Path) -> None:
    """Loading succeeds or raises one line that names a file or the folder."""
    try:
        load()
    except ValueError as error:
        said = str(error)
        assert folder.name in said, said[:300]
        assert len(said.splitlines()) == 1, said[:300]


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_damaged_model_of_ours_is_refused_in_a_line(tmp_path: Path, file: str) -> None:
    folder = own_model(tmp_path / "run")
    path, numbers = folder / file, random.Random(1)
    content = path.read_bytes()
    cases = [*changed(content, numbers)]
    if file == "config.json":
        cases += with_odd_values(json.loads(content))
    for case in cases:
        path.write_bytes(case)
        refused_in_words(lambda: hw.load(folder), folder)
    path.unlink()
    refused_in_words(lambda: hw.load(folder), folder)


@pytest.mark.parametrize(
    "file", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"]
)
def test_a_damaged_model_of_transformers_is_refused_in_a_line(tmp_path: Path, file: str) -> None:
    folder = transformers_model(tmp_path / "model")
    path, numbers = folder / file, random.Random(2)
    for case in [*changed(path.read_bytes(), numbers)][4:]:
        path.write_bytes(case)
        refused_in_words(lambda: opening.opened(str(folder)), folder)


def test_a_command_says_in_a_line_which_file_is_damaged(tmp_path: Path) -> None:
    folder = own_model(tmp_path / "run")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:200])
    for words in (["look", str(folder), "--terminal"], ["train", "score", str(folder)]):
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 2
        assert isinstance(result.exception, SystemExit)


HOSTILE = "\x1b]0;owned\x07\x9b31m\u202e\u2066red"
COMMANDS = (
    ["look", "--text", "to be", "--json"], ["look", "--text", "to be", "--terminal"],
    ["sparse", "--text", "to be or not to be. " * 9], ["cost"], ["train", "score"],
)  # fmt: skip


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join((words[0], words[-1])))
def test_a_configuration_controls_no_terminal(tmp_path: Path, words: list[str]) -> None:
    ours, theirs = own_model(tmp_path / "ours"), transformers_model(tmp_path / "theirs")
    for folder, name, value in (
        (ours, "task", HOSTILE), (ours, "model", {HOSTILE: 1}), (ours, "model", [HOSTILE]),
        (theirs, "model_type", HOSTILE), (theirs, "architectures", [HOSTILE]),
        (theirs, "attn_implementation", HOSTILE),
    ):  # fmt: skip
        path = folder / "config.json"
        content = path.read_text()
        path.write_text(json.dumps({**json.loads(content), name: value}))
        result = CliRunner().invoke(app, [*words, str(folder)])
        assert result.exception is None or isinstance(result.exception, SystemExit), (name, value)
        written = result.output + (result.stderr if result.stderr_bytes is not None else "")
        assert not set(written) & set("\x1b\x07\x9b\u202e\u2066"), (name, value)
        path.write_text(content)
