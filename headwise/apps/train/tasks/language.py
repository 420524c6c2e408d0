"""Language modelling: predict each token from those before it."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.apps.train.data.batches import Shuffled, generator
from headwise.apps.train.data.texts import Text
from headwise.apps.train.ranks import ALONE, TrainingRanks
from headwise.apps.train.tasks.metrics import bits_per_byte
from headwise.models import GPT, GPTConfig
from headwise.models.trained import Tokeniser, chunks


class TextBatch(NamedTuple):
    """Windows of a text: inputs (B, context), and for each the token after it, (B, context)."""

    inputs: Tensor
    targets: Tensor


def numbers(text: str, tokeniser: Tokeniser, together: int = 256) -> Tensor:
    """The token ids (N,) int32 of a long text, after a start token so that all are predicted."""
    parts = [torch.tensor([tokeniser.start], dtype=torch.int32)]
    waiting: list[str] = []
    for chunk in chunks(text):
        waiting.append(chunk)
        if len(waiting) == together:
            parts.append(_flat(tokeniser.encode_all(waiting)))
            waiting = []
    if waiting:
        parts.append(_flat(tokeniser.encode_all(waiting)))
    return torch.cat(parts)


def _flat(lists: list[list[int]]) -> Tensor:
    return torch.tensor([number for each in lists for number in each], dtype=torch.int32)


@dataclass
class Language:
    """Learn to continue this text; a batch is `size` windows of `context` tokens.

    Of several `ranks`, each computes a part of every batch, in training and in evaluation.
    """

    text: Text
    tokeniser: Tokeniser
    config: GPTConfig
    context: int
    size: int
    seed: int
    ranks: TrainingRanks = ALONE
    unit: ClassVar[str] = "tokens"

    @cached_property
    def tokens(self) -> Tensor:
        """The training text, (N,)."""
        return numbers(self.text.train, self.tokeniser)

    @cached_property
    def order(self) -> Shuffled:
        """The windows that make up each batch."""
        blocks = (len(self.tokens) - 1) // self.context - 1  # one less: every epoch is shifted
        if blocks < 1:
            raise ValueError(
                f"the training text has {len(self.tokens) - 1} tokens, too few for two windows of "
                f"{self.context}; use a longer text or a shorter context"
            )
        return Shuffled(blocks, self.size, self.seed)

    def build(self) -> nn.Module:
        """A new GPT."""
        return GPT(self.config)

    def batch(self, number: int, device: torch.device) -> TextBatch:
        """Windows of the text; each epoch cuts it in different places."""
        if self.tokens.device != device:
            self.tokens = self.tokens.to(device)
        shift = generator(self.seed, self.order.epoch_of(number), 1)
        first = int(torch.randint(self.context, (), generator=shift))
        starts = self.order.batch(number) * self.context + first  # (B,)
        index = starts[:, None] + torch.arange(self.context + 1)  # (B, context + 1)
        windows = self.tokens[index.to(device, non_blocking=True)].long()
        return TextBatch(windows[:, :-1], windows[:, 1:])

    def count(self, batch: TextBatch) -> int:
        """One prediction per token."""
        return batch.inputs.numel()

    def sizes(self, batch: TextBatch) -> dict[str, int]:
        """All windows are full."""
        return {"batch": batch.inputs.shape[0], "queries": batch.inputs.shape[1]}

    def loss(self, model: nn.Module, batch: TextBatch, smoothing: float) -> Tensor:
        """Cross-entropy in nats, summed over this rank's part of the batch."""
        logits = model(self.ranks.part(batch.inputs))  # (B, context, vocabulary)
        return F.cross_entropy(
            at_least_float(logits.flatten(0, 1)),
            self.ranks.part(batch.targets).flatten(),
            label_smoothing=smoothing,
            reduction="sum",
        )

    def evaluate(self, model: nn.Module, device: torch.device) -> dict[str, float]:
        """Bits per byte of the first part of the validation text."""
        text = self.text.valid[: max(100_000, 16 * self.context)]
        tokens = numbers(text, self.tokeniser)
        nats = text_loss(model, tokens.to(device), self.context, self.context, self.ranks)
        return {
            "valid_loss": nats / (len(tokens) - 1),
            "valid_bits_per_byte": bits_per_byte(nats, text),
        }

    def judge(self, model: nn.Module, device: torch.device) -> dict[str, Any]:
        """Bits per byte of the test text; each token is predicted from at least half a context."""
        tokens = numbers(self.text.test, self.tokeniser)
        stride = max(1, self.context // 2)
        nats = text_loss(model, tokens.to(device), self.context, stride, self.ranks)
        return {
            "bits_per_byte": bits_per_byte(nats, self.text.test),
            "loss": nats / (len(tokens) - 1),
            "perplexity": math.exp(nats / (len(tokens) - 1)),
            "tokens": len(tokens) - 1,
            "bytes": len(self.text.test.encode()),
            "context": self.context,
        }


def text_loss(
    model: nn.Module,
    tokens: Tensor,
    context: int,
    stride: int,
    ranks: TrainingRanks = ALONE,
    together: int = 8,
) -> float:
    """The summed loss, in nats, of all tokens (N,) but the first, by windows of `context` tokens.

    A window starts `stride` after the one before and counts only the tokens that one did not reach,
    so every token after the first window is predicted from at least context - stride others.
    """
    total = 0.0
    last = len(tokens) - 1
    firsts = list(range(0, max(1, last - context + stride), stride))
    rows: list[tuple[Tensor, int]] = []
    for number, first in enumerate(firsts):
        window = tokens[first : first + context + 1].long()
        rows.append((window, 0 if number == 0 else context - stride))
        full = len(rows) == together * ranks.rows or number == len(firsts) - 1
        next_is_short = not full and last - firsts[number + 1] < context
        if full or next_is_short or len(window) <= context:
            total += _window_loss(model, rows, ranks)
            rows = []
    return ranks.total(total)


def _window_loss(model: nn.Module, rows: list[tuple[Tensor, int]], ranks: TrainingRanks) -> float:
    """The loss of this rank's part of windows; of each, the tokens from a number on are counted."""
    length = len(rows[0][0]) - 1
    rows = rows + [(rows[0][0], length)] * (-len(rows) % ranks.rows)  # every rank has a window
    windows = torch.stack([window for window, _ in rows])
    counted = torch.tensor([number for _, number in rows], device=windows.device)
    kept = ranks.part(torch.arange(length, device=windows.device) >= counted[:, None])  # (B, N)
    logits = at_least_float(model(ranks.part(windows[:, :-1])))
    targets = ranks.part(windows[:, 1:])
    nats = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")  # (B, N)
    return float(nats.double().masked_fill(~kept, 0.0).sum())


def at_least_float(x: Tensor) -> Tensor:
    """A tensor in float32, or in float64 if it is that."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
