"""A budget for whole gRPC responses that clients have not read yet: their number and their total size.

gRPC sends a whole response together with its status and reports only when both have been sent, so there is no timeout
for a client that does not read, unlike for responses that are written before their status.  The budget limits the
memory that such clients can occupy.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, Final

__all__ = ["MAX_ANSWERS", "MAX_BYTES", "SendBudget"]

MAX_ANSWERS: Final = 256
MAX_BYTES: Final = 32 << 20


class SendBudget:
    """Counts responses from the moment that gRPC has them until the end of their RPCs."""

    def __init__(self, max_answers: int = MAX_ANSWERS, max_bytes: int = MAX_BYTES) -> None:
        self.num_answers = self.num_bytes = 0
        self._max_answers, self._max_bytes = max_answers, max_bytes
        self._turn, self._left = asyncio.Lock(), asyncio.Event()

    @property
    def has_room(self) -> bool:
        """True if new requests may be answered with a whole response."""
        return self.num_answers < self._max_answers and self.num_bytes < self._max_bytes

    async def add(self, size: int, seconds: float) -> None:
        """Count a response of ``size`` bytes until the calling task ends.

        Waits for room, in order of arrival; a single response always has room, however large.  Raises TimeoutError if
        there is no room within ``seconds``.
        """
        if self._turn.locked() or not self._fits(size):
            async with asyncio.timeout(seconds), self._turn:
                while not self._fits(size):
                    self._left.clear()
                    await self._left.wait()
        task: asyncio.Task[Any] | None = asyncio.current_task()
        if task is None:
            raise RuntimeError("add must be called in a task")
        self.num_answers += 1
        self.num_bytes += size
        task.add_done_callback(partial(self._ended, size))

    def _fits(self, size: int) -> bool:
        if not self.num_answers:
            return True
        return self.num_answers < self._max_answers and self.num_bytes + size <= self._max_bytes

    def _ended(self, size: int, _task: asyncio.Task[Any]) -> None:
        self.num_answers -= 1
        self.num_bytes -= size
        self._left.set()
