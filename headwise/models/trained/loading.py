"""Trained models, ready to use: the built-in ones by name, your own by their folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import Tensor

from headwise.core.arguments import is_number
from headwise.files import json_object
from headwise.hub import unreachable
from headwise.models.generate import Greedy, Strategy
from headwise.models.gpt import GPT, GPTConfig
from headwise.models.trained import checkpoint_parts, checkpoints
from headwise.models.trained.run_folder import Run
from headwise.models.trained.tokenisers import Tokeniser
from headwise.models.trained.translating import translate
from headwise.models.transformer import Transformer, TransformerConfig
from headwise.models.vit import ViT, ViTConfig

ASSETS = Path(__file__).parents[2] / "assets"
"""The folder of the built-in models."""

MOST = 2**31
"""The largest number in a model's configuration: a context of two thousand million tokens."""

CONFIGS: dict[str, type[TransformerConfig] | type[GPTConfig] | type[ViTConfig]] = {
    "translate": TransformerConfig,
    "language": GPTConfig,
    "vision": ViTConfig,
}
"""The configuration of the model of each task."""


@dataclass(frozen=True)
class LanguageModel:
    """A GPT, its tokeniser and its model card."""

    model: GPT
    tokeniser: Tokeniser
    card: str

    def encode(self, text: str) -> Tensor:
        """The token ids (1, N) of a text, with a start token in front."""
        ids = [self.tokeniser.start, *self.tokeniser.encode(text)]
        return torch.tensor([ids], device=self.model.embedding.weight.device)

    def pieces(self, text: str) -> list[str]:
        """The N tokens of `encode`, as text."""
        return self.tokeniser.pieces(self.encode(text)[0].tolist())

    def complete(self, text: str, count: int = 50, strategy: Strategy | None = None) -> str:
        """Continue a text by at most `count` tokens, greedily by default."""
        out = self.model.generate(self.encode(text), count, strategy=strategy or Greedy())
        return self.tokeniser.decode(out[0].tolist())


@dataclass(frozen=True)
class Translator:
    """A Transformer, its tokeniser and its model card."""

    model: Transformer
    tokeniser: Tokeniser
    card: str

    def encode(self, sentence: str) -> Tensor:
        """The encoder's token ids (1, S) of a sentence, with an end token behind."""
        ids = [*self.tokeniser.encode(sentence), self.tokeniser.end]
        return torch.tensor([ids], device=self.model.embedding.weight.device)

    def encode_target(self, sentence: str) -> Tensor:
        """The decoder's token ids (1, T) of a translation, with a start token in front."""
        ids = [self.tokeniser.start, *self.tokeniser.encode(sentence)]
        return torch.tensor([ids], device=self.model.embedding.weight.device)

    def translate(
        self, sentences: str | Sequence[str], strategy: Strategy | None = None
    ) -> list[str]:
        """Translate each sentence, by beam search of width four unless `strategy` is given."""
        several = [sentences] if isinstance(sentences, str) else list(sentences)
        return translate(self.model, self.tokeniser, several, strategy)


