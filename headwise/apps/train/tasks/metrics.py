"""Metrics as others report them: BLEU, chrF, bits per byte."""

import math
from collections.abc import Sequence
from typing import Any


def bleu(said: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, Any]:
    """BLEU and chrF of translations, each against all its references, with sacrebleu's signatures.

    `single` is BLEU against the first reference of each. If sacrebleu is missing, "bleu" is None.

    >>> scores = bleu(["le chat dort sur le tapis ."], [["le chat dort sur le tapis ."]])
    >>> round(scores["bleu"], 1)
    100.0
    """
    try:
        from sacrebleu.metrics.bleu import BLEU
        from sacrebleu.metrics.chrf import CHRF
    except ModuleNotFoundError:
        return {"bleu": None, "why": "sacrebleu is not installed: pip install 'headwise[train]'"}
    most = max(map(len, references))
    # sacrebleu expects the n-th references of all sentences together, None if there are fewer.
    streams: Any = [
        [each[n] if n < len(each) else None for each in references] for n in range(most)
    ]
    first = [[each[0] for each in references]]
    counts, characters = BLEU(), CHRF()
    score = counts.corpus_score(list(said), streams)
    return {
        "bleu": score.score,
        "bleu_signature": str(counts.get_signature()),
        "single": BLEU().corpus_score(list(said), first).score,
        "chrf": characters.corpus_score(list(said), streams).score,
        "chrf_signature": str(characters.get_signature()),
    }


def bits_per_byte(nats: float, text: str) -> float:
    """The summed loss of a text, in nats, as bits per byte: comparable across tokenisers.

    >>> bits_per_byte(4 * math.log(2), "four")
    1.0
    """
    return nats / math.log(2) / len(text.encode())
