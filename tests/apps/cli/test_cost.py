"""`headwise cost` as a user sees it."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.cells import cell_len

import headwise as hw
from headwise.apps.cli import cost_question
from headwise.costs.machines import measure
from headwise.models import GPT
from tests import command_line
from tests.costs.machines.test_measure import SMALL

run, refused = (partial(each, "cost") for each in (command_line.run, command_line.refused))
DECODER = ["--layers", "2", "--width", "64", "--heads", "4", "--vocabulary", "100"]


def found(*words: str) -> Any:
    return json.loads(run(*words, "--json"))


def test_the_built_in_model_has_as_many_parameters_as_it_says() -> None:
    model = hw.load("gpt").model
    (figures,) = found("gpt", "--length", "1k", "--dtype", "fp32")
    assert figures["params"] == sum(each.numel() for each in model.parameters())
    assert figures["memory"] == figures["weights"] + figures["kv_cache"]


def test_a_decoder_described_by_flags_is_counted_as_its_model() -> None:
    sketch = cost_question.sketched(
        {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "vocabulary": 100}
    )
    with torch.device("meta"):
        model = GPT(sketch.config())
    (figures,) = found(*DECODER, "--kv-heads", "2")
    assert figures["params"] == sum(each.numel() for each in model.parameters())


def test_the_table_fits_80_columns_and_has_exact_numbers() -> None:
    output = run("gpt", "--device", "h100")
    assert "5,573,888" in output
    assert "on NVIDIA H100 SXM" in output
    assert "feed_forward" in output
    assert "\x1b" not in output
    assert max(cell_len(line) for line in output.splitlines()) <= 80


def test_models_stand_side_by_side() -> None:
    output = run("gpt", "translate")
    assert "gpt" in output.splitlines()[0]
    assert "translate" in output.splitlines()[0]
    assert [each["model"] for each in found("gpt", "translate")] == ["gpt", "translate"]


def test_a_config_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    fields = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 192,
    }  # fmt: skip
    path.write_text(json.dumps(fields))
    (figures,) = found(str(path), "--decode", "--length", "100")
    assert figures["kv_cache"] == 2 * 2 * 2 * 16 * 100 * 2  # 2·l·g·d·t numbers of two bytes


def test_decoding_training_and_prefill_are_different_uses() -> None:
    (prefill,), (decode,), (training,) = (
        found(*DECODER, "--length", "256", *more) for more in ([], ["--decode"], ["--training"])
    )
    assert training["flops"] == 3 * prefill["flops"]
    assert decode["flops"] < prefill["flops"] / 100
    assert decode["kv_cache"] == prefill["kv_cache"]
    assert training["memory"] == 16 * training["params"] + training["activations"]
    (less,) = found(*DECODER, "--length", "256", "--training", "--recompute")
    assert less["activations"] < training["activations"]


def test_a_sweep_has_a_row_for_each_value_and_can_be_drawn(tmp_path: Path) -> None:
    picture = tmp_path / "cost.svg"
    output = run(*DECODER, "--sweep", "length=1k..4k", "--plot", str(picture), "--device", "a100")
    for length in ("1,024", "2,048", "4,096"):
        assert length in output
    drawn = picture.read_text()
    assert drawn.lstrip().startswith("<?xml")
    assert "KV cache" in drawn
    assert "seconds" in drawn


def test_a_sweep_of_two_models_is_drawn_as_a_png(tmp_path: Path) -> None:
    picture = tmp_path / "cost.png"
    run("gpt", "translate", "--sweep", "batch=1,2", "--plot", str(picture), "--length", "64")
    assert picture.stat().st_size > 5000


def test_heads_of_a_described_decoder_are_swept_at_the_same_parameters() -> None:
    ((_, rows),) = found(*DECODER, "--sweep", "heads=1..4").items()
    assert [row["heads"] for row in rows] == [1, 2, 4]
    assert len({row["params"] for row in rows}) == 1
    assert rows[2]["special"] > rows[0]["special"]


def test_the_longest_context_fits_and_one_more_token_does_not() -> None:
    (fit,) = found(*DECODER, "--fit", "3MB", "--batch", "2")
    tokens = fit["tokens"]
    (most,), (more,) = (
        found(*DECODER, "--decode", "--batch", "2", "--length", str(length))
        for length in (tokens, tokens + 1)
    )
    assert most["memory"] <= 3_000_000 < more["memory"]
    assert f"{tokens:,} tokens fit into 3.00 MB" in " ".join(
        run(*DECODER, "--fit", "3MB", "--batch", "2").split()
    )


def test_a_model_is_not_asked_for_more_tokens_than_it_takes(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gpt2", "n_positions": 512}))
    (figures,), (fit,) = found(str(path)), found(str(path), "--fit", "80GB")
    assert figures["tokens"] == 512
    assert (fit["tokens"], fit["limit"]) == (512, "positions")
    assert "1024" in refused(str(path), "--length", "1k")


def test_a_fit_has_no_more_tokens_than_the_configuration_has_positions(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    small = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    path.write_text(json.dumps({"model_type": "llama", **small, "max_position_embeddings": 512}))
    (fit,) = found(str(path), "--fit", "1GB")
    assert (fit["tokens"], fit["limit"]) == (512, "stated")
    assert fit["fits"] > 512
    said = " ".join(run(str(path), "--fit", "1GB").split())
    assert "512 tokens fit into 1.00 GB" in said
    assert f"states no more positions, and memory has room for {fit['fits']:,}" in said
    assert "配置没有更多的位置" in run(str(path), "--fit", "1GB", "--zh")


def test_figures_say_what_they_leave_out(tmp_path: Path) -> None:
    """Of a model that also reads images, a prompt of text runs a part."""
    path = tmp_path / "config.json"
    text = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 100,
            "num_attention_heads": 4, "intermediate_size": 96}  # fmt: skip
    vision = {"model_type": "clip_vision_model", "num_hidden_layers": 2, "hidden_size": 64,
              "num_attention_heads": 4, "intermediate_size": 96}  # fmt: skip
    path.write_text(
        json.dumps({"model_type": "llava", "text_config": text, "vision_config": vision})
    )
    (figures,) = found(str(path), "--length", "64")
    assert "model.vision_tower" in figures["left_out"][0]
    assert "not counted in FLOPs, bytes moved and times: model.vision_tower" in " ".join(
        run(str(path), "--length", "64").split()
    )
    assert "没有计入" in run(str(path), "--length", "64", "--zh")
    (rows,) = found(str(path), "--sweep", "length=64,128").values()
    assert all(row["left_out"] == figures["left_out"] for row in rows)


def test_the_cache_of_a_token_is_a_line_of_its_own() -> None:
    (figures,) = found(*DECODER, "--decode", "--length", "100")
    assert figures["kv_cache_per_token"] * 100 == figures["kv_cache"]
    assert "KV cache per token" in run(*DECODER)
    assert "每词元 KV 缓存" in run(*DECODER, "--zh")


def test_absurd_numbers_are_refused_at_once() -> None:
    flags = ["--layers", "2", "--width", "64", "--heads", "4"]
    assert "--layers" in refused("--layers", "999999999999", *flags[2:])
    for name in ("--hidden", "--vocabulary", "--head-dim", "--batch"):
        assert "Error" in refused(*flags, name, "9" * 30)


def test_a_mesh_gives_the_cost_of_one_rank() -> None:
    (whole,), (rank,) = (found(*DECODER, *more) for more in ([], ["--mesh", "tp=2"]))
    assert rank["kv_cache"] == whole["kv_cache"] / 2


def test_a_measured_machine_is_the_device_this(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWISE_CACHE", str(tmp_path))
    monkeypatch.setattr(measure, "CPU", replace(SMALL, widths=(16,)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "not measured; run headwise cost --measure" in refused(*DECODER, "--device", "this")
    output = run("--measure")
    assert "memory bandwidth" in output
    (figures,) = found(*DECODER, "--device", "this", "--dtype", "fp32")
    assert figures["seconds"] > 0


def test_the_list_of_devices_names_their_sources() -> None:
    output = run("--devices")
    assert "NVIDIA H200 Tensor Core GPU, datasheet" in output
    assert {each["id"] for each in found("--devices")} >= {"h100", "mi300x", "cpu"}


def test_help_teaches_by_example() -> None:
    said = " ".join(run("--help").split())
    assert "--fit 80GB" in said
    assert "two per multiply-add" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "name a model or a config.json, or describe a decoder"),
        (["--layers", "2"], "also needs --width and --heads"),
        (["gpt", "--layers", "2"], "gpt is described already; leave out --layers"),
        ([*DECODER, "--length", "many"], "--length 'many' is not a size"),
        ([*DECODER, "--sweep", "depth=1..4"], "not an axis with values; try length=1k..128k"),
        ([*DECODER, "--sweep", "length=4k..1k"], "needs 2 to 64 rising values"),
        (["gpt", "--sweep", "heads=1,2"], "described by flags, and gpt is a model"),
        ([*DECODER, "--plot", "x.svg"], "--plot draws a sweep"),
        ([*DECODER, "--mesh", "tp"], "is not a mesh; try tp=4,cp=2"),
        ([*DECODER, "--decode", "--training"], "two uses; give one of them"),
        ([*DECODER, "--fit", "1kB"], "not even one token fits"),
        ([*DECODER, "--device", "z80"], "there is no device 'z80'"),
        ([*DECODER[:4], "--heads", "3"], "not divisible by 3 heads"),
        ([*DECODER, "--length", "99999999k"], "is too long; at most 16,777,216 tokens"),
        ([*DECODER, "--sweep", "batch=1,2", "--plot", "x.gif"], "x.gif is not a picture"),
        ([*DECODER, "--recompute"], "--recompute is about training; add --training"),
        ([*DECODER, "--training", "--cache", "int8"], "training keeps no KV cache"),
        ([*DECODER, "--fit", "1GB", "--length", "1k"], "--fit finds the length"),
        ([*DECODER, "--fit", "1GB", "--device", "h100"], "--fit is about memory, not time"),
        ([*DECODER, "--sweep", "length=1,2", "--length", "1k"], "--sweep gives the lengths"),
        ([*DECODER, "--fit", "1GB", "--explain"], "--fit and --explain are two questions"),
    ],
)
def test_a_wrong_question_is_refused_with_what_works(words: list[str], said: str) -> None:
    assert said in refused(*words)


def chinese(text: str) -> bool:
    return any("\u4e00" <= letter <= "\u9fff" for letter in text)


def test_everything_that_is_printed_has_its_chinese() -> None:
    """No line of words stays English, apart from names of devices and documents."""
    decoder = [*DECODER, "--kv-heads", "2", "--window", "9"]
    more = ["--decode", "--cache", "int8", "--device", "h100", "--mesh", "tp=2"]
    for words in (decoder, [*decoder, *more], [*decoder, "--training", "--recompute"]):
        for line in run(*words, "--zh").splitlines():
            assert chinese(line) or not line.strip(), line
    assert "放得下" in run(*decoder, "--fit", "1GB", "--zh")
    swept = run(*decoder, "--sweep", "heads=2,4", "--zh")
    assert "头数" in swept
    assert "exactly" not in swept
    assert "参数量" in run("gpt", "translate", "--zh")
    assert run("--devices", "--zh").count("出处：") == run("--devices").count("Source:")


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--layers", "2"],
        [*DECODER, "--length", "many"],
        [*DECODER, "--sweep", "depth=1..4"],
        [*DECODER, "--mesh", "tp=3"],
        [*DECODER, "--dtype", "fp7"],
        [*DECODER, "--cache", "fp7"],
        [*DECODER, "--fit", "1kB"],
        [*DECODER, "--device", "z80"],
    ],
)
def test_a_wrong_question_is_refused_in_chinese(words: list[str]) -> None:
    box = refused(*words, "--zh").split("Invalid value:")[1]
    assert chinese(box)
