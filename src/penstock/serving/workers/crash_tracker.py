"""Which requests ran when workers died: one that was there twice is refused, not tried for ever."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Final

__all__ = ["MAX_DEATHS", "CrashTracker"]

MAX_DEATHS: Final = 2
MAX_WAITS: Final = 3
"""Who ran in a worker that died is reckoned from the order of places, which may be wrong: what waited through so many
deaths counts as having run."""
_FORGET_S: Final = 600.0
_MOST: Final = 4096


class CrashTracker:
    """Counts deaths per fingerprint of a request.  One that was answered, or was not seen for ten minutes, is clear."""

    def __init__(self) -> None:
        self._deaths: OrderedDict[bytes, tuple[int, float, str]] = OrderedDict()
        self._waits: OrderedDict[bytes, tuple[int, float, str]] = OrderedDict()

    def __len__(self) -> int:
        """Fingerprints that are known: with none there is nothing to look up."""
        return len(self._deaths)

    def num_deaths(self, fingerprint: bytes) -> int:
        """Workers that died with it."""
        count, when, _ = self._deaths.get(fingerprint, (0, 0.0, ""))
        return count if time.monotonic() - when < _FORGET_S else 0

    def add(self, fingerprint: bytes, worker: str) -> int:
        """The death of a worker, which counts once however many equal requests were there; returns the sum."""
        return _count(self._deaths, fingerprint, worker)

    def add_wait(self, fingerprint: bytes, worker: str) -> int:
        """A worker died while it waited for a place there; returns the sum of deaths."""
        if _count(self._waits, fingerprint, worker) < MAX_WAITS:
            return self.num_deaths(fingerprint)
        del self._waits[fingerprint]
        return self.add(fingerprint, worker)

    def clear(self, fingerprint: bytes) -> None:
        """It was answered."""
        self._deaths.pop(fingerprint, None)
        self._waits.pop(fingerprint, None)


def _count(counts: OrderedDict[bytes, tuple[int, float, str]], fingerprint: bytes, worker: str) -> int:
    """One more, unless this worker was counted already; the sum, in which what is long ago does not count."""
    count, when, last = counts.get(fingerprint, (0, 0.0, ""))
    now = time.monotonic()
    if now - when >= _FORGET_S:
        count = 0
    if not count or last != worker:
        count += 1
    counts[fingerprint] = (count, now, worker)
    counts.move_to_end(fingerprint)
    while len(counts) > _MOST:
        counts.popitem(last=False)
    return count
