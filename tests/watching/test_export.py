"""Folders and arrays for other people's viewers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import headwise as hw
from headwise.models import GPT, GPTConfig, Transformer, TransformerConfig
from headwise.watching import viewers as export
from headwise.watching.head_types import sampled_weights

CONFIG = GPTConfig(vocabulary=9, context=64, d_model=16, layers=2, heads=2)


@pytest.fixture
def seen() -> hw.Watch:
    torch.manual_seed(0)
    model = GPT(CONFIG).eval()
    with hw.watch(model) as seen:
        model(torch.randint(0, 9, (3, 40)))
    return seen


def test_headvis_finds_its_files_and_every_weight_is_the_maps(
    seen: hw.Watch, tmp_path: Path
) -> None:
    texts = [[f"t{token}" for token in row] for row in seen.tokens.tolist()]
    folder = export.headvis(seen, tmp_path / "tree", texts, model="tiny")
    config = json.loads((folder / "config.json").read_text())
    assert config["heads"] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    needed = {"model_name", "dataset_name", "n_sequences", "seq_len", "dtype"}
    assert needed <= set(config["pipeline_config"])
    scatter = json.loads((folder / "scatter_data.json").read_text())
    table = seen.heads()
    entropies = [row["pattern_entropy"] for row in scatter]
    assert entropies == pytest.approx(table["entropy_mean"], abs=1e-4)
    assert all(isinstance(row["induction_score"], float) for row in scatter)
    weights, positions = sampled_weights(seen.layers[0])
    far = (positions[:, None] - torch.arange(40)).abs().double()
    share = weights[1].double() / len(positions)  # of all rows together
    mean = float((share * far).sum())
    spread = sum((share * (far - mean) ** 2).flatten().tolist())
    assert scatter[1]["qk_distance_variance"] == pytest.approx(spread, rel=1e-3)
    head = json.loads((folder / "heads" / "L1H0.json").read_text())
    far: list[float] = [0.0] * len(head["qk_distance_histogram"]["bin_values"])
    tokens: list[dict[str, float]] = [{}, {}]
    for sequence in head["sequences"]:
        weights = seen.map(1, 0, batch=sequence["sequence_id"])[0, 0]
        pairs = zip(sequence["attention_indices"], sequence["attention_values"], strict=True)
        for flat, value in pairs:
            assert value == pytest.approx(float(weights[flat // 40, flat % 40]), abs=1e-4)
            row, key = divmod(flat, 40)
            far[(row - key).bit_length()] += value
            for sums, place in zip(tokens, (row, key), strict=True):
                token = sequence["tokens"][place]
                sums[token] = sums.get(token, 0.0) + value
        assert 1 <= sequence["interval"] <= config["n_intervals"]
    assert {sequence["interval"] for sequence in head["sequences"]} >= {config["n_intervals"]}
    assert sum(head["histogram"]["bin_values"]) == 3
    assert head["qk_distance_histogram"]["bin_values"] == pytest.approx(far, abs=0.05)
    for sums, name in zip(tokens, ("top_query_tokens", "top_key_tokens"), strict=True):
        found = [each["weight"] for each in head[name]]
        assert {each["token"]: each["weight"] for each in head[name]} == pytest.approx(
            sums, abs=0.05
        )
        assert found == sorted(found, reverse=True)


def test_what_headvis_can_not_show_is_refused(seen: hw.Watch, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the last pass had 3 sequences of 40"):
        export.headvis(seen, tmp_path, [["a"]])


def test_arrays_are_what_output_attentions_gives(seen: hw.Watch) -> None:
    arrays = export.attentions(seen)
    assert [x.shape for x in arrays] == [(3, 2, 40, 40)] * 2
    torch.testing.assert_close(arrays[0].sum(-1), torch.ones(3, 2, 40))


def test_arrays_of_cross_attention_are_asked_for_by_kind() -> None:
    config = TransformerConfig(30, d_model=16, encoder_layers=1, decoder_layers=1, heads=2)
    model = Transformer(config).eval()
    with hw.watch(model) as seen:
        model(torch.randint(3, 30, (1, 7)), torch.randint(3, 30, (1, 5)))
    (cross,) = export.attentions(seen, kind="cross")
    assert cross.shape == (1, 2, 5, 7)
