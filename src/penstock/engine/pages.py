"""KV pages: which request holds which page, and what it contains.  A page keeps the keys and values of 32 tokens.

Layers that see equally far back share a page group.  Every group has its own pool, and every request has one page table
for each group, so that a windowed layer can free pages that a full one keeps.  A full page may get a name, a key made
of all tokens up to its end (PageKeys), and a later request with the same tokens shares it.  A named page that no
request holds stays until its place is needed; the least recently used goes first.  No tensors here.

With context parallelism pages are dealt out to ranks: page p is on rank p % n.  The eight pages of a partition are on
one rank, and the partitions of a request on the ranks in turn.
"""

from __future__ import annotations

import os
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol

from penstock.errors import InternalError
from penstock.runtime.program import PAGE_TOKENS, PARTITION_PAGES, pages_for

__all__ = ["FREED", "NameObserver", "PageKeys", "PageLedger", "PagePool", "PageTables"]

FREED = -1
"""The entry of a page table whose page was freed."""

_ANCHOR_PAGES = 16
"""In a group in which the last page is enough to go on, every so many pages one is kept longer than the others."""


class NameObserver(Protocol):
    """Is told of the names of a pool's pages, after each change."""

    def note(self, key: bytes) -> None:
        """Note that a page got a name, or lost it."""

    def restart(self) -> None:
        """Note that all names may have changed."""


