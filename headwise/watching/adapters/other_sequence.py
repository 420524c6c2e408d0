"""Tells by a module's arguments whether its keys come from another sequence than its queries."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

KEYS = frozenset(
    (
        *("encoder_hidden_states", "key_value_states", "encoder_outputs", "cross_states"),
        *("context", "memory", "key", "keys", "kv", "k", "cond"),
    )
)
"""Names of arguments that keys are made of, where they are not None."""

_BESIDE = ("pos", "emb", "mask", "bias", "resid", "quer", "value")
"""Parts of the names of arguments that are as long as a sequence, and that no key is made of."""


class Elsewhere(NamedTuple):
    """The hints in a module's arguments that its keys are of another sequence."""

    stated: bool  # an argument with one of the usual names is another sequence
    lengths: tuple[int, ...]  # of other arguments that keys may be made of

    def holds(self, keys: int, masked: bool) -> bool:
        """True if a call of the module with this many keys looks at another sequence."""
        return self.stated or (not masked and keys in self.lengths)


def elsewhere(
    names: tuple[str, ...], given: tuple[Any, ...], options: Mapping[str, Any]
) -> Elsewhere:
    """Find sequences (B, M, D) among a module's arguments that its first one is not.

    Those without a usual name count if they are as wide as the first, and no position or mask.
    """
    named = dict(zip(names, given, strict=False)) | dict(options)
    rows = [(name, x) for name, x in named.items() if isinstance(x, Tensor) and x.ndim == 3]
    lengths: list[int] = []
    for name, x in rows[1:]:
        first = rows[0][1]
        if is_same(x, first) or not x.is_floating_point():
            continue
        if name in KEYS:
            return Elsewhere(True, ())
        if x.shape[2] == first.shape[2] and not any([part in name for part in _BESIDE]):
            lengths += x.shape[:2]
    return Elsewhere(False, tuple(lengths))


@functools.cache
def parameters(forward: Any) -> tuple[str, ...]:
    """The names of the arguments of a module's forward."""
    return tuple(inspect.signature(forward).parameters)[1:]  # without self


def is_same(x: Tensor, y: Tensor) -> bool:
    """True if two tensors are the same numbers in memory; compiled code asks by `is`."""
    if x is y or torch.compiler.is_compiling() or x.is_nested or y.is_nested:
        return x is y
    begins = x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
    return begins and x.storage_offset() == y.storage_offset() and x.shape == y.shape
