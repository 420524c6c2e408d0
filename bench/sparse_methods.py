"""The weight and the loss that each sparse method keeps or costs, on the models of headwise.

python -m bench.sparse_methods writes bench/results/sparse_methods.json: the report of
`headwise sparse gpt` on its sample text, and the weight that the largest keys hold in each kind of
attention of the translator. About two minutes on two cores.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import headwise as hw
from bench import described
from headwise.apps.look.readers.opening import opened
from headwise.apps.look.readers.reader import SAMPLE_SENTENCE, SAMPLE_TEXT, silent
from headwise.apps.look.sparsity.survey import Survey

RESULTS = Path(__file__).parent / "results" / "sparse_methods.json"
BUDGETS = [16, 32, 64, 128]


def language() -> dict[str, Any]:
    """The report of the built-in GPT, 512 tokens of the sample text."""
    survey = Survey(opened("gpt", "cpu"), SAMPLE_TEXT, 512, silent)
    return survey.measure(BUDGETS, 16, 0.95, 0.05).as_dictionary()


def translation() -> dict[str, Any]:
    """The mean weight on each row's largest keys, and the keys of 95 %, by kind of attention."""
    loaded = hw.load("translate")
    (said,) = loaded.translate(SAMPLE_SENTENCE)
    with torch.no_grad(), hw.watch(loaded.model) as seen:
        loaded.model(loaded.encode(SAMPLE_SENTENCE), loaded.encode_target(said))
    found: dict[str, Any] = {}
    for layer in seen.layers:
        amap = layer.map()
        side = "encoder" if "encoder" in layer.name else "decoder"
        kind = "cross" if layer.kind == "cross" else side
        kept, needed = amap.kept((1, 2, 4, 8)), amap.needed(0.95)
        line = found.setdefault(kind, {"keys": amap.shape[3], "kept": [], "needed": []})
        line["kept"].append(kept.mean((0, 1, 2)).tolist())
        line["needed"].append(needed.double().mean().item())
    return {
        kind: line
        | {
            "kept": dict(
                zip((1, 2, 4, 8), torch.tensor(line["kept"]).mean(0).tolist(), strict=True)
            ),
            "needed": sum(line["needed"]) / len(line["needed"]),
        }
        for kind, line in found.items()
    }


def main() -> None:
    """Measure, print the tables, and write the results."""
    described(__doc__ or "").parse_args()
    found = {"gpt": language(), "translate": translation()}
    for method, points in found["gpt"]["methods"].items():
        line = "  ".join(f"{point['budget']:>4} {point['increase']:+.3f}" for point in points)
        print(f"{method:<16} {line}")
    for kind, line in found["translate"].items():
        kept = ", ".join(f"{k}: {x:.3f}" for k, x in line["kept"].items())
        print(f"{kind:<8} {line['keys']} keys; kept {kept}; needed {line['needed']:.1f}")
    RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
