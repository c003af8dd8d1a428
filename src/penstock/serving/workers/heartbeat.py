"""The age of an engine's current iteration, which a worker reports to the primary twice a second."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from penstock.processes.silence import HEARTBEAT_S

__all__ = ["HEARTBEAT_S", "Heartbeat"]

_MAX_STEP_S: Final = 2 * HEARTBEAT_S


class Heartbeat:
    """Measures the age of an engine's current iteration in time during which this process ran.

    After a process was stopped and continued (Ctrl-Z and fg, a machine that sleeps), its clocks have jumped ahead
    although its engine is fine.  Between two looks an age therefore grows by at most two heartbeats.

    ``longest_s``: the seconds that an iteration may reasonably take.  It starts with the given value and is at least
    twice the longest iteration that has ended.
    """

    def __init__(self, longest_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.longest_s = longest_s
        self._clock = clock
        self._last_look = clock()
        self._iteration_start = 0.0
        self._age_s = 0.0

    def look(self, iteration_start: float) -> float:
        """Return the age in seconds of the iteration that began at ``iteration_start``, a time of the same clock."""
        now = self._clock()
        elapsed_s = min(now - self._last_look, _MAX_STEP_S)
        self._last_look = now
        if iteration_start == self._iteration_start:
            self._age_s += elapsed_s
        else:
            self.longest_s = max(self.longest_s, 2 * self._age_s)
            self._iteration_start, self._age_s = iteration_start, min(now - iteration_start, elapsed_s)
        return self._age_s
