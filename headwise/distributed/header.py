"""The header that ranks exchange before a call: each learns what the others are about to do.

A header has a fixed size, so ranks that differ still understand each other. A rank that failed
before the call sends its error, and when all have computed, another header tells who failed there.
So every rank ends a call that can't succeed, and names the rank.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headwise.distributed.transport import RankError, RankGroup, packed, unpacked

SIZE = 64  # int64 numbers
KINDS = ("attention", "observe", "backward", "unshard", "finished", "figures", "positions", "map")
_WHEN = {"finished": "while it computed", "figures": "in hw.watch"}  # a rank failed
_START = 4  # the numbers before the fields: failed, kind, call, fields

_calls: Counter[str] = Counter()  # how many calls each group has seen


@dataclass(frozen=True)
class Header:
    """A call of one rank: sizes and words must be the same on every rank, `own` need not."""

    kind: str
    sizes: Mapping[str, int] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)
    own: Sequence[int] = ()

    def numbers(self, call: int, failure: Exception | None = None) -> list[int]:
        """The header as numbers, SIZE of them; if this rank failed, its error instead."""
        if failure is not None:
            return _failed(self, call, failure)
        fields = [*self.sizes.values(), *map(digest, self.words.values())]
        found = [0, KINDS.index(self.kind), call, len(fields), *fields, *self.own]
        return found + [0] * (SIZE - len(found))


def agree(ranks: RankGroup, header: Header, failure: Exception | None = None) -> list[list[int]]:
    """Exchange headers and return every rank's `own` numbers.

    ValueError on every rank if ranks differ, and RankError if one failed; each names the rank.
    `failure` is this rank's own, raised when the others know.
    """
    call = _calls[ranks.name]
    _calls[ranks.name] += 1
    numbers = header.numbers(call, failure)
    device = ranks.quickest
    message = packed(torch.tensor(numbers, dtype=torch.int64, device=device))
    arrived = ranks.exchange(
        dict.fromkeys(ranks.others, message), dict.fromkeys(ranks.others, 8 * SIZE), device,
        counted=False,
    ).take()  # fmt: skip
    if failure is not None:
        raise failure
    every = [
        numbers
        if rank == ranks.own
        else unpacked(arrived[rank], ((SIZE,), torch.int64))[0].tolist()
        for rank in range(ranks.count)
    ]
    return compare(header, every, ranks.own)


@contextmanager
def telling(ranks: RankGroup, kind: str = "finished") -> Iterator[None]:
    """Compute something on every rank; if it fails on one, the others raise RankError after it.

    Messages that fail are errors on both sides already.
    """
    failure = None
    try:
        yield
    except RankError:
        raise
    except Exception as error:
        failure = error
    agree(ranks, Header(kind), failure)


def _failed(header: Header, call: int, failure: Exception) -> list[int]:
    text = f"{type(failure).__name__}: {failure}".encode()[: 8 * (SIZE - _START)]
    room = text.ljust(8 * (SIZE - _START), b"\0")
    words = torch.frombuffer(bytearray(room), dtype=torch.int64).tolist()
    return [1, KINDS.index(header.kind), call, 0, *words]


def compare(header: Header, every: list[list[int]], own: int) -> list[list[int]]:
    """Every rank's `own` numbers; `every` has the headers of all ranks, and this is rank `own`.

    Raise an error that names the ranks that failed or differ.
    """
    for rank, found in enumerate(every):
        if found[0]:
            raw = bytes(torch.tensor(found[_START:], dtype=torch.int64).view(torch.uint8).tolist())
            text = raw.rstrip(b"\0").decode(errors="replace")
            when = _WHEN.get(KINDS[found[1]], "before the call")
            raise RankError(f"rank {rank} of {len(every)} failed {when}: {text}")
    names = ["the function", "the number of calls before this one", "options"]
    names += [*header.sizes, *header.words]
    for place, name in enumerate(names, 1):
        values = [found[place] for found in every]
        usual = Counter(values).most_common(1)[0][0]
        others = [rank for rank, value in enumerate(values) if value != usual]
        if others:
            raise ValueError(_difference(header, name, others, values, usual, own))
    first = _START + len(header.sizes) + len(header.words)
    return [found[first : first + len(header.own)] for found in every]


def _difference(
    header: Header, name: str, others: list[int], values: list[int], usual: int, own: int
) -> str:
    who = f"rank {others[0]}" if len(others) == 1 else f"ranks {', '.join(map(str, others))}"
    call = f"{_call(header.kind)} on {len(values)} ranks"
    if name == "the function":
        found = ", ".join(KINDS[values[rank]] for rank in others)
        return (
            f"{who} differs in {name}: it is in {found}, the others in {KINDS[usual]}\n  in {call}"
        )
    said = header.words.get(name)
    if said is not None:
        return f"{who} differs in {name}; here, on rank {own}, it is {said}\n  in {call}"
    found = ", ".join(str(values[rank]) for rank in others)
    return f"{who} differs in {name}: {found} there, {usual} elsewhere\n  in {call}"


def _call(kind: str) -> str:
    """The user's call that sends headers of a kind."""
    return "hw.watch" if kind == "figures" else f"hw.distributed.{kind}"


def digest(text: str) -> int:
    """A number of 63 bits that stands for a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def content(x: Tensor) -> str:
    """A short text that stands for a tensor's values."""
    flat = x.detach().to("cpu").contiguous().flatten().view(torch.uint8)
    found = hashlib.blake2b(
        ctypes.string_at(flat.data_ptr(), flat.numel()), digest_size=8
    ).hexdigest()
    return f"{x.dtype}{tuple(x.shape)}#{found}"
