"""Characters that are spelt by several tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable

MOST = 4  # bytes of a character in UTF-8, so at most this many tokens spell one
BROKEN = "\ufffd"


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
        if not text.endswith(BROKEN) or len(waiting) == MOST:
            found += [text, *[""] * (len(waiting) - 1)]
            waiting = []
    return found + [decode([id]) for id in waiting]
