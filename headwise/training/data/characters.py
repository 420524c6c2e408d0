"""Characters that several tokens spell together, put back together."""

from __future__ import annotations

from collections.abc import Callable, Iterable

MOST = 4  # bytes of a character in UTF-8, so tokens that may have a part of it
BROKEN = "\ufffd"


def whole_characters(ids: Iterable[int], decode: Callable[[list[int]], str]) -> list[str]:
    """The text of each token; what several spell stands at the first of them, the others are empty.

    Tokens of bytes cut a character such as 中 in two or three, and none of the parts has a text.

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
