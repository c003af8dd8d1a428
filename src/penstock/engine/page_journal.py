"""Reports to a router of what the pages of an engine hold: the keys that were gained and dropped since the last one."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from penstock.engine.pages import PageKeys, PageLedger, PagePool

__all__ = ["MAX_CHANGES", "PageJournal", "PageReport"]

MAX_CHANGES: Final = 4096
"""Limit on the changes that wait for a report.  After more of them the next report has everything."""


@dataclass(frozen=True)
class PageReport:
    """The keys of pages that an engine gained and dropped since its last report.

    ``number`` grows by one with each report.  ``is_full``: ``gained`` has the keys of all pages that can be shared.
    ``num_blank``: the free pages without a key.  Once there are none, each new page takes the place of another.
    """

    number: int
    is_full: bool
    gained: Sequence[bytes]
    dropped: Sequence[bytes]
    num_blank: int


class PageJournal:
    """Collects the changes of an engine's shareable pages.  Nothing is collected before the first ``ask``.

    A key counts once however often it changed, and what it is at the time of the report counts.  With several page
    groups the journal follows one that sees everything: a prompt is shared as far as that group has its pages, unless a
    windowed group has lost the last of them.  Where all groups are windowed there are no reports, because such an
    engine goes on from the last pages of a beginning when the first are gone.  Any thread may call ``ask`` and
    ``take``.
    """

    def __init__(self, keys: PageKeys | None = None) -> None:
        self.keys = keys or PageKeys()
        self._lock = threading.Lock()  # guards all but the pool
        self._pool: PagePool | None = None
        self._changed: dict[bytes, None] = {}
        self._is_asked = self._is_full_due = self._is_silent = False
        self._number = 0

    def watch(self, ledger: PageLedger) -> None:
        """Follow the pages of a ledger, in place of those of an earlier one."""
        groups = zip(ledger.windows, ledger.pools, strict=True)
        self._pool = next((pool for window, pool in groups if window <= 0), None)
        self._is_silent = self._pool is None and bool(ledger.pools)
        if self._pool is not None:
            self._pool.journal = self
        self.restart()

    def ask(self) -> None:
        """Request reports; the next one lists all pages."""
        with self._lock:
            self._is_asked = True
        self.restart()

    def restart(self) -> None:
        """Note that everything may have changed."""
        with self._lock:
            self._is_full_due = True
            self._changed.clear()

    def note(self, key: bytes) -> None:
        """Note that a key was given to a page or taken from it.  Call it after the change."""
        with self._lock:
            if self._is_full_due:  # also before the first call of ``ask``
                return
            self._changed[key] = None
            if len(self._changed) > MAX_CHANGES:
                self._is_full_due = True
                self._changed.clear()

    def take(self) -> PageReport | None:
        """Return what has changed since the last report; None if nothing has, or if no one asked.

        Reports must be sent in the order in which they were taken.
        """
        with self._lock:
            is_full, changed = self._is_full_due, self._changed
            if not self._is_asked or self._is_silent or not (is_full or changed):
                return None
            self._is_full_due, self._changed = False, {}
            self._number += 1
            number = self._number
        # A change from here on is in the next report, too.
        pool = self._pool
        if pool is None:
            return PageReport(number, is_full, (), (), 0)
        if is_full:
            return PageReport(number, True, pool.names(), (), pool.num_blank)
        gained, dropped = list[bytes](), list[bytes]()
        for key in changed:
            (gained if pool.has_name(key) else dropped).append(key)
        return PageReport(number, False, gained, dropped, pool.num_blank)
