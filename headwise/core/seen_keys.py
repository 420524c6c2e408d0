"""Keys that no row sees: they may hold anything, so no engine may read them."""

from __future__ import annotations

from torch import Tensor

from headwise.core.intervals import rows_per_key
from headwise.core.problem import Terms


def hide_unseen(terms: Terms, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v with zeros for keys that no row sees, if such keys share a block with visible ones.

    A weight of zero times NaN is NaN, and the unwritten part of a cache may hold NaN.
    """
    seen = seen_keys(terms, k)
    if seen is None or bool(seen.all()):
        return k, v
    used = used_stretch(seen)
    if terms.dense is None and bool(seen[..., used].all()):
        return k, v  # the schedule of an interval mask never reaches outside that stretch
    return k.masked_fill(~seen[..., None], 0), v.masked_fill(~seen[..., None], 0)


def used_stretch(seen: Tensor) -> slice:
    """The keys from the first to the last that any row sees; seen (B|1, Hkv|1, M)."""
    used = seen.flatten(0, 1).any(0).nonzero()
    return slice(int(used[0]), int(used[-1]) + 1) if len(used) else slice(0, 0)


def seen_keys(terms: Terms, k: Tensor) -> Tensor | None:
    """The keys that some row sees, bool (B|1, Hkv|1, M); None if there is no mask."""
    heads, keys = k.shape[1], k.shape[2]
    if terms.dense is not None:
        seen = terms.dense.any(-2).expand(-1, -1, keys)
    elif terms.intervals is not None:
        seen = rows_per_key(terms.intervals, keys) > 0
    else:
        return None
    if seen.shape[1] > 1:  # a key head serves a group of query heads
        seen = seen.unflatten(1, (heads, -1)).any(2)
    return seen
