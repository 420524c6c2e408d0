"""Masks of the compiled region that is being traced: each is read once, for all its layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from headwise.core.intervals import Mask
from headwise.core.mask_reading import TracedDense, packed_mask
from headwise.core.observation import sample_rows
from headwise.core.patterns import Causal, Window
from headwise.watching.adapters.traced_graph import counts_by_one, is_in_main_graph

Made = TypeVar("Made")

# The compiler loses what is assigned to a global object after a call such as flex_attention; it
# follows lists.
RUNNING: list[nn.Module | None] = []
"""The modules whose forwards are being traced; None where an adapter reads a call already."""
_read: list[tuple[Tensor, tuple[object, ...], Any]] = []
_rows: list[tuple[tuple[int, int], torch.device, Tensor | None]] = []
_plain: list[object] = []  # transformers' functions that show earlier keys, and that show all
_single: list[Tensor] = []  # numbers of sequences (B, N) that are all the same


def know(rules: Any) -> None:
    """Remember the functions of transformers' masking_utils: torch 2.11 can't trace its import."""
    names = ("causal_mask_function", "bidirectional_mask_function")
    _plain[:] = [getattr(rules, name) for name in names if hasattr(rules, name)]


def forget() -> None:
    """The region has been traced."""
    _read.clear()
    _rows.clear()
    _single.clear()


def recall(make: Callable[[], Made], tensor: Tensor, *options: object) -> Made:
    """The result of `make` for this tensor and these options, in a region that is being traced."""
    for known, given, found in _read:
        if known is tensor and (not given or given == options):
            kept: Made = found
            return kept
    made = make()
    # What the body of a checkpoint computes is not there for the next one.
    if RUNNING and is_in_main_graph():
        _read.append((tensor, options, made))
    return made


NUMBERING = "find_packed_sequence_indices"
"""The function of transformers' masking_utils that tells packed sequences by their positions."""


def numbered(ids: Tensor | None) -> Tensor | None:
    """The result of `NUMBERING`, with a note if there can't be but one sequence.

    Outside compiled code transformers looks, and returns None then.
    """
    tracing = torch.compiler.is_compiling() and RUNNING and is_in_main_graph()
    if ids is not None and tracing and counts_by_one():
        _single.append(ids)
    return ids


RULES = ("and_masks", "packed_sequence_mask_function", "sliding_window_overlay")
"""The functions of transformers' masking_utils whose results say here what they are made of."""


class NamedRule:
    """The result of one of `RULES`, and what it is made of."""

    def __init__(self, function: Callable[..., Tensor], name: str, parts: tuple[Any, ...]) -> None:
        self.function, self.name, self.parts = function, name, parts
        self.__name__ = name  # torch 2.11's vmap asks for it, and can't trace repr()

    def __call__(self, *place: Any) -> Tensor:
        return self.function(*place)


def note(tensor: object, named: dict[str, Any]) -> None:
    """Remember what is known of a mask (B, 1, N, M) from the keywords that transformers made it of.

    A mask without padding need not be read from its tensor; with padding (B, tokens), that says
    which rows and keys are hidden.
    """
    if not RUNNING or not isinstance(tensor, Tensor) or tensor.ndim != 4 or "q_length" not in named:
        return
    if isinstance(named.get("q_offset"), Tensor) or not is_in_main_graph():
        return
    key = named.get("kv_offset", 0)
    known = KnownMask()
    if known.add(named.get("mask_function")):
        mask = known.mask(named.get("q_offset", 0) - key, key, named.get("attention_mask"), tensor)
        if mask is not None:
            _read.append((tensor, (), (mask, None)))


class KnownMask:
    """The parts of a mask of transformers, all of which hold."""

    def __init__(self) -> None:
        self.causal = False
        self.window: int | None = None  # a row sees so many keys: its own and those before
        self.packed: Tensor | None = None  # (B, N): the numbers of sequences

    def add(self, rule: Any) -> bool:
        """Add what a rule says; False if it is not known here."""
        if any([rule is one for one in _plain]):
            self.causal = self.causal or rule is _plain[0]
            return True
        if not isinstance(rule, NamedRule):
            return False
        if rule.name == "sliding_window_overlay":
            self.window = rule.parts[0]
            return True
        if rule.name == "packed_sequence_mask_function":
            ids = rule.parts[0]
            self.packed = None if any([ids is one for one in _single]) else ids
            return True
        return all([self.add(part) for part in rule.parts])

    def mask(self, offset: int, key: int, padding: Any, tensor: Tensor) -> Mask | None:
        """The mask of a tensor (B, 1, N, M) whose first key is this one; None if it has to be read.

        Query i stands beside key i + offset.
        """
        keys, window = tensor.shape[3], self.window
        if self.packed is not None:
            low = None if window is None else 1 - window
            if offset or padding is not None:
                return None
            return packed_mask(self.packed, low, 1 if self.causal else None)
        plain = not self.causal and window is None
        if padding is None:
            if not self.causal:
                return None
            causal = Causal(offset)
            return causal if window is None else causal & Window(window - 1, 0, offset)
        if padding.ndim != 2 or padding.shape[1] < key + keys:
            return None
        shown = padding[:, key : key + keys].bool()[:, None]  # (B, 1, M)
        if plain:
            return TracedDense.of(shown[:, :, None], shown)
        return TracedDense.of(tensor if tensor.dtype == torch.bool else tensor >= 0, shown)


def sampled(rows: int, queries: int, device: torch.device) -> Tensor | None:
    """The rows to look at, computed once for all layers; None for all."""
    for known, given, found in _rows:
        if known == (rows, queries) and given == device:
            return found
    found = sample_rows(rows, queries, device)
    if RUNNING and is_in_main_graph():
        _rows.append(((rows, queries), device, found))
    return found
