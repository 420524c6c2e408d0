"""`headwise sparse` as a user sees it."""

import json
import math
import re
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from playwright.sync_api import expect
from rich.console import Console
from typer.testing import CliRunner

import headwise as hw
from headwise.apps.cli.main import app
from headwise.apps.look.readers import opening
from headwise.apps.look.readers.reader import SAMPLE_TEXT
from headwise.apps.look.session import Progress, Session
from headwise.apps.look.sparse_report import METHODS, Point, SparseReport
from headwise.apps.look.sparsity import command as view
from headwise.apps.look.sparsity.survey import cheapest
from tests.apps.look.conftest import Served, Visits
from tests.apps.look.test_page_access import findings
from tests.apps.look.test_page_narrow import try_widths

SHORT = ["--tokens", "64", "--budget", "8", "--budget", "32"]


def invoked(*words: str) -> Any:
    return CliRunner().invoke(app, ["sparse", *words])


def refused(*words: str) -> str:
    result = invoked(*words)
    assert result.exit_code == 2, result.output
    return " ".join(result.output.replace("│", " ").split())


@pytest.fixture(scope="module")
def report() -> Any:
    with pytest.MonkeyPatch.context() as here:
        here.delenv("TRITON_INTERPRET", raising=False)  # as in every test that is not of triton
        result = invoked(*SHORT, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.output[result.output.index("{") :])


def test_the_loss_of_all_keys_and_of_the_largest_is_the_models(report: Any) -> None:
    gpt = hw.load("gpt")
    ids = gpt.encode(SAMPLE_TEXT)[:, :64]

    def loss() -> float:
        with torch.no_grad():
            return F.cross_entropy(gpt.model(ids)[0, 32:-1], ids[0, 33:]).item()

    assert report["loss"] == pytest.approx(loss(), abs=1e-5)
    with hw.sparsify(gpt.model, hw.sparse.TopK(8)):
        few = loss()
    points = {point["budget"]: point for point in report["methods"]["top-k"]}
    assert points[8]["loss"] == pytest.approx(few, abs=1e-5)
    assert points[8]["increase"] == pytest.approx(few - loss(), abs=1e-5)
    assert report["scored"] == 31


def test_the_report_has_every_method_head_and_layer(report: Any) -> None:
    assert list(report["methods"]) == list(METHODS) == list(report["about"])
    assert [(x["layer"], x["head"]) for x in report["heads"]] == [
        (layer, head) for layer in range(6) for head in range(8)
    ]
    for head in report["heads"]:
        assert 1 <= head["needed_mean"] <= head["needed_max"] <= 64
        assert 0 < head["kept"]["8"] <= head["kept"]["32"] <= 1 + 1e-6
    assert [x["layer"] for x in report["layers"]] == list(range(6))


def test_the_suggestion_costs_at_most_what_is_allowed_and_is_measured(report: Any) -> None:
    suggestion = report["suggestion"]
    assert suggestion["increase"] <= report["allowed"]
    chosen = {x["layer"]: x["suggested"] for x in report["layers"] if x["suggested"]}
    gpt = hw.load("gpt")
    ids = gpt.encode(SAMPLE_TEXT)[:, :64]
    policies = {layer: hw.sparse.TopK(k) for layer, k in chosen.items()}
    with torch.no_grad(), hw.sparsify(gpt.model, policies):
        loss = F.cross_entropy(gpt.model(ids)[0, 32:-1], ids[0, 33:]).item()
    assert suggestion["loss"] == pytest.approx(loss, abs=1e-5)


def test_the_tables_and_bars_are_printed(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text(SAMPLE_TEXT[:600], encoding="utf-8")
    result = invoked("gpt", "--text", str(file), "--tokens", "48", "--budget", "8")
    assert result.exit_code == 0, result.output
    for said in ("gpt 48 tokens", "window + sinks", "Keys that a row needs", "hw.sparsify", "█"):
        assert said in result.output


def test_what_can_not_be_measured_is_refused_in_words(tmp_path: Path) -> None:
    assert "does not predict the next token" in refused("translate", "--text", SAMPLE_TEXT)
    assert "the text has 3 tokens" in refused("--text", "to be")
    assert "no budget is below the 40 tokens" in refused("--tokens", "40", "--budget", "64")
    assert "there is no model 'gtp'" in refused("gtp")
    assert "greater than or equal to 0.01" in refused(*SHORT, "--share", "0")
    assert "there is no file no-such-book.txt" in refused("--text", "no-such-book.txt")


def test_a_transformers_model_has_a_report(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from headwise.apps.look.readers.transformers_reader import TransformersTextReader
    from headwise.apps.look.sparsity.survey import Survey

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=100, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    whole = transformers.LlamaForCausalLM(config).eval()

    def tokeniser(text: str, verbose: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) % 100 for letter in text]}

    reader = TransformersTextReader("llama", whole.model, tokeniser, whole)
    survey = Survey(reader, SAMPLE_TEXT, 40, lambda stage, done: None)
    found = survey.measure([4, 16], 4, 0.9, 1.0)
    assert len(found.heads) == 8
    bare = TransformersTextReader("llama", whole.model, tokeniser, whole.model)
    with pytest.raises(ValueError, match="does not predict the next token"):
        Survey(bare, SAMPLE_TEXT, 40, lambda stage, done: None)
    assert [len(points) for points in found.methods.values()] == [2, 2, 2, 2, 1, 2]
    assert found.suggestion.increase <= 1.0


