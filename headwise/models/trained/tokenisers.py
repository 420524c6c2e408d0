"""Byte-level subwords: any text can be encoded, and decodes to itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any

BYTES = 256
"""The smallest vocabulary: one token per byte."""

LONGEST = 4  # bytes of a character in UTF-8, so at most this many tokens spell one
BROKEN = "\ufffd"


class Tokeniser:
    """Byte-pair encoding learnt from text, with three special tokens: pad, start and end.

    >>> tokeniser = Tokeniser.learn(["the cat sat on the mat"] * 10, size=270)
    >>> ids = tokeniser.encode("the cat 🐈")
    >>> tokeniser.pieces(ids)[:2], tokeniser.decode(ids)
    (['the', ' cat'], 'the cat 🐈')
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner  # a tokenizers.Tokenizer
        texts: int = inner.get_vocab_size()
        self.pad, self.start, self.end = texts, texts + 1, texts + 2

    @property
    def size(self) -> int:
        """The size of the vocabulary, with pad, start and end."""
        return self.end + 1

    @classmethod
    def learn(cls, texts: Iterable[str], size: int) -> Tokeniser:
        """Learn subwords from texts; `size` counts them with pad, start and end.

        The special tokens are outside the vocabulary of the text, so "<pad>" written in a text is
        five characters and not padding.
        """
        tokenizers = _tokenizers()
        if size < BYTES + 3:
            raise ValueError(
                f"a vocabulary of {size} tokens is too small; it needs at least {BYTES + 3}: "
                f"{BYTES} bytes and 3 special tokens"
            )
        inner = tokenizers.Tokenizer(tokenizers.models.BPE())
        inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=size - 3,
            initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
            max_token_length=32,  # a ruled line of a table is not a word
        )
        inner.train_from_iterator(map(whole, texts), trainer)
        return cls(inner)

    def encode(self, text: str) -> list[int]:
        """The token ids of a text."""
        return list(self.inner.encode(whole(text)).ids)

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of many texts, computed on all cores."""
        return [list(each.ids) for each in self.inner.encode_batch_fast([*map(whole, texts)])]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids; pad, start and end are skipped."""
        return str(self.inner.decode([i for i in ids if 0 <= i < self.pad]))

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """Each token for a reader: its text, or a sign for pad, start and end."""
        signs = {self.pad: "·", self.start: "⟨start⟩", self.end: "⟨end⟩"}
        found = []
        for sign, part in groupby(ids, signs.get):
            same = list(part)
            found += (
                whole_characters(same, self.inner.decode) if sign is None else [sign] * len(same)
            )
        return found

    def save(self, path: Path) -> None:
        """Write a tokenizer.json, which other libraries can read too."""
        path.write_text(self.inner.to_str(), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Tokeniser:
        """Read a tokenizer.json that `save` wrote."""
        tokenizers = _tokenizers()
        try:
            return cls(tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8")))
        except Exception as error:  # tokenizers raises plain Exceptions
            raise ValueError(f"{path} is not a tokeniser: {error}") from error


def whole(text: str) -> str:
    """The text itself; ValueError if it contains half a character, which can't be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text has a lone surrogate at character {error.start}, which can't be encoded; "
            "read the file with errors='replace'"
        ) from error
    return text


def whole_characters(ids: Iterable[int], decode: Callable[[list[int]], str]) -> list[str]:
    """The text of each token; a character that several tokens spell goes to the first of them.

    Byte-level tokens may split a character such as 中, and its parts have no text of their own.

    >>> spelt = {1: b"to ", 2: b"\\xe4\\xb8", 3: b"\\xad", 4: b"."}
    >>> whole_characters([1, 2, 3, 4],
    ...                  lambda ids: b"".join(map(spelt.get, ids)).decode(errors="replace"))
    ['to ', '中', '', '.']
    """
    found: list[str] = []
    waiting: list[int] = []
    for id in ids:
        waiting.append(id)
        text = decode(waiting)
        if not text.endswith(BROKEN) or len(waiting) == LONGEST:
            found += [text, *[""] * (len(waiting) - 1)]
            waiting = []
    return found + [decode([id]) for id in waiting]


def chunks(text: str, characters: int = 1 << 16) -> Iterator[str]:
    """A long text in parts of at most `characters`, cut after a line if possible."""
    start = 0
    while start < len(text):
        end = text.rfind("\n", start, start + characters) + 1
        end = end if end > start else start + characters
        yield text[start:end]
        start = end


def _tokenizers() -> ModuleType:
    """The optional package, which `import headwise` must do without."""
    try:
        import tokenizers
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            "tokenisers need the package tokenizers: pip install 'headwise[train]'",
            name=missing.name,
        ) from missing
    return tokenizers
