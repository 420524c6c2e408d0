"""Four heads made by hand, so that there is something to look at without a trained model.

Every token writes one key: where it stands (rotary features) and which word it is (a vector hashed
from its letters). All heads read the same keys, and a head is nothing but a question put to them:
its query. So what a head does can be told from how it was made, and checked in its map.
"""

import hashlib
import math
import re
from dataclasses import dataclass

import torch
from torch import Tensor

import headwise as hw

SENTENCE = "the cat sat on the mat because the cat was tired"
"""What to look at when nothing is given: words that come back."""

TOKEN = re.compile(r"[\u3040-\u9fff]|[^\W\u3040-\u9fff]+(?:['’]\w+)*|[^\w\s\x00-\x1f\x7f]")
"""A Chinese or Japanese character, a word with its apostrophes, or a mark."""

HALF = 64
"""Entries for the place, and as many for the word."""


@dataclass(frozen=True)
class Head:
    """A head's name and the question its queries ask."""

    name: str
    asks: str


HEADS = (
    Head("previous token", "who stands right before me?"),
    Head("same word", "where was my word said before?"),
    Head("first token", "who stands at the beginning?"),
    Head("neighbours", "who stands near me, the nearer the better?"),
)


def choose(wanted: str | None) -> tuple[int, ...]:
    """The heads someone asked for by number or by the start of a name; all of them for None.

    >>> choose("same"), choose("0"), choose(None)
    ((1,), (0,), (0, 1, 2, 3))
    """
    if wanted is None:
        return tuple(range(len(HEADS)))
    for number, head in enumerate(HEADS):
        if wanted == str(number) or (wanted and head.name.startswith(wanted.lower())):
            return (number,)
    known = ", ".join(f"{number} ({head.name})" for number, head in enumerate(HEADS))
    raise ValueError(f"there is no head {wanted!r}; the heads are {known}")


@dataclass(frozen=True)
class Sight:
    """A text and what the heads did with it: tokens N, statistics (1, 4, N), maps (1, 4, N, N)."""

    tokens: tuple[str, ...]
    seen: hw.Observation
    maps: hw.AttentionMap


def tokenise(text: str) -> tuple[str, ...]:
    """Words, single CJK characters and punctuation marks.

    >>> tokenise("Don't panic, 世界!")
    ("Don't", 'panic', ',', '世', '界', '!')
    """
    return tuple(TOKEN.findall(text))


def look_at(text: str) -> Sight:
    """Run the four heads over a text, under a causal mask.

    >>> sight = look_at("to be or not to be")
    >>> sight.tokens[int(sight.maps[0, 1, 5].argmax())]  # the last word finds its earlier self
    'be'
    """
    tokens = tokenise(text)
    if not tokens:
        raise ValueError(f"there is no word to look at in {text!r}")
    q, k, v = queries_keys_values(tokens)
    causal = hw.mask.causal()
    _, seen = hw.observe(q, k, v, mask=causal, score=hw.Dot(scale=1.0))
    maps = hw.attention_map(q, k, mask=causal, score=hw.Dot(scale=1.0))
    return Sight(tokens=tokens, seen=seen, maps=maps)


def queries_keys_values(tokens: tuple[str, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (1, 4, N, 128), keys (1, 1, N, 128) and values (1, 1, N, 64): one key-value head."""
    place = torch.arange(len(tokens))
    here = place_features(place)  # (N, HALF)
    word = torch.stack([word_features(token) for token in tokens])  # (N, HALF)
    nothing = torch.zeros_like(word)
    queries = (
        # The factor is how loudly a head asks: loud is sharp, quiet is soft.
        torch.cat([60 * place_features(place - 1), nothing], -1),
        # Minus its own place: where the word was said before, the earlier one wins.
        torch.cat([-4 * here, 24 * word], -1),
        torch.cat([60 * place_features(torch.zeros_like(place)), nothing], -1),
        torch.cat([6 * here, nothing], -1),
    )
    q = torch.stack(queries)[None]
    k = torch.cat([here, word], -1)[None, None]
    return q, k, word[None, None]


def place_features(place: Tensor) -> Tensor:
    """Rotary features of positions (N,), each row (HALF,) of length 1.

    The product of two rows depends on how far apart they stand only, and is 1 at no distance.
    """
    frequency = 100.0 ** -torch.linspace(0, 1, HALF // 2)
    angle = place[:, None] * frequency  # (N, HALF / 2)
    return torch.cat([angle.cos(), angle.sin()], -1) / math.sqrt(HALF // 2)


def word_features(word: str) -> Tensor:
    """A direction (HALF,) for a word, hashed from its letters: the same word, the same one."""
    digest = hashlib.blake2b(word.lower().encode(), digest_size=HALF // 8).digest()
    signs = [1.0 if byte >> bit & 1 else -1.0 for byte in digest for bit in range(8)]
    return torch.tensor(signs) / math.sqrt(HALF)
