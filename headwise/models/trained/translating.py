"""Translate sentences with a trained Transformer or LSTM."""

from collections.abc import Sequence

import torch

from headwise.models.generate import Beam, Strategy
from headwise.models.lstm import LSTM
from headwise.models.trained.tokenisers import Tokeniser
from headwise.models.transformer import Transformer

MOST = 1000
"""The longest sentence, in tokens."""


def translate(
    model: Transformer | LSTM,
    tokeniser: Tokeniser,
    sentences: Sequence[str],
    strategy: Strategy | None = None,
    together: int = 64,
) -> list[str]:
    """Translate sentences in batches of similar length; the results keep the order.

    A translation has at most 2 n + 10 tokens, where n is the longest sentence of its batch.
    """
    device = next(model.parameters()).device
    sources = [[*ids, tokeniser.end] for ids in tokeniser.encode_all(sentences)]
    longest = max(map(len, sources), default=0)
    if longest > MOST:
        raise ValueError(
            f"a sentence of {longest:,} tokens can't be translated; at most {MOST:,} can"
        )
    order = sorted(range(len(sources)), key=lambda number: len(sources[number]))
    translations = [""] * len(sources)
    for first in range(0, len(order), together):
        chosen = order[first : first + together]
        lengths = torch.tensor([len(sources[number]) for number in chosen])
        width = int(lengths.max())
        padded = [
            sources[number] + [tokeniser.pad] * (width - len(sources[number])) for number in chosen
        ]
        out = model.generate(
            torch.tensor(padded, device=device),
            2 * width + 10,
            source_lengths=lengths.to(device),
            strategy=strategy or Beam(),
        )
        for number, ids in zip(chosen, out.tolist(), strict=True):
            translations[number] = tokeniser.decode(ids)
    return translations
