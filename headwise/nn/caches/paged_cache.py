"""A cache whose tokens are stored in pages of a shared pool."""

from __future__ import annotations

import weakref
from typing import Self

import torch
from torch import Tensor

from headwise.checks import check_count, check_kind, check_sizes
from headwise.core.problem import describe
from headwise.engines.decoding import Stored
from headwise.nn.caches.packed_cache import Packed, emptied


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


class PagedCache(Packed):
    """Any length the pool has pages for; `release`, or deleting the cache, gives them back.

    `reorder` copies nothing: entries that continue the same one share its pages, and one that
    writes to a shared page gets its own copy first. So `reorder(unfinished)` gives back the pages
    of sequences that have ended.

    >>> import torch, headwise as hw
    >>> pool = hw.nn.PagePool(pages=8, page=16)
    >>> attn = hw.nn.MultiHeadAttention(32, 4, mask=hw.mask.causal()).eval()
    >>> x, cache = torch.randn(2, 20, 32), hw.nn.PagedCache(pool)
    >>> with torch.no_grad():
    ...     steps = [attn(x[:, i : i + 1], cache=cache) for i in range(20)]
    ...     print(torch.allclose(torch.cat(steps, 1), attn(x), atol=1e-6), pool.free)
    True 4
    >>> cache.reorder(torch.tensor([1]))
    >>> pool.free
    6
    """

    def __init__(self, pool: PagePool) -> None:
        check_kind("pool", pool, PagePool, "hw.nn.PagePool(pages=64)")
        self.pool = pool
        self._tables: list[list[int]] = []  # the pages of each batch entry
        self._table: Tensor | None = None  # the same as a tensor, for the kernel
        weakref.finalize(self, _give_back, pool, self._tables)

    def write(self, keys: Tensor, values: Tensor) -> None:
        self._check(keys, values)
        if keys.shape[0] == 0:
            raise ValueError(f"a PagedCache needs at least one sequence; keys are {describe(keys)}")
        self.pool.reserve(keys, values)
        count = keys.shape[2]
        self._make_room(keys.shape[0], self._length + count)
        self._keys, self._values = emptied(keys), emptied(values)
        assert self.pool.keys is not None and self.pool.values is not None
        at = torch.arange(self._length, self._length + count, device=keys.device)
        pages = self._pages()[:, at // self.pool.page].long()  # (B, N)
        self.pool.keys[pages, :, at % self.pool.page] = keys.transpose(1, 2)
        self.pool.values[pages, :, at % self.pool.page] = values.transpose(1, 2)
        self._length += count

    def _make_room(self, batch: int, length: int) -> None:
        """Give each entry pages for `length` tokens, and its own copy of those it will write to."""
        pool, size = self.pool, self.pool.page
        tables: list[list[int]] = self._tables or [[] for _ in range(batch)]
        partly = self._length % size != 0 and length > self._length
        last = self._length // size
        mine = [table for table in tables if partly and pool.shared(table[last])]
        needed = [-(-length // size) - len(table) for table in tables]
        if sum(needed) + len(mine) > pool.free:
            pool.take(sum(needed) + len(mine))  # raises, and takes nothing
        if not self._tables:
            self._tables.extend(tables)
        if not mine and not any(needed):
            return
        for table in mine:
            if pool.shared(table[last]):  # of two that share it, the second keeps it
                (own,) = pool.copy([table[last]])
                pool.give_back([table[last]])
                table[last] = own
        for table, more in zip(self._tables, needed, strict=True):
            table += pool.take(more)
        self._table = None

    def _pages(self) -> Tensor:
        """The numbers, in the pool, of each entry's pages: (B, pages) int32."""
        assert self._keys is not None or self.pool.keys is not None
        if self._table is None:
            assert self.pool.keys is not None
            self._table = torch.tensor(
                self._tables, dtype=torch.int32, device=self.pool.keys.device
            )
        return self._table

    def read(self) -> tuple[Tensor, Tensor]:
        held = self.held()
        assert held.pages is not None
        found = []
        for pool in (held.keys, held.values):
            pages = pool[held.pages.long()].transpose(1, 2)  # (B, Hkv, pages, page, width)
            found.append(pages.flatten(2, 3)[:, :, : self._length])
        return found[0], found[1]

    def held(self) -> Stored:
        if self.pool.keys is None or self.pool.values is None or not self._tables:
            raise ValueError(f"{self!r} is empty; append tokens before attending to them")
        return Stored(self.pool.keys, self.pool.values, self._length, pages=self._pages())

    def rollback(self, count: int) -> None:
        super().rollback(count)
        kept = -(-self._length // self.pool.page)
        for table in self._tables:
            self.pool.give_back(table[kept:])
            del table[kept:]
        self._table = None

    def reorder(self, index: Tensor) -> None:
        super().reorder(index)
        tables = [list(self._tables[b]) for b in index.tolist()]
        for table in tables:
            self.pool.share(table)
        _give_back(self.pool, self._tables)
        self._tables.extend(tables)
        self._table = None

    def release(self) -> None:
        """Forget every token and give all pages back."""
        _give_back(self.pool, self._tables)
        self._keys = self._values = self._table = None
        self._length = 0

    def fresh(self) -> Self:
        return type(self)(self.pool)


def _give_back(pool: PagePool, tables: list[list[int]]) -> None:
    for table in tables:
        pool.give_back(table)
    tables.clear()
