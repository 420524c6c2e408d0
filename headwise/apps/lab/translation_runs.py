"""The translators of the fair table: same data, same steps, a rate of its own for each.

A piece of `Lab.keep` trains all seeds of a variant as one stack of models, so that claims share the
runs, and an interrupted table goes on with the pieces it had.
"""

from __future__ import annotations

import base64
import math
import time
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise import Dot
from headwise.apps.lab.counting import parameters
from headwise.apps.lab.laboratory import Lab
from headwise.apps.lab.translation_rivals import RecurrentTranslator, in_place_of_attention
from headwise.apps.train.data.pairs import Pair, Split, read, split
from headwise.apps.train.padded_batches import FullBatches, Padded, mean_losses, padded
from headwise.apps.train.recipe import Recipe
from headwise.apps.train.stacked_training import StackedTraining
from headwise.apps.train.stacking import StackedAttention
from headwise.apps.train.tasks.metrics import SentenceCounts, sentence_counts
from headwise.apps.train.tasks.translation import by_sentence
from headwise.models import Greedy, Transformer, TransformerConfig
from headwise.models.trained import Tokeniser
from headwise.nn import Additive, MultiHeadAttention, PreNorm, ReLU, Shared, Unprojected

VARIANTS: dict[str, Mapping[str, Any]] = {
    "base": {},
    **{f"heads-{heads}": {"heads": heads} for heads in (1, 4, 16)},
    "keys-half": {},
    "shared": {"projections": Shared()},
    "unprojected": {"projections": Unprojected()},
    "unscaled": {"score": Dot(1.0)},
    "unscaled-narrow": {"score": Dot(1.0)},
    "additive": {"score": Additive()},
    "fixed": {},
    "convolution": {},
    "recurrence": {},
    "lstm-attention": {},
}
"""Every row of the table, and its changes to the configuration of the base model."""

TWIN = "twin-"
"""A base model of the size of the variant that is named after it: its inner layers differ."""
SIZES = 0.02
"""The share by which a variant's size may differ from the base model's without a twin."""

RATES = (4e-4, 8e-4, 1.6e-3, 3.2e-3, 6.4e-3)
"""Peak rates of which each variant gets the one with the least validation loss."""
TWINS = 3
"""Trainings of each twin in the full form."""
MANY = 1000
"""Sentences from which on counting them is shared out."""
HEADLESS = ("base", "heads-1", "heads-16")
"""Variants that are also measured without each of their heads."""


@dataclass(frozen=True)
class TranslationData:
    """Sentences as all translators of a form get them, on a device."""

    tokeniser: Tokeniser
    train: tuple[Padded, ...]
    valid: tuple[Padded, ...]
    test: tuple[Padded, ...]
    seen: tuple[Padded, ...]  # as many pairs of those trained on as there are for testing
    references: Mapping[str, list[str]]  # each test sentence with its translations
    sources: Sequence[list[int]]  # the tokens of each test sentence


@cache
def corpus(form: str, device: torch.device, folder: Path | None = None) -> TranslationData:
    """Read the sentences, learn the subwords or find them in the folder, put all on the device."""
    lab = Lab(form, device)
    parts = split(numbers() if form == "tiny" else read("tatoeba-en-fr"))
    parts = replace(parts, train=parts.train[: lab.pick(tiny=200, quick=20_000, full=178_009)])
    lengths = lab.pick(tiny=(64,), quick=(8, 12, 16, 20), full=(8, 12, 16, 24))
    tokeniser = subwords(parts, vocabulary(lab), form, folder)
    test = few(parts, lab.pick(tiny=4, quick=1000, full=2000))
    references = by_sentence(test)

    def ready(pairs: list[Pair]) -> tuple[Padded, ...]:
        return padded(pairs, tokeniser, lengths, device)

    return TranslationData(
        tokeniser,
        train=ready(parts.train),
        valid=ready(parts.valid),
        test=ready(test),
        seen=ready(parts.train[: len(test)]),
        references=references,
        sources=[[*ids, tokeniser.end] for ids in tokeniser.encode_all(list(references))],
    )


def learn_subwords(lab: Lab) -> None:
    """Let a lab's folder have the subwords, before several processes look for them."""
    assert lab.folder is not None
    if not (lab.folder / "kept" / f"subwords.{lab.form}.json").exists():
        corpus(lab.form, torch.device("cpu"), lab.folder)


