"""Models that read: what is asked of one, and what is checked before it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from headwise.look.scene import Description, Input
from headwise.messages import say

Report = Callable[[str, float | None], None]
"""Told what is being done, and how much of it is: `report("running the model", 0.5)`."""

MOST_TOKENS = {"cpu": 32_768, "cuda": 262_144}
"""A longer input would take more than some minutes before anything is seen."""


class Reader(Protocol):
    """A model that is ready to be looked at while it reads."""

    @property
    def description(self) -> Description:
        """The model in a few numbers."""

    @property
    def sample(self) -> str | None:
        """What to read when nothing is given; None: it must be given something."""

    def read(self, what: str | bytes, report: Report) -> Input:
        """Read a text, or the bytes of an image."""


def silent(stage: str, done: float | None) -> None:
    """A report that nobody hears."""


@contextmanager
def running(model: nn.Module, report: Report) -> Iterator[None]:
    """Report how many of a model's blocks have run, and keep no gradients."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    blocks = [block for blocks in lists for block in blocks]
    ran = 0

    def count(*_: object) -> None:
        nonlocal ran
        ran += 1
        report("running the model", min(1.0, ran / len(blocks)))

    handles: list[Any] = [block.register_forward_hook(count) for block in blocks]
    report("running the model", 0.0)
    try:
        with torch.no_grad():
            yield
    finally:
        for handle in handles:
            handle.remove()


def described(
    name: str, model: nn.Module, layers: int, heads: int, context: int | None = None
) -> Description:
    """A model of so many layers, with so many heads each; shared weights are counted once."""
    learnt = list(model.parameters())
    device = learnt[0].device.type if learnt else "cpu"
    count = sum(each.numel() for each in learnt)
    return Description(name, count, layers, layers * heads, context, device)


def checked_text(what: str | bytes) -> str:
    """The text; ValueError where there is no word in it."""
    if isinstance(what, bytes):
        raise ValueError(say("this model reads text, and an image was given; --text would work"))
    if not what.strip():
        raise ValueError(say("there is no word to look at in {text!r}", text=what[:20]))
    return what


def check_length(tokens: int, device: torch.device) -> None:
    """ValueError where so many tokens would take too long on their device."""
    most = MOST_TOKENS.get(device.type, MOST_TOKENS["cpu"])
    if tokens > most:
        more = say("; a GPU takes more") if device.type == "cpu" else ""
        raise ValueError(
            say(
                "{tokens:,} tokens are too many to look at on {device}: at most {most:,}{more}",
                tokens=tokens, device=device.type, most=most, more=more,
            )
        )  # fmt: skip


def too_long(tokens: int, context: int | None) -> tuple[str, ...]:
    """What to say of an input that is longer than those the model was trained on.

    >>> too_long(5000, 4096)
    ('5,000 tokens; the model was trained on 4,096 at a time',)
    """
    if context is None or tokens <= context:
        return ()
    said = say(
        "{tokens:,} tokens; the model was trained on {context:,} at a time",
        tokens=tokens,
        context=context,
    )
    return (said,)


def title(text: str) -> str:
    """A text's first words, on one line.

    >>> title("To be,\\nor not to be, that is the question: whether 'tis nobler")
    'To be, or not to be, that is the questi…'
    """
    line = " ".join(text[:400].split())
    return line if len(line) <= 40 else line[:39].rstrip() + "…"
