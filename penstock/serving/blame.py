"""Which requests were open when workers died: one that was there twice is refused, not tried for ever."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Final

__all__ = ["MOST_DEATHS", "Blame"]

MOST_DEATHS: Final = 2
_FORGET_S: Final = 600.0
_MOST: Final = 4096


class Blame:
    """Counts deaths per fingerprint of a request.  One that was answered, or was not seen for ten minutes, is clear."""

    def __init__(self) -> None:
        self._deaths: OrderedDict[bytes, tuple[int, float, str]] = OrderedDict()

    def num_deaths(self, fingerprint: bytes) -> int:
        """Workers that died with it."""
        count, when, _ = self._deaths.get(fingerprint, (0, 0.0, ""))
        return count if time.monotonic() - when < _FORGET_S else 0

    def add(self, fingerprint: bytes, worker: str) -> int:
        """The death of a worker, which counts once however many equal requests were there; returns the sum."""
        count = self.num_deaths(fingerprint)
        if not count or self._deaths[fingerprint][2] != worker:
            count += 1
        self._deaths[fingerprint] = (count, time.monotonic(), worker)
        self._deaths.move_to_end(fingerprint)
        while len(self._deaths) > _MOST:
            self._deaths.popitem(last=False)
        return count

    def clear(self, fingerprint: bytes) -> None:
        """It was answered."""
        self._deaths.pop(fingerprint, None)
