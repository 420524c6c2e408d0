"""Translators that differ in their attention alone: same data, same budget, every curve kept.

Each run is one piece of `Lab.keep`, so claims share the runs, and an interrupted one resumes.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise import Dot, watch
from headwise.apps.lab.counting import parameters
from headwise.apps.lab.laboratory import Lab
from headwise.apps.lab.learner import Learner
from headwise.apps.lab.padded_batches import FullBatches, Padded, padded
from headwise.apps.lab.translation_rivals import (
    FixedTranslator,
    WindowTranslator,
    recurrent,
    recurrent_attending,
)
from headwise.apps.train.data.pairs import Pair, Split, read, split
from headwise.apps.train.meter import DivergedError
from headwise.apps.train.recipe import Recipe
from headwise.apps.train.tasks.metrics import bleu
from headwise.apps.train.tasks.translation import by_sentence
from headwise.models import Greedy, Transformer, TransformerConfig
from headwise.models.trained import Tokeniser, translate
from headwise.nn import (
    Additive,
    Cosine,
    MultiHeadAttention,
    PreNorm,
    ReLU,
    Shared,
    Unprojected,
)

VARIANTS: dict[str, Mapping[str, Any]] = {
    "base": {},
    **{f"heads-{heads}": {"heads": heads} for heads in (1, 2, 4, 8, 16, 32)},
    "unscaled": {"score": Dot(1.0)},
    **{f"unscaled-heads-{heads}": {"heads": heads, "score": Dot(1.0)} for heads in (1, 2, 4)},
    "shared": {"projections": Shared()},
    "unprojected": {"projections": Unprojected()},
    "additive": {"score": Additive()},
    "cosine": {"score": Cosine()},
}
"""The changes of each variant to the base model."""

NARROWER = {"keys-half": 2, "keys-quarter": 4}
"""Variants whose queries and keys are so many times as narrow, with values as wide as before."""

RIVALS: Mapping[str, Callable[[TransformerConfig], nn.Module]] = {
    "fixed": FixedTranslator,
    "convolution": WindowTranslator,
    "lstm": recurrent,
    "lstm-attention": recurrent_attending,
}
"""Other models of the base model's width."""

SAVED = 60.0
"""Seconds of training between two states that a killed run could resume from."""

Training = Generator[int, None, dict[str, Any]]
"""A training that yields after every step, and returns its figures; closed early, it is saved."""


@dataclass(frozen=True)
class TranslationData:
    """Sentences as all translators of a form get them, on a device."""

    tokeniser: Tokeniser
    train: tuple[Padded, ...]
    valid: tuple[Padded, ...]
    test: tuple[Padded, ...]
    seen: tuple[Padded, ...]  # as many pairs of those trained on as there are for testing
    references: Mapping[str, list[str]]  # each test sentence with its translations


@cache
def corpus(form: str, device: torch.device) -> TranslationData:
    """Read the sentences, learn the subwords, and put it all on the device."""
    lab = Lab(form, device)
    parts = split(numbers() if form == "tiny" else read("tatoeba-en-fr"))
    parts = replace(parts, train=parts.train[: lab.pick(tiny=200, quick=20_000, full=178_009)])
    lengths = lab.pick(tiny=(64,), quick=(8, 12, 16, 20), full=(8, 12, 16, 24))
    texts = (text for pair in parts.train for text in pair)
    tokeniser = Tokeniser.learn(texts, lab.pick(tiny=300, quick=1000, full=4000))
    test = few(parts, lab.pick(tiny=4, quick=300, full=2000))

    def ready(pairs: list[Pair]) -> tuple[Padded, ...]:
        return padded(pairs, tokeniser, lengths, device)

    return TranslationData(
        tokeniser,
        train=ready(parts.train),
        valid=ready(parts.valid),
        test=ready(test),
        seen=ready(parts.train[: len(test)]),
        references=by_sentence(test),
    )


