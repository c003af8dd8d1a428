"""KV pages: who holds which.  A page keeps the keys and values of 32 tokens.

Layers that see equally far back share a page group; every group has its own pool and every request one page
table per group, so that a windowed layer can give up pages that a full one keeps.  No tensors here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from penstock.errors import InternalError
from penstock.runtime.program import PAGE_TOKENS, pages_for

__all__ = ["FREED", "PageLedger", "PagePool", "PageTables"]

FREED = -1
"""The entry of a page table whose page was given up."""


class PagePool:
    """The pages of one group, counted by reference: a page that several requests share is free when none holds it."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._references = [0] * num_pages

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def take(self) -> int:
        """A free page, now held once.  InternalError when there is none: the caller asks ``num_free`` first."""
        if not self._free:
            raise InternalError("page pool: a page was taken when none was free")
        page = self._free.pop()
        self._references[page] = 1
        return page

    def share(self, page: int) -> None:
        """Hold a page once more."""
        if self._references[page] < 1:
            raise InternalError(f"page pool: page {page} is shared but nobody holds it")
        self._references[page] += 1

    def give_back(self, page: int) -> None:
        """Let go of a page once."""
        if self._references[page] < 1:
            raise InternalError(f"page pool: page {page} is given back but nobody holds it")
        self._references[page] -= 1
        if self._references[page] == 0:
            self._free.append(page)

    def check_integrity(self, held: Sequence[int]) -> None:
        """InternalError unless exactly the pages in ``held`` (repeated when shared) are held."""
        counted = [0] * self.num_pages
        for page in held:
            counted[page] += 1
        if counted != self._references:
            raise InternalError(f"page pool: tables hold {counted}, the pool counts {self._references}")
        free = set(self._free)
        if len(free) != len(self._free):
            raise InternalError("page pool: a page is free twice")
        if free != {page for page, count in enumerate(counted) if count == 0}:
            raise InternalError("page pool: the free list and the reference counts disagree")


@dataclass(eq=False)
class PageTables:
    """A request's pages: one table per group; entry i holds positions 32 i to 32 i + 31, or FREED."""

    tables: list[list[int]]
    num_freed: list[int] = field(default_factory=list)  # leading entries given up, per group

    def __post_init__(self) -> None:
        """Start with nothing given up."""
        if not self.num_freed:
            self.num_freed = [0] * len(self.tables)


class PageLedger:
    """All groups together.

    ``windows`` has the window of each group in tokens, 0 for layers that see everything.
    """

    def __init__(self, num_pages: int, windows: Sequence[int]) -> None:
        self.windows = tuple(windows)
        self.pools = [PagePool(num_pages) for _ in self.windows]
        self.num_pages = num_pages
        self._windowed = [(group, window) for group, window in enumerate(self.windows) if window > 0]

    def open(self) -> PageTables:
        """Empty tables for a request."""
        return PageTables([[] for _ in self.windows])

    def missing(self, pages: PageTables, num_tokens: int) -> int:
        """Pages (in the group that lacks most) that are not free but needed to hold ``num_tokens`` tokens."""
        needed = pages_for(num_tokens)
        pairs = zip(pages.tables, self.pools, strict=True)
        return max((needed - len(table) - pool.num_free for table, pool in pairs), default=0)

    def grow(self, pages: PageTables, num_tokens: int) -> bool:
        """Extend every table to hold ``num_tokens`` tokens; False, and nothing taken, when pages are short."""
        needed = pages_for(num_tokens)
        for table in pages.tables:
            if len(table) < needed:
                break
        else:
            return True  # 31 of 32 decodes
        if self.missing(pages, num_tokens) > 0:
            return False
        for table, pool in zip(pages.tables, self.pools, strict=True):
            while len(table) < needed:
                table.append(pool.take())
        return True

    def slide(self, pages: PageTables, next_position: int) -> None:
        """Give up pages that no token from ``next_position`` on can see."""
        for group, window in self._windowed:
            table = pages.tables[group]
            oldest = next_position - window + 1
            while pages.num_freed[group] < len(table) and (pages.num_freed[group] + 1) * PAGE_TOKENS <= oldest:
                index = pages.num_freed[group]
                self.pools[group].give_back(table[index])
                table[index] = FREED
                pages.num_freed[group] += 1

    def close(self, pages: PageTables) -> None:
        """Give back every page of a request."""
        for group, (table, pool) in enumerate(zip(pages.tables, self.pools, strict=True)):
            for page in table[pages.num_freed[group] :]:
                pool.give_back(page)
            table.clear()
            pages.num_freed[group] = 0

    def check_integrity(self, holders: Iterable[PageTables]) -> None:
        """InternalError unless exactly these tables hold exactly the pages that are not free."""
        everyone = list(holders)
        for group, pool in enumerate(self.pools):
            held = [page for pages in everyone for page in pages.tables[group] if page != FREED]
            pool.check_integrity(held)
            for pages in everyone:
                head = pages.num_freed[group]
                if any((page == FREED) != (i < head) for i, page in enumerate(pages.tables[group])):
                    raise InternalError("page tables: freed entries are not the leading ones")
