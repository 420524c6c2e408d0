"""Translators that no claim needs, for the table: other models, and more unscaled ones.

They are trained as those of `translation_runs`: same data, same budget, every curve kept.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.core.intervals import Mask
from headwise.core.patterns import Lengths
from headwise.lab.counting import parameters
from headwise.lab.laboratory import Lab
from headwise.lab.translation_runs import VARIANTS, few, numbers, setup, train, train_loss
from headwise.mask import causal
from headwise.models import LSTM, LSTMConfig, Strategy, Transformer, TransformerConfig
from headwise.models.generate import Beam
from headwise.models.lstm import State
from headwise.nn import Bahdanau, FixedAttention
from headwise.nn.caches.cache import Cache
from headwise.score import Dot
from headwise.training.meter import DivergedError
from headwise.training.run_folder import Run
from headwise.training.tasks.translation import Translation
from headwise.training.trainer import Trainer

KERNEL = 3
LENGTH = 160
"""The most positions with fixed weights: more than the longest translation that is searched for."""


class SlidingWindow(nn.Module):
    """A gated convolution in the place of self-attention: x (B, N, d_model) -> (B, N, d_model)."""

    def __init__(self, d_model: int, ahead: int) -> None:
        super().__init__()
        self.around = (KERNEL - 1 - ahead, ahead)  # zeros before and after
        self.convolution = nn.Conv1d(d_model, 2 * d_model, KERNEL)

    def forward(self, x: Tensor, *, mask: Mask | None = None, cache: Cache | None = None) -> Tensor:
        if cache is not None:
            raise ValueError("a sliding window keeps no cache; generate with cache=None")
        if isinstance(mask, Lengths):  # padding is as empty as what lies beyond the sentence
            inside = torch.arange(x.shape[1], device=x.device) < torch.as_tensor(mask.n)[:, None]
            x = x * inside[..., None]
        return F.glu(self.convolution(F.pad(x.transpose(1, 2), self.around)), dim=1).transpose(1, 2)


class WindowTranslator(Transformer):
    """A Transformer with convolutions for self-attention; attention to the source stays."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        for layers, ahead in ((self.encoder, KERNEL // 2), (self.decoder, 0)):
            for layer in layers:
                layer.attention = SlidingWindow(config.d_model, ahead)

    def generate(
        self,
        source: Tensor,
        count: int,
        *,
        source_lengths: Tensor | None = None,
        strategy: Strategy = Beam(),
        cache: Cache | None = None,
    ) -> Tensor:
        """Translate as a Transformer does, computing all tokens again at every step."""
        return super().generate(
            source, count, source_lengths=source_lengths, strategy=strategy, cache=cache
        )


class FixedTranslator(Transformer):
    """A Transformer with fixed weights for self-attention; attention to the source stays."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        for layers, mask in ((self.encoder, None), (self.decoder, causal())):
            for layer in layers:
                layer.attention = FixedAttention(config.d_model, config.heads, LENGTH, mask=mask)


class SingleLSTM(LSTM):
    """An LSTM translator that computes in float32, also where autocast chooses bf16."""

    def read(self, source: Tensor, lengths: Tensor | None = None) -> State:
        """source (B, S) -> the state before the first target token."""
        with torch.autocast(source.device.type, enabled=False):
            return super().read(source, lengths)

    def write(self, target: Tensor, state: State) -> tuple[Tensor, State]:
        """target (B, T) -> logits (B, T, vocabulary) and the state after the last token."""
        with torch.autocast(target.device.type, enabled=False):
            return super().write(target, state)


def recurrent(config: TransformerConfig) -> SingleLSTM:
    """An LSTM as wide as this Transformer, without attention."""
    return SingleLSTM(lstm_config(config, None))


def recurrent_attending(config: TransformerConfig) -> SingleLSTM:
    """An LSTM as wide as this Transformer, with Bahdanau's attention."""
    return SingleLSTM(lstm_config(config, Bahdanau(config.d_model)))


def lstm_config(config: TransformerConfig, attention: Bahdanau | None) -> LSTMConfig:
    """The LSTM that corresponds to a Transformer."""
    return LSTMConfig(
        config.vocabulary,
        d_model=config.d_model,
        layers=config.encoder_layers,
        attention=attention,
        dropout=config.dropout,
        padding=config.padding,
        start=config.start,
        end=config.end,
    )


MODELS: Mapping[str, Callable[[TransformerConfig], nn.Module]] = {
    "unscaled-heads-2": Transformer,
    "unscaled-heads-4": Transformer,
    "fixed": FixedTranslator,
    "convolution": WindowTranslator,
    "lstm": recurrent,
    "lstm-attention": recurrent_attending,
}
CHANGES: Mapping[str, Mapping[str, Any]] = {
    "unscaled-heads-2": {"heads": 2, "score": Dot(1.0)},
    "unscaled-heads-4": {"heads": 4, "score": Dot(1.0)},
}


@dataclass
class RivalTranslation(Translation):
    """The task of translation for one of these models."""

    variant: str = ""

    def build(self) -> nn.Module:
        """A new model of this variant."""
        return MODELS[self.variant](self.config)


def piece(variant: str) -> Callable[..., Mapping[str, Any]]:
    """The function that trains a variant: one piece of `Lab.keep`."""
    return train if variant in VARIANTS else train_rival


def train_rival(lab: Lab, folder: Path | None, variant: str, seed: int) -> dict[str, Any]:
    """Train one of these models and measure it on held-out sentences."""
    if folder is None:
        with tempfile.TemporaryDirectory() as name:
            return train_rival(lab, Path(name), variant, seed)
    data = "tatoeba-en-fr" if lab.form != "tiny" else str(numbers(folder / "numbers.tsv"))
    chosen = setup(lab, "base", seed, data)
    chosen = replace(chosen, model=replace(chosen.model, **CHANGES.get(variant, {})))
    found = chosen.prepare(Run(folder))
    split = replace(found.split, test=few(found.split, lab.pick(tiny=4, quick=300, full=2000)))
    task: Any = RivalTranslation(
        split, found.tokeniser, found.config, found.tokens, found.longest, seed, variant
    )

    def report(measured: dict[str, Any]) -> None:
        if "gradient_norm" in measured:
            lab.report(f"{variant}, seed {seed}, step", measured["step"], measured["steps"])

    settings = {"variant": variant, "form": lab.form}
    trainer: Trainer[Any] = Trainer(task, chosen.recipe, Run(folder), settings, lab.device, report)
    try:
        model: Any = trainer.train()
    except DivergedError:
        return {"variant": variant, "seed": seed, "diverged": True}
    lines = list(Run(folder).measured())
    (test,) = [line["test"] for line in lines if "test" in line][-1:]
    return {
        "variant": variant,
        "seed": seed,
        "diverged": False,
        "parameters": parameters(model),
        "bleu": test["bleu"],
        "signature": test.get("bleu_signature"),
        "test_loss": test["loss"],
        "train_loss": train_loss(lab, task, model),
        "curve": [[x["step"], x["valid_loss"]] for x in lines if "valid_loss" in x],
    }
