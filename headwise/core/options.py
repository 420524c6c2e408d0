"""The keywords of an attention call as one value."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from headwise.bias import Bias
from headwise.core.intervals import Mask
from headwise.dropout import Dropout
from headwise.score import Score


class Options(NamedTuple):
    """The keywords of `hw.attention`; public signatures spell them out, all else passes this.

    A named tuple, because building one takes a third of the time of a frozen dataclass, and every
    call builds one.
    """

    score: Score | None = None  # None: a plain Dot
    mask: Mask | None = None
    bias: Bias | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    dropout: float | Dropout = 0.0
    engine: str = "auto"

    def keywords(self) -> dict[str, Any]:
        """Return every option by its keyword.

        >>> Options(softcap=30.0).keywords()["softcap"]
        30.0
        """
        return dict(zip(self._fields, self, strict=True))

    def of_weights(self) -> dict[str, Any]:
        """Return the options that decide the weights before dropout, by keyword.

        >>> list(Options().of_weights())
        ['score', 'mask', 'bias', 'softcap', 'sinks']
        """
        return dict(zip(self._fields[:5], self[:5], strict=True))


PLAIN = Options()
