"""Counts worker crashes per request, so that a request that crashes workers is refused instead of retried forever."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Final

__all__ = ["MAX_CRASHES", "CrashTracker"]

MAX_CRASHES: Final = 2
"""A request that ran in this many workers when they crashed is refused."""
MAX_WAITS: Final = 3
"""The primary infers from the queue order which requests ran in a crashed worker, and may be wrong.  A request that
waited during this many crashes counts as having run in one."""
_FORGET_S: Final = 600.0
_MAX_REQUESTS: Final = 4096


class CrashTracker:
    """Counts crashes by the fingerprint of a request.  A count ends with an answer, or ten minutes after a crash."""

    def __init__(self) -> None:
        self._crashes: OrderedDict[bytes, tuple[int, float, str]] = OrderedDict()
        self._waits: OrderedDict[bytes, tuple[int, float, str]] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of known fingerprints; without any there is nothing to look up."""
        return len(self._crashes)

    def num_crashes(self, fingerprint: bytes) -> int:
        """Return how many workers crashed while they ran the request."""
        count, when, _ = self._crashes.get(fingerprint, (0, 0.0, ""))
        return count if time.monotonic() - when < _FORGET_S else 0

    def add(self, fingerprint: bytes, worker: str) -> int:
        """Count the crash of a worker that ran the request, and return the sum.

        A crash counts once, however many equal requests the worker had.
        """
        return _count(self._crashes, fingerprint, worker)

    def add_wait(self, fingerprint: bytes, worker: str) -> int:
        """Count the crash of a worker in whose queue the request waited, and return the sum of crashes."""
        if _count(self._waits, fingerprint, worker) < MAX_WAITS:
            return self.num_crashes(fingerprint)
        del self._waits[fingerprint]
        return self.add(fingerprint, worker)

    def clear(self, fingerprint: bytes) -> None:
        """Forget a request that was answered."""
        self._crashes.pop(fingerprint, None)
        self._waits.pop(fingerprint, None)


def _count(counts: OrderedDict[bytes, tuple[int, float, str]], fingerprint: bytes, worker: str) -> int:
    """Add one, unless this worker was the last one counted, and return the sum.  An old sum starts again."""
    count, when, last = counts.get(fingerprint, (0, 0.0, ""))
    now = time.monotonic()
    if now - when >= _FORGET_S:
        count = 0
    if not count or last != worker:
        count += 1
    counts[fingerprint] = (count, now, worker)
    counts.move_to_end(fingerprint)
    while len(counts) > _MAX_REQUESTS:
        counts.popitem(last=False)
    return count
