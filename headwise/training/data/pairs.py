"""Sentences and their translations, and a split that no sentence of the test leaks through."""

import hashlib
import io
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from headwise.training.data import corpora
from headwise.training.data.download_cache import path_of

LONGEST = 10_000
"""Characters of a sentence beyond which a file is surely not what it was taken for."""

HELD_OUT = 0.02
"""The share of the sentences in each of valid and test."""

Pair = tuple[str, str]


@dataclass(frozen=True)
class Split:
    """Pairs to learn from, to choose by, and to be judged by; no English sentence is in two."""

    train: list[Pair]
    valid: list[Pair]
    test: list[Pair]


def part_of(english: str) -> str:
    """train, valid or test: a function of the letters and digits of the English sentence alone.

    So all translations of a sentence go together, with every spelling of it that differs in case
    or punctuation only, and a part keeps its sentences when a corpus grows.

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
    """Deal the pairs into their parts, in their order."""
    parts: dict[str, list[Pair]] = {"train": [], "valid": [], "test": []}
    for pair in pairs:
        parts[part_of(pair[0])].append(pair)
    for name, part in parts.items():
        if not part:
            raise ValueError(
                f"no pair falls into the part {name!r} of a corpus of "
                f"{sum(map(len, parts.values()))} pairs: it is empty or far too small to be split "
                f"(each of valid and test takes {HELD_OUT:.0%} of the English sentences)"
            )
    return Split(**parts)


def parse(lines: Iterable[str], name: str) -> list[Pair]:
    """Pairs out of lines `english TAB other`; what follows a second tab is left out.

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
                f"{name}, line {number}: {max(len(english), len(rest[0])):,} characters, more than "
                f"the {LONGEST:,} of any sentence: is this a file of pairs?"
            )
        pairs.append((english.strip(), rest[0].strip()))
    if not pairs:
        raise ValueError(f"{name} has no pairs: it is empty")
    return pairs


def read(source: str | Path) -> list[Pair]:
    """The pairs of a corpus by its name, or of a file of lines `english TAB other`."""
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
            f"there are no pairs {str(source)!r}: it is no file, and the corpora of pairs are "
            f"{corpora.TATOEBA_EN_FR.name}, {corpora.HELP_EN_DE.name}, {corpora.HELP_EN_ZH.name}"
        )
    try:
        with path.open(encoding="utf-8", newline="\n") as file:
            return parse(file, path.name)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path.name} is not UTF-8 text: {error}") from error
