"""The language of a command's output: English, or 中文 with `--zh`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from headwise.messages import Sentence, said_by

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
        raise typer.BadParameter(in_language(said_by(error), zh)) from error