def subwords(parts: Split, size: int, form: str, folder: Path | None) -> Tokeniser:
    """The tokeniser of the training sentences, kept in the folder."""
    file = None if folder is None else folder / "kept" / f"subwords.{form}.json"
    if file is not None and file.exists():
        return Tokeniser.load(file)
    tokeniser = Tokeniser.learn((text for pair in parts.train for text in pair), size)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        tokeniser.save(file)
    return tokeniser


def few(parts: Split, count: int) -> list[Pair]:
    """About `count` test sentences with all their translations, no longer than those trained on."""
    longest = max(len(english) for english, _ in parts.train)
    sentences = [x for x in by_sentence(parts.test) if len(x) <= longest]
    kept = set(sentences[:: max(1, len(sentences) // count)])
    return [pair for pair in parts.test if pair[0] in kept]


def recipe(lab: Lab, share: float = 1.0) -> Recipe:
    """The optimiser and the number of steps, or a share of them, which all variants share."""
    steps = round(share * lab.pick("steps", tiny=4, quick=400, full=4000))
    return Recipe(
        steps=steps,
        warmup=steps // 8,
        label_smoothing=0.1,
        evaluate_every=max(1, steps // lab.pick(tiny=8, quick=4, full=8)),
    )


def config(lab: Lab, tokeniser: Tokeniser | None = None) -> TransformerConfig:
    """The base model; without a tokeniser, one that is only counted."""
    width = lab.pick("width", tiny=32, quick=64, full=256)
    layers = lab.pick("layers", tiny=1, quick=2)
    return TransformerConfig(
        vocabulary=vocabulary(lab) if tokeniser is None else tokeniser.size,
        d_model=width,
        encoder_layers=layers,
        decoder_layers=layers,
        heads=lab.pick("heads", tiny=4, quick=4, full=8),
        feed_forward=ReLU(2 * width),
        arrangement=PreNorm(),
        dropout=lab.pick("dropout", tiny=0.0, quick=0.1),
        padding=tokeniser.pad if tokeniser else 0,
        start=tokeniser.start if tokeniser else 1,
        end=tokeniser.end if tokeniser else 2,
    )


def vocabulary(lab: Lab) -> int:
    """The number of subwords."""
    return lab.pick(tiny=300, quick=1000, full=2000)


def build(lab: Lab, variant: str, tokeniser: Tokeniser | None = None, seed: int = 0) -> nn.Module:
    """A new model of a variant, or of a variant's twin."""
    base = config(lab, tokeniser)
    if variant.startswith(TWIN):
        base = replace(base, feed_forward=twin_width(lab, variant.removeprefix(TWIN)))
        variant = "base"
    torch.manual_seed(seed)
    if variant == "lstm-attention":
        return RecurrentTranslator(base)
    if variant in ("fixed", "convolution", "recurrence"):
        return in_place_of_attention(Transformer(base), variant)
    changes = dict(VARIANTS[variant])
    if variant == "keys-half":
        wide = base.d_model // base.heads
        changes = {"head_dim": wide // 2, "value_dim": wide}
    model = Transformer(replace(base, **changes))
    if variant == "unscaled-narrow":
        narrow(model)
    return model


def narrow(model: nn.Module) -> None:
    """Divide W_q and b_q by √d_k, so that unscaled logits start as scaled ones do."""
    for module in model.modules():
        if isinstance(module, MultiHeadAttention):
            with torch.no_grad():
                for parameter in module.query.parameters():
                    parameter.div_(math.sqrt(module.head_dim))


def size_of(lab: Lab, variant: str) -> int:
    """The parameters of a variant."""
    with torch.device("meta"):
        return parameters(build(lab, variant))


def twin_width(lab: Lab, variant: str) -> ReLU:
    """The inner layers that give the base model as many parameters as a variant has."""
    base = config(lab)
    inner = base.feed_forward
    assert isinstance(inner, ReLU)
    each = (base.encoder_layers + base.decoder_layers) * (2 * base.d_model + 1)
    return ReLU(inner.width + round((size_of(lab, variant) - size_of(lab, "base")) / each))


def twins(lab: Lab) -> dict[str, str]:
    """The twin of each variant that needs one; variants of the same size share theirs."""
    base, found, named = size_of(lab, "base"), {}, dict[int, str]()
    for variant in VARIANTS:
        size = size_of(lab, variant)
        if abs(size / base - 1) > SIZES:
            found[variant] = named.setdefault(size, TWIN + variant)
    return found


def chosen(lab: Lab, variant: str) -> float:
    """The rate of a variant, trained for unless it is kept; a twin has the base model's."""
    variant = "base" if variant.startswith(TWIN) else variant
    return float(lab.keep(f"rate-{variant}", choose, variant=variant)["rate"])


def choose(lab: Lab, folder: Path | None, variant: str) -> dict[str, Any]:
    """Train a variant at every rate, a quarter as long, and choose by validation loss."""
    rates = lab.pick("rates", tiny=(1e-3,), quick=(5e-3,), full=RATES)
    if len(rates) == 1:
        return {"variant": variant, "rate": rates[0], "rates": list(rates), "losses": [None]}
    training = started(lab, variant, [0] * len(rates), rates, recipe(lab, 0.25))
    for step in range(training.recipe.steps):
        lab.report(f"rates of {variant}, step", step, training.recipe.steps)
        training.update()
    data = corpus(lab.form, lab.device, lab.folder)
    losses: list[float | None] = [
        loss if finite else None
        for loss, finite in zip(
            mean_losses(training, data.valid, data.tokeniser.pad), training.finite(), strict=True
        )
    ]
    best = min((loss, rate) for loss, rate in zip(losses, rates, strict=True) if loss is not None)
    return {"variant": variant, "rate": best[1], "rates": list(rates), "losses": losses}


def translated(lab: Lab, variant: str) -> list[dict[str, Any]]:
    """The runs of a variant: BLEU, losses, the curve, and of some the loss without each head."""
    found = lab.keep(f"translate-{variant}", train, variant=variant, seeds=seeds_of(lab, variant))
    runs: list[dict[str, Any]] = found["runs"]
    return runs


def seeds_of(lab: Lab, variant: str) -> int:
    """The trainings of a variant, side by side."""
    few = variant.startswith(TWIN) and lab.form == "full"
    return TWINS if few else lab.pick("seeds", tiny=1, quick=4, full=5)


def train(lab: Lab, folder: Path | None, variant: str, seeds: int) -> dict[str, Any]:
    """Train the seeds of a variant side by side and measure them on held-out sentences."""
    rate = chosen(lab, variant)
    data, plan, begun = corpus(lab.form, lab.device, lab.folder), recipe(lab), time.monotonic()
    training = started(lab, variant, range(seeds), [rate] * seeds, plan)
    curve: list[tuple[int, list[float]]] = []
    for step in range(1, plan.steps + 1):
        training.update()
        if step % plan.evaluate_every == 0:
            lab.report(f"{variant}, step", step, plan.steps)
            curve.append((step, mean_losses(training, data.valid, data.tokeniser.pad)))
    seconds = time.monotonic() - begun
    finite = training.finite()
    tested, known = (
        mean_losses(training, data.test, data.tokeniser.pad),
        mean_losses(training, data.seen, data.tokeniser.pad),
    )
    heads = without_each_head(training, data) if variant in HEADLESS else None
    references = list(data.references.values())
    counts = scored(said(training, data), references)
    norms = training.largest_norms(20)
    runs: list[dict[str, Any]] = []
    for seed in range(seeds):
        about = {"variant": variant, "seed": seed, "rate": rate, "diverged": not finite[seed]}
        if finite[seed]:
            found = counts[seed]
            about |= {
                "curve": [[step, losses[seed]] for step, losses in curve],
                "bleu": found.bleu(),
                "signature": found.signature,
                "test_loss": tested[seed],
                "train_loss": known[seed],
                "gradient_norms": norms[seed],
                "statistics": packed(found.counts),
            }
            if heads is not None:
                about["without_head"] = {x: [y[seed] for y in of] for x, of in heads.items()}
        runs.append(about)
    return {
        "variant": variant,
        "parameters": size_of(lab, variant),
        "seconds": round(seconds, 1),
        "lengths": packed([[min(len(x), 255)] for x in data.sources]),
        "runs": runs,
    }


def step_times(lab: Lab, folder: Path | None) -> dict[str, Any]:
    """Milliseconds of a step of all seeds of each variant, which must have the GPU alone."""
    found: dict[str, float] = {}
    for variant in VARIANTS if lab.device.type == "cuda" else ():
        seeds = seeds_of(lab, variant)
        training = started(lab, variant, range(seeds), [1e-3] * seeds, recipe(lab))
        while training.capture and len(training.graphs) < len(training.rows):
            training.update()
        found[variant] = round(1000 * training.seconds(40), 2)
        lab.report(f"{variant}: {found[variant]} ms", len(found), len(VARIANTS))
    return {"milliseconds": found}


def started(
    lab: Lab, variant: str, seeds: Sequence[int], rates: Sequence[float], plan: Recipe
) -> StackedTraining:
    """A stack of models of a variant, one for each seed and rate, before its first step."""
    data = corpus(lab.form, lab.device, lab.folder)
    models = [build(lab, variant, data.tokeniser, seed) for seed in seeds]
    tokens = lab.pick("tokens", tiny=256, quick=1024, full=4096)
    order = FullBatches(data.train, tokens, seeds, data.tokeniser.pad)
    torch.manual_seed(seeds[0])  # of dropout
    half = torch.bfloat16 if lab.device.type == "cuda" else None
    return StackedTraining(models, plan, rates, order, lab.device, half)


def said(training: StackedTraining, data: TranslationData, together: int = 500) -> list[list[str]]:
    """The translations of the test sentences by each model, greedily."""
    runs, pad = training.runs, data.tokeniser.pad
    order = sorted(range(len(data.sources)), key=lambda number: len(data.sources[number]))
    texts = [[""] * len(order) for _ in range(runs)]
    with training.measuring() as model:
        for first in range(0, len(order), together):
            chosen = order[first : first + together]
            lengths = torch.tensor([len(data.sources[number]) for number in chosen])
            width = int(lengths.max())
            rows = [data.sources[x] + [pad] * (width - len(data.sources[x])) for x in chosen]
            out = model.generate(  # type: ignore[operator]
                torch.tensor(rows, device=training.device).repeat(runs, 1),
                2 * width + 10,
                source_lengths=lengths.to(training.device).repeat(runs),
                strategy=Greedy(),
                cache=None,
            )
            for mine, tokens in zip(texts, out.unflatten(0, (runs, -1)).tolist(), strict=True):
                for number, ids in zip(chosen, tokens, strict=True):
                    mine[number] = data.tokeniser.decode(ids)
    return texts


def scored(
    texts: Sequence[Sequence[str]], references: Sequence[Sequence[str]]
) -> list[SentenceCounts]:
    """The counts behind BLEU for each model's translations; several processes share many."""
    if len(references) < MANY:
        return [sentence_counts(mine, references) for mine in texts]
    with ProcessPoolExecutor(len(texts), mp_context=get_context("spawn")) as processes:
        return list(processes.map(sentence_counts, texts, [references] * len(texts)))


def without_each_head(
    training: StackedTraining, data: TranslationData
) -> dict[str, list[list[float]]]:
    """The test losses with one head switched off: for every layer, one list for each head."""
    found: dict[str, list[list[float]]] = {}
    for name, module in training.stack.module.named_modules():
        if isinstance(module, StackedAttention):
            for head in range(module.heads):
                module.head_gate = torch.ones(module.heads, device=training.device)
                module.head_gate[head] = 0
                losses = [
                    round(loss, 4) for loss in mean_losses(training, data.test, data.tokeniser.pad)
                ]
                found.setdefault(name, []).append(losses)
            module.head_gate = None
    return found


def packed(rows: Sequence[Sequence[int]]) -> str:
    """Rows of numbers below 256 as a text.

    >>> unpacked(packed([[1, 2], [3, 255]]), 2)
    [[1, 2], [3, 255]]
    """
    numbers = bytes(min(number, 255) for row in rows for number in row)
    return base64.b85encode(zlib.compress(numbers, 9)).decode()


def unpacked(text: str, width: int) -> list[list[int]]:
    """The rows that `packed` has written."""
    numbers = zlib.decompress(base64.b85decode(text))
    return [list(numbers[place : place + width]) for place in range(0, len(numbers), width)]


def numbers() -> list[Pair]:
    """A toy corpus for tests: the numbers to 999, digit by digit, in English and French."""
    english = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    french = ["zéro", "un", "deux", "trois", "quatre", "cinq", "six", "sept", "huit", "neuf"]
    spelt = [[int(digit) for digit in str(number)] for number in range(1000)]
    return [
        (" ".join(english[x] for x in each), " ".join(french[x] for x in each)) for each in spelt
    ]
