"""When requests must have ended.  The engine asks between steps."""

from __future__ import annotations

import heapq

from penstock.engine.request import Request, Status
from penstock.errors import DeadlineError

__all__ = ["Deadlines"]

_FEW = 64
"""Entries of ended requests that are kept rather than looked for."""


class Deadlines:
    """The requests that have a deadline, the next one first; some that have ended meanwhile are among them."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, Request]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request: Request) -> None:
        """Note when a request must have ended, if it must."""
        if request.options.deadline_s is not None:
            when = request.timings.submitted + request.options.deadline_s
            heapq.heappush(self._entries, (when, request.id, request))

    def take_over(self, now: float) -> list[tuple[Request, DeadlineError]]:
        """Take out those whose time is over at ``now`` (of ``time.perf_counter``), with the error to end them with."""
        found = []
        while self._entries and self._entries[0][0] <= now:
            request = heapq.heappop(self._entries)[2]
            where = "waited" if request.status is Status.WAITING else f"had {len(request.output_ids)} tokens"
            message = f"deadline_s {request.options.deadline_s:g} is over: the request still {where}"
            found.append((request, DeadlineError(message, param="deadline_s")))
        return found

    def forget_ended(self, num_open: int) -> None:
        """Let go of ended requests when most are; ``num_open`` have not ended."""
        if len(self._entries) > max(_FEW, 2 * num_open):
            self._entries = [entry for entry in self._entries if entry[2].status is not Status.FINISHED]
            heapq.heapify(self._entries)