@dataclass(frozen=True)
class Classifier:
    """A ViT, its model card, and the mean and deviation of each channel of its training images.

    Pixels range from 0 to 1. `mean` and `deviation` are empty for runs that did not keep them.
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
    """Load a trained model: "gpt", "translate", or the folder of a run of `headwise train`.

    The weights are float32, whatever they were stored as, and the model is in eval mode. A run that
    has not finished is loaded from its last checkpoint.

    >>> import headwise as hw
    >>> translator = hw.load("translate")
    >>> translator.translate("Let's see.")
    ['Voyons !']
    """
    folder = ASSETS / what if what in built_in() else Path(what)
    if not folder.is_dir():
        raise ValueError(
            f"there is no model {str(what)!r}: it is not a folder, and the built-in models are "
            f"{', '.join(built_in())}"
        )
    run = Run(folder)
    settings = run.settings()
    task = settings.get("task")
    if not isinstance(task, str) or task not in CONFIGS:
        known = ", ".join(CONFIGS)
        raise ValueError(f"{run.config} describes an unknown task {task!r}; known are {known}")
    tensors, origin = _weights(run)
    try:
        config = CONFIGS[task].from_dict(settings["model"])
        check_sizes(config.to_dict(), len(tensors))
        with torch.device("meta"):  # takes no memory, whatever the configuration asks for
            checkpoints.check_weights(build(config), tensors, origin)
    except (KeyError, TypeError, ValueError, RuntimeError, ArithmeticError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{run.config} does not describe the model in {origin}: {reason}; copy both again"
        ) from error
    model = build(config)
    checkpoints.put_weights(model, tensors, origin)
    model.to(device).eval()
    return _ready(model, run)


def build(config: TransformerConfig | GPTConfig | ViTConfig) -> Transformer | GPT | ViT:
    """Build the model of a configuration."""
    if isinstance(config, TransformerConfig):
        return Transformer(config)
    return GPT(config) if isinstance(config, GPTConfig) else ViT(config)


def _weights(run: Run) -> tuple[dict[str, Tensor], Path]:
    """The weights of a run and the file that holds them; of its last checkpoint if it goes on."""
    if run.model.exists():
        return checkpoints.load(run.model)[0], run.model
    shared = checkpoint_parts.newest(run.shared_state)
    if shared is not None and not checkpoint_parts.is_older(shared, run.state):
        return checkpoint_parts.weights(shared), shared
    return checkpoints.below("model/", checkpoints.load(run.state)[0]), run.state


def check_sizes(described: Any, tensors: int, name: str = "model") -> None:
    """ValueError if a configuration's numbers are too large for its weights, before it is built.

    >>> check_sizes({"layers": 10**9}, tensors=62)
    Traceback (most recent call last):
    ValueError: model.layers=1000000000 is more than the 62 tensors of the weights
    """
    if isinstance(described, dict):
        for key, value in described.items():
            check_sizes(value, tensors, f"{name}.{key}")
    elif isinstance(described, list):
        for value in described:
            check_sizes(value, tensors, name)
    elif isinstance(described, int) and name.endswith("layers") and described > tensors:
        raise ValueError(f"{name}={described} is more than the {tensors} tensors of the weights")
    elif isinstance(described, int) and abs(described) > MOST:
        raise ValueError(f"{name}={described} is more than the {MOST} that headwise reads")


def _ready(model: Any, run: Run) -> LanguageModel | Translator | Classifier:
    path = run.folder / "card.md"
    card = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    if isinstance(model, ViT):
        return Classifier(model, card, *_pixels(run, model.config.channels))
    tokeniser = Tokeniser.load(run.tokeniser)
    if tokeniser.size > model.config.vocabulary:
        raise ValueError(
            f"{run.tokeniser} has {tokeniser.size} tokens, and the model knows "
            f"{model.config.vocabulary}: they are not of one run; copy both again"
        )
    if isinstance(model, GPT):
        return LanguageModel(model, tokeniser, card)
    return Translator(model, tokeniser, card)


def _pixels(run: Run, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The mean and deviation of each channel, if the run kept them."""
    pixels = run.settings().get("pixels", {})
    if not pixels:
        return (), ()
    found: list[Any] = [
        pixels.get(x) if isinstance(pixels, dict) else None for x in ("mean", "deviation")
    ]
    for each in found:
        if not isinstance(each, list) or len(each) != channels or not all(map(is_number, each)):
            raise ValueError(
                f"{run.config} is damaged: pixels={pixels!r} should have a mean and a deviation of "
                f"{channels} numbers each; copy it again"
            )
    mean, deviation = found
    return tuple(mean), tuple(deviation)


def built_in() -> list[str]:
    """The names of the models inside the package."""
    return sorted(path.parent.name for path in ASSETS.glob("*/config.json"))


def find_model(what: str) -> None:
    """ValueError if there is no such model, before anything is loaded."""
    folder = Path(what)
    if what in built_in():
        return
    if not folder.is_dir():
        is_on_disk(what)
    elif not (folder / "config.json").is_file():
        raise ValueError(
            f"{what} holds no model: it has no config.json, as a run of headwise train or a model "
            "of transformers has"
        )


def holds_trained_model(folder: Path) -> bool:
    """True if a folder is a run of `headwise train`."""
    try:
        return "task" in json_object((folder / "config.json").read_bytes(), folder)
    except (OSError, ValueError):
        return False


def is_on_disk(what: str) -> bool:
    """True if a transformers model is on this machine; ValueError if the hub can't be asked.

    >>> is_on_disk("gtp")
    Traceback (most recent call last):
    ValueError: there is no model 'gtp'; did you mean gpt? For a model on the hub, give owner/gtp
    """
    if Path(what).is_dir():
        return True
    meant = get_close_matches(what.lower(), built_in(), 1)
    if meant and what.isalpha():  # gpt2 is a model of the hub
        said = f"there is no model {what!r}; did you mean {meant[0]}?"
        raise ValueError(f"{said} For a model on the hub, give owner/{what}")
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ModuleNotFoundError as missing:
        reason = "a name on the hub needs transformers: pip install transformers"
        raise _missing(what, reason) from missing
    try:
        if isinstance(try_to_load_from_cache(what, "config.json"), str):
            return True
    except HFValidationError as error:
        raise _missing(what, "it is not a name on the hub either") from error
    _reach_hub(what)
    return False


def _reach_hub(what: str) -> None:
    """ValueError if the hub is out of reach."""
    reason = unreachable()
    if reason:
        raise _missing(what, f"the hub can't be asked for it ({reason})")


def _missing(what: str, reason: str) -> ValueError:
    return ValueError(
        f"there is no model {what!r}: it is not a folder here, and {reason}. The built-in models "
        "are gpt and translate"
    )
