"""Model folders from strangers: damaged ones are refused in one line, and none runs code."""

import json
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import headwise as hw
from headwise.apps.cli.main import app
from headwise.apps.lab import record
from headwise.apps.lab.claims import CLAIMS
from headwise.apps.look.readers import opening
from headwise.apps.train import checkpoints
from headwise.apps.train.loading import ASSETS, _check_size
from headwise.models import GPT, GPTConfig

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


def test_a_configuration_larger_than_its_weights_is_refused_before_it_is_built() -> None:
    weights = checkpoints.weights(GPT(CONFIG))
    for name, value in (("layers", 10**12), ("d_model", 2 * 10**9), ("vocabulary", 10**12)):
        huge = GPTConfig(**{**vars(CONFIG), name: value})
        with pytest.raises(ValueError, match=r"fewer layers|holds another model|can't be built"):
            _check_size(huge, weights, Path("config.json"))


class Trap:
    """An object whose pickle leaves a mark when it is opened."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def traps(mark: Path, folder: Path) -> list[bytes]:
    """The trap as a plain pickle, and as torch.save writes it."""
    torch.save({"weight": Trap(mark)}, folder / "trap")
    return [pickle.dumps(Trap(mark)), (folder / "trap").read_bytes()]


PLANTED = (
    "config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.pkl", "card.md",
    "model.safetensors", "last.safetensors", "model.safetensors.index.json",
    "last/.metadata", "last/4/.metadata", "last/4/__0_0.distcp", "last/4/about.json",
    "last/4/index.json", "last/4/rank-0.safetensors",
    "pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt", "model.pth", "model.ckpt",
    "optimizer.pt", "training_args.bin", "generation_config.json", "metrics.jsonl",
    "manifest.json", "watch/manifest.json", "series-rank0-000001.parquet", "alarms-rank0.jsonl",
    "maps/000001-layer0-head0-rank0.safetensors", "heads.json", ".headwise",
)  # fmt: skip


def watched_run(folder: Path) -> Path:
    """A folder as `seen.save` leaves it."""
    model = hw.nn.MultiHeadAttention(8, 2)
    with hw.watch(model) as seen:
        model(torch.randn(1, 5, 8))
    seen.save(folder, maps=[(0, 0)])
    return folder


FOLDERS: dict[str, Callable[[Path], Path]] = {
    "own": own_model,
    "transformers": transformers_model,
    "watched": watched_run,
}


def ways_in(folder: Path) -> Iterator[Callable[[], object]]:
    """Everything that opens a folder."""
    yield lambda: hw.load(folder)
    yield lambda: opening.opened(str(folder))
    yield lambda: hw.watching.open_run(folder).map(layer=0, head=0)
    for words in (
        ["look", str(folder), "--terminal"],
        ["watch", str(folder), "--json"],
        ["train", "score", str(folder)],
        ["cost", str(folder)],
    ):
        yield lambda words=words: CliRunner().invoke(app, words)  # type: ignore[misc]


@pytest.mark.parametrize("kind", FOLDERS)
def test_nothing_in_a_folder_is_unpickled(tmp_path: Path, kind: str) -> None:
    mark, folder = tmp_path / "mark", FOLDERS[kind](tmp_path / "folder")
    there = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    for number, trap in enumerate(traps(mark, tmp_path)):
        for name in sorted({*there, *PLANTED}):
            path = folder / name
            before = path.read_bytes() if path.exists() else None
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(trap)
            if name.startswith("last/") and (folder / "model.safetensors").exists():
                (folder / "model.safetensors").rename(tmp_path / "aside")
            ways = [*ways_in(folder)]
            for way in ways if before is not None or number == 0 else ways[:3]:
                try:
                    way()
                except Exception:  # refused, which is right
                    continue
                finally:
                    assert not mark.exists(), (name, number)
            if (tmp_path / "aside").exists():
                (tmp_path / "aside").rename(folder / "model.safetensors")
            path.unlink()
            if before is not None:
                path.write_bytes(before)


def test_nothing_in_a_result_of_the_lab_is_unpickled(tmp_path: Path) -> None:
    mark, claim = tmp_path / "mark", CLAIMS[0]
    for trap in traps(mark, tmp_path):
        for form in ("quick", "full"):
            record.file_of(tmp_path, claim.id, form).write_bytes(trap)
            with pytest.raises(ValueError, match="is not a result of the lab"):
                record.read(tmp_path, claim.id, form)
            assert not mark.exists()


def test_the_trap_works(tmp_path: Path) -> None:
    plain, saved = traps(tmp_path / "mark", tmp_path)
    pickle.loads(plain)
    assert (tmp_path / "mark").exists()
    (tmp_path / "mark").unlink()
    (tmp_path / "saved").write_bytes(saved)
    torch.load(tmp_path / "saved", weights_only=False)
    assert (tmp_path / "mark").exists()


def test_checkpoints_of_an_older_headwise_are_not_opened(tmp_path: Path) -> None:
    folder, mark = own_model(tmp_path / "run"), tmp_path / "mark"
    (folder / "model.safetensors").unlink()
    (folder / "last/4").mkdir(parents=True)
    (folder / "last/4/.metadata").write_bytes(pickle.dumps(Trap(mark)))
    with pytest.raises(ValueError, match="a pickle, which can run code and is not opened"):
        hw.load(folder)
    assert not mark.exists()


def test_a_models_own_code_is_refused_and_never_asked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, mark = transformers_model(tmp_path / "model"), tmp_path / "mark"
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    config["model_type"] = "own"
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(f"from pathlib import Path\nPath({str(mark)!r}).touch()\n")

    def asked(*_: object) -> str:
        raise AssertionError("a prompt appeared")

    monkeypatch.setattr("builtins.input", asked)
    with pytest.raises(ValueError, match="headwise runs no code that comes with a model"):
        opening.opened(str(folder))
    assert not mark.exists()


def test_every_call_of_transformers_says_that_no_code_is_trusted() -> None:
    calls = 0
    for file in Path(hw.__file__).parent.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        for part in text.split(".from_pretrained(")[1:]:
            if '"headwise")' in part[:80] or part.startswith("..."):  # a docstring
                continue
            calls += 1
            assert "trust_remote_code=False" in part[:120] or "**here" in part[:120], file
    assert calls >= 5
