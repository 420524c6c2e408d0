"""Language modelling: predict each token from those before it."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.models import GPT, GPTConfig
from headwise.training.data.batches import Shuffled, generator
from headwise.training.data.texts import Text
from headwise.training.data.tokenisers import Tokeniser, chunks
from headwise.training.tasks.metrics import bits_per_byte


class TextBatch(NamedTuple):
    """tokens (B, context + 1): all but the last are inputs, all but the first are targets."""

    tokens: Tensor


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
    """Learn to continue this text; a batch is `size` windows of `context` tokens."""

    text: Text
    tokeniser: Tokeniser
    config: GPTConfig
    context: int
    size: int
    seed: int
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
        return TextBatch(self.tokens[index.to(device, non_blocking=True)].long())

    def count(self, batch: TextBatch) -> int:
        """One prediction per token."""
        return batch.tokens.shape[0] * (batch.tokens.shape[1] - 1)

    def sizes(self, batch: TextBatch) -> dict[str, int]:
        """All windows are full."""
        return {"batch": batch.tokens.shape[0], "queries": batch.tokens.shape[1] - 1}

    def loss(self, model: nn.Module, batch: TextBatch, smoothing: float) -> Tensor:
        """Cross-entropy in nats, summed."""
        logits = model(batch.tokens[:, :-1])  # (B, context, vocabulary)
        return F.cross_entropy(
            logits.flatten(0, 1).float(),
            batch.tokens[:, 1:].flatten(),
            label_smoothing=smoothing,
            reduction="sum",
        )

    def evaluate(self, model: nn.Module, device: torch.device) -> dict[str, float]:
        """Bits per byte of the first part of the validation text."""
        text = self.text.valid[: max(100_000, 16 * self.context)]
        tokens = numbers(text, self.tokeniser)
        nats = text_loss(model, tokens.to(device), self.context, stride=self.context)
        return {
            "valid_loss": nats / (len(tokens) - 1),
            "valid_bits_per_byte": bits_per_byte(nats, text),
        }

    def judge(self, model: nn.Module, device: torch.device) -> dict[str, Any]:
        """Bits per byte of the test text; each token is predicted from at least half a context."""
        tokens = numbers(self.text.test, self.tokeniser)
        nats = text_loss(model, tokens.to(device), self.context, stride=max(1, self.context // 2))
        return {
            "bits_per_byte": bits_per_byte(nats, self.text.test),
            "loss": nats / (len(tokens) - 1),
            "perplexity": math.exp(nats / (len(tokens) - 1)),
            "tokens": len(tokens) - 1,
            "bytes": len(self.text.test.encode()),
            "context": self.context,
        }


def text_loss(
    model: nn.Module, tokens: Tensor, context: int, stride: int, together: int = 8
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
        full = len(rows) == together or number == len(firsts) - 1
        next_is_short = not full and last - firsts[number + 1] < context
        if full or next_is_short or len(window) <= context:
            total += _window_loss(model, rows)
            rows = []
    return total


def _window_loss(model: nn.Module, rows: list[tuple[Tensor, int]]) -> float:
    windows = torch.stack([window for window, _ in rows])
    logits = model(windows[:, :-1]).float()
    nats = F.cross_entropy(logits.transpose(1, 2), windows[:, 1:], reduction="none")  # (B, N)
    return sum(
        float(row[counted:].double().sum()) for row, (_, counted) in zip(nats, rows, strict=True)
    )
