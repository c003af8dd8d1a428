"""Prefault the memory of KV pages before a step needs it.

The kernel allocates memory at the first write, here in huge pages, each of which holds the same run of KV pages of one
layer.  Without prefaulting, the step that reaches a new run waits for one huge page of every layer and state at once,
and so does every answer in it.  A background thread allocates the next run while the current one is used.  Pages that
are never reached are never allocated: a program uses at most the memory of its longest use and one further run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

__all__ = ["PagePrefault"]

MIN_MARGIN: Final = 16
"""The smallest lead in pages: one step of 512 tokens, during which the next pages are allocated."""
PAUSE_FACTOR: Final = 1.0
"""The pause after each part, as a multiple of the time that the part took."""


class PagePrefault:
    """Allocates the memory of ``num_pages`` KV pages in runs of ``run_len``, each when half of the previous is used.

    ``make(part, start, stop)`` allocates the pages from ``start`` to ``stop`` in one of ``num_parts`` and returns False
    when the kernel cannot.  A computing thread may have to wait for the core meanwhile, so each part is followed by a
    pause of the same length.  The first run is left to the first steps, which come immediately.
    """

    def __init__(self, make: Callable[[int, int, int], bool], num_parts: int, num_pages: int, run_len: int) -> None:
        self._make = make
        self._num_parts = num_parts
        self._num_pages = num_pages
        self._run_len = run_len
        self._margin = max(MIN_MARGIN, run_len // 2)
        self.num_made = self._wanted = min(num_pages, run_len)
        """``num_made``: the number of leading pages that are allocated, at least one run."""
        self._work = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def use(self, num_pages: int) -> None:
        """Report that the leading ``num_pages`` are in use; the next run is then allocated in the background."""
        if num_pages + self._margin <= self._wanted or self._wanted == self._num_pages or self._closed:
            return
        with self._work:
            needed = -(-(num_pages + self._margin) // self._run_len) * self._run_len
            self._wanted = min(self._num_pages, needed)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="penstock-pages", daemon=True)
                self._thread.start()
            self._work.notify()

    def close(self) -> None:
        """Stop after the current part.  A second call does nothing."""
        with self._work:
            self._closed = True
            self._work.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._closed:
            with self._work:
                self._work.wait_for(lambda: self._closed or self.num_made < self._wanted)
            stop = min(self._wanted, self.num_made + self._run_len)
            for part in range(self._num_parts):
                start = time.perf_counter()
                if self._closed or not self._make(part, self.num_made, stop):
                    self._closed = True  # if the kernel cannot, the first write to each page allocates it
                    return
                with self._work:
                    self._work.wait_for(lambda: self._closed, PAUSE_FACTOR * (time.perf_counter() - start))
            self.num_made = stop
