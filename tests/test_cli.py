"""What someone at a terminal gets."""

import json

import pytest
import torch
from rich.cells import cell_len
from typer.testing import CliRunner

from headwise import doctor
from headwise.cli import app
from headwise.look import handmade


def run(*words: str, stdin: str = "") -> str:
    """The output of `headwise …`, which must succeed."""
    result = CliRunner().invoke(app, list(words), input=stdin, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def refused(*words: str) -> str:
    """What `headwise …` says when it refuses."""
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 2
    return " ".join(result.output.replace("│", " ").split())


def test_help_names_the_commands_and_teaches_by_example() -> None:
    assert "look" in run("--help")
    assert "doctor" in run("--help")
    assert "headwise look 'to be or not to be'" in run("look", "--help")


def test_version_is_the_package_s() -> None:
    assert run("--version").startswith("headwise 0.")


def test_look_shows_tokens_heads_and_maps_within_80_columns_without_colour() -> None:
    output = run("look")
    assert all(head.name in output for head in handmade.HEADS)
    assert "██" in output
    assert "\x1b" not in output
    assert max(cell_len(line) for line in output.splitlines()) <= 80


@pytest.mark.parametrize("tokens", [1, 2, 31, 32, 33, 500])
def test_look_fits_80_columns_however_long_the_text(tokens: int) -> None:
    output = run("look", "-", stdin="extraordinarily 世 " * (tokens // 2) + "word " * (tokens % 2))
    assert f"{tokens} tokens" in output
    assert max(cell_len(line) for line in output.splitlines()) <= 80


def test_look_draws_the_one_head_asked_for_by_number_or_name() -> None:
    assert run("look", "--head", "1") == run("look", "--head", "same")
    assert handmade.HEADS[0].asks not in run("look", "--head", "1")


def test_look_refuses_a_head_it_does_not_have_and_names_those_it_has() -> None:
    assert "there is no head '7'; the heads are 0 (previous token)" in refused(
        "look", "--head", "7"
    )


@pytest.mark.parametrize("text", ["", " \n ", "\x1b\x07"])
def test_look_refuses_a_text_without_words(text: str) -> None:
    assert "there is no word to look at" in refused("look", text)


def test_look_gives_programs_the_tokens_the_figures_and_the_map() -> None:
    seen = json.loads(run("look", "to be or not to be", "--json", "--head", "0"))
    assert seen["tokens"] == ["to", "be", "or", "not", "to", "be"]
    (head,) = seen["heads"]
    assert head["name"] == "previous token"
    assert head["made_by_hand"] is True
    weights = torch.tensor(head["map"]["weights"])
    assert weights.shape == (6, 6)
    torch.testing.assert_close(weights.sum(-1), torch.ones(6))
    previous = weights.diagonal(-1).sum() / 6  # the first row has no previous token
    assert head["statistics"]["previous_mass_mean"] == pytest.approx(float(previous), abs=1e-4)


def test_a_long_text_gives_programs_a_pooled_map_that_says_so() -> None:
    seen = json.loads(run("look", "-", "--json", "--head", "0", stdin="word " * 300))
    assert seen["heads"][0]["map"]["size"] == 256
    assert seen["heads"][0]["map"]["pooled"] == "max"
    assert len(seen["heads"][0]["map"]["weights"]) == 256


def test_each_hand_made_head_does_what_its_name_says() -> None:
    sight = handmade.look_at("one two three one two three one two three")
    figures = sight.seen.heads()
    previous, same, first, near = range(4)
    assert figures["previous_mass_mean"][previous] > 0.8
    assert figures["sink_mass_mean"][first] > 0.9
    assert figures["effective_keys_mean"].argmax() == near
    assert figures["distance_mean"][same] > figures["distance_mean"][near]
    assert sight.tokens[int(sight.maps[0, 1, 8, :].argmax())] == "three"
    assert int(sight.maps[0, 1, 8, :].argmax()) != 8


def test_doctor_reports_versions_devices_and_engines() -> None:
    output = run("doctor")
    for word in ("versions", "devices", "engines", "known traps", torch.__version__, "reference"):
        assert word in output
    assert max(cell_len(line) for line in output.splitlines()) <= 80


def test_doctor_gives_programs_the_same() -> None:
    facts = json.loads(run("doctor", "--json"))
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["devices"][0]["kind"] == "cpu"
    assert facts["engines"]["reference"] is None


SOUND = {
    "flags": frozenset({"avx2"}),
    "environ": {},
    "versions": {"triton": "3.7.0", "numpy": "2.4.6"},
    "threads": 2,
    "cores": 2,
    "torchvision_error": None,
}


@pytest.mark.parametrize(
    ("machine", "traps"),
    [
        ({}, []),
        ({"flags": frozenset({"amx_bf16"})}, ["amx"]),
        ({"flags": frozenset({"amx_bf16"}), "environ": {"ONEDNN_MAX_CPU_ISA": "AVX2"}}, []),
        ({"torchvision_error": "operator torchvision::nms does not exist"}, ["torchvision"]),
        ({"versions": {"triton": "3.6.0", "numpy": "2.4.0"}}, ["triton-numpy"]),
        ({"versions": {"triton": "3.6.0", "numpy": "2.3.5"}}, []),
        ({"versions": {"triton": None, "numpy": None}}, []),
        ({"threads": 1}, ["one-thread"]),
        ({"threads": 1, "cores": 1}, []),
    ],
)
def test_doctor_knows_the_traps(machine: dict[str, object], traps: list[str]) -> None:
    found = doctor.known_traps(**{**SOUND, **machine})  # type: ignore[arg-type]
    assert [trap.name for trap in found] == traps


def test_an_import_that_fails_is_told_by_its_last_line() -> None:
    assert doctor.import_error("json") is None
    assert "No module named" in str(doctor.import_error("no_such_module_anywhere"))
