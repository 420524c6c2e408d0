"""The protocol of a model that reads an input, the checks before it, and the sample texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from headwise.apps.look.scene import Description, Input
from headwise.messages import say

Report = Callable[[str, float | None], None]
"""Called with the stage and the share of it that is done: `report("running the model", 0.5)`."""

MOST_TOKENS = {"cpu": 32_768, "cuda": 262_144}
"""Reading a longer input would take more than a few minutes."""

SAMPLE_TEXT = """\
The lighthouse of Saint Marlow stands on a rock at the mouth of the river Tamsin. It was built in \
1821 by the engineer Edmund Harrowgate, who had never seen the sea before. Edmund Harrowgate came \
from a family of clockmakers, and the lamp of the lighthouse of Saint Marlow turns to this day on \
a clockwork that he made himself.

The first keeper was Johanna Pell. Johanna Pell lived on the rock for forty-one years with two \
goats, a telescope and a library of three hundred books, all of which she had read at least \
twice. In her diary she wrote down the weather, the ships, and what the goats had eaten. In the \
winter of 1838 the goats had eaten a chart of the river Tamsin, and the ships that asked for the \
chart were sent away with a goat.

On the night of 9 November 1844 the ship Northern Crown, with a cargo of oranges, lost its way in \
the fog. The captain of the Northern Crown saw no light, because there was no light: the \
clockwork had stopped. Johanna Pell climbed the one hundred and twelve steps, found a moth \
between two wheels of the clockwork, and took it out with a hairpin. The light turned again. The \
Northern Crown turned too, and for a week the children of Saint Marlow ate oranges on the beach.

The moth was kept. It can be seen in the museum of Saint Marlow, in a glass case, beside the \
hairpin of Johanna Pell and the spectacles of Edmund Harrowgate. The label says: "The moth that \
stopped the lighthouse." Visitors ask for the moth more often than for the spectacles, and more \
often for the oranges than for the moth.

In 1921, one hundred years after Edmund Harrowgate had lit the lamp for the first time, the \
lighthouse of Saint Marlow was given electric light. The clockwork was left in its place. Every \
year, on 9 November, the electric light is turned off for an hour, the clockwork is wound up by \
hand, and the lamp turns as it turned for Johanna Pell. The ships on the river Tamsin sound their \
horns, and someone always brings a goat.
"""
"""The default text of a language model: its names return, and the model has never met them, so
heads can only find them in the text before."""

SAMPLE_SENTENCE = "She has never seen such a big black dog in her life."
"""The default text of a translator: its French has another word order."""


class Illustrated(NamedTuple):
    """The bytes of image files and a text about them, for models that read both."""

    images: tuple[bytes, ...]
    text: str


Given = str | bytes | Illustrated
"""An input: a text, the bytes of an image, or images and a text."""


class Reader(Protocol):
    """A loaded model that reads inputs while its heads are watched."""

    @property
    def model(self) -> nn.Module | None:
        """The model itself; None of a recording."""

    @property
    def description(self) -> Description:
        """The model in a few numbers."""

    @property
    def sample(self) -> str | None:
        """The text to read if none is given; None if there is no default (images)."""

    def count(self, text: str) -> int:
        """The number of tokens that a text has for this model; 0 if it reads no text."""

    def read(self, what: Given, report: Report) -> Input:
        """Read a text, an image, or both."""


def silent(stage: str, done: float | None) -> None:
    """A report that is ignored."""


@contextmanager
def running(model: nn.Module, report: Report) -> Iterator[None]:
    """Report how many of a model's blocks have run; no gradients are kept."""
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


def checked_text(what: Given) -> str:
    """The text; ValueError if there is an image or no word in it."""
    if not isinstance(what, str):
        raise ValueError(say("this model reads text, and an image was given; use --text"))
    if not what.strip():
        raise ValueError(say("there is no word to look at in {text!r}", text=what[:20]))
    return what


def most_tokens(device: str) -> int:
    """The most tokens that are read on a device."""
    return MOST_TOKENS.get(device, MOST_TOKENS["cpu"])


def check_length(tokens: int, device: str) -> None:
    """ValueError if so many tokens would take too long on their device."""
    most = most_tokens(device)
    if tokens > most:
        more = say("; a GPU takes more") if device == "cpu" else ""
        raise ValueError(
            say(
                "{tokens:,} tokens are too many to look at on {device}: at most {most:,}{more}",
                tokens=tokens, device=device, most=most, more=more,
            )
        )  # fmt: skip


def too_long(tokens: int, context: int | None) -> tuple[str, ...]:
    """A note on an input that is longer than those the model was trained on.

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
