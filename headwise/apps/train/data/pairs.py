"""Sentences and their translations, split so that no test sentence is trained on."""

import hashlib
import io
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from headwise.apps.train.data import corpora
from headwise.apps.train.data.download_cache import path_of

LONGEST = 10_000
"""The most characters of a sentence; a longer line means that the file holds something else."""

HELD_OUT = 0.02
"""The share of the sentences in each of valid and test."""

Pair = tuple[str, str]


@dataclass(frozen=True)
class Split:
    """Pairs for training, validation and test; no English sentence is in two of them."""

    train: list[Pair]
    valid: list[Pair]
    test: list[Pair]


def part_of(english: str) -> str:
    """Choose train, valid or test by the letters and digits of the English sentence.

    All translations of a sentence, and spellings that differ only in case or punctuation, go into
    the same part, and a sentence keeps its part when the corpus grows.

    >>> part_of("Go!") == part_of("go.")
    True
    """
    letters = "".join(filter(str.isalnum, english.casefold()))
    digest = hashlib.sha256(letters.encode()).digest()
    place = int.from_bytes(digest[:8], "big") / 2**64
    if place < HELD_OUT:
        return "test"
    return "valid" if place < 2 * HELD_OUT else "train"


def split(pairs: Iterable[Pair]) -> Split:
    """Sort the pairs into their parts, in order."""
    parts: dict[str, list[Pair]] = {"train": [], "valid": [], "test": []}
    for pair in pairs:
        parts[part_of(pair[0])].append(pair)
    for name, part in parts.items():
        if not part:
            raise ValueError(
                f"no pair falls into the part {name!r} of a corpus of "
                f"{sum(map(len, parts.values()))} pairs: it is empty or far too small to be split "
                f"(valid and test take {HELD_OUT:.0%} of the English sentences each)"
            )
    return Split(**parts)


def parse(lines: Iterable[str], name: str) -> list[Pair]:
    """Pairs from lines `english TAB other`; anything after a second tab is ignored.

    >>> parse(["Go.\\tVa !\\tCC-BY 2.0"], "example")
    [('Go.', 'Va !')]
    """
    pairs = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        english, *rest = line.rstrip("\n").split("\t")
        if not rest or not english.strip() or not rest[0].strip():
            raise ValueError(
                f"{name}, line {number}: expected `english TAB translation`, got {line[:60]!r}"
            )
        if max(len(english), len(rest[0])) > LONGEST:
            raise ValueError(
                f"{name}, line {number}: {max(len(english), len(rest[0])):,} characters, "
                f"more than {LONGEST:,}: is this a file of pairs?"
            )
        pairs.append((english.strip(), rest[0].strip()))
    if not pairs:
        raise ValueError(f"{name} has no pairs: it is empty")
    return pairs


def read(source: str | Path) -> list[Pair]:
    """The pairs of a corpus by name, or of a file of lines `english TAB other`."""
    if source == corpora.TATOEBA_EN_FR.name:
        bundle = zipfile.ZipFile(path_of(corpora.TATOEBA_EN_FR, "fra-eng.zip"))
        with bundle, bundle.open("fra.txt") as file:
            return parse(io.TextIOWrapper(file, "utf-8", newline="\n"), str(source))
    for corpus in (corpora.HELP_EN_DE, corpora.HELP_EN_ZH):
        if source == corpus.name:
            with path_of(corpus, "pairs.tsv").open(encoding="utf-8", newline="\n") as file:
                return parse(file, str(source))
    path = Path(source)
    if not path.is_file():
        raise ValueError(
            f"there are no pairs {str(source)!r}: it is not a file, and the corpora of pairs are "
            f"{corpora.TATOEBA_EN_FR.name}, {corpora.HELP_EN_DE.name}, {corpora.HELP_EN_ZH.name}"
        )
    try:
        with path.open(encoding="utf-8", newline="\n") as file:
            return parse(file, path.name)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path.name} is not UTF-8 text: {error}") from error
