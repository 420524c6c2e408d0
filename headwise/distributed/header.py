"""The header that ranks exchange before a call: each learns what the others are about to do.

A header has a fixed size, so ranks that differ still understand each other; then they exchange the
values in question too. A rank that failed before the call sends its error, and when all have
computed, another header tells who failed there. So every rank ends a call that can't succeed, and
names the rank.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headwise.distributed.descriptions import Values
from headwise.distributed.transport import RankError, RankGroup, packed, unpacked

SIZE = 64  # int64 numbers
TEXT = 4096  # bytes of a text that is exchanged where ranks differ in it
_CALLS = {
    "attention": "hw.distributed.attention",
    "observe": "hw.distributed.observe",
    "backward": "a backward of hw.distributed",
    "unshard": "hw.distributed.unshard",
    "finished": "hw.distributed",
    "figures": "hw.watch",
    "positions": "a model split by hw.distributed.context_parallel",
    "map": "hw.distributed.attention_map",
    "index loss": "hw.distributed.index_loss",
}
"""The kinds of headers, and the user's call that sends each."""
KINDS = tuple(_CALLS)
_WHEN = {"finished": "while it computed", "figures": "in hw.watch"}  # a rank failed
_START = 4  # the numbers before the fields: failed, kind, call, fields

_calls: Counter[str] = Counter()  # how many calls each group has seen


@dataclass(frozen=True)
class Header:
    """A call of one rank: `same` must be the same on every rank, `own` need not."""

    kind: str
    same: Mapping[str, str | Values] = field(default_factory=dict)
    own: Sequence[int] = ()

    def numbers(self, call: int, failure: Exception | None = None) -> list[int]:
        """The header as numbers, SIZE of them; if this rank failed, its error instead."""
        if failure is not None:
            return _failed(self, call, failure)
        fields = [digest(x) if isinstance(x, str) else x.number for x in self.same.values()]
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
    every = [unpacked(x, ((SIZE,), torch.int64))[0].tolist() for x in _swapped(ranks, message)]
    if failure is not None:
        raise failure

    def texts(name: str) -> list[str]:
        text = str(header.same[name]).encode()
        text = text if len(text) <= TEXT else text[: TEXT - 3] + "…".encode()
        room = torch.frombuffer(bytearray(text.ljust(TEXT, b"\0")), dtype=torch.uint8)
        found = _swapped(ranks, room.to(device))
        return [bytes(x.tolist()).rstrip(b"\0").decode(errors="replace") for x in found]

    return compare(header, every, ranks.own, texts)


def _swapped(ranks: RankGroup, message: Tensor) -> list[Tensor]:
    """The messages of all ranks, which have the same size, uint8 (n,)."""
    size, others = message.numel(), ranks.others
    arrived = ranks.exchange(
        dict.fromkeys(others, message), dict.fromkeys(others, size), message.device, counted=False
    ).take()
    return [arrived.get(rank, message) for rank in range(ranks.count)]


@contextmanager
def failing_together(
    ranks: RankGroup, kind: str = "finished", same: Mapping[str, Values] | None = None
) -> Iterator[None]:
    """Compute something on every rank; if it fails on one, the others raise RankError after it.

    Messages that fail are errors on both sides already. `same` are values that all ranks should
    have: they are compared only now, because a GPU has had the time to sum them up.
    """
    failure = None
    try:
        yield
    except RankError:
        raise
    except Exception as error:
        failure = error
    agree(ranks, Header(kind, {} if failure is not None else same or {}), failure)


def _failed(header: Header, call: int, failure: Exception) -> list[int]:
    text = f"{type(failure).__name__}: {failure}".encode()[: 8 * (SIZE - _START)]
    room = text.ljust(8 * (SIZE - _START), b"\0")
    words = torch.frombuffer(bytearray(room), dtype=torch.int64).tolist()
    return [1, KINDS.index(header.kind), call, 0, *words]


def compare(
    header: Header,
    every: list[list[int]],
    own: int,
    texts: Callable[[str], list[str]] | None = None,
) -> list[list[int]]:
    """Every rank's `own` numbers; `every` has the headers of all ranks, and this is rank `own`.

    Raise an error that names the ranks that failed or differ. `texts` asks all ranks for what they
    have under a name.
    """
    for rank, found in enumerate(every):
        if found[0]:
            raw = bytes(torch.tensor(found[_START:], dtype=torch.int64).view(torch.uint8).tolist())
            text = raw.rstrip(b"\0").decode(errors="replace")
            when = _WHEN.get(KINDS[found[1]], "before the call")
            raise RankError(f"rank {rank} of {len(every)} failed {when}: {text}")
    names = ["the function", "the number of calls before this one", "options"]
    names += header.same
    for place, name in enumerate(names, 1):
        values = [found[place] for found in every]
        usual = Counter(values).most_common(1)[0][0]
        others = [rank for rank, value in enumerate(values) if value != usual]
        if others:
            ask = texts if name in header.same else None
            raise ValueError(_difference(header, name, others, values, own, ask))
    first = _START + len(header.same)
    return [found[first : first + len(header.own)] for found in every]


def _difference(
    header: Header,
    name: str,
    others: list[int],
    values: list[int],
    own: int,
    texts: Callable[[str], list[str]] | None,
) -> str:
    who = f"rank {others[0]} differs" if len(others) == 1 else f"ranks {_list(others)} differ"
    call = f"{_CALLS[header.kind]} on {len(values)} ranks"
    most = next(rank for rank in range(len(values)) if rank not in others)
    if name == "the function":
        found = _list(KINDS[values[rank]] for rank in others)
        usual = KINDS[values[most]]
        return f"{who} in {name}: it is in {found}, the others in {usual}\n  in {call}"
    if name in header.same and texts is None:
        said = header.same[name]
        return f"{who} in {name}; here, on rank {own}, it is {said}\n  in {call}"
    shown = list(map(str, values)) if texts is None else texts(name)
    found = _list(shown[rank] for rank in others)
    return f"{who} in {name}: {found} there, {shown[most]} elsewhere\n  in {call}"


def _list(of: Iterable[object]) -> str:
    return ", ".join(map(str, of))


def digest(text: str) -> int:
    """A number of 63 bits that stands for a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1
