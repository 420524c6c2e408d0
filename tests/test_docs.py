"""Every example in the README and in docs/ runs and prints the output that the page shows."""

import doctest
import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench import cost, cost_peers
from bench.gpu_tables import tables
from headwise.apps.cli.main import app

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("README*.md"), *ROOT.glob("docs/**/*.md")])
BLOCK = re.compile(r"^```(?P<language>\w+)\n(?P<body>.*?)^```", re.DOTALL | re.MULTILINE)
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS

FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
CHINESE = sorted(page for page in PAGES if ".zh" in page.name)

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """Fenced blocks in a language, each with the line (from 0) on which its code starts."""
    text = page.read_text(encoding="utf-8")
    return [
        (text.count("\n", 0, match.start("body")), match["body"])
        for match in BLOCK.finditer(text)
        if match["language"] == language
    ]


@pytest.mark.parametrize(
    "page",
    # A translated page has the examples of the other, but for their comments.
    [pytest.param(x, marks=pytest.mark.slow if x in CHINESE else ()) for x in PAGES],
    ids=[str(x.relative_to(ROOT)) for x in PAGES],
)
def test_python_examples_run_in_order_and_print_what_they_show(page: Path) -> None:
    namespace: dict[str, object] = {}
    for line, body in blocks(page, "python"):
        if ">>>" not in body:
            # Leading empty lines make a traceback point into the page.
            exec(compile("\n" * line + body, str(page), "exec"), namespace)
            continue
        example = doctest.DocTestParser().get_doctest(body, namespace, page.name, str(page), line)
        report: list[str] = []
        runner = doctest.DocTestRunner(optionflags=FLAGS)
        runner.run(example, out=report.append, clear_globs=False)
        namespace.update(example.globs)
        assert not report, "".join(report)


@pages
def test_console_examples_print_what_they_show(page: Path) -> None:
    for _, body in blocks(page, "console"):
        for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
            command, _, shown = part.partition("\n")
            words = shlex.split(command, comments=True)
            if words[:2] not in (["headwise", "look"], ["headwise", "cost"]):
                # the others depend on the machine
                continue
            result = CliRunner().invoke(app, words[1:], catch_exceptions=False)
            assert plain(result.output) == plain(shown)


def plain(text: str) -> list[str]:
    """Lines without trailing space."""
    return [line.rstrip() for line in text.strip().splitlines()]


@pages
def test_links_to_files_of_the_repository_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", [*PAGES, ROOT / "page/README.md"], ids=lambda page: page.name)
def test_files_named_in_backticks_exist(page: Path) -> None:
    """Paths start at the root of the repository, or in a folder that the page names."""
    spans = re.findall(r"`([\w./-]+)`", FENCED.sub("", page.read_text(encoding="utf-8")))
    folders = [ROOT, page.parent, *(ROOT / span for span in spans if span.endswith("/"))]
    for path in (span for span in spans if re.search(r"^\w+/.*\.\w+$", span)):
        places = [folder for folder in folders if (folder / path.split("/")[0]).is_dir()]
        if places and "yours" not in path.lower():  # a file of the reader's
            assert any((folder / path).is_file() for folder in places), path


chinese = pytest.mark.parametrize("page", CHINESE, ids=lambda page: str(page.relative_to(ROOT)))


@chinese
def test_both_languages_have_the_same_sections_examples_tables_and_commands(page: Path) -> None:
    english = page.with_name(page.name.replace(".zh", ""))
    assert outline(page) == outline(english)


def outline(page: Path) -> dict[str, object]:
    """The parts of a page that do not depend on its language."""
    prose = FENCED.sub("", page.read_text(encoding="utf-8"))
    lines = prose.splitlines()
    return {
        "headings": [line.split(" ")[0] for line in lines if line.startswith("#")],
        "tables": [line.count("|") for line in lines if line.startswith("|")],
        "code": {" ".join(said.split()) for said in re.findall(r"`([^`]+)`", prose)},
        "pictures": len(re.findall(r"^!\[", prose, re.MULTILINE)),
        "examples": [
            [code for line in body.splitlines() if (code := line.split("#")[0].rstrip())]
            for _, body in blocks(page, "python")
        ],
    }


@chinese
def test_chinese_sentences_have_chinese_punctuation(page: Path) -> None:
    prose = re.sub(r"`[^`]*`", "`", FENCED.sub("", page.read_text(encoding="utf-8")))
    assert re.findall(r".{0,9}[一-鿿][,;:?!].{0,9}", prose) == []


@pytest.mark.parametrize(
    ("page", "file"),
    [("speed.md", "cpu.json"), ("speed.md", "modules.json"), ("gpu.md", "gpu.json")],
)
def test_every_benchmark_result_is_listed_as_met_or_missed(page: str, file: str) -> None:
    listed = {
        frozenset(cell.strip() for cell in line.split("|"))
        for line in (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()
    }
    found = json.loads((ROOT / "bench/results" / file).read_text(encoding="utf-8"))["figures"]
    for figure in found:
        value = f"{figure['value']:.2f} {figure['unit']}"
        judged = "met" if figure["met"] else "**missed**"
        row = {figure["name"], value, figure["target"], judged}
        assert any(row <= line for line in listed), row


@pytest.mark.parametrize("page", ["cost-time.md", "cost-time.zh.md"])
def test_the_tables_of_costs_are_the_recorded_results(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert cost.documented(text) == text


@pytest.mark.parametrize("page", ["cost.md", "cost.zh.md"])
def test_the_tables_of_peers_are_the_recorded_results(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    kept = json.loads((ROOT / "bench/results/cost_peers.json").read_text(encoding="utf-8"))
    assert cost_peers.table(kept["flops"], kept["versions"]) in text
    assert cost_peers.memory_table(kept["memory"]) in text


def gpu_tables() -> dict[str, list[str]]:
    """The rows of the measured tables of docs/gpu.md by their headings."""
    page = (ROOT / "docs/gpu.md").read_text(encoding="utf-8").partition("## Measured")[2]
    found = [each.splitlines() for each in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE)]
    return {heading: rows for heading, _, *rows in found}


MASKS = "| call (d 128 unless said) |"
"""How the heading begins of the table that another benchmark made."""


def test_the_tables_of_gpu_md_are_the_recorded_results() -> None:
    shown = [rows for heading, rows in gpu_tables().items() if not heading.startswith(MASKS)]
    found = json.loads((ROOT / "bench/results/gpu.json").read_text(encoding="utf-8"))
    assert shown == tables(found)


def test_the_table_of_masks_is_the_recorded_results() -> None:
    (rows,) = (rows for heading, rows in gpu_tables().items() if heading.startswith(MASKS))
    kept = json.loads((ROOT / "bench/results/gpu_masks.json").read_text(encoding="utf-8"))
    for row in rows:
        _, plain, entropy, five, every, cudnn, rate, _ = map(str.strip, row.strip("|").split("|"))
        cell = min(kept["cells"], key=lambda cell: abs(cell["ms"]["plain"] - float(plain)))
        ms = cell["ms"]
        for names, said in (
            (("plain",), plain), (("entropy",), entropy), (("five",), five), (("cudnn",), cudnn),
            (("every", "every in the loop"), every),  # the faster of two ways
        ):  # fmt: skip
            found = [ms[name] for name in names if name in ms]
            assert not said or any(abs(float(said) - one) < 6e-4 for one in found), row
        assert rate == f"{cell['TFLOP/s']['plain']}", row


@pages
def test_tests_named_in_backticks_exist(page: Path) -> None:
    for path, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text(encoding="utf-8")):
        assert re.search(rf"^def {name}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
