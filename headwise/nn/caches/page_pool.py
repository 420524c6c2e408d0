"""Memory for many sequences, given out page by page, so none reserves more than it uses."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.checks import check_count, check_sizes


class PagePool:
    """`pages` pages of `page` tokens each, shared by every `PagedCache` made with this pool.

    Memory is allocated at the first token, for keys and values like its own. A page that two
    sequences share becomes free when both give it back.

    >>> import torch, headwise as hw
    >>> pool = hw.nn.PagePool(pages=8, page=16)
    >>> cache = hw.nn.PagedCache(pool)
    >>> keys, values = cache.append(*torch.randn(2, 1, 2, 40, 8))
    >>> pool.free, (cache.release(), pool.free)[1]
    (5, 8)
    """

    def __init__(self, pages: int, page: int = 64) -> None:
        check_sizes(pages=pages, page=page)
        if page & (page - 1):
            raise ValueError(f"page={page} must be a power of two: the tokens of one page")
        self.pages, self.page = pages, page
        self.keys: Tensor | None = None  # (pages, Hkv, page, D)
        self.values: Tensor | None = None  # (pages, Hkv, page, Dv)
        self._free = list(range(pages))[::-1]
        self._users = [0] * pages

    @property
    def free(self) -> int:
        """The number of pages that no sequence holds."""
        return len(self._free)

    def reserve(self, keys: Tensor, values: Tensor) -> None:
        """Allocate for keys (B, Hkv, any, D) and values (B, Hkv, any, Dv) like these, once."""
        if self.keys is None or self.values is None:
            room = self.pages, keys.shape[1], self.page
            self.keys = keys.new_zeros(*room, keys.shape[3])
            self.values = values.new_zeros(*room, values.shape[3])
            return
        for name, held, new in (("keys", self.keys, keys), ("values", self.values, values)):
            have = held.shape[1], held.shape[3], held.dtype, held.device
            given = new.shape[1], new.shape[3], new.dtype, new.device
            if have != given:
                raise ValueError(
                    f"{self!r} holds {name} of (heads, width, dtype, device) = {have}, not "
                    f"{given}; layers that differ need a pool each"
                )

    def take(self, count: int) -> list[int]:
        """Take this many free pages, or none and raise ValueError."""
        check_count("count", count)
        if count > len(self._free):
            raise ValueError(
                f"{self!r} does not have {count} free pages; release() a cache whose sequences "
                "have ended, or make the pool larger"
            )
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._users[page] = 1
        return taken

    def share(self, pages: list[int]) -> None:
        """Count one more sequence that holds these pages."""
        for page in pages:
            self._users[page] += 1

    def give_back(self, pages: list[int]) -> None:
        """Count one sequence less; pages that no sequence holds are free again."""
        for page in pages:
            self._users[page] -= 1
            if self._users[page] == 0:
                self._free.append(page)

    def shared(self, page: int) -> bool:
        """True if more than one sequence holds the page."""
        return self._users[page] > 1

    def copy(self, pages: list[int]) -> list[int]:
        """New pages with the same contents, for a sequence about to write to shared ones."""
        assert self.keys is not None and self.values is not None
        new = self.take(len(pages))
        source, target = (torch.tensor(x, device=self.keys.device) for x in (pages, new))
        self.keys[target] = self.keys[source]
        self.values[target] = self.values[source]
        return new

    def __repr__(self) -> str:
        return f"PagePool(pages={self.pages}, page={self.page}, free={self.free})"
