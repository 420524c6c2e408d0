"""Results of the lab that are damaged or hostile: one line that names the file."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from headwise.apps.cli.main import app
from headwise.apps.lab import command_view as lab_view
from headwise.apps.lab import record
from headwise.apps.lab.laboratory import Lab
from headwise.apps.lab.runner import find

HOSTILE = "\x1b]0;owned\x07\x9b31m\u202e\u2066red"
NAMES = ("scale-variance", "scale-saturation", "heads-parameters")
OTHERS: tuple[Any, ...] = (None, -1, 1e400, "x", [], [None], {}, {"a": [1]}, [[[]]])


def current(name: str) -> dict[str, Any]:
    """The recorded result of a claim, as if it had been measured by this code."""
    from headwise.apps.lab.fingerprint import fingerprint
    from headwise.version import __version__

    (claim,) = find([name])
    found = json.loads(record.file_of(record.RECORDED, name, "quick").read_text("utf-8"))
    return {**found, "version": __version__, "code": fingerprint(claim.experiment)}


def damages(content: dict[str, Any], chance: random.Random) -> list[bytes]:
    """A result's file, damaged in many ways."""
    whole = json.dumps(content).encode()
    places = [chance.randrange(len(whole)) for _ in range(8)]
    found = [whole[:at] for at in places[:3]]
    for at in places[3:]:
        found.append(whole[:at] + bytes([whole[at] ^ (1 << chance.randrange(8))]) + whole[at + 1 :])
    deep = '{"a":' * 500 + "1" + "}" * 500
    for text in ("", "null", "3", '"x"', "[]", "{}", "[" * 100_000, deep):
        found.append(text.encode())
    for name in content:
        found.append(json.dumps({key: x for key, x in content.items() if key != name}).encode())
        found += [json.dumps({**content, name: x}).encode() for x in chance.sample(OTHERS, 4)]
    for name in content["figures"]:
        for x in OTHERS:
            figures = {**content["figures"], name: x}
            found.append(json.dumps({**content, "figures": figures}).encode())
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_damaged_result_is_refused_in_one_line_that_names_it(name: str, tmp_path: Path) -> None:
    (claim,), chance = find([name]), random.Random(0)
    file = record.file_of(tmp_path, name, "quick")
    said = []
    for damaged in damages(current(name), chance):
        file.write_bytes(damaged)
        try:
            result = record.best(claim, [tmp_path])
            lab_view.show_claim(Console(quiet=True), claim, result, zh=True)
            lab_view.show_list(Console(quiet=True), [(claim, result)], zh=False)
            json.dumps(record.described(claim, result))
        except ValueError as error:
            said.append(str(error))
    assert len(said) > 30
    for line in said:
        assert line.startswith(str(file))
        assert line.endswith("; delete it")
        assert "\n" not in line


def test_a_damaged_piece_is_named(tmp_path: Path) -> None:
    def compute(lab: Lab, folder: Path | None) -> dict[str, Any]:
        return {"a": 1}

    lab = Lab("tiny", folder=tmp_path)
    assert lab.keep("piece", compute) == {"a": 1}
    for damaged in ("", "null", "[]", "{}", "[" * 100_000, '{"about": 1'):
        (tmp_path / "kept/piece.json").write_text(damaged)
        with pytest.raises(ValueError, match=r"piece\.json is damaged .*; delete it"):
            lab.keep("piece", compute)


def hostile(value: Any) -> Any:
    """Every text of a value replaced, except for those that choose something."""
    if isinstance(value, dict):
        return {key: hostile(x) for key, x in value.items()}
    if isinstance(value, list):
        return [hostile(x) for x in value]
    return HOSTILE if isinstance(value, str) else value


@pytest.mark.parametrize("options", [[], ["--json"], ["--zh"]])
def test_texts_of_a_result_control_no_terminal(options: list[str], tmp_path: Path) -> None:
    name = "scale-saturation"
    content, file = current(name), record.file_of(tmp_path, name, "full")
    texts = {key: HOSTILE for key, x in content.items() if isinstance(x, str)}
    texts |= {key: content[key] for key in ("id", "verdict", "version", "code")}
    whole = {**content, **texts, "condition": HOSTILE}
    stale = {**whole, "figures": hostile(content["figures"]), "version": HOSTILE}
    wrong = {**whole, "verdict": HOSTILE, HOSTILE: 1}
    for written in (whole, stale, wrong, {**whole, "figures": hostile(content["figures"])}):
        file.write_text(json.dumps(written), "utf-8")
        for words in (["lab", "show", name], *([["lab"]] if written is wrong else [])):
            result = CliRunner().invoke(app, [*words, "--out", str(tmp_path), *options])
            assert result.exit_code in (0, 2), result.output
            assert result.output
            assert not set(result.output) & set("\x1b\x07\x9b\u202e\u2066"), words
