"""Subwords over bytes: any text becomes numbers and comes back the same."""

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

try:
    import tokenizers
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "tokenisers need the package tokenizers: pip install 'headwise[train]'", name=missing.name
    ) from missing

from headwise.training.data.characters import whole_characters

BYTES = 256
"""The smallest vocabulary: one number a byte."""


class Tokeniser:
    """Byte-pair encoding learnt from text, and three numbers no text can produce: pad, start, end.

    >>> tokeniser = Tokeniser.learn(["the cat sat on the mat"] * 10, size=270)
    >>> ids = tokeniser.encode("the cat 🐈")
    >>> tokeniser.pieces(ids)[:2], tokeniser.decode(ids)
    (['the', ' cat'], 'the cat 🐈')
    """

    def __init__(self, inner: "tokenizers.Tokenizer") -> None:
        self.inner = inner
        texts = inner.get_vocab_size()
        self.pad, self.start, self.end = texts, texts + 1, texts + 2

    @property
    def size(self) -> int:
        """How many numbers there are, pad, start and end included."""
        return self.end + 1

    @classmethod
    def learn(cls, texts: Iterable[str], size: int) -> "Tokeniser":
        """Find the subwords of a text; `size` counts them with pad, start and end.

        The special numbers stand outside the vocabulary of the text, so that "<pad>" written in a
        text is five characters and not the padding.
        """
        if size < BYTES + 3:
            raise ValueError(f"a vocabulary needs {BYTES} bytes and 3 special tokens, got {size}")
        inner = tokenizers.Tokenizer(tokenizers.models.BPE())
        inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=size - 3,
            initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
            max_token_length=32,  # a ruled line of a table is no word
        )
        inner.train_from_iterator(map(whole, texts), trainer)
        return cls(inner)

    def encode(self, text: str) -> list[int]:
        """The numbers of a text."""
        return list(self.inner.encode(whole(text)).ids)

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """The numbers of each of many texts, on all cores."""
        return [list(each.ids) for each in self.inner.encode_batch_fast([*map(whole, texts)])]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of numbers; pad, start and end say nothing."""
        return str(self.inner.decode([i for i in ids if 0 <= i < self.pad]))

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """Each number as a reader should see it: its text, or a sign for what has none."""
        signs = {self.pad: "·", self.start: "⟨start⟩", self.end: "⟨end⟩"}
        found = []
        for sign, part in groupby(ids, signs.get):
            same = list(part)
            found += (
                whole_characters(same, self.inner.decode) if sign is None else [sign] * len(same)
            )
        return found

    def save(self, path: Path) -> None:
        """Write it as a tokenizer.json, which other libraries read too."""
        path.write_text(self.inner.to_str(), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "Tokeniser":
        """Read a tokenizer.json that `save` wrote."""
        try:
            text = path.read_text(encoding="utf-8")
            json.loads(text)
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} is no tokeniser: {error}") from error
        return cls(tokenizers.Tokenizer.from_str(text))


def whole(text: str) -> str:
    """The text, unless it holds half a character: such a string has no bytes to encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text has a lone surrogate at character {error.start}, which is no character; "
            "read the file with errors='replace'"
        ) from error
    return text


def chunks(text: str, characters: int = 1 << 16) -> Iterator[str]:
    """A long text in parts that end at the end of a line, or of the part where no line ends."""
    start = 0
    while start < len(text):
        end = text.rfind("\n", start, start + characters) + 1
        end = end if end > start else start + characters
        yield text[start:end]
        start = end
