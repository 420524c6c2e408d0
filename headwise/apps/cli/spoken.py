"""The language of a command's output: English, or 中文 with `--zh`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from headwise.apps.look.scene import printable
from headwise.messages import Sentence, said_by

CONTROLS = re.compile("[\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that JSON may hold as they are, and that a terminal or an encoder stumbles over."""

Zh = Annotated[bool, typer.Option("--zh", help="In 中文.")]


def in_language(sentence: str, zh: bool) -> str:
    """A sentence in 中文 or in English; text without a translation as it is."""
    return sentence.zh if zh and isinstance(sentence, Sentence) else str(sentence)


@contextmanager
def explained(zh: bool) -> Iterator[None]:
    """Print an expected error as one sentence instead of a traceback."""
    try:
        yield
    except (ValueError, OSError, ModuleNotFoundError) as error:
        raise typer.BadParameter(printable(in_language(said_by(error), zh))) from error


def json_text(content: Any) -> str:
    """JSON for a terminal or a program: characters that control a terminal are escaped.

    >>> print(json_text({"名": "red\\x9b31m"}))
    {
      "名": "red\\u009b31m"
    }
    """
    written = json.dumps(content, indent=2, ensure_ascii=False)
    return CONTROLS.sub(lambda found: json.dumps(found[0])[1:-1], written)
