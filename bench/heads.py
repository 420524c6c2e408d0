"""Measurements of the heads of the built-in models, for the tables of their cards.

    python -m bench.heads gpt
    python -m bench.heads translate

GPT: on the first 4096 tokens of its shipped sample (enwik8, test part), and, for induction, on 64
random tokens repeated once: the weight of a row on the token after the same token's first
occurrence. Translator: on the shipped sentences and their translations, teacher-forced.
"""

import argparse
import json
from typing import Any

import torch
from torch import Tensor

import headwise as hw
from headwise.models.trained import ASSETS, LanguageModel, Translator
from headwise.watching import watch

STATISTICS = ("entropy", "max_logit", "sink_mass", "previous_mass", "self_mass", "distance")
REPEATED = 64


def sample(name: str) -> Any:
    return json.loads((ASSETS / name / "sample.json").read_text(encoding="utf-8"))


def means(seen: Any) -> dict[str, Tensor]:
    """The mean of each statistic over the rows of each head, (H,)."""
    return {
        name: getattr(seen, name).float().mean((0, 2)) for name in STATISTICS if name in seen.values
    }


@torch.no_grad()
def gpt(loaded: LanguageModel, tokens: int = 4096) -> list[dict[str, Any]]:
    text = loaded.encode(sample("gpt")["text"])[:, :tokens]
    with watch(loaded.model) as natural:
        loaded.model(text)
    half = torch.randint(
        loaded.tokeniser.pad, (1, REPEATED), generator=torch.Generator().manual_seed(0)
    )
    with watch(loaded.model) as repeated:
        loaded.model(torch.cat((half, half), 1))
    rows = []
    for layer, seen in enumerate(natural.layers):
        figures = means(seen.observation)
        weights = repeated.layer(seen.name).map()[
            0, :, REPEATED:, :REPEATED
        ]  # (H, 64, 64): 2nd half on 1st
        induction = weights.diagonal(1, -2, -1).mean(-1)  # token i + 1 of the first half
        for head in range(len(induction)):
            row = {"layer": layer, "head": head}
            row |= {name: round(float(values[head]), 3) for name, values in figures.items()}
            rows.append({**row, "induction": round(float(induction[head]), 3)})
    return rows


@torch.no_grad()
def translate(loaded: Translator) -> list[dict[str, Any]]:
    totals: dict[str, list[dict[str, Tensor]]] = {}
    for source, references in sample("translate")["pairs"]:
        with watch(loaded.model) as watched:
            loaded.model(loaded.encode(source), loaded.encode_target(references[0]))
        for layer in watched.layers:
            figures = means(layer.observation)
            weights = layer.map()[0]  # (H, N, M)
            places = torch.arange(weights.shape[-1], dtype=torch.float32)
            figures["end_mass"] = weights[..., -1].mean(-1)
            figures["next_mass"] = weights.diagonal(1, -2, -1).sum(-1) / weights.shape[-2]
            figures["slope"] = slope((weights * places).sum(-1))
            totals.setdefault(layer.name, []).append(figures)
    rows = []
    for name, several in totals.items():
        for head in range(loaded.model.config.heads):
            row: dict[str, Any] = {"attention": name, "head": head}
            for statistic in several[0]:
                mean = torch.stack([each[statistic][head] for each in several]).mean()
                row[statistic] = round(float(mean), 3)
            rows.append(row)
    return rows


def slope(looked: Tensor) -> Tensor:
    """The slope of the mean attended position (H, N) per row; near 0 for a head that stays."""
    steps = torch.arange(looked.shape[-1], dtype=torch.float32)
    steps = steps - steps.mean()
    return (looked * steps).sum(-1) / steps.square().sum().clamp_min(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=["gpt", "translate"])
    chosen = parser.parse_args().model
    loaded = hw.load(chosen)
    rows = gpt(loaded) if isinstance(loaded, LanguageModel) else translate(loaded)
    print("\t".join(rows[0]))
    for row in rows:
        print("\t".join(map(str, row.values())))


if __name__ == "__main__":
    main()