def test_the_budgets_are_the_smallest_that_the_sum_allows() -> None:
    def points(*increases: float) -> list[Point]:
        return [Point(k, 0.0, x) for k, x in zip((1, 2, 4), increases, strict=True)]

    alone = {0: points(0.5, 0.2, 0.1), 1: points(3.0, 2.0, 1.0), 2: points(0.0, 0.0, 0.0)}
    assert cheapest(alone, 0.25) == {0: 2, 2: 1}  # layer 1 keeps all
    assert cheapest(alone, 1.6) == {0: 1, 1: 4, 2: 1}
    assert cheapest(alone, 0.0) == {2: 1}


def test_it_speaks_chinese(report: Any) -> None:
    written = StringIO()
    view.show(Console(width=200, file=written), parsed(report), zh=True)
    printed = written.getvalue()
    for said in ("64 个词元", "窗口 + 注意力汇", "建议", "hw.sparsify"):
        assert said in printed
    assert not re.search(r"[a-z]{3,} [a-z]{3,} [a-z]{3,}", printed), "a sentence is in English"


def parsed(report: Any) -> SparseReport:
    with NamedTemporaryFile(suffix=".json") as file:
        Path(file.name).write_text(json.dumps(report), encoding="utf-8")
        return SparseReport.read(Path(file.name))


def test_a_report_is_read_again_as_it_was_written(report: Any) -> None:
    assert json.loads(json.dumps(parsed(report).as_dictionary())) == report


@pytest.mark.parametrize(
    "wrong",
    [
        {"loss": "3"}, {"heads": []}, {"methods": {"mine": []}}, {"tokens": -1}, {"tokens": True},
        {"suggestion": None}, {"layers": [{"layer": 0}]}, {"model": 7}, {"loss": math.nan},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_report_is_refused(report: Any, wrong: Any, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    for text in (json.dumps(report | wrong), "[" * 99_999, "{}", "7"):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=r"report\.json is not a report of headwise sparse"):
            opening.find(str(file))


@pytest.mark.parametrize("part", ["layers", "heads", "points"])
def test_a_report_that_no_chart_can_show_is_refused(report: Any, part: str, tmp_path: Path) -> None:
    first = report["layers"][0]
    wrong = {
        "layers": {"layers": [first, first]},
        "heads": {"heads": report["heads"][:1] * 2},
        "points": {"layers": [first | {"points": []}]},
    }[part]
    file = tmp_path / "report.json"
    file.write_text(json.dumps(report | wrong), encoding="utf-8")
    with pytest.raises(ValueError, match="not a report of headwise sparse"):
        opening.find(str(file))


def test_the_page_shows_a_recorded_report(
    report: Any, serve: Callable[..., Served], visit: Visits
) -> None:
    session = Session(sparse=parsed(report), progress=Progress("ready", None))
    page = visit(base=serve(session).url)
    expect(page.get_by_role("img", name="Loss above the whole model’s")).to_be_visible()
    suggested = [x["suggested"] for x in report["layers"]]
    for layer, keys in enumerate(suggested):
        expect(page.locator(f"[data-layer='{layer}'] b")).to_have_text(str(keys or "all"))
    needed = round(report["heads"][9]["needed_mean"])
    expect(page.locator("[data-needs='1.1']")).to_have_text(str(needed))
    few = page.locator("[data-method='window + sinks'] td").first
    points = {x["budget"]: x["increase"] for x in report["methods"]["window + sinks"]}
    expect(few).to_have_text(f"{points[8]:+.3f}".replace("-", "−"))
    assert findings(page) == []
    page.keyboard.press("Shift+L")
    expect(page.get_by_role("heading", name="建议的每层预算")).to_be_visible()
    page.emulate_media(color_scheme="dark")
    assert findings(page) == []
    try_widths(page)


def test_a_file_of_its_own_needs_no_server(report: Any, visit: Visits, tmp_path: Path) -> None:
    source, file = tmp_path / "report.json", tmp_path / "report.html"
    source.write_text(json.dumps(report | {"model": "</script>"}), encoding="utf-8")
    result = CliRunner().invoke(app, ["look", str(source), "--out", str(file)])
    assert result.exit_code == 0, result.output
    page = visit(file.as_uri(), offline=True)
    expect(page.get_by_role("heading", name="</script>")).to_be_visible()
    expect(page.get_by_role("link")).to_have_text(["Sparse"])
    shown = CliRunner().invoke(app, ["look", str(source), "--terminal"])
    assert "shows it in the" in shown.output
