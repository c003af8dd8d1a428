"""The memory of KV pages, made before a step needs it.

The system makes memory when it is first written, here in huge pages, each of which holds the same run of KV pages of
one layer: the step that reaches a new run waits for one huge page of every layer and state at once, and every answer
with it.  A thread of its own makes the next run while this one is used.  What is never reached is never made, so that
a program takes no more memory than its longest use and one run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

__all__ = ["PagePrefault"]

MIN_MARGIN: Final = 16
"""Pages: a step of 512 tokens, while which the next ones are made."""
PAUSE: Final = 1.0
"""Times what a part took."""


class PagePrefault:
    """Makes the memory of ``num_pages`` KV pages in runs of ``run_len``, in order, each when half of the one before is
    used.

    ``make(part, start, stop)`` makes that of some pages in one of ``num_parts`` and says whether the system could; a
    thread that computes may wait for the core meanwhile, so there is a pause as long behind each.  The first run is
    left to the first steps, which come at once.
    """

    def __init__(self, make: Callable[[int, int, int], bool], num_parts: int, num_pages: int, run_len: int) -> None:
        self._make = make
        self._num_parts = num_parts
        self._num_pages = num_pages
        self._run_len = run_len
        self._margin = max(MIN_MARGIN, run_len // 2)
        self._made = self._wanted = min(num_pages, run_len)
        self._work = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def num_made(self) -> int:
        """Leading pages whose memory is there, the first run's counted whether used or not."""
        return self._made

    def use(self, num_pages: int) -> None:
        """The leading ``num_pages`` are used from now on; those that come next are made meanwhile."""
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
        """Stop, behind the part that is being made.  Calling it again does nothing."""
        with self._work:
            self._closed = True
            self._work.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._closed:
            with self._work:
                self._work.wait_for(lambda: self._closed or self._made < self._wanted)
            stop = min(self._wanted, self._made + self._run_len)
            for part in range(self._num_parts):
                start = time.perf_counter()
                if self._closed or not self._make(part, self._made, stop):
                    self._closed = True  # if the system cannot, the first write to each makes it, as ever
                    return
                with self._work:
                    self._work.wait_for(lambda: self._closed, PAUSE * (time.perf_counter() - start))
            self._made = stop
