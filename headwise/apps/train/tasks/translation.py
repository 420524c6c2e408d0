"""Translation: predict each token of a translation from the sentence and the tokens before it."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.apps.train.data.batches import ByLength
from headwise.apps.train.data.pairs import Pair, Split
from headwise.apps.train.tasks.metrics import bleu
from headwise.models import LSTM, Greedy, Transformer, TransformerConfig
from headwise.models.trained import Tokeniser, translate


class SentenceBatch(NamedTuple):
    """source (B, S) with end tokens, padded; lengths (B,); target (B, T + 1), from start to end."""

    source: Tensor
    lengths: Tensor
    target: Tensor
    predictions: int


class Sentences:
    """Pairs as token ids, ready for batching; pairs longer than `longest` are left out."""

    def __init__(self, pairs: Sequence[Pair], tokeniser: Tokeniser, longest: int) -> None:
        sources = tokeniser.encode_all([source for source, _ in pairs])
        targets = tokeniser.encode_all([target for _, target in pairs])
        both = [
            (source, target)
            for source, target in zip(sources, targets, strict=True)
            if max(len(source), len(target)) < longest
        ]
        if not both:
            raise ValueError(
                f"none of the {len(pairs)} pairs is shorter than {longest} tokens: nothing to learn"
            )
        self.left_out = len(pairs) - len(both)
        self.pad = tokeniser.pad
        self.sources = Flat([[*source, tokeniser.end] for source, _ in both])
        self.targets = Flat([[tokeniser.start, *target, tokeniser.end] for _, target in both])
        self.lengths = [(len(target) + 1, len(source) + 1) for source, target in both]

    def batch(self, examples: list[int], device: torch.device) -> SentenceBatch:
        """A batch of these pairs, padded to the longest of them."""
        chosen = torch.tensor(examples)
        count = sum(self.lengths[example][0] for example in examples)
        source, target = (
            side.padded(chosen, self.pad, device) for side in (self.sources, self.targets)
        )
        return SentenceBatch(source, self.sources.sizes[chosen].to(device), target, count)


class Flat:
    """Lists of integers, concatenated in one tensor."""

    def __init__(self, lists: Iterable[list[int]]) -> None:
        lists = list(lists)
        self.values = torch.tensor([number for each in lists for number in each])
        self.sizes = torch.tensor([len(each) for each in lists])
        self.starts = self.sizes.cumsum(0) - self.sizes

    def padded(self, chosen: Tensor, pad: int, device: torch.device) -> Tensor:
        """The chosen lists (B,) as rows of one tensor (B, longest)."""
        sizes = self.sizes[chosen]
        places = torch.arange(int(sizes.max()))  # (longest,)
        inside = places < sizes[:, None]  # (B, longest)
        index = (self.starts[chosen, None] + places).clamp_max(len(self.values) - 1)
        return self.values[index].where(inside, pad).to(device, non_blocking=True)


@dataclass
class Translation:
    """Learn to translate these pairs; `tokens` padded tokens per batch."""

    split: Split
    tokeniser: Tokeniser
    config: TransformerConfig
    tokens: int
    longest: int
    seed: int
    unit: ClassVar[str] = "tokens"

    @cached_property
    def train(self) -> Sentences:
        """The training pairs."""
        return Sentences(self.split.train, self.tokeniser, self.longest)

    @cached_property
    def valid(self) -> Sentences:
        """The validation pairs."""
        return Sentences(self.split.valid, self.tokeniser, self.longest)

    @cached_property
    def order(self) -> ByLength:
        """The pairs that make up each batch."""
        return ByLength(self.train.lengths, self.tokens, self.seed)

    def build(self) -> nn.Module:
        """A new Transformer."""
        return Transformer(self.config)

    def batch(self, number: int, device: torch.device) -> SentenceBatch:
        """Pairs of similar length."""
        return self.train.batch(self.order.batch(number), device)

    def count(self, batch: SentenceBatch) -> int:
        """One prediction per token of the translation, its end included."""
        return batch.predictions

    def sizes(self, batch: SentenceBatch) -> dict[str, int]:
        """As long as the longest sentence of each language."""
        size, queries = batch.target[:, :-1].shape
        return {"batch": size, "queries": queries, "context": batch.source.shape[1]}

    def loss(self, model: nn.Module, batch: SentenceBatch, smoothing: float) -> Tensor:
        """Cross-entropy in nats, summed."""
        logits = model(batch.source, batch.target[:, :-1], source_lengths=batch.lengths)
        return F.cross_entropy(
            logits.flatten(0, 1).float(),  # (B · T, vocabulary)
            batch.target[:, 1:].flatten(),
            ignore_index=self.tokeniser.pad,
            label_smoothing=smoothing,
            reduction="sum",
        )

    def evaluate(self, model: nn.Module, device: torch.device) -> dict[str, Any]:
        """The loss per token on the validation pairs, and the translations of some of them."""
        assert isinstance(model, Transformer | LSTM)
        some = list(by_sentence(self.split.valid))[:: max(1, len(self.split.valid) // 3)][:3]
        translations = translate(model, self.tokeniser, some, Greedy())
        return {
            "valid_loss": self.mean_loss(model, self.valid, device),
            "samples": list(zip(some, translations, strict=True)),
        }

    def mean_loss(self, model: nn.Module, sentences: Sentences, device: torch.device) -> float:
        """Nats per token."""
        order = ByLength(sentences.lengths, self.tokens, seed=0)
        total, count = 0.0, 0
        for number in range(order.epoch_length):
            batch = sentences.batch(order.batch(number), device)
            total += float(self.loss(model, batch, smoothing=0.0))
            count += batch.predictions
        return total / count

    def judge(self, model: nn.Module, device: torch.device) -> dict[str, Any]:
        """Loss and BLEU on the test sentences; all translations of a sentence are references."""
        assert isinstance(model, Transformer | LSTM)
        test = Sentences(self.split.test, self.tokeniser, self.longest)
        loss = self.mean_loss(model, test, device)
        references = by_sentence(self.split.test)
        translations = translate(model, self.tokeniser, list(references))
        return {
            "loss": loss,
            "perplexity": math.exp(loss),
            "sentences": len(references),
            **bleu(translations, list(references.values())),
        }


def by_sentence(pairs: Iterable[Pair]) -> dict[str, list[str]]:
    """Each English sentence with all its translations.

    >>> by_sentence([("Go.", "Va !"), ("Hi.", "Salut."), ("Go.", "Marche.")])
    {'Go.': ['Va !', 'Marche.'], 'Hi.': ['Salut.']}
    """
    found: dict[str, list[str]] = {}
    for english, other in pairs:
        found.setdefault(english, []).append(other)
    return found
