"""The settings of a run: data, model, batches and recipe of each task."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, ClassVar

from headwise.apps.train.data import labelled_images as images
from headwise.apps.train.data import pairs, texts
from headwise.apps.train.recipe import Recipe
from headwise.apps.train.tasks.language import Language
from headwise.apps.train.tasks.translation import Translation
from headwise.apps.train.tasks.vision import Vision
from headwise.checks import CheckedFields, Size
from headwise.models import GPTConfig, TransformerConfig, ViTConfig
from headwise.models.trained import CONFIGS, Run, Tokeniser, chunks


@dataclass(frozen=True)
class TranslateSetup(CheckedFields):
    """Translate the pairs of a corpus or a file; `pairs` limits how many are trained on.

    The tokeniser's vocabulary and special tokens replace those of `model`.
    """

    data: str
    vocabulary: Size
    model: TransformerConfig
    recipe: Recipe
    tokens: Size
    longest: Size = 64
    pairs: Size | None = None
    task: ClassVar[str] = "translate"

    def prepare(self, run: Run) -> Translation:
        """Read the data, load or learn the run's subwords, and build the task."""
        split = pairs.split(pairs.read(self.data))
        split = replace(split, train=split.train[: self.pairs])
        tokeniser = subwords(run, chain.from_iterable(split.train), self.vocabulary)
        config = replace(
            self.model,
            vocabulary=tokeniser.size,
            padding=tokeniser.pad,
            start=tokeniser.start,
            end=tokeniser.end,
        )
        return Translation(split, tokeniser, config, self.tokens, self.longest, self.recipe.seed)


@dataclass(frozen=True)
class LanguageSetup(CheckedFields):
    """Continue the text of a corpus or a file; `batch` windows of the model's context per step."""

    data: str
    vocabulary: Size
    model: GPTConfig
    recipe: Recipe
    batch: Size
    task: ClassVar[str] = "language"

    def prepare(self, run: Run) -> Language:
        """Read the data, load or learn the run's subwords, and build the task."""
        text = texts.read_text(self.data)
        some = islice(chunks(text.train), 160)  # ten million characters show the common words
        tokeniser = subwords(run, some, self.vocabulary)
        config = replace(self.model, vocabulary=tokeniser.size, end=tokeniser.end)
        return Language(text, tokeniser, config, config.context, self.batch, self.recipe.seed)


@dataclass(frozen=True)
class VisionSetup(CheckedFields):
    """Classify the images of a corpus."""

    data: str
    model: ViTConfig
    recipe: Recipe
    batch: Size
    task: ClassVar[str] = "vision"

    def prepare(self, run: Run) -> Vision:
        """Read the data and build the task."""
        found = images.read_images(self.data)
        return Vision(
            found, self.model, self.model.classes, self.batch, self.recipe.seed,
            photographs=found.train[0].shape[1] == 3,
        )  # fmt: skip


Setup = TranslateSetup | LanguageSetup | VisionSetup
SETUPS: dict[str, type[TranslateSetup] | type[LanguageSetup] | type[VisionSetup]] = {
    kind.task: kind for kind in (TranslateSetup, LanguageSetup, VisionSetup)
}


def to_dict(setup: Setup) -> dict[str, Any]:
    """A setup as a dictionary for JSON."""
    plain = {field.name: getattr(setup, field.name) for field in dataclasses.fields(setup)}
    return {
        "task": setup.task,
        **plain,
        "model": setup.model.to_dict(),
        "recipe": setup.recipe.to_dict(),
    }


def from_dict(described: dict[str, Any]) -> Setup:
    """The setup that `to_dict` described."""
    described = dict(described)
    task = described.pop("task", None)
    if task not in SETUPS:
        raise ValueError(f"there is no task {task!r}; the tasks are {', '.join(SETUPS)}")
    described["model"] = CONFIGS[task].from_dict(described["model"])
    described["recipe"] = Recipe.from_dict(described["recipe"])
    return SETUPS[task](**described)


def setup_of_run(run: Run) -> Setup:
    """The setup that a run was started with."""
    try:
        return from_dict(run.settings()["setup"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{run.config} does not describe a run: {error!r}") from error


def subwords(run: Run, texts: Iterator[str], size: int) -> Tokeniser:
    """The run's tokeniser, learnt from these texts when the run begins."""
    if run.config.exists() or not run.writes:  # the process that writes has learnt it
        return Tokeniser.load(run.tokeniser)
    tokeniser = Tokeniser.learn(texts, size)
    run.folder.mkdir(parents=True, exist_ok=True)
    tokeniser.save(run.tokeniser)
    return tokeniser
