"""Predicted against real effects of edges: how well does one backward pass rank them?

    python -m bench.edges [--edges 120]

Every drawn edge of a model is hidden, one at a time, and the change of the logit difference to the
runner-up is compared with its effect to first order, its weight, gradient × weight and attention
rollout. Then edges are hidden together, in the order of each. CPU, a few minutes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import headwise as hw
from bench import described
from headwise.apps.lab.experiments.edge_effects import MEASURES, SHARES, Subject, compared
from headwise.devices import cpu_name
from headwise.watching import log_probability

RESULTS = Path(__file__).parent / "results" / "edges.json"
TEXTS = (
    "Anarchism is a political philosophy. Many anarchists say that anarchism is a political",
    "The Northern Crown is a small constellation in the northern sky. Its brightest star was named "
    "by the Greeks. The Northern",
    "The capital of France is",
    "one two three four one two three four one two three",
    "The President of the United States of America lives in the United States of",
)
PAIRS = (
    ("Two men are playing in the snow.", "Zwei Männer spielen im"),
    ("A woman in a red dress is reading a book.", "Eine Frau in einem roten Kleid liest ein"),
)


def main() -> None:
    """Print the table and write it to bench/results."""
    parser = described(__doc__ or "")
    parser.add_argument("--edges", type=int, default=120, help="drawn from each input")
    count = parser.parse_args().edges
    found = [compared(subject, count) for subject in subjects()]
    sure = compared(gpt_subjects()[-1], count, scalar=log_probability)
    show(found, sure)
    content = {"machine": f"{cpu_name()}, one thread", "shares": SHARES, "subjects": found}
    RESULTS.write_text(json.dumps(content | {"log-probability": sure}, indent=1) + "\n")


def subjects() -> list[Subject]:
    """The models and their inputs."""
    return [*gpt_subjects(), *translator_subjects(), fresh_gpt(), fresh_vit()]


def gpt_subjects() -> list[Subject]:
    """The built-in GPT and what it reads; the last text makes it the surest."""
    gpt = hw.load("gpt")
    inputs = [gpt.encode(text) for text in TEXTS]
    model = gpt.model
    return [Subject("GPT", model, lambda ids=ids: model(ids)[0, -1]) for ids in inputs]


def translator_subjects() -> list[Subject]:
    """The built-in translator, about to say its next word."""
    translator = hw.load("translate")
    model = translator.model
    pairs = [(translator.encode(a), translator.encode_target(b)[:, :-1]) for a, b in PAIRS]
    return [Subject("translator", model, lambda pair=pair: model(*pair)[0, -1]) for pair in pairs]


def fresh_gpt() -> Subject:
    """A GPT that has learned nothing."""
    torch.manual_seed(0)
    gpt = hw.load("gpt")
    model, ids = hw.models.GPT(gpt.model.config).eval(), gpt.encode(TEXTS[0])
    return Subject("GPT, untrained", model, lambda: model(ids)[0, -1])


def fresh_vit() -> Subject:
    """A ViT that has learned nothing, before a picture of noise."""
    torch.manual_seed(0)
    model = hw.models.ViT(
        hw.models.ViTConfig(image=32, patch=8, d_model=64, layers=4, heads=4)
    ).eval()
    image = torch.randn(1, 3, 32, 32)
    return Subject("ViT, untrained", model, lambda: model(image)[0])


def show(found: list[dict[str, Any]], sure: dict[str, Any]) -> None:
    """Print what was found."""
    print("correlation of ranks with the real change, by magnitude; overlap of the largest tenth")
    print(f"{'':16} {'sure':>5}  " + "  ".join(f"{name:>17}" for name in MEASURES) + "  Pearson")
    for each in found:
        cells = [
            f"{each['spearman'][name]:9.3f} ({each['overlap'][name]:4.0%})"
            if name in each["spearman"]
            else f"{'–':>17}"
            for name in MEASURES
        ]
        line = "  ".join(f"{cell:>17}" for cell in cells)
        print(f"{each['subject']:16} {each['probability']:5.0%}  {line}  {each['pearson']:7.3f}")
    print("\nlogit difference left after hiding " + ", ".join(f"{x:.1%}" for x in SHARES))
    for each in found:
        for name, left in each["hidden"].items():
            numbers = "  ".join(f"{x:7.2f}" for x in left)
            print(f"{each['subject']:16} by {name:8} {numbers}")
    print("\nreal change over predicted one (least squares), light and heavy edges")
    for each in [*found, sure | {"subject": "GPT, log p instead"}]:
        parts = [f"{name} {x['slope']:6.2f}" for name, x in each["by_weight"].items() if x["edges"]]
        print(f"{each['subject']:18} {each['probability']:5.0%}  " + "  ".join(parts))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
