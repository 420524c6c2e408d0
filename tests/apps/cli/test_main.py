"""The command line as a user sees it."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.cells import cell_len
from typer.testing import CliRunner

from headwise.apps.cli import doctor, main, warming
from headwise.apps.cli.main import app
from headwise.apps.look import terminal_view as terminal
from headwise.apps.look.readers.opening import opened
from headwise.apps.look.readers.reader import silent
from tests.command_line import refused, run


def test_help_names_the_commands_and_teaches_by_example() -> None:
    assert "look" in run("--help")
    assert "doctor" in run("--help")
    assert "headwise look --terminal --text 'to be or not to be'" in run("look", "--help")


@pytest.mark.parametrize("name", main.COMMANDS)
def test_the_list_of_commands_says_what_each_says_of_itself(name: str) -> None:
    helped = (main.loaded(name).help or "").split("[b]")[0].strip().split("\n\n")[0]
    assert " ".join(helped.split()) == main.COMMANDS[name].about


@pytest.mark.parametrize("words", [("--help",), ("--version",), ("watch", "--help")])
def test_a_command_loads_only_what_it_needs(words: tuple[str, ...]) -> None:
    told = f"""
import sys
from headwise.apps.cli.main import app
app({list(words)}, standalone_mode=False)
print([name for name in sys.modules if name.startswith("headwise.apps.")], file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    others = {"look", "cost", "train", "lab", "doctor"}
    assert not [name for name in others if f"headwise.apps.cli.{name}'" in done.stderr]
    assert "headwise.apps.lab" not in done.stderr


def test_version_is_the_package_s() -> None:
    assert run("--version").startswith("headwise 0.")


def test_look_shows_tokens_heads_and_maps_within_80_columns_without_colour() -> None:
    output = run("look", "--terminal")
    assert "18 tokens" in output
    assert "of 48 heads" in output
    assert "of all 48 heads\nhead 4.6 looks most at the token before" in output
    assert "██" in output
    assert "\x1b" not in output
    assert max(cell_len(line) for line in output.splitlines()) <= 80


@pytest.mark.parametrize("words", [1, 15, 16, 17, 250])
def test_look_fits_80_columns_however_long_the_text(words: int) -> None:
    output = run("look", "--terminal", "--file", "-", stdin="extraordinarily 世 " * words)
    assert max(cell_len(line) for line in output.splitlines()) <= 80


def test_no_control_character_of_a_text_reaches_the_terminal() -> None:
    output = run(
        "look", "--terminal", "--file", "-", stdin="to \x1b[2Jbe\x07 or\x9b1m not\n\u202eto"
    )
    assert "␛" in output
    assert "⏎" in output
    assert not any(sign in output for sign in "\x1b\x07\x9b\u202e")


@pytest.mark.parametrize("width", ["20", "30", "44", "60"])
def test_figures_that_do_not_fit_are_left_out_and_never_cut(
    monkeypatch: pytest.MonkeyPatch, width: str
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    output = run("look", "--terminal")
    table = output.split("heads\n")[1].split("\n\n")[0]
    assert "…" not in table
    assert "keys" in table
    assert max(cell_len(line) for line in table.splitlines()) <= int(width)


def test_look_draws_the_one_head_asked_for() -> None:
    output = run("look", "--terminal", "--head", "5.1")
    assert output.count("head 5.1") == 1
    assert "head 4.6" not in output


def test_look_lists_every_head_when_asked() -> None:
    listed = [
        line.split()[0]
        for line in run("look", "--terminal", "--all").splitlines()
        if line[:1].isdigit()
    ]
    assert all(f"{layer}.{head}" in listed for layer in range(6) for head in range(8))


def test_look_refuses_a_head_it_does_not_have_and_names_those_it_has() -> None:
    assert "no head '9.9'; heads are layer.number, 0.0 to 5.7" in refused(
        "look", "--terminal", "--head", "9.9"
    )


def test_look_refuses_a_model_it_does_not_have_and_names_those_it_has() -> None:
    said = refused("look", "--terminal", "runs/no/where")
    assert "no model 'runs/no/where'" in said
    assert "gpt and translate" in said


@pytest.mark.parametrize("text", ["", " \n "])
def test_look_refuses_a_text_without_words(text: str) -> None:
    assert "there is no word to look at" in refused("look", "--terminal", "--text", text)


def test_look_shows_which_source_token_each_translated_one_looks_at() -> None:
    output = run("look", "translate", "--terminal", "--text", "The cat is black.")
    assert "→ Le chat est noir." in output
    assert "is most decided" in output
    assert "previous" not in output  # of another text nothing is the token before


def test_without_a_text_each_model_is_shown_what_it_can_read() -> None:
    assert "Elle n'a jamais vu un gros chien noir" in run("look", "translate", "--terminal")
    (note,) = json.loads(run("look", "translate", "--json"))["notes"]
    assert note.startswith("→ Elle")


def test_look_gives_programs_the_tokens_the_figures_and_the_map() -> None:
    words = ("look", "--terminal", "--text", "to be or not to be", "--json", "--head", "4.6")
    seen = json.loads(run(*words))
    assert seen["rows"] == ["⟨start⟩", "to", " be", " or", " not", " to", " be"]
    (head,) = seen["heads"]
    weights = torch.tensor(head["map"]["weights"])
    assert weights.shape == (7, 7)
    torch.testing.assert_close(weights.sum(-1), torch.ones(7))
    previous = weights.diagonal(-1).sum() / 7  # the first row has no previous token
    assert head["statistics"]["previous_mass_mean"] == pytest.approx(float(previous), abs=1e-4)


def test_a_long_text_gives_programs_a_pooled_map_that_says_so() -> None:
    seen = json.loads(
        run("look", "--terminal", "--file", "-", "--json", "--head", "0.0", stdin="word " * 300)
    )
    assert seen["heads"][0]["map"]["pooled"] == "max"
    assert len(seen["heads"][0]["map"]["weights"]) == 256


def test_the_sample_shows_an_induction_head_at_work() -> None:
    group = opened("gpt").read(terminal.SENTENCE, silent).main
    head = group.head("5.1")
    looked = head.map[0, 0, 16]  # the last " is" looks at what followed the first one
    assert group.rows[int(looked.argmax())] == " a"


def test_doctor_reports_versions_devices_and_engines() -> None:
    output = run("doctor")
    for word in (
        "versions",
        "devices",
        "engines",
        "known problems",
        torch.__version__,
        "reference",
    ):
        assert word in output
    assert max(cell_len(line) for line in output.splitlines()) <= 80


def test_doctor_gives_programs_the_same() -> None:
    facts = json.loads(run("doctor", "--json"))
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["devices"][0]["kind"] == "cpu"
    assert facts["engines"]["reference"] is None


@pytest.mark.parametrize("option", ["--tune", "--warm"])
def test_tuning_without_a_gpu_says_what_is_missing(
    option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # lets kernels run, and is no GPU to measure
    result = CliRunner().invoke(app, ["doctor", option])
    assert result.exit_code == 1
    assert "needs an NVIDIA GPU: there is none here" in result.output + str(result.exception)


@pytest.mark.parametrize("use", [*warming.MASKS, *warming.OTHERS])
def test_calls_of_every_kind_are_made_to_warm_the_kernels(use: str) -> None:
    warming.make(f"{use} · 16 · float32", "cpu", 72)


def test_warming_compiles_every_kind_in_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (8 << 30, 8 << 30))
    monkeypatch.setattr("headwise.apps.cli.doctor.engines", lambda: {"triton": None})

    def ran(command: list[str], **_: object) -> SimpleNamespace:
        failed = command[-1].startswith("window")
        return SimpleNamespace(returncode=int(failed), stderr="x\nno room" if failed else "")

    monkeypatch.setattr(warming.subprocess, "run", ran)
    found = json.loads(run("doctor", "--warm", "--json"))
    assert sorted(x["calls"] for x in found) == sorted(warming.kinds())
    assert {x["error"] for x in found if "window" not in x["calls"]} == {None}
    assert {x["error"] for x in found if x["calls"].startswith("window")} == {"no room"}


def test_tuning_gives_programs_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    tuning = pytest.importorskip("headwise.engines.triton.tuning")
    tuned = tuning.Tuned("forward", 64, tuning.Shape(128, 64, 8, 3), usual=2.0, best=1.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr("headwise.apps.cli.doctor.engines", lambda: {"triton": None})
    monkeypatch.setattr(tuning, "tune", lambda device: iter([tuned]))
    monkeypatch.setattr(tuning, "keep", lambda device, found: Path("tuned.json"))
    found = json.loads(run("doctor", "--tune", "--json"))
    assert found["kept_in"] == "tuned.json"
    assert found["kernels"][0]["chosen"] == {"rows": 128, "keys": 64, "warps": 8, "stages": 3}


SOUND = {
    "flags": frozenset({"avx2"}),
    "environ": {},
    "versions": {"triton": "3.7.0", "numpy": "2.4.6"},
    "threads": 2,
    "cores": 2,
    "torchvision_error": None,
}


@pytest.mark.parametrize(
    ("properties", "traps"),
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
def test_doctor_knows_the_traps(properties: dict[str, object], traps: list[str]) -> None:
    found = doctor.known_traps(**{**SOUND, **properties})  # type: ignore[arg-type]
    assert [trap.name for trap in found] == traps


def test_a_failed_import_is_explained_by_its_last_line() -> None:
    assert doctor.import_error("json") is None
    assert "No module named" in str(doctor.import_error("no_such_module_anywhere"))


@pytest.mark.parametrize("name", ["cpu", "modules", "numerics", "pictures", "watch", "watch_gpu"])
def test_a_benchmark_asked_for_help_describes_itself_and_does_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    isa = os.environ.get("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", isa)  # numerics sets it, for good
    script = importlib.import_module(f"bench.{name}")
    monkeypatch.setattr("sys.argv", [name, "--help"])
    with pytest.raises(SystemExit) as left:
        script.main()
    assert left.value.code == 0
    assert script.__doc__.strip() in capsys.readouterr().out
