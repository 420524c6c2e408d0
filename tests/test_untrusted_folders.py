"""Nothing in a folder that headwise opens can run code: no pickle, and no model's own module."""

from __future__ import annotations

import ast
import io
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import headwise as hw
from headwise.apps.cli.main import app
from headwise.apps.lab import record
from headwise.apps.look.readers import opening
from headwise.apps.look.readers.reader import silent
from headwise.apps.train import LanguageSetup, Recipe, export, judge, train
from headwise.apps.train import sharded_checkpoints as sharded
from headwise.apps.train.ranks import ALONE
from headwise.models import GPTConfig
from headwise.models.trained import checkpoints
from headwise.nn import SwiGLU

pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")
pytest.importorskip("pyarrow")

PACKAGE = Path(hw.__file__).parent
# Files that some version of some library would unpickle.
NAMES = (
    ".metadata", "last/.metadata", "last/1/.metadata", "last/1/__0_0.distcp", "last/9/.metadata",
    "last.pt", "last.bin", "model.pt", "model.pth", "model.bin", "model.pkl", "model.ckpt",
    "pytorch_model.bin", "adapter_model.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth",
    "training_args.bin", "tokenizer.pkl", "vocab.pkl", "vocab.bin", "tokenizer.model",
    "config.yaml", "data.joblib", "arrays.npy", "arrays.npz", "watch/.metadata", "maps/map.pt",
)  # fmt: skip


class Marks:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def pickles(mark: Path) -> list[bytes]:
    zipped = io.BytesIO()
    torch.save(Marks(mark), zipped)
    return [pickle.dumps(Marks(mark)), zipped.getvalue()]


