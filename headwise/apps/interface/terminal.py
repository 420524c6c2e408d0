"""The output of a command: English, or 中文 with `--zh`; JSON; errors as one sentence; progress."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from headwise.messages import Sentence, printable, said_by

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


def bar(console: Console | None = None) -> Progress:
    """A progress bar that vanishes at the end."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console or Console(stderr=True), transient=True)


def shown_in(progress: Progress) -> Callable[[str, float | None], None]:
    """A report that moves a progress bar."""
    task = progress.add_task("loading the model", total=None)

    def report(stage: str, done: float | None) -> None:
        total = None if done is None else 1.0
        progress.update(task, description=stage, completed=done or 0, total=total)

    return report
