"""Messages in both languages: none is missing, and both take the same values."""

import ast
import copy
import json
import string
from functools import cache
from pathlib import Path

import pytest

import headwise
from headwise.chinese import CHINESE
from headwise.messages import Sentence, from_json, halves, said_by, say, with_chinese

ROOT = Path(__file__).resolve().parent.parent


@cache
def said() -> list[tuple[str, ast.Call]]:
    """Every call of `say` in the package, with its file."""
    folder = Path(headwise.__file__).parent
    found = []
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "headwise.messages" in text and path.name != "chinese.py":
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "say":
                    found.append((str(path.relative_to(folder)), node))
    return found


def fields(sentence: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(sentence) if name is not None}


def test_every_sentence_that_is_said_has_both_languages() -> None:
    used = set()
    for file, call in said():
        (sentence,) = call.args
        assert isinstance(sentence, ast.Constant), f"{file}: say takes the sentence itself"
        assert sentence.value in CHINESE, f"{file}: {sentence.value!r} has no 中文"
        used.add(sentence.value)
    assert used == set(CHINESE), f"nobody says {set(CHINESE) - used}"


def test_both_languages_have_the_values_that_are_given() -> None:
    for english, chinese in CHINESE.items():
        assert fields(english) == fields(chinese), english
        assert any("\u4e00" <= letter <= "\u9fff" for letter in chinese), chinese
    for file, call in said():
        given = {keyword.arg for keyword in call.keywords}
        assert given == fields(ast.literal_eval(call.args[0])), f"{file}: {ast.unparse(call)}"


def test_a_sentence_is_english_text_that_keeps_its_chinese() -> None:
    sentence = say("there is no input {id}", id="{7}")
    assert sentence == "there is no input {7}"
    assert sentence.zh == "没有输入 {7}"
    assert copy.deepcopy(sentence).zh == sentence.zh
    assert json.dumps(sentence) == '"there is no input {7}"'
    assert Sentence("as it is").zh == "as it is"
    assert say("there are: {there}", there=say("none yet")).zh == "现有：还没有"


def test_errors_keep_the_sentence_they_were_raised_with() -> None:
    assert said_by(ValueError(say("none yet"))).zh == "还没有"
    assert said_by(KeyError("name")) == "'name'"
    assert said_by(OSError(2, say("none yet"))).zh == "[Errno 2] none yet"
    assert said_by(ValueError()) == ""


@pytest.mark.parametrize("hint", ["", "; there are self"])
def test_a_hint_stands_behind_the_semicolon_in_both(hint: str) -> None:
    problem, advice = halves(Sentence(f"no group{hint}", f"没有组{hint.replace('; ', '；')}"))
    assert (problem, problem.zh) == ("no group", "没有组")
    assert advice == advice.zh == hint[2:]


def test_json_carries_both_languages_and_gives_them_back() -> None:
    found = {"step": 3, "rules": [{"says": say("none yet")}], "name": "plain"}
    written = json.loads(json.dumps(with_chinese(found), ensure_ascii=False))
    assert written == {**found, "zh": {"none yet": "还没有"}}
    again = from_json(written)
    assert again == found
    assert again["rules"][0]["says"].zh == "还没有"
    assert with_chinese({"name": "plain"}) == {"name": "plain"}
    assert from_json({"says": "from an older folder"}) == {"says": "from an older folder"}


def rivals() -> dict[str, str]:
    """The translations that docs/glossary.md rules out, with the one to use instead."""
    lines = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")][1:]
    return {rival: wanted for _, wanted, ruled in rows for rival in ruled.split(", ")}


def test_a_term_has_one_translation() -> None:
    files = {
        *ROOT.glob("*.zh.md"), *ROOT.glob("docs/**/*.zh.md"), *ROOT.glob("docs/**/*.ipynb"),
        *ROOT.glob("page/src/locales/*.ts"), *ROOT.glob("headwise/**/*.py"),
        *ROOT.glob("headwise/**/*.zh.md"),
        *ROOT.glob("docs/handbook/pictures/*.zh.svg"),
    }  # fmt: skip
    assert len(files) > 100
    assert rivals()["令牌"] == "词元"
    found = [
        f"{file.relative_to(ROOT)}: {rival}; write {wanted}"
        for file in sorted(files)
        for rival, wanted in rivals().items()
        if rival in file.read_text(encoding="utf-8")
    ]
    assert not found, "\n".join(found)
