"""Messages in English that carry their 中文 translation for the page.

Every sentence is made by `both`. `say` finds the translation in a table, `headwise.chinese`, where
translators have all messages of the code together; a text such as a claim of the lab has its two
languages side by side. Errors, logs and the terminal show the English text; the answers of the
page's server and the folders of runs hold both.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from typing import Any

from headwise.chinese import CHINESE

__all__ = ["Sentence", "both", "from_json", "halves", "printable", "said_by", "say", "with_chinese"]

SIGNS: dict[int, str | int] = {**{code: 0x2400 + code for code in range(32)}, 10: "⏎", 127: "␡"}
"""Visible signs for control characters."""

ORDERING = "\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
"""Characters that change the direction of the text around them."""


class Sentence(str):
    """An English text with its 中文 translation, which is the English text if there is none.

    >>> Sentence("no heads", "没有头").zh
    '没有头'
    """

    __slots__ = ("zh",)
    zh: str

    def __new__(cls, english: str, zh: str | None = None) -> Sentence:
        made = super().__new__(cls, english)
        made.zh = english if zh is None else zh
        return made

    def __reduce__(self) -> tuple[type[Sentence], tuple[str, str]]:
        return Sentence, (str(self), self.zh)


def both(english: str, chinese: str | None = None, **values: object) -> Sentence:
    """A sentence in both languages, filled in with the same values as by `str.format`.

    >>> both("{count} of {all} rows", "{all} 行中的 {count} 行", count=3, all=4).zh
    '4 行中的 3 行'
    """
    chinese = english if chinese is None else chinese
    if not values:
        return Sentence(english, chinese)
    theirs = {name: x.zh if isinstance(x, Sentence) else x for name, x in values.items()}
    return Sentence(english.format(**values), chinese.format(**theirs))


def say(english: str, **values: object) -> Sentence:
    """A sentence of the table, as `both` fills it in.

    >>> say("there is no input {id}", id="7")
    'there is no input 7'
    >>> say("there is no input {id}", id="7").zh
    '没有输入 7'
    """
    return both(english, CHINESE.get(english), **values)


def said_by(error: BaseException) -> Sentence:
    """The message of an error.

    >>> said_by(ValueError(say("there is no input {id}", id="7"))).zh
    '没有输入 7'
    """
    (first, *rest) = error.args or ("",)
    return first if isinstance(first, Sentence) and not rest else Sentence(str(error))


def printable(text: str) -> str:
    """Replace characters that would control a terminal, break a line or be malformed in XML.

    >>> printable("\\x1b[31m red\\n")
    '␛[31m red⏎'
    """
    return "".join(
        "\N{REPLACEMENT CHARACTER}"
        if unicodedata.category(letter) in ("Cc", "Cs", "Cn", "Zl", "Zp") or letter in ORDERING
        else letter
        for letter in text.translate(SIGNS)
    )


def halves(sentence: Sentence) -> tuple[Sentence, Sentence]:
    """Split a message at its semicolon: the problem, and what to do about it.

    >>> halves(Sentence("it is long; cut it", "太长；请截短"))
    ('it is long', 'cut it')
    """
    problem, _, hint = sentence.partition("; ")
    theirs, _, advice = sentence.zh.partition("；")
    return Sentence(problem, theirs), Sentence(hint, advice)


def with_chinese(content: dict[str, Any]) -> dict[str, Any]:
    """A dictionary for JSON, with the 中文 of its sentences, by their English, under "zh".

    >>> with_chinese({"error": say("there is no input {id}", id="7")})
    {'error': 'there is no input 7', 'zh': {'there is no input 7': '没有输入 7'}}
    """
    found = {str(x): x.zh for x in _sentences(content) if x.zh != x}
    return {**content, "zh": found} if found else content


def from_json(content: dict[str, Any]) -> dict[str, Any]:
    """Undo `with_chinese`: the dictionary, with its sentences.

    >>> from_json({"says": "it is long", "zh": {"it is long": "太长"}})["says"].zh
    '太长'
    """
    found = content.get("zh")
    if not isinstance(found, dict):
        return content
    found = {english: zh for english, zh in found.items() if isinstance(zh, str)}
    return {name: _understood(x, found) for name, x in content.items() if name != "zh"}


def _sentences(value: Any) -> Iterator[Sentence]:
    if isinstance(value, Sentence):
        yield value
    elif isinstance(value, dict | list | tuple):
        for inside in value.values() if isinstance(value, dict) else value:
            yield from _sentences(inside)


def _understood(value: Any, chinese: dict[str, str]) -> Any:
    if isinstance(value, str):
        return Sentence(value, chinese[value]) if value in chinese else value
    if isinstance(value, dict):
        return {name: _understood(x, chinese) for name, x in value.items()}
    return [_understood(x, chinese) for x in value] if isinstance(value, list) else value
