"""Tells by a module's arguments whether its keys come from another sequence than its queries."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from headwise.nn.call import Call

KEYS = frozenset(
    (
        *("encoder_hidden_states", "key_value_states", "encoder_outputs", "cross_states"),
        *("context", "memory", "key", "keys", "kv", "k", "cond"),
    )
)
"""Names of arguments that keys are made of, where they are not None."""

_BESIDE = ("pos", "emb", "mask", "bias", "resid", "query", "value")
"""Parts of the names of arguments that are as long as a sequence, and that no key is made of."""


def looks_elsewhere(
    module: nn.Module, given: tuple[Any, ...], options: Mapping[str, Any], call: Call
) -> bool:
    """True if a module's arguments have keys of another sequence than its queries.

    That is an argument with one of the usual names or, without a mask, any other that is as long
    as the keys and as wide as the first argument.
    """
    named = dict(zip(_parameters(type(module).forward), given, strict=False)) | dict(options)
    rows = {name: x for name, x in named.items() if isinstance(x, Tensor) and x.ndim == 3}
    first = next(iter(rows.values()), None)
    for name, x in rows.items():
        if first is None or _is_same(x, first) or not x.is_floating_point():
            continue
        if name in KEYS:
            return True
        fits = call.k.shape[2] in x.shape[:2] and x.shape[2] == first.shape[2]
        if call.mask is None and fits and not any(part in name for part in _BESIDE):
            return True
    return False


@functools.cache
def _parameters(forward: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)[1:]  # without self


def _is_same(x: Tensor, y: Tensor) -> bool:
    if x is y or x.is_nested or y.is_nested:
        return x is y
    begins = x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
    return begins and x.storage_offset() == y.storage_offset() and x.shape == y.shape