def few(parts: Split, count: int) -> list[Pair]:
    """About `count` test sentences with all their translations, no longer than those trained on."""
    longest = max(len(english) for english, _ in parts.train)
    sentences = [x for x in by_sentence(parts.test) if len(x) <= longest]
    kept = set(sentences[:: max(1, len(sentences) // count)])
    return [pair for pair in parts.test if pair[0] in kept]


def recipe(lab: Lab, seed: int) -> Recipe:
    """The optimiser and the number of steps, which all variants share."""
    steps = lab.pick("steps", tiny=2, quick=400, full=1000)
    return Recipe(
        steps=steps,
        learning_rate=lab.pick("rate", tiny=1e-3, quick=5e-3, full=1.5e-3),
        warmup=steps // 8,
        label_smoothing=0.1,
        seed=seed,
        evaluate_every=max(1, steps // 8),
    )


def build(lab: Lab, variant: str, tokeniser: Tokeniser) -> nn.Module:
    """A new model of a variant."""
    width = lab.pick("width", tiny=32, quick=64, full=256)
    layers = lab.pick("layers", tiny=1, quick=2)
    config = TransformerConfig(
        vocabulary=tokeniser.size,
        d_model=width,
        encoder_layers=layers,
        decoder_layers=layers,
        heads=lab.pick("heads", tiny=4, quick=4, full=8),
        feed_forward=ReLU(2 * width),
        arrangement=PreNorm(),
        dropout=0.0,
        padding=tokeniser.pad,
        start=tokeniser.start,
        end=tokeniser.end,
    )
    if variant in RIVALS:
        return RIVALS[variant](config)
    if variant in NARROWER:
        wide = width // config.heads
        narrow = {"head_dim": wide // NARROWER[variant], "value_dim": wide}
        return Transformer(replace(config, **narrow))  # type: ignore[arg-type]
    return Transformer(replace(config, **VARIANTS[variant]))


def translated(lab: Lab, variant: str, seed: int) -> dict[str, Any]:
    """The figures of one run: BLEU, losses, the curve, and the loss without each head."""
    return lab.keep(f"translate-{variant}-{seed}", train, variant=variant, seed=seed)


def train(lab: Lab, folder: Path | None, variant: str, seed: int) -> dict[str, Any]:
    """Train a translator and measure it on held-out sentences."""
    if folder is None:
        with tempfile.TemporaryDirectory() as name:
            return train(lab, Path(name), variant, seed)
    training = train_in_steps(lab, folder, variant, seed)
    total = recipe(lab, seed).steps
    try:
        while True:
            lab.report(f"{variant}, seed {seed}, step", next(training), total)
    except StopIteration as finished:
        figures: dict[str, Any] = finished.value
        return figures
    finally:
        training.close()


def train_in_steps(lab: Lab, folder: Path, variant: str, seed: int) -> Training:
    """Train a translator step by step, from the state in the folder if there is one."""
    data, chosen = corpus(lab.form, lab.device), recipe(lab, seed)
    torch.manual_seed(seed)
    model = build(lab, variant, data.tokeniser)
    order = FullBatches(data.train, lab.pick(tiny=256, quick=1024, full=8192), seed)
    learner = Learner(model, chosen, order, data.tokeniser.pad)
    state = folder / "state.safetensors"
    curve: list[list[float]] = []
    if state.exists():
        curve = learner.restore(state)["curve"]
    saved = time.monotonic()
    try:
        while learner.step < chosen.steps:
            learner.update()
            if learner.step % chosen.evaluate_every == 0:
                learner.check()
                curve.append([learner.step, learner.mean_loss(data.valid)])
            if time.monotonic() - saved > SAVED:
                learner.check()
                learner.save(state, {"curve": curve})
                saved = time.monotonic()
            yield learner.step
        figures = measured(learner, data, variant)
    except GeneratorExit:
        learner.save(state, {"curve": curve})
        raise
    except DivergedError:
        figures = {"diverged": True}
    state.unlink(missing_ok=True)
    return {"variant": variant, "seed": seed, "curve": curve, **figures}


def measured(learner: Learner, data: TranslationData, variant: str) -> dict[str, Any]:
    """The figures of a trained model, on test sentences."""
    learner.check()
    model: Any = learner.model
    with learner.measuring():
        said = translate(model, data.tokeniser, list(data.references), Greedy(), together=512)
    scored = bleu(said, list(data.references.values()))
    found = {
        "diverged": False,
        "parameters": parameters(model),
        "bleu": scored["bleu"],
        "signature": scored.get("bleu_signature"),
        "test_loss": learner.mean_loss(data.test),
        "train_loss": learner.mean_loss(data.seen),
        "gradient_norms": learner.largest_norms(20),
    }
    if variant in RIVALS:
        return found
    return found | {
        "without_head": without_each_head(learner, data),
        "effective_keys": effective_keys(learner, data),
    }


def without_each_head(learner: Learner, data: TranslationData) -> dict[str, list[float]]:
    """The test loss with one head switched off: for every layer, one loss a head."""
    found: dict[str, list[float]] = {}
    for name, module in learner.model.named_modules():
        if isinstance(module, MultiHeadAttention):
            for head in range(module.heads):
                with learner.beside(), module.drop_heads(head):
                    found.setdefault(name, []).append(round(learner.mean_loss(data.test), 4))
    return found


def effective_keys(learner: Learner, data: TranslationData) -> float:
    """exp(entropy) of the rows of the encoder's heads on test sentences, on average."""
    part, model = max(data.test, key=len), learner.model
    assert isinstance(model, Transformer)
    with learner.measuring():
        with watch(model, stats=("effective_keys",)) as seen:
            model.encode(part.source[:64], part.lengths[:64])
        found = [float(row["effective_keys_mean"]) for row in seen.heads()]
    return sum(found) / len(found)


def numbers() -> list[Pair]:
    """A toy corpus for tests: the numbers to 999, digit by digit, in English and French."""
    english = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    french = ["zéro", "un", "deux", "trois", "quatre", "cinq", "six", "sept", "huit", "neuf"]
    spelt = [[int(digit) for digit in str(number)] for number in range(1000)]
    return [
        (" ".join(english[x] for x in each), " ".join(french[x] for x in each)) for each in spelt
    ]
