"""Running text for language modelling, in its usual parts."""

import gzip
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from headwise.apps.train.data import corpora
from headwise.apps.train.data.download_cache import path_of


@dataclass(frozen=True)
class Text:
    """Text for training, validation and test."""

    train: str
    valid: str
    test: str


def read_text(source: str | Path) -> Text:
    """The text of a corpus by name, or of a UTF-8 file, split 90 : 5 : 5 like enwik8."""
    if source == corpora.ENWIK8.name:
        whole = gzip.decompress(path_of(corpora.ENWIK8, "enwik8.gz").read_bytes())
        cuts = (0, 90_000_000, 95_000_000, 100_000_000)  # no cut splits a character
        return Text(*(whole[a:b].decode() for a, b in pairwise(cuts)))
    if source == corpora.WIKITEXT_2.name:
        return Text(
            *(
                gzip.decompress(path_of(corpora.WIKITEXT_2, f"{part}.raw.gz").read_bytes()).decode()
                for part in ("train", "valid", "test")
            )
        )
    path = Path(source)
    if not path.is_file():
        raise ValueError(
            f"there is no text {str(source)!r}: it is not a file, and the corpora of text are "
            f"{corpora.ENWIK8.name}, {corpora.WIKITEXT_2.name}"
        )
    try:
        return split_text(path.read_text(encoding="utf-8"), path.name)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path.name} is not UTF-8 text: {error}") from error


def split_text(text: str, name: str) -> Text:
    """Split a text, in order, into 90 % for training, 5 % for validation and 5 % for test.

    >>> parts = split_text("abcdefghij" * 10, "letters")
    >>> len(parts.train), len(parts.valid), len(parts.test)
    (90, 5, 5)
    """
    first, second = len(text) * 90 // 100, len(text) * 95 // 100
    parts = Text(text[:first], text[first:second], text[second:])
    if not (parts.train and parts.valid and parts.test):
        raise ValueError(
            f"{name} is empty or too short to be split in three: {len(text)} characters"
        )
    return parts
