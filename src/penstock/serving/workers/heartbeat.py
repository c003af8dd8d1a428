"""How long an engine's loop has stood, as its worker tells the primary twice a second."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

__all__ = ["BEAT_S", "Heartbeat"]

BEAT_S: Final = 0.5
_MAX_GROWN_S: Final = 2 * BEAT_S


class Heartbeat:
    """The age of an engine's last turn, counted in time in which this process ran itself.

    A process that is stopped and goes on (Ctrl-Z, fg; a machine that sleeps) finds its clocks far ahead, and its engine
    did nothing wrong.  So from one look to the next an age grows by no more than two beats.

    ``longest_s``: seconds that a turn may well take.  It begins with what is given, and is at least twice the longest
    turn seen so far that came to its end.
    """

    def __init__(self, longest_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.longest_s = longest_s
        self._clock = clock
        self._looked = clock()
        self._turn = 0.0
        self._age_s = 0.0

    def look(self, last_turn: float) -> float:
        """The age of the turn that began at ``last_turn`` on the same clock."""
        now = self._clock()
        grown_s = min(now - self._looked, _MAX_GROWN_S)
        self._looked = now
        if last_turn == self._turn:
            self._age_s += grown_s
        else:
            self.longest_s = max(self.longest_s, 2 * self._age_s)
            self._turn, self._age_s = last_turn, min(now - last_turn, grown_s)
        return self._age_s
