"""Trained models, ready to use: the built-in ones by name, your own by their folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

if TYPE_CHECKING:
    from headwise.models import GPT, Strategy, Transformer, ViT
    from headwise.training.data.tokenisers import Tokeniser

ASSETS = Path(__file__).parent.parent / "assets"
"""Where the built-in models lie."""


@dataclass(frozen=True)
class LanguageModel:
    """A GPT, its tokeniser, and its card."""

    model: GPT
    tokeniser: Tokeniser
    card: str

    def encode(self, text: str) -> Tensor:
        """A text as the model reads it, (1, N), a start before it."""
        ids = [self.tokeniser.start, *self.tokeniser.encode(text)]
        return torch.tensor([ids], device=self.model.embedding.weight.device)

    def pieces(self, text: str) -> list[str]:
        """The N tokens of `encode`, as text."""
        return self.tokeniser.pieces(self.encode(text)[0].tolist())

    def complete(self, text: str, count: int = 50, strategy: Strategy | None = None) -> str:
        """What the model writes after a text: `count` tokens at most, the likeliest by default."""
        from headwise.models import Greedy

        out = self.model.generate(self.encode(text), count, strategy=strategy or Greedy())
        return self.tokeniser.decode(out[0].tolist())


@dataclass(frozen=True)
class Translator:
    """A Transformer, its tokeniser, and its card."""

    model: Transformer
    tokeniser: Tokeniser
    card: str

    def encode(self, sentence: str) -> Tensor:
        """A sentence as the encoder reads it, (1, S), an end after it."""
        ids = [*self.tokeniser.encode(sentence), self.tokeniser.end]
        return torch.tensor([ids], device=self.model.embedding.weight.device)

    def encode_target(self, sentence: str) -> Tensor:
        """A translation as the decoder reads it, (1, T), a start before it."""
        ids = [self.tokeniser.start, *self.tokeniser.encode(sentence)]
        return torch.tensor([ids], device=self.model.embedding.weight.device)

    def translate(
        self, sentences: str | Sequence[str], strategy: Strategy | None = None
    ) -> list[str]:
        """A translation of each sentence, by a beam of four unless told otherwise."""
        from headwise.training.tasks.translating import translate

        several = [sentences] if isinstance(sentences, str) else list(sentences)
        return translate(self.model, self.tokeniser, several, strategy)


@dataclass(frozen=True)
class Classifier:
    """A ViT, its card, and what it scales pixels of 0 to 1 by, a number a channel.

    `mean` and `deviation` are empty where the run was trained before they were kept.
    """

    model: ViT
    card: str
    mean: tuple[float, ...] = ()
    deviation: tuple[float, ...] = ()


Device = str | torch.device


@overload
def load(what: Literal["gpt"], device: Device = ...) -> LanguageModel: ...
@overload
def load(what: Literal["translate"], device: Device = ...) -> Translator: ...
@overload
def load(what: str | Path, device: Device = ...) -> LanguageModel | Translator | Classifier: ...
def load(what: str | Path, device: Device = "cpu") -> LanguageModel | Translator | Classifier:
    """A trained model: "gpt", "translate", or the folder of a run of `headwise train`.

    The weights are float32 whatever they were stored as, and the model is in eval mode. A run that
    is not done yet is loaded from its last checkpoint.

    >>> import headwise as hw
    >>> translator = hw.load("translate")
    >>> translator.translate("Let's see.")
    ['Voyons !']
    """
    from headwise.training import checkpoints, setups
    from headwise.training.run_folder import Run

    folder = ASSETS / what if what in built_in() else Path(what)
    if not folder.is_dir():
        raise ValueError(
            f"there is no model {str(what)!r}: it is no folder, and the built-in models are "
            f"{', '.join(built_in())}"
        )
    run = Run(folder)
    asked = run.asked()
    if asked.get("task") not in setups.CONFIGS:
        raise ValueError(f"{run.config} describes no model headwise knows: {asked.get('task')!r}")
    config = setups.CONFIGS[asked["task"]].from_dict(asked["model"])
    if run.model.exists():
        origin, tensors = run.model, checkpoints.load(run.model)[0]
    else:
        origin = run.state
        tensors = checkpoints.below("model/", checkpoints.load(run.state)[0])
    model = setups.build(config)
    checkpoints.put_weights(model, tensors, origin)
    model.to(device).eval()
    return _ready(model, run)


def _ready(model: Any, run: Any) -> LanguageModel | Translator | Classifier:
    from headwise.models import GPT, Transformer
    from headwise.training.data.tokenisers import Tokeniser

    path = run.folder / "card.md"
    card = path.read_text(encoding="utf-8") if path.exists() else ""
    if isinstance(model, GPT):
        return LanguageModel(model, Tokeniser.load(run.tokeniser), card)
    if isinstance(model, Transformer):
        return Translator(model, Tokeniser.load(run.tokeniser), card)
    pixels = run.asked().get("pixels", {})
    mean, deviation = (tuple(pixels.get(name, ())) for name in ("mean", "deviation"))
    return Classifier(model, card, mean, deviation)


def built_in() -> list[str]:
    """The names of the models inside the package."""
    return sorted(path.parent.name for path in ASSETS.glob("*/config.json"))
