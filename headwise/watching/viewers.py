"""Recordings for other viewers: the folder of HeadVis and Neuronpedia, the arrays of BertViz."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.version import __version__
from headwise.watching import head_types
from headwise.watching.recorder.layer import WatchedLayer
from headwise.watching.recording import Recording

KEYS_A_ROW, LEAST = 8, 0.005
"""The viewer gets at most this many weights per row, and none smaller than this."""

INTERVALS = 5
"""Sequences are sorted into this many parts, by their largest weight."""

DISTANCES = [0, *(1 << power for power in range(13))]
TOKENS = 50
BINS = 50

METRICS = {
    "self_attention_score": "Mean weight on the token itself.",
    "prev_token_score": "Mean weight on the token before.",
    "pattern_entropy": "Mean entropy of a row's weights, in nats.",
    "qk_distance": "Mean distance between query and key, weighted.",
    "qk_distance_variance": "Variance of that distance, over sampled rows of the first sequence.",
    "induction_score": "Mean weight on what followed earlier occurrences of the same token.",
}


def headvis(
    seen: Recording,
    folder: str | Path,
    tokens: Sequence[Sequence[str]],
    model: str = "model",
    dataset: str = "watched",
) -> Path:
    """Write the last pass as the folder that HeadVis and Neuronpedia's tools read.

    `tokens` are the texts of the pass, a list of strings each. Every weight comes from the maps, so
    the model may run with any kernel, at any length.
    """
    layers = [layer for layer in seen.layers if layer.kind == "self"]
    if not layers:
        raise ValueError("HeadVis shows self-attention, and no layer of this recording is that")
    _, heads, queries, _ = layers[0].map().shape
    if any(layer.heads != heads for layer in layers):
        raise ValueError("HeadVis shows models whose layers all have the same number of heads")
    texts = [[str(token) for token in text] for text in tokens]
    if [len(text) for text in texts] != [queries] * layers[0].map().shape[0]:
        raise ValueError(
            f"tokens have lengths {[len(text) for text in texts]}; the last pass had "
            f"{layers[0].map().shape[0]} sequences of {queries}"
        )
    target = Path(folder)
    (target / "heads").mkdir(parents=True, exist_ok=True)
    (target / "attributions").mkdir(exist_ok=True)
    scatter = []
    for number, layer in enumerate(layers):
        figures, weights = layer.figures(), head_types.sampled_weights(layer)
        induction = head_types.scores(layer, seen.tokens).induction
        spread = _distance_variance(*weights)
        for head in range(heads):
            values = {
                "self_attention_score": figures["self_mass_mean"][head],
                "prev_token_score": figures["previous_mass_mean"][head],
                "pattern_entropy": figures["entropy_mean"][head],
                "qk_distance": figures["distance_mean"][head],
                "qk_distance_variance": spread[head],
                "induction_score": induction[head],
            }
            scatter.append(
                {"layer": number, "head": head} | {name: _round(x) for name, x in values.items()}
            )
            _write(target / "heads" / f"L{number}H{head}.json", _head(layer, head, texts))
    _write(target / "scatter_data.json", scatter)
    _write(target / "server_config.json", {})
    _write(target / "attributions" / "manifest.json", {})
    _write(target / "config.json", _config(len(layers), heads, len(texts), queries, model, dataset))
    return target


def attentions(seen: Recording, kind: str = "self") -> tuple[Tensor, ...]:
    """Every weight of the last pass, (B, H, N, M) per layer, as BertViz takes them.

    The same as a transformers model's output_attentions=True; ValueError if a layer has too many
    weights to hold in memory.
    """
    return tuple(layer.map().to_tensor() for layer in seen.layers if layer.kind == kind)


def _config(
    layers: int, heads: int, sequences: int, length: int, model: str, dataset: str
) -> dict[str, Any]:
    run = {
        "model_name": model,
        "np_model_id": model,
        "dataset_name": dataset,
        "n_sequences": sequences,
        "seq_len": length,
        "dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "attn_implementation": "headwise",
        "sparse_topk_per_row": KEYS_A_ROW,
        "sparse_threshold": LEAST,
        "headwise": __version__,
    }
    return {
        "model_name": model,
        "np_model_id": model,
        "dataset_name": dataset,
        "heads": [[layer, head] for layer in range(layers) for head in range(heads)],
        "n_layers": layers,
        "n_heads": heads,
        "n_intervals": INTERVALS,
        "metrics": list(METRICS),
        "metric_descriptions": METRICS,
        "head_data_pattern": "L{layer}H{head}.json",
        "has_umap": False,
        "umap_heads": [],
        "custom_plots": [
            {"key": "qk_distance_histogram", "label": "Query-key distance"},
            {"key": "histogram", "label": "Largest weights"},
        ],
        "custom_tables": [
            {"key": "top_query_tokens", "label": "Top query tokens"},
            {"key": "top_key_tokens", "label": "Top key tokens"},
        ],
        "statistics_display": {
            "n_samples": {"label": "Sequences", "format": "default"},
            "mean_max_activation": {"label": "Mean largest weight", "format": "default"},
        },
        "pipeline_config": run,
    }


class Weight(NamedTuple):
    """One weight that the viewer gets."""

    row: int
    key: int
    value: float


def _head(layer: WatchedLayer, head: int, texts: list[list[str]]) -> dict[str, Any]:
    """The sequences as one head reads them: sparse weights, and sums over them."""
    read = [_weights(layer, number, head) for number in range(len(texts))]
    # The first token has the largest weights of all, so it is left out.
    largest = [max((x.value for x in some if x.row and x.key), default=0.0) for some in read]
    counts = torch.histc(torch.tensor(largest), BINS, 0, 1).int().tolist()
    both = [(text, x) for text, some in zip(texts, read, strict=True) for x in some]
    return {
        "sequences": _sequences(texts, read, largest),
        "qk_distance_histogram": {
            "bin_edges": DISTANCES,
            "bin_values": [_round(x) for x in _by_distance(x for _, x in both)],
        },
        "top_query_tokens": _top((text[x.row], x.value) for text, x in both),
        "top_key_tokens": _top((text[x.key], x.value) for text, x in both),
        "histogram": {
            "bin_edges": [_round(i / BINS) for i in range(BINS + 1)],
            "bin_values": counts,
        },
        "statistics": {
            "n_samples": len(texts),
            "mean_max_activation": _round(sum(largest) / len(largest)),
        },
    }


def _weights(layer: WatchedLayer, number: int, head: int) -> list[Weight]:
    """The largest weights of each row of a sequence, row by row."""
    values, keys = (x[0, 0] for x in layer.map().head(number, head).top(KEYS_A_ROW))
    rows, kept = torch.arange(len(keys))[:, None].expand_as(keys), values >= LEAST
    found = zip(rows[kept].tolist(), keys[kept].tolist(), values[kept].tolist(), strict=True)
    return [Weight(*each) for each in found]


def _sequences(
    texts: list[list[str]], read: list[list[Weight]], largest: list[float]
) -> list[dict[str, Any]]:
    """Each sequence with its weights, and the interval in which its largest one stands."""
    order = sorted(range(len(texts)), key=largest.__getitem__)
    ranks = {number: rank for rank, number in enumerate(order, 1)}
    return [
        {
            "sequence_id": number,
            "tokens": text,
            "attention_indices": [x.row * len(text) + x.key for x in read[number]],
            "attention_values": [_round(x.value) for x in read[number]],
            "seq_len": len(text),
            "max_activation": _round(largest[number]),
            "interval": -(-ranks[number] * INTERVALS // len(texts)),  # 1 to INTERVALS
        }
        for number, text in enumerate(texts)
    ]


def _by_distance(weights: Iterable[Weight]) -> list[float]:
    """The sum of the weights in each interval of distances."""
    found = [0.0] * (len(DISTANCES) - 1)
    for row, key, value in weights:
        place = bisect_right(DISTANCES, abs(row - key)) - 1
        if place < len(found):
            found[place] += value
    return found


def _top(weights: Iterable[tuple[str, float]]) -> list[dict[str, Any]]:
    """The tokens that get the most weight."""
    sums: dict[str, float] = {}
    for token, value in weights:
        sums[token] = sums.get(token, 0.0) + value
    most = sorted(sums.items(), key=lambda each: each[1], reverse=True)[:TOKENS]
    return [{"token": token, "weight": _round(x)} for token, x in most]


def _distance_variance(weights: Tensor, positions: Tensor) -> Tensor:
    """Variance of |i - j| under the weights (Hq, R, M) of some rows, (Hq,)."""
    distance = (positions[:, None] - torch.arange(weights.shape[2])).abs().double()
    p = weights.double()
    return (p * distance**2).sum(-1).mean(1) - (p * distance).sum(-1).mean(1) ** 2


def _round(value: float | Tensor) -> float | None:
    number = float(value)
    return round(number, 4) if number == number else None


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")