def small_setup(text: Path) -> LanguageSetup:
    config = GPTConfig(
        vocabulary=270, context=16, d_model=16, layers=1, heads=2, feed_forward=SwiGLU(16)
    )
    return LanguageSetup(str(text), 270, config, Recipe(steps=2), batch=2)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One folder of each kind."""
    there = tmp_path_factory.mktemp("folders")
    (there / "book.txt").write_text("attention is a weighted mean of values . " * 400)
    setup = small_setup(there / "book.txt")
    kinds = {name: there / name for name in ("finished", "stopped", "sharded", "watched", "lab")}
    assert train(setup, kinds["finished"], device="cpu", watch_every=1) is not None
    assert train(setup, kinds["stopped"], device="cpu", should_stop=lambda: True) is None
    shutil.copytree(kinds["stopped"], kinds["sharded"])
    (kinds["sharded"] / "last.safetensors").unlink()
    model = hw.load(kinds["stopped"]).model
    about = checkpoints.load(kinds["stopped"] / "last.safetensors")[1]
    described = {"step": 1, "asked": about["asked"]}
    optimizer = setup.recipe.optimizer(model)
    sharded.save(kinds["sharded"] / "last", model, optimizer, described, ALONE)
    shutil.copytree(kinds["finished"] / "watch", kinds["watched"])
    kinds["lab"].mkdir()
    result = next(record.RECORDED.glob("*.full.json"))
    shutil.copy(result, kinds["lab"])
    if "transformers" in available():
        kinds["transformers"] = there / "transformers"
        save_transformers(kinds["transformers"], kinds["finished"] / "tokenizer.json")
    return kinds


def available() -> set[str]:
    with suppress(ModuleNotFoundError):
        import transformers

        return {transformers.__name__}
    return set()


def save_transformers(folder: Path, tokeniser: Path) -> None:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=270, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(tokenizer_file=str(tokeniser)).save_pretrained(folder)


def looked_at(folder: Path) -> None:
    opening.find(str(folder))
    opening.opened(str(folder), "cpu").read("to be", silent)


def written(folder: Path) -> None:
    out = str(folder.parent / "page.html")
    given = ["look", str(folder), "--text", "to be", "--out", out, "--device", "cpu"]
    ran = CliRunner().invoke(app, given)
    if ran.exit_code:
        raise ValueError(ran.output)


def watched(folder: Path) -> None:
    run = hw.watching.open_run(folder)
    run.heads()
    for kept in run.kept:
        run.map(kept.layer, kept.head, step=kept.step)


def lab(folder: Path) -> None:
    for path in folder.glob("*.full.json"):
        record.read(folder, path.name.removesuffix(".full.json"), "full")


def resumed(folder: Path) -> None:
    train(None, folder, device="cpu", should_stop=lambda: True)


def cost(folder: Path) -> None:
    hw.cost(str(folder), queries=8)


def exported(folder: Path) -> None:
    out = folder.parent / "exported"
    shutil.rmtree(out, ignore_errors=True)
    export(folder, out)


OPENED: dict[str, tuple[Callable[[Path], object], ...]] = {
    "finished": (hw.load, looked_at, written, judge, exported, watched, resumed, cost),
    "stopped": (hw.load, looked_at, written, judge, resumed),
    "sharded": (hw.load, looked_at, written, judge, resumed),
    "watched": (hw.load, looked_at, written, watched, cost),
    "lab": (lab, looked_at),
    "transformers": (hw.load, looked_at, written, cost),
}


def copies(folder: Path, into: Path, mark: Path) -> Iterator[Path]:
    """The folder with a pickle in each of its files, then with pickles under all names."""
    files = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]
    for content in pickles(mark):
        for file in files:
            shutil.copytree(folder, into)
            (into / file).write_bytes(content)
            yield into
            shutil.rmtree(into)
        for without in ((), ("model.safetensors", "last.safetensors", "index.json")):
            shutil.copytree(folder, into)
            for name in NAMES:
                (into / name).parent.mkdir(parents=True, exist_ok=True)
                (into / name).write_bytes(content)
            for path in into.rglob("*"):
                if path.name in without:
                    path.unlink()
            yield into
            shutil.rmtree(into)


@pytest.mark.parametrize("kind", OPENED)
def test_the_folders_themselves_are_opened(
    folders: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    if kind not in folders:
        pytest.skip("transformers is not installed")
    refused = {"watched": {hw.load, looked_at, cost}, "transformers": {hw.load},
               "finished": {cost}, "lab": {looked_at}}  # fmt: skip
    for open_it in OPENED[kind]:
        shutil.copytree(folders[kind], tmp_path / "copy")
        if open_it in refused.get(kind, ()):
            with pytest.raises(ValueError):
                open_it(tmp_path / "copy")
        else:
            open_it(tmp_path / "copy")
        shutil.rmtree(tmp_path / "copy")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", OPENED)
def test_no_pickle_in_any_file_of_any_folder_runs(
    folders: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    if kind not in folders:
        pytest.skip("transformers is not installed")
    mark = tmp_path / "mark"
    pickle.loads(pickle.dumps(Marks(mark)))
    assert mark.is_dir()  # so a pickle that is opened is noticed
    mark.rmdir()
    for folder in copies(folders[kind], tmp_path / "copy", mark):
        for open_it in OPENED[kind]:
            with suppress(Exception):
                open_it(folder)
            assert not mark.exists(), (open_it.__name__, folder)


def test_a_checkpoint_that_is_a_pickle_is_refused_in_a_line(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    run, mark = tmp_path / "run", tmp_path / "mark"
    shutil.copytree(folders["sharded"], run)
    (run / "last/1/index.json").unlink()
    (run / "last/1/.metadata").write_bytes(pickles(mark)[0])
    for open_it in (hw.load, looked_at, judge, resumed):
        with pytest.raises(ValueError, match="is a pickle, which can run code and is not opened"):
            open_it(run)
    said = CliRunner().invoke(app, ["train", "score", str(run), "--device", "cpu"])
    assert said.exit_code == 2
    assert "is a pickle, which can run code" in said.output
    assert not mark.exists()


def test_the_index_of_transformers_weights_can_not_lead_to_a_pickle(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    folder, mark = tmp_path / "model", tmp_path / "mark"
    for name in ("weights.bin", "../weights.safetensors", 3):
        shutil.copytree(folders["transformers"], folder, dirs_exist_ok=True)
        (folder / "model.safetensors").unlink()
        (folder / "weights.bin").write_bytes(pickles(mark)[1])
        index = {"metadata": {}, "weight_map": {"model.embed_tokens.weight": name}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ValueError, match="which is not a safetensors file beside it"):
            looked_at(folder)
    assert not mark.exists()


def test_a_models_own_code_never_runs_nor_is_asked_about(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")

    def asked(*_: object) -> str:
        raise AssertionError("a prompt appeared")

    monkeypatch.setattr("builtins.input", asked)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    mark = tmp_path / "mark"
    code = f"import os\nos.mkdir({str(mark)!r})\nclass Own: pass\n"
    owns = {"AutoConfig": "own.Own", "AutoModel": "own.Own", "AutoModelForCausalLM": "own.Own"}
    for file, given in (
        ("config.json", {"model_type": "own", "auto_map": owns}),
        ("config.json", {"attn_implementation": "somebody/kernel"}),
        ("tokenizer_config.json", {"tokenizer_class": "Own", "auto_map": {
            "AutoTokenizer": ["own.Own", "own.Own"]}}),
    ):  # fmt: skip
        folder = tmp_path / "model"
        shutil.copytree(folders["transformers"], folder, dirs_exist_ok=True)
        (folder / "own.py").write_text(code)
        written = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(written | given))
        with pytest.raises(ValueError) as refused:
            looked_at(folder)
        assert "\n" not in str(refused.value)
        assert "code of its own, which headwise does not run" in str(refused.value)
        with suppress(ValueError):
            cost(folder)
        assert not mark.exists()


def called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def calls() -> Iterator[tuple[str, ast.Call]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}", node


def test_every_call_that_loads_by_transformers_refuses_a_models_own_code() -> None:
    names = ("from_pretrained", "from_config")
    methods = [(place, x) for place, x in calls() if isinstance(x.func, ast.Attribute)]
    found = [(place, x) for place, x in methods if called(x) in names]
    assert len(found) > 5
    for place, node in found:
        given = {each.arg: each.value for each in node.keywords}
        value = given.get("trust_remote_code")
        assert isinstance(value, ast.Constant), place
        assert value.value is False, place


def test_nothing_in_the_package_unpickles() -> None:
    modules = {"pickle", "cPickle", "dill", "joblib", "shelve", "marshal", "yaml", "cloudpickle"}
    loaders = {"state_dict_loader", "filesystem", "default_planner"}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(each.name for each in node.names)]
            for name in names:
                assert name.split(".")[0] not in modules, path
                assert name.split(".")[-1] not in loaders, path
    for place, node in calls():
        assert "allow_pickle" not in {each.arg for each in node.keywords}, place
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        assert (getattr(owner, "id", ""), called(node)) not in {
            ("torch", "load"), ("np", "load"), ("numpy", "load"),
        }, place  # fmt: skip
