"""Metrics as others report them: BLEU, chrF, bits per byte."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class SentenceCounts:
    """The counts behind BLEU for each sentence: both lengths, and how many 1- to 4-grams match.

    `signature` is sacrebleu's.
    """

    counts: Sequence[Sequence[int]]
    signature: str

    def bleu(self) -> float:
        """The BLEU of all sentences together."""
        return bleu_of([sum(each) for each in zip(*map(with_totals, self.counts), strict=True)])


def sentence_counts(said: Sequence[str], references: Sequence[Sequence[str]]) -> SentenceCounts:
    """Count in each translation what BLEU is computed of.

    >>> found = sentence_counts(["le chat dort sur le tapis ."], [["le chat dort sur un tapis ."]])
    >>> found.counts, round(found.bleu(), 1)
    ([[7, 7, 6, 4, 2, 1]], 48.9)
    """
    from sacrebleu.metrics.bleu import BLEU

    metric, found = BLEU(effective_order=True), []  # which counts the same, and does not warn
    for mine, theirs in zip(said, references, strict=True):
        score = metric.sentence_score(mine, list(theirs))
        found.append([score.sys_len, score.ref_len, *score.counts])
    return SentenceCounts(found, _signature(references))


def _signature(references: Sequence[Sequence[str]]) -> str:
    """sacrebleu's signature of a score against these references."""
    return str(bleu(["."] * len(references), references)["bleu_signature"])


def with_totals(counts: Sequence[int]) -> list[int]:
    """The counts of a sentence, and how many 1- to 4-grams it has.

    >>> with_totals([3, 4, 2, 1, 0, 0])
    [3, 4, 2, 1, 0, 0, 3, 2, 1, 0]
    """
    return [*counts, *(max(0, counts[0] - shorter) for shorter in range(4))]


def bleu_of(sums: Sequence[float]) -> float:
    """BLEU, as sacrebleu computes it, of the sums of `with_totals` over sentences."""
    from sacrebleu.metrics.bleu import BLEU

    said, referred, *grams = map(int, sums)
    return float(BLEU.compute_bleu(grams[:4], grams[4:], said, referred, "exp").score)


def bits_per_byte(nats: float, text: str) -> float:
    """The summed loss of a text, in nats, as bits per byte: comparable across tokenisers.

    >>> bits_per_byte(4 * math.log(2), "four")
    1.0
    """
    return nats / math.log(2) / len(text.encode())
