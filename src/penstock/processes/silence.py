"""The loss of a connection to another machine: heartbeats come over it, and then they do not."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from penstock.processes.frames import FrameStream

__all__ = ["HEARTBEAT_S", "SILENT_S", "until_silent"]

HEARTBEAT_S: Final = 0.5
"""The pause between heartbeats."""
SILENT_S: Final = 2.0
"""A machine from which nothing has come for so many seconds is lost."""


async def until_silent(stream: FrameStream[Any], seconds: float) -> bool:
    """Wait until nothing has come over ``stream`` for ``seconds`` and return True, or for its end and return False.

    The kernel notices a lost machine too, but a proxy or a firewall on the way may answer in its place.  Time in which
    this process was stopped, or too busy to read, does not count.
    """
    loop, pause_s, start = asyncio.get_running_loop(), seconds / 8, time.monotonic()
    while not stream.ended.is_set():
        due = loop.time() + pause_s
        with suppress(TimeoutError):
            await asyncio.wait_for(stream.ended.wait(), pause_s)
            return False
        if loop.time() - due > pause_s:
            start = time.monotonic()
        elif time.monotonic() - max(start, stream.heard) > seconds - pause_s:
            return True
    return False
