"""The loss of a connection to another machine: heartbeats come over it, and then they do not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from penstock.processes.frames import FrameStream

__all__ = ["HEARTBEAT_S", "SILENT_S", "Silence", "comes_in_time", "until_silent"]

HEARTBEAT_S: Final = 0.5
"""The pause between heartbeats."""
SILENT_S: Final = 2.0
"""A machine from which nothing has come for so many seconds is lost."""
_LATE_S: Final = 0.25


class Silence:
    """Measure for how long nothing has come from a peer.

    Time in which this process was stopped, or too busy to read, does not count.  Neither does time in which the whole
    machine stood still, and the peers on it with it.
    """

    def __init__(self) -> None:
        self._start = time.monotonic()

    def seconds(self, heard: float = 0.0) -> float:
        """Return the time since ``heard``, a reading of the monotonic clock, or since the measurement began."""
        return time.monotonic() - max(self._start, heard)

    def is_late(self, due: float) -> bool:
        """Return True if this process is late for ``due``: the measurement begins anew."""
        is_late = time.monotonic() - due > _LATE_S
        if is_late:
            self._start = time.monotonic()
        return is_late

    async def sleep(self, seconds: float) -> None:
        """Sleep between two looks at the peers."""
        due = time.monotonic() + seconds
        await asyncio.sleep(seconds)
        self.is_late(due)


async def until_silent(stream: FrameStream[Any], seconds: float) -> bool:
    """Wait until nothing has come over ``stream`` for ``seconds`` and return True, or for its end and return False.

    The kernel notices a lost machine too, but a proxy or a firewall on the way may answer in its place.
    """
    ended = asyncio.ensure_future(stream.ended.wait())
    try:
        return not await comes_in_time(ended, seconds, lambda: stream.heard)
    finally:
        ended.cancel()


async def comes_in_time(awaited: asyncio.Future[Any], seconds: float, heard: Callable[[], float] = lambda: 0.0) -> bool:
    """Wait for ``awaited`` and return True, or until its peer was silent for ``seconds`` and return False.

    ``heard`` returns when something else came from the peer last.
    """
    silence, pause_s = Silence(), seconds / 8
    while True:
        due = time.monotonic() + pause_s
        if (await asyncio.wait([awaited], timeout=pause_s))[0]:
            return True
        if not silence.is_late(due) and silence.seconds(heard()) > seconds - pause_s:
            return False
