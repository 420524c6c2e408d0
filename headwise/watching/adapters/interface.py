"""Reading a call of transformers' attention interface."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwise.core.intervals import Mask
from headwise.core.mask_reading import PlacedIntervals, read_mask, split_mask, traced_mask
from headwise.core.mask_rules import by_rows
from headwise.core.options import Options
from headwise.core.place import Place
from headwise.nn.call import Call
from headwise.watching.adapters.packed_sequences import by_lengths, by_positions
from headwise.watching.adapters.scaled_dot_product import MaskMemo, as_dot, band, known_band
from headwise.watching.recorder.seen_call import Kind

_FULL = ("eager", "flex_attention")
"""Implementations whose mask is complete: without one, every key is seen."""


@dataclass(frozen=True)
class TokenSequence:
    """The tokens of the model that is running."""

    queries: int  # tokens of this forward
    tokens: int  # including those in the cache
    shown: Tensor | None  # (B, tokens) bool: not padding; None if unknown
    begins: Tensor | int | None  # (B|1,): the first token that is not padding; None if unknown

    @property
    def past(self) -> int:
        """Tokens that earlier forwards left in the cache."""
        return self.tokens - self.queries

    def padding(self, q: Tensor) -> Tensor | None:
        """The rows of q (B, H, N, D) that are padding, (B, N) bool; None if unknown."""
        if self.shown is None or self.queries != q.shape[2] or self.shown.shape[0] != q.shape[0]:
            return None
        return ~self.shown[:, self.past :]

    def forgotten(self, q: Tensor, k: Tensor, kind: Kind) -> int | None:
        """How many tokens a sliding cache forgot before k; None if these are not its queries."""
        if kind == "cross" or self.queries != q.shape[2]:
            return None
        return max(0, self.tokens - k.shape[2])


@dataclass(frozen=True)
class InterfaceCall:
    """The arguments of an attention function of transformers."""

    implementation: str
    module: nn.Module
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Any
    options: dict[str, Any]

    def option(self, name: str) -> Any:
        """An argument by its name; None if it was not given."""
        return self.options.get(name)


def to_call(
    given: InterfaceCall, kind: Kind, sequence: TokenSequence | None, memo: MaskMemo
) -> Call:
    """The call of `hw.attention` that computes the same; ValueError if there is none."""
    _refuse(given)
    q, k, v = given.q, given.k, given.v
    position_bias = given.option("position_bias")
    causal = is_causal(given)
    if causal and given.implementation == "sdpa" and k.shape[2] > q.shape[2]:
        # the first tokens in a static cache: the rest of it is empty
        k, v = k[:, :, : q.shape[2]], v[:, :, : q.shape[2]]
        position_bias = None if position_bias is None else position_bias[..., : q.shape[2]]
    mask, bias = _mask_and_bias(given, k, kind, causal, sequence, memo)
    apart = _packed(given, k, memo)
    mask = mask if apart is None else apart if mask is None else mask & apart
    if isinstance(position_bias, Tensor):
        bias = position_bias if bias is None else position_bias + bias
    sinks, scaling = given.option("s_aux"), given.option("scaling")
    score = as_dot(None if scaling is None else float(scaling))
    return Call(
        q,
        k,
        v,
        Options(
            score,
            mask,
            bias,
            given.option("softcap"),
            None if sinks is None else sinks.reshape(-1),
        ),
    )


def _refuse(given: InterfaceCall) -> None:
    if given.implementation.startswith("paged") or given.option("cache") is not None:
        raise ValueError(
            "compiled code can't look into the paged cache of continuous batching; generate "
            "without default_compile_level"
        )


def _packed(given: InterfaceCall, k: Tensor, memo: MaskMemo) -> Mask | None:
    """The mask of packed sequences that a function keeps apart by itself, as flash attention."""
    if given.mask is not None or given.implementation in (*_FULL, "sdpa"):
        return None
    by_ends = by_lengths(given.options, given.q, k, memo)
    if by_ends is not None or "flash" not in given.implementation:
        return by_ends
    return by_positions(given.option("position_ids"), given.q, k, memo)


def is_causal(given: InterfaceCall) -> bool:
    """True if the function hides the keys after a query by itself."""
    if given.implementation in _FULL or (given.mask is not None and len(given.mask.shape) == 4):
        return False
    stated = given.option("is_causal")
    hides = getattr(given.module, "is_causal", True) if stated is None else stated
    return bool(hides) and given.q.shape[2] > 1


def _mask_and_bias(
    given: InterfaceCall,
    k: Tensor,
    kind: Kind,
    causal: bool,
    sequence: TokenSequence | None,
    memo: MaskMemo,
) -> tuple[Mask | None, Tensor | None]:
    stands, begins = _stand(given.q, k, kind, sequence)
    if isinstance(given.mask, Tensor) and given.mask.ndim == 4:
        tensor = given.mask

        def made() -> tuple[Mask | None, Tensor | None]:
            cut = tensor[..., : k.shape[2]].detach()
            if torch.compiler.is_compiling():
                return traced_mask(cut, given.q.shape[2])
            seen, bias = (cut, None) if cut.dtype == torch.bool else split_mask(cut)
            if seen is None:
                return _all_seen(given.q, k, stands, begins), bias
            seen = seen.expand(*seen.shape[:2], given.q.shape[2], k.shape[2])
            chunks = getattr(getattr(given.module, "config", None), "attention_chunk_size", None)
            return read_mask(seen, stands, _edge(begins, k), packed=chunks is None), bias

        return memo.recall(made, tensor, k.shape[2], stands if kind == "self" else kind)
    if given.mask is None or isinstance(given.mask, Tensor):
        return _flat(given, k, causal, stands, begins), None
    return _of_blocks(given.mask, given.q, k, stands, _edge(begins, k)), None


def _stand(
    q: Tensor, k: Tensor, kind: Kind, sequence: TokenSequence | None
) -> tuple[bool | int, Tensor | int | None]:
    """The key beside which the first query stands, and where each sequence begins.

    A number is known without waiting for a GPU.
    """
    if kind == "cross":
        return False, None
    gone = None if sequence is None else sequence.forgotten(q, k, kind)
    if sequence is None or gone is None:
        return True, None
    begins = None if sequence.begins is None else sequence.begins - gone
    return sequence.past - gone, begins[:, None, None] if isinstance(begins, Tensor) else begins


def _at_the_first_key(begins: Tensor | int | None) -> bool:
    return not (bool(begins.any()) if isinstance(begins, Tensor) else begins)


def _edge(begins: Tensor | int | None, k: Tensor) -> Tensor | None:
    """Where sequences begin, as a tensor."""
    if isinstance(begins, int):
        return torch.full((1, 1, 1), begins, dtype=torch.int32, device=k.device)
    return begins


def _all_seen(q: Tensor, k: Tensor, stands: bool | int, begins: Tensor | int | None) -> Mask | None:
    """No mask; or one that hides nothing but says where the queries stand."""
    at_the_end = isinstance(stands, bool) or stands == k.shape[2] - q.shape[2]
    if at_the_end and _at_the_first_key(begins):
        return None
    edge = torch.zeros(1, 1, q.shape[2], dtype=torch.int32, device=q.device)
    offset = k.shape[2] - q.shape[2] if isinstance(stands, bool) else stands
    return PlacedIntervals(edge, edge + k.shape[2], offset, _edge(begins, k))


def _flat(
    given: InterfaceCall, k: Tensor, causal: bool, stands: bool | int, begins: Tensor | int | None
) -> Mask | None:
    """The mask of functions given none, or (B, M) with 0 for padding: causal, with a window."""
    q, width = given.q, given.option("sliding_window")
    offset = k.shape[2] - q.shape[2] if isinstance(stands, bool) else stands
    if given.implementation == "sdpa":
        offset, width = 0 if causal else offset, None  # its mask would have had the window
    if given.implementation in _FULL:
        width = None
    banded = band if torch.compiler.is_compiling() else known_band
    mask = banded(causal, offset, width)
    if given.mask is not None:
        if torch.compiler.is_compiling():
            raise ValueError("its padding (B, M) is a tensor, which compiled code can't look into")
        shown = given.mask[:, -k.shape[2] :].bool()
        shown = shown[:, None, None].expand(-1, 1, q.shape[2], -1)
        padding = read_mask(shown, stands, _edge(begins, k))
        if padding.pieces == 0 and width is not None:
            raise ValueError(
                "its padding lies inside the sequence, and its window does not count padding"
            )
        mask = padding if mask is None else mask & padding
    if mask is None:
        return _all_seen(q, k, stands, begins)
    if mask.pieces == 0 or _at_the_first_key(begins):
        return mask
    first, last = mask.intervals(Place.of(q, k))[0]
    return PlacedIntervals(first, last, offset, _edge(begins, k))


def _of_blocks(
    blocks: Any, q: Tensor, k: Tensor, stands: bool | int, begins: Tensor | None
) -> Mask:
    """FlexAttention's BlockMask, read from its rule a few rows at a time."""
    if torch.compiler.is_compiling():
        raise ValueError("its mask is a BlockMask, which compiled code can't look into")
    batch, heads = blocks.shape[:2]
    return by_rows(
        blocks.mask_mod, (batch, heads, q.shape[2], k.shape[2]), q.device, stands, begins
    )
