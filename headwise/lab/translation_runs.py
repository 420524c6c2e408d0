"""Translators that differ in their attention alone: same data, same budget, every curve kept.

Each run is one piece of `Lab.keep`, so claims share the runs, and an interrupted one resumes from
its last checkpoint.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from headwise.lab.laboratory import Lab
from headwise.models import Transformer, TransformerConfig
from headwise.nn import (
    Additive,
    Cosine,
    MultiHeadAttention,
    PreNorm,
    ReLU,
    Shared,
    Unprojected,
)
from headwise.score import Dot
from headwise.training.data.pairs import Pair, Split
from headwise.training.meter import DivergedError
from headwise.training.recipe import Recipe
from headwise.training.run_folder import Run
from headwise.training.setups import TranslateSetup
from headwise.training.tasks.translation import Sentences, Translation, by_sentence
from headwise.training.trainer import Trainer, undisturbed
from headwise.watching.watch import watch

VARIANTS: dict[str, Mapping[str, Any]] = {
    "base": {},
    **{f"heads-{heads}": {"heads": heads} for heads in (1, 2, 4, 8, 16, 32)},
    "unscaled": {"score": Dot(1.0)},
    "unscaled-heads-1": {"heads": 1, "score": Dot(1.0)},
    "shared": {"projections": Shared()},
    "unprojected": {"projections": Unprojected()},
    "additive": {"score": Additive()},
    "cosine": {"score": Cosine()},
}
"""The changes of each variant to the base model, which has four heads."""


def setup(lab: Lab, variant: str, seed: int, data: str) -> TranslateSetup:
    """The settings of one run."""
    width = lab.pick(tiny=32, quick=64, full=256)
    layers = lab.pick(tiny=1, quick=2, full=3)
    config = TransformerConfig(
        vocabulary=lab.pick(tiny=300, quick=1000, full=4000),
        d_model=width,
        encoder_layers=layers,
        decoder_layers=layers,
        heads=lab.pick(tiny=4, quick=4, full=8),
        feed_forward=ReLU(2 * width),
        arrangement=PreNorm(),
        dropout=lab.pick(tiny=0.0, quick=0.0, full=0.1),
    )
    steps = lab.pick(tiny=2, quick=400, full=4000)
    return TranslateSetup(
        data=data,
        vocabulary=config.vocabulary,
        model=replace(config, **VARIANTS[variant]),
        recipe=Recipe(
            steps=steps,
            learning_rate=lab.pick(tiny=1e-3, quick=5e-3, full=1.5e-3),
            warmup=steps // 8,
            label_smoothing=0.1,
            seed=seed,
            evaluate_every=max(1, steps // 8),
            checkpoint_every=max(1, steps // 8),
        ),
        tokens=lab.pick(tiny=256, quick=1024, full=8192),
        longest=lab.pick(tiny=64, quick=20, full=48),
        pairs=lab.pick(tiny=200, quick=20_000, full=178_009),
    )


def translated(lab: Lab, variant: str, seed: int) -> dict[str, Any]:
    """The figures of one run: BLEU, losses, the curve, and the loss without each head."""
    return lab.keep(f"translate-{variant}-{seed}", train, variant=variant, seed=seed)


def train(lab: Lab, folder: Path | None, variant: str, seed: int) -> dict[str, Any]:
    """Train a translator and measure it on held-out sentences."""
    if folder is None:
        with tempfile.TemporaryDirectory() as name:
            return train(lab, Path(name), variant, seed)
    data = "tatoeba-en-fr" if lab.form != "tiny" else str(numbers(folder / "numbers.tsv"))
    chosen = setup(lab, variant, seed, data)
    task: Any = chosen.prepare(Run(folder))
    task.split = replace(task.split, test=few(task.split, lab.pick(tiny=4, quick=300, full=2000)))

    def report(measured: dict[str, Any]) -> None:
        if "gradient_norm" in measured:
            lab.report(f"{variant}, seed {seed}, step", measured["step"], measured["steps"])

    settings = {"variant": variant, "form": lab.form}
    trainer: Trainer[Any] = Trainer(task, chosen.recipe, Run(folder), settings, lab.device, report)
    try:
        model = trainer.train()
    except DivergedError:
        return {"variant": variant, "seed": seed, "diverged": True}
    assert isinstance(model, Transformer)
    lines = list(Run(folder).measured())  # all of them: this run may have been resumed
    (test,) = [line["test"] for line in lines if "test" in line][-1:]
    return {
        "variant": variant,
        "seed": seed,
        "diverged": False,
        "bleu": test["bleu"],
        "signature": test.get("bleu_signature"),
        "test_loss": test["loss"],
        "train_loss": train_loss(lab, task, model),
        "curve": [[x["step"], x["valid_loss"]] for x in lines if "valid_loss" in x],
        "gradient_norms": [x["gradient_norm"] for x in lines if "gradient_norm" in x],
        "without_head": without_each_head(lab, task, model),
        "effective_keys": effective_keys(lab, task, model),
    }


def few(split: Split, count: int) -> list[Pair]:
    """About `count` test sentences with all their translations, no longer than those trained on."""
    longest = max(len(english) for english, _ in split.train)
    sentences = [x for x in by_sentence(split.test) if len(x) <= longest]
    kept = set(sentences[:: max(1, len(sentences) // count)])
    return [pair for pair in split.test if pair[0] in kept]


def train_loss(lab: Lab, task: Translation, model: Transformer) -> float:
    """The loss per token on sentences that were trained on, as many as there are for testing."""
    pairs = task.split.train[: len(task.split.test)]
    sentences = Sentences(pairs, task.tokeniser, task.longest)
    return float(
        undisturbed(lambda: task.mean_loss(model, sentences, lab.device), model, lab.device)
    )


def without_each_head(lab: Lab, task: Translation, model: Transformer) -> list[dict[str, Any]]:
    """The test loss with one head switched off, for every head of every layer."""
    sentences = Sentences(task.split.test, task.tokeniser, task.longest)
    found = []
    for name, module in model.named_modules():
        if isinstance(module, MultiHeadAttention):
            for head in range(module.heads):
                with module.drop_heads(head):
                    loss = undisturbed(
                        lambda: task.mean_loss(model, sentences, lab.device), model, lab.device
                    )
                found.append({"layer": name, "head": head, "loss": float(loss)})
    return found


def effective_keys(lab: Lab, task: Translation, model: Transformer) -> float:
    """exp(entropy) of the rows of the encoder's heads on test sentences, on average."""
    sentences = Sentences(task.split.test, task.tokeniser, task.longest)
    batch = sentences.batch(list(range(min(64, len(sentences.lengths)))), lab.device)

    def encode() -> list[float]:
        with watch(model, stats=("effective_keys",)) as seen:
            model.encode(batch.source, batch.lengths)
        return [float(row["effective_keys_mean"]) for row in seen.heads()]

    found = undisturbed(encode, model, lab.device)
    return sum(found) / len(found)


def numbers(path: Path) -> Path:
    """A toy corpus for tests: the numbers to 999, digit by digit, in English and French."""
    english = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    french = ["zéro", "un", "deux", "trois", "quatre", "cinq", "six", "sept", "huit", "neuf"]
    lines = []
    for number in range(1000):
        digits = [int(digit) for digit in str(number)]
        words = (" ".join(names[digit] for digit in digits) for names in (english, french))
        lines.append("\t".join(words))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
