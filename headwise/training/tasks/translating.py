"""From a sentence to its translation."""

from collections.abc import Sequence

import torch

from headwise.models import Beam, Strategy, Transformer
from headwise.training.data.tokenisers import Tokeniser

MOST = 1000
"""Tokens of a sentence beyond which it is none."""


def translate(
    model: Transformer,
    tokeniser: Tokeniser,
    sentences: Sequence[str],
    strategy: Strategy | None = None,
    together: int = 64,
) -> list[str]:
    """Translate sentences, those of similar length together; the order is kept.

    A translation has at most twice as many tokens as the sentence, and ten.
    """
    device = next(model.parameters()).device
    sources = [[*ids, tokeniser.end] for ids in tokeniser.encode_all(sentences)]
    longest = max(map(len, sources), default=0)
    if longest > MOST:
        raise ValueError(
            f"a sentence of {longest:,} tokens can't be translated, {MOST:,} are the most"
        )
    order = sorted(range(len(sources)), key=lambda number: len(sources[number]))
    said = [""] * len(sources)
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
            said[number] = tokeniser.decode(ids)
    return said
