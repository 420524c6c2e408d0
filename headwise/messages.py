"""What is said to people: in English where it is said, and in 中文 beside it for the page.

The English sentence is its own key in the one table of translations, `headwise.chinese`. Errors,
logs and the terminal show it as any other text; an answer of the page's server, and a run's folder,
carry the 中文 along.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headwise.chinese import CHINESE


class Sentence(str):
    """A text in English that knows itself in 中文; the same where nobody translated it.

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


def say(english: str, **values: object) -> Sentence:
    """A sentence of the table, with its values filled in as `str.format` does.

    >>> say("there is no input {id}", id="7")
    'there is no input 7'
    >>> say("there is no input {id}", id="7").zh
    '没有输入 7'
    """
    theirs = {name: x.zh if isinstance(x, Sentence) else x for name, x in values.items()}
    return Sentence(english.format(**values), CHINESE.get(english, english).format(**theirs))


def said_by(error: BaseException) -> Sentence:
    """What an error says.

    >>> said_by(ValueError(say("there is no input {id}", id="7"))).zh
    '没有输入 7'
    """
    (first, *rest) = error.args or ("",)
    return first if isinstance(first, Sentence) and not rest else Sentence(str(error))


def halves(sentence: Sentence) -> tuple[Sentence, Sentence]:
    """What is wrong, and what would work: before and after the semicolon.

    >>> halves(Sentence("it is long; cut it", "太长；请截短"))
    ('it is long', 'cut it')
    """
    problem, _, hint = sentence.partition("; ")
    theirs, _, advice = sentence.zh.partition("；")
    return Sentence(problem, theirs), Sentence(hint, advice)


def with_chinese(said: dict[str, Any]) -> dict[str, Any]:
    """A dictionary for JSON, with its sentences in 中文 by their English under "zh".

    >>> with_chinese({"error": say("there is no input {id}", id="7")})
    {'error': 'there is no input 7', 'zh': {'there is no input 7': '没有输入 7'}}
    """
    found = {str(x): x.zh for x in _sentences(said) if x.zh != x}
    return {**said, "zh": found} if found else said


def from_json(said: dict[str, Any]) -> dict[str, Any]:
    """What `with_chinese` made, as it was before.

    >>> from_json({"says": "it is long", "zh": {"it is long": "太长"}})["says"].zh
    '太长'
    """
    found = said.get("zh")
    if not isinstance(found, dict):
        return said
    return {name: _understood(x, found) for name, x in said.items() if name != "zh"}


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
