"""The heads that each rank computes where ranks share out heads instead of positions."""

from __future__ import annotations

from typing import NamedTuple

from headwise.distributed.layouts import equal_parts
from headwise.distributed.ranges import Range


class HeadShare(NamedTuple):
    """The query heads of one rank, and the key heads that they use."""

    queries: Range
    keys: Range


def head_shares(heads: int, kv_heads: int, ranks: int) -> tuple[HeadShare, ...]:
    """The heads of each rank, as equal as whole groups allow: a rank has whole groups or one part.

    With fewer key heads than ranks, several ranks use one key head.

    >>> [share.queries for share in head_shares(8, 8, 3)]
    [(0, 3), (3, 6), (6, 8)]
    >>> head_shares(6, 2, 4)[1:3]
    (HeadShare(queries=(2, 3), keys=(0, 1)), HeadShare(queries=(3, 5), keys=(1, 2)))
    """
    group = heads // kv_heads
    if kv_heads >= ranks:
        keys = equal_parts(kv_heads, ranks)
        return tuple(HeadShare((group * i, group * j), (i, j)) for i, j in keys)
    found = []
    for key, (first, last) in enumerate(equal_parts(ranks, kv_heads)):
        for i, j in equal_parts(group, last - first):
            queries = (key * group + i, key * group + j)
            found.append(HeadShare(queries, (key, key + (i < j))))
    return tuple(found)