class PagePool:
    """The pages of one group, counted by reference: a page that several requests share is free when none holds it.

    ``num_ranks``: the ranks that the pages are dealt out to.  ``journal`` notes each name that is given or removed.
    """

    def __init__(self, num_pages: int, num_ranks: int = 1) -> None:
        self.num_pages, self.num_ranks = num_pages, num_ranks
        self._free = [list(range(num_pages))[rank::num_ranks][::-1] for rank in range(num_ranks)]
        # named and not held, least recently used first
        self._idle: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_ranks)]
        self._references = [0] * num_pages
        self._key_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}
        self.journal: NameObserver | None = None

    @property
    def num_free(self) -> int:
        """The number of pages that no request holds, named or not."""
        return sum(map(len, self._free)) + sum(map(len, self._idle))

    @property
    def num_named(self) -> int:
        """The number of pages whose content may be shared."""
        return len(self._page_of)

    @property
    def num_blank(self) -> int:
        """The number of free pages without a name."""
        return sum(map(len, self._free))

    def names(self) -> list[bytes]:
        """Return the names of all pages that have one, the oldest first.  Any thread may call this."""
        return list(self._page_of)

    def has_name(self, key: bytes) -> bool:
        """Return True if a page has this name."""
        return key in self._page_of

    def rank_of(self, index: int, rotation: int) -> int:
        """Return the rank of the page at an index of a table; ``rotation`` is that of its first partition."""
        return (index // PARTITION_PAGES + rotation) % self.num_ranks

    def missing(self, start: int, stop: int, rotation: int, spare: int = 0) -> int:
        """Return how many free pages are missing for the entries ``start`` to ``stop`` - 1 of a table.

        ``spare``: pages that are to be left.  With several ranks this is the count of the rank that lacks most.
        """
        if self.num_ranks == 1:
            return max(0, stop - start) + spare - self.num_free
        needed = Counter(self.rank_of(index, rotation) for index in range(start, stop))
        return max(
            needed[rank] + spare - len(self._free[rank]) - len(self._idle[rank]) for rank in range(self.num_ranks)
        )

    def take(self, rank: int = 0) -> int:
        """Return a free page of a rank, which is then held once.

        If no page is blank, the least recently used named page loses its name.  Raises InternalError if no page is
        free; check ``missing`` first.
        """
        if self._free[rank]:
            page = self._free[rank].pop()
        elif self._idle[rank]:
            page, _ = self._idle[rank].popitem(last=False)
            key = self._key_of.pop(page)
            del self._page_of[key]
            if self.journal is not None:
                self.journal.note(key)
        else:
            raise InternalError("page pool: take() was called with no free page")
        self._references[page] = 1
        return page

    def find(self, key: bytes, rank: int = 0) -> int | None:
        """Return the page with this name on a rank, or None."""
        page = self._page_of.get(key)
        return page if page is None or page % self.num_ranks == rank else None

    def find_at(self, index: int, rotation: int, key: bytes) -> int | None:
        """Return the page with this name that may be at an index of a table, or None."""
        return self.find(key, self.rank_of(index, rotation))

    def find_run(self, start: int, rotation: int, keys: Iterable[bytes]) -> list[int]:
        """Return the pages with these names for the entries of a table from ``start`` on, up to one that is missing."""
        find, pages = self._page_of.get, []
        is_dealt_out = self.num_ranks > 1
        for index, key in enumerate(keys, start):
            page = find(key)
            if page is None or (is_dealt_out and page % self.num_ranks != self.rank_of(index, rotation)):
                break
            pages.append(page)
        return pages

    def name(self, page: int, key: bytes) -> None:
        """Give a held page a name, so that others can find it.  Does nothing if another page has the name."""
        if self._references[page] < 1:
            raise InternalError(f"page pool: page {page} cannot be named: no request holds it")
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key
            if self.journal is not None:
                self.journal.note(key)

    def unname(self, page: int) -> None:
        """Remove a page's name, so that it is not shared again.  Requests that hold the page keep it."""
        key = self._key_of.pop(page, None)
        if key is None:
            return
        del self._page_of[key]
        if self.journal is not None:
            self.journal.note(key)
        rank = page % self.num_ranks
        if page in self._idle[rank]:
            del self._idle[rank][page]
            self._free[rank].append(page)

    def share(self, *pages: int) -> None:
        """Hold pages once more.  A page that no request holds must have a name."""
        references = self._references
        for page in pages:
            if references[page] == 0:
                idle = self._idle[page % self.num_ranks]
                if page not in idle:
                    raise InternalError(
                        f"page pool: page {page} cannot be shared: no request holds it and it has no name"
                    )
                del idle[page]
            references[page] += 1

    def give_back(self, *pages: int, reuse_first: bool = False) -> None:
        """Release pages once, in this order.  With ``reuse_first`` they are taken again before other named pages."""
        references, key_of = self._references, self._key_of
        for page in pages:
            count = references[page] - 1
            if count < 0:
                raise InternalError(f"page pool: page {page} cannot be given back: no request holds it")
            references[page] = count
            if count == 0:
                rank = page % self.num_ranks
                if page in key_of:
                    self._idle[rank][page] = None
                    if reuse_first:
                        self._idle[rank].move_to_end(page, last=False)
                else:
                    self._free[rank].append(page)

    def forget(self) -> None:
        """Remove every name, so that nothing computed so far is shared again."""
        for free, idle in zip(self._free, self._idle, strict=True):
            free += idle
            idle.clear()
        self._key_of.clear()
        self._page_of.clear()
        if self.journal is not None:
            self.journal.restart()

    def check_integrity(self, held: Sequence[int]) -> None:
        """Raise InternalError unless exactly the pages in ``held`` (repeated if shared) are held."""
        counted = [0] * self.num_pages
        for page in held:
            counted[page] += 1
        if counted != self._references:
            raise InternalError(f"page pool: tables hold {counted}, the pool counts {self._references}")
        blank, idle = [[page for of_rank in lists for page in of_rank] for lists in (self._free, self._idle)]
        free = blank + idle
        if len(set(free)) != len(free):
            raise InternalError("page pool: a page is listed as free twice")
        if set(free) != {page for page, count in enumerate(counted) if count == 0}:
            raise InternalError("page pool: the free pages and the reference counts disagree")
        if {page: key for key, page in self._page_of.items()} != self._key_of:
            raise InternalError("page pool: names and pages disagree")
        if any(page in self._key_of for page in blank) or any(page not in self._key_of for page in idle):
            raise InternalError("page pool: a blank page has a name, or an idle one has none")
        if any(page % self.num_ranks != rank for rank, pages in enumerate(self._free) for page in pages):
            raise InternalError("page pool: a page is listed for another rank than its own")


@dataclass(eq=False, slots=True)
class PageTables:
    """A request's pages: one table for each group; entry i holds positions 32 i to 32 i + 31, or FREED.

    ``num_freed`` counts the leading entries of each group that were freed, ``num_named`` the leading pages that have
    names. ``version`` grows with every change, so that a copy can be recognized as old.  ``rotation``: the rank of the
    first partition.
    """

    tables: list[list[int]]
    num_freed: list[int] = field(default_factory=list)
    num_named: int = 0
    version: int = 0
    rotation: int = 0

    def __post_init__(self) -> None:
        """Start with no freed entries."""
        if not self.num_freed:
            self.num_freed = [0] * len(self.tables)


class PageLedger:
    """The pages of all groups.

    ``windows`` has the window of each group in tokens, 0 for layers that see everything.  ``num_ranks``: the ranks that
    pages are dealt out to.  ``group_pages``: the pages of each group, at most ``num_pages``; empty is ``num_pages`` for
    all.
    """

    def __init__(
        self, num_pages: int, windows: Sequence[int], num_ranks: int = 1, group_pages: Sequence[int] = ()
    ) -> None:
        self.windows = tuple(windows)
        self.pools = [PagePool(count, num_ranks) for count in group_pages or (num_pages,) * len(self.windows)]
        self.num_pages, self.num_ranks = num_pages, num_ranks
        self._windowed = [(group, window) for group, window in enumerate(self.windows) if window > 0]

    def open(self, rotation: int = 0) -> PageTables:
        """Return empty tables for a request, whose first partition is on rank ``rotation`` % ``num_ranks``.

        Requests share pages only if they have the same rotation.
        """
        return PageTables([[] for _ in self.windows], rotation=rotation % self.num_ranks)

    def missing(self, pages: PageTables, num_tokens: int) -> int:
        """Return how many free pages are missing to hold ``num_tokens`` tokens, in the group that lacks most."""
        needed = pages_for(num_tokens)
        pairs = zip(pages.tables, self.pools, strict=True)
        return max((pool.missing(len(table), needed, pages.rotation) for table, pool in pairs), default=0)

    def grow(self, pages: PageTables, num_tokens: int) -> bool:
        """Extend every table to hold ``num_tokens`` tokens.  If pages are short, take none and return False."""
        needed = pages_for(num_tokens)
        for table in pages.tables:
            if len(table) < needed:
                break
        else:
            return True  # the case of 31 of 32 decodes
        if self.missing(pages, num_tokens) > 0:
            return False
        for table, pool in zip(pages.tables, self.pools, strict=True):
            while len(table) < needed:
                table.append(pool.take(pool.rank_of(len(table), pages.rotation)))
        pages.version += 1
        return True

    def reserve(self, pages: PageTables, num_tokens: int, spare: int = 0) -> bool:
        """Extend every table to hold ``num_tokens`` tokens that are not computed here, without pages that none sees.

        If pages are short, or fewer than ``spare`` would be left, take none and return False.
        """
        self.slide(pages, num_tokens)
        needed, rotation = pages_for(num_tokens), pages.rotation
        starts = [
            max(len(table), min(needed, _first_seen(num_tokens, window)) if window > 0 else 0)
            for window, table in zip(self.windows, pages.tables, strict=True)
        ]
        if any(
            pool.missing(start, needed, rotation, spare) > 0 for pool, start in zip(self.pools, starts, strict=True)
        ):
            return False
        for group, (start, pool) in enumerate(zip(starts, self.pools, strict=True)):
            table = pages.tables[group]
            if start > len(table):
                table += [FREED] * (start - len(table))
                pages.num_freed[group] = start
            table += [pool.take(pool.rank_of(index, rotation)) for index in range(len(table), needed)]
        pages.version += 1
        return True

    def slide(self, pages: PageTables, next_position: int) -> None:
        """Free the pages that no token from ``next_position`` on can see."""
        for group, window in self._windowed:
            self._free_leading(pages, group, min(len(pages.tables[group]), _first_seen(next_position, window)))

    def _free_leading(self, pages: PageTables, group: int, stop: int) -> None:
        """Free the leading entries of a table, up to ``stop``.

        Where a token sees at most the page before its own, each page is a snapshot from which another request can go
        on.  One long prompt would replace the snapshots of all others, so only some of its own stay.
        """
        table, is_snapshot = pages.tables[group], 0 < self.windows[group] <= PAGE_TOKENS + 1
        for index in range(pages.num_freed[group], stop):
            self.pools[group].give_back(table[index], reuse_first=is_snapshot and (index + 1) % _ANCHOR_PAGES > 0)
            table[index] = FREED
            pages.num_freed[group] = index + 1
            pages.version += 1

    def count_shareable(self, pages: PageTables, num_own: int, keys: Sequence[bytes]) -> int:
        """Return how many leading pages the request has or could share.

        The result is the largest n for which a token at position 32 n needs only those pages.
        ``num_own``: its leading pages whose content it has computed or shares already.  ``keys``: the names of its
        leading pages.
        """
        longest = len(keys)
        for window, pool in zip(self.windows, self.pools, strict=True):
            if window <= 0:
                longest = num_own + len(pool.find_run(num_own, pages.rotation, keys[num_own:longest]))
        return longest if not self._windowed else self._shareable_in_windows(pages, num_own, keys[:longest])

    def _shareable_in_windows(self, pages: PageTables, num_own: int, keys: Sequence[bytes]) -> int:
        sound = [True] * (len(keys) + 1)
        for group, window in self._windowed:
            run_start = pages.num_freed[group]  # pages run_start to index - 1 are known
            for index in range(num_own, len(keys) + 1):
                if run_start > _first_seen(index * PAGE_TOKENS, window):
                    sound[index] = False
                pool = self.pools[group]
                if index < len(keys) and pool.find_at(index, pages.rotation, keys[index]) is None:
                    run_start = index + 1
        return max((n for n in range(num_own, len(keys) + 1) if sound[n]), default=num_own)

    def adopt(self, pages: PageTables, num_own: int, keys: Sequence[bytes]) -> None:
        """Share the pages ``num_own`` to ``len(keys)`` from ``count_shareable``.  A partly written page is replaced."""
        for group, (window, pool) in enumerate(zip(self.windows, self.pools, strict=True)):
            table = pages.tables[group]
            first = _first_seen(len(keys) * PAGE_TOKENS, window) if window > 0 else 0
            self._free_leading(pages, group, min(first, num_own, len(table)))
            pool.give_back(*table[max(num_own, pages.num_freed[group]) :])
            del table[num_own:]
            table += [FREED] * (min(first, len(keys)) - num_own)
            shared = pool.find_run(len(table), pages.rotation, keys[len(table) :])
            if len(table) + len(shared) != len(keys):
                raise InternalError("page tables: a page to share has no name")
            table += shared
            pool.share(*shared)
            pages.num_freed[group] = max(pages.num_freed[group], min(first, len(table)))
        pages.num_named = len(keys)
        pages.version += 1

    def fork(
        self, pages: PageTables, source: PageTables, num_tokens: int, copy: Callable[[int, int, int], None] | None
    ) -> int:
        """Replace the pages of a request by those of another one that has computed ``num_tokens`` tokens.

        Full pages are shared.  ``copy`` copies the last one, from a page of a group to another.  Without it, or without
        a free page, that page is left out.  Returns how many leading tokens the pages hold: 0 if a window has freed
        pages that the tokens of the last page see.
        """
        self.close(pages)
        pages.rotation = source.rotation
        num_full, rest = divmod(num_tokens, PAGE_TOKENS)
        is_free = all(pool.missing(num_full, num_full + 1, pages.rotation) <= 0 for pool in self.pools)
        copies = rest > 0 and copy is not None and is_free
        if (
            rest
            and not copies
            and any(
                source.num_freed[group] > _first_seen(num_full * PAGE_TOKENS, window)
                for group, window in self._windowed
            )
        ):
            return 0
        for group, (table, pool) in enumerate(zip(source.tables, self.pools, strict=True)):
            shared = table[:num_full]
            pool.share(*(page for page in shared if page != FREED))
            if copies and copy is not None:
                shared.append(pool.take(pool.rank_of(num_full, pages.rotation)))
                copy(group, table[num_full], shared[-1])
            pages.tables[group][:] = shared
            pages.num_freed[group] = source.num_freed[group]
        pages.num_named = min(source.num_named, num_full)
        pages.version += 1
        return num_tokens if copies or not rest else num_full * PAGE_TOKENS

    def name(self, pages: PageTables, keys: Sequence[bytes]) -> None:
        """Give the leading ``len(keys)`` pages their names.  They must be full and computed."""
        for table, pool in zip(pages.tables, self.pools, strict=True):
            for index in range(pages.num_named, len(keys)):
                if table[index] != FREED:
                    pool.name(table[index], keys[index])
        pages.num_named = max(pages.num_named, len(keys))

    def unname(self, pages: PageTables) -> None:
        """Remove the names of these pages, whose content may be damaged."""
        for table, pool in zip(pages.tables, self.pools, strict=True):
            for page in table:
                if page != FREED:
                    pool.unname(page)

    def close(self, pages: PageTables) -> None:
        """Free every page of a request, the last first, so that a shared beginning stays longest."""
        for group, (table, pool) in enumerate(zip(pages.tables, self.pools, strict=True)):
            pool.give_back(*reversed(table[pages.num_freed[group] :]))
            table.clear()
            pages.num_freed[group] = 0
        pages.num_named = 0
        pages.version += 1

    def forget(self) -> None:
        """Remove every name."""
        for pool in self.pools:
            pool.forget()

    def check_integrity(self, holders: Iterable[PageTables]) -> None:
        """Raise InternalError unless exactly these tables hold exactly the pages that are not free."""
        tables = list(holders)
        for group, pool in enumerate(self.pools):
            held = [page for pages in tables for page in pages.tables[group] if page != FREED]
            pool.check_integrity(held)
            for pages in tables:
                head = pages.num_freed[group]
                if any((page == FREED) != (i < head) for i, page in enumerate(pages.tables[group])):
                    raise InternalError("page tables: freed entries are not the leading ones")


def _first_seen(position: int, window: int) -> int:
    """Return the first page that the token at ``position`` sees; its window of ``window`` tokens includes itself."""
    return max(0, position - window + 1) // PAGE_TOKENS


_KEY_BYTES = 16


class PageKeys:
    """Creates the keys of pages: names for the content of a page and of everything before it.

    A page's keys and values follow from all tokens up to its end, so its key is a hash of its own tokens chained to the
    key of the page before.  The hash is 128 bits of BLAKE2 with a secret of the service: a client cannot construct a
    collision, and one by chance is expected after about 10^18 pages.  A request's salt is the first link of the chain.
    Requests with different salts share nothing, so that one tenant cannot learn by timing what another tenant sent.
    ``secret``: that of other keys that are compared with these; a random one by default.
    """

    def __init__(self, secret: bytes = b"") -> None:
        self._secret = secret or os.urandom(_KEY_BYTES)

    def use_secret(self, secret: bytes) -> None:
        """Make the keys that follow with another secret of at most 64 bytes.  No page may have a key."""
        self._secret = secret

    def extend(self, keys: list[bytes], salt: str, tokens: Sequence[int]) -> None:
        """Append the keys of further pages to ``keys``.

        ``tokens`` are those after the pages that have keys, 32 for each page.  An incomplete page at the end gets no
        key.
        """
        key = keys[-1] if keys else self._hash(salt.encode("utf-8", "surrogatepass"))
        for start in range(0, len(tokens) - PAGE_TOKENS + 1, PAGE_TOKENS):
            key = self._hash(key + array("i", tokens[start : start + PAGE_TOKENS]).tobytes())
            keys.append(key)

    def _hash(self, data: bytes) -> bytes:
        return blake2b(data, digest_size=_KEY_BYTES, key=self._secret).digest()
