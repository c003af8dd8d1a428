"""Whole answers over gRPC that their clients have not taken yet: how many there may be, and how large together.

gRPC sends a whole answer and its status in one turn, and says nothing until both have left: so there is no clock for a
reader who takes nothing, as there is where an answer is written first and its status then.  What such readers can hold
is bounded here instead.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, Final

__all__ = ["MAX_ANSWERS", "MAX_BYTES", "SendBudget"]

MAX_ANSWERS: Final = 256
MAX_BYTES: Final = 32 << 20


class SendBudget:
    """Counts answers from the moment that gRPC has them to the end of their RPCs."""

    def __init__(self, max_answers: int = MAX_ANSWERS, max_bytes: int = MAX_BYTES) -> None:
        self.num_answers = self.num_bytes = 0
        self._max_answers, self._max_bytes = max_answers, max_bytes
        self._turn, self._left = asyncio.Lock(), asyncio.Event()

    @property
    def has_room(self) -> bool:
        """Whether what is asked for from now on may be answered like this."""
        return self.num_answers < self._max_answers and self.num_bytes < self._max_bytes

    async def add(self, size: int, seconds: float) -> None:
        """Count an answer of so many bytes until the task that calls this has ended.

        Waits for room, those who came first going first; an answer alone has room, however large.  TimeoutError when
        there is none for so long.
        """
        if self._turn.locked() or not self._fits(size):
            async with asyncio.timeout(seconds), self._turn:
                while not self._fits(size):
                    self._left.clear()
                    await self._left.wait()
        task: asyncio.Task[Any] | None = asyncio.current_task()
        if task is None:
            raise RuntimeError("an answer is counted for the task that gives it")
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
