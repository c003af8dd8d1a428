"""Pages of a text that go from one engine to another: what the sender holds, and what the receiver grants.

Pages are found and used by their names, as those of equal prompts are (``pages.py``).  The sender holds the pages of
the longest beginning of the text that it knows.  The receiver holds free pages for that beginning, and names them when
their content has come.  A request with that text then shares them instead of computing it.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from penstock.engine.pages import FREED
from penstock.runtime.program import PAGE_TOKENS

if TYPE_CHECKING:
    from penstock.engine.engine import Engine
    from penstock.engine.pages import PageTables

__all__ = ["HeldPages", "can_copy_pages", "grant_pages", "hold_pages"]

_CHECKSUM_BYTES = 16


def can_copy_pages(engine: Engine) -> bool:
    """Return True if pages have names and can be reached, so that they can go from and to the engine."""
    return engine.options.prefix_cache and not engine.scheduler.whole_prompts and any(engine.program.page_memory())


class HeldPages:
    """The pages that an engine holds for a transfer, and the bytes of their parts: a page of a page group is a part.

    ``first``: the leading pages of the text before this one are not part of the transfer.  Use it in the engine's
    thread only, between steps: an engine that starts over after an error gives its pages to others.
    """

    def __init__(self, engine: Engine, pages: PageTables, keys: list[bytes], first: int = 0) -> None:
        self._engine, self._ledger, self._pages, self._keys = engine, engine.scheduler.ledger, pages, keys
        self._memory = engine.program.page_memory()
        self._hash = blake2b(digest_size=_CHECKSUM_BYTES)
        self._places: list[tuple[int, int]] = []
        self.num_done = 0
        """The number of parts that were read or written."""
        self.begin_at(first)

    def begin_at(self, first: int) -> None:
        """Set ``first``, before a part is read or written."""
        self.first = first
        self._places = [
            (group, table[index])
            for group, table in enumerate(self._pages.tables)
            for index in range(first, len(table))
            if table[index] != FREED
        ]

    @property
    def num_pages(self) -> int:
        """The number of leading pages of the text."""
        return len(self._keys)

    @property
    def num_parts(self) -> int:
        """The number of parts of the transfer."""
        return len(self._places)

    @property
    def checksum(self) -> bytes:
        """The BLAKE2 hash of the parts so far."""
        return self._hash.digest()

    @property
    def _is_current(self) -> bool:
        """False if the engine has started over or is closed."""
        return self._engine.scheduler.ledger is self._ledger and not self._engine.is_closed

    @property
    def is_known(self) -> bool:
        """True if the pages still have their names: no request that wrote them has failed."""
        known = self._ledger.count_shareable(self._ledger.open(), 0, self._keys)
        return self._is_current and known == len(self._keys)

    def read(self) -> bytes | None:
        """Return the next part; None if there is none."""
        if self.num_done >= self.num_parts or not self._is_current:
            return None
        group, page = self._places[self.num_done]
        data = b"".join(state[page].tobytes() for state in self._memory[group])
        self._note(data)
        return data

    def write(self, data: bytes) -> bool:
        """Store the next part.  Return False, and store nothing, if there is none or its size is wrong."""
        if self.num_done >= self.num_parts or not self._is_current:
            return False
        group, page = self._places[self.num_done]
        states = self._memory[group]
        if len(data) != sum(state.shape[1] for state in states):
            return False
        start = 0
        for state in states:
            stop = start + state.shape[1]
            state[page] = np.frombuffer(data, np.uint8, stop - start, start)
            start = stop
        self._note(data)
        return True

    def _note(self, data: bytes) -> None:
        self._hash.update(data)
        self.num_done += 1

    def use(self, num_parts: int, checksum: bytes) -> bool:
        """Name the pages, so that requests share them, if the sender's count and checksum are those of what came."""
        with self._engine.exclusive():
            is_whole = self.num_done == self.num_parts == num_parts and checksum == self.checksum
            if not is_whole or not self._is_current:
                return False
            self._ledger.name(self._pages, self._keys)
            return True

    def release(self) -> None:
        """Give the pages back.  Named ones stay until their memory is needed.  A second call does nothing."""
        with self._engine.exclusive():
            if self._is_current:
                self._ledger.close(self._pages)


def hold_pages(engine: Engine, token_ids: Sequence[int], salt: str) -> HeldPages | None:
    """Hold the known leading pages of a text, for a sender; None if there are none or they cannot be read."""
    with engine.exclusive():
        keys = _keys_of(engine, token_ids, salt)
        ledger = engine.scheduler.ledger
        pages = ledger.open()
        num_known = ledger.count_shareable(pages, 0, keys)
        if not num_known:
            return None
        ledger.adopt(pages, 0, keys[:num_known])
        return HeldPages(engine, pages, keys[:num_known])


def grant_pages(engine: Engine, token_ids: Sequence[int], salt: str) -> HeldPages | None:
    """Hold pages for the whole text, for a receiver; None if they are short or cannot be written.

    ``first`` is the number of leading pages that are known.
    """
    with engine.exclusive():
        keys = _keys_of(engine, token_ids, salt)
        if not keys:
            return None
        ledger = engine.scheduler.ledger
        pages = ledger.open()
        num_known = ledger.count_shareable(pages, 0, keys)
        if num_known:
            ledger.adopt(pages, 0, keys[:num_known])
        spare = len(engine.scheduler.running)  # each may soon need one more
        if not ledger.reserve(pages, len(keys) * PAGE_TOKENS, spare):
            ledger.close(pages)
            return None
        return HeldPages(engine, pages, keys, num_known)


def _keys_of(engine: Engine, token_ids: Sequence[int], salt: str) -> list[bytes]:
    """Return the keys of the whole pages of a text; none if its pages cannot be copied."""
    if engine.is_closed or not engine.program.page_memory():
        return []
    return engine.scheduler.keys_of(token_ids, salt)
