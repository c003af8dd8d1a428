"""The deadlines of requests, which the engine checks between steps."""

from __future__ import annotations

import heapq

from penstock.engine.request import Request, RequestStatus
from penstock.errors import DeadlineError

__all__ = ["Deadlines"]

_MIN_ENTRIES = 64
"""Up to this many entries, ended requests are not searched for."""


class Deadlines:
    """The requests with a deadline, earliest first.  Some of them may have ended."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, Request]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request: Request) -> None:
        """Add a request if it has a deadline."""
        if request.options.deadline_s is not None:
            when = request.timings.submitted + request.options.deadline_s
            heapq.heappush(self._entries, (when, request.id, request))

    def take_expired(self, now: float) -> list[tuple[Request, DeadlineError]]:
        """Remove the requests whose deadline is before ``now`` (``time.perf_counter``).

        Returns each with the error to end it with.
        """
        expired = []
        while self._entries and self._entries[0][0] <= now:
            request = heapq.heappop(self._entries)[2]
            state = (
                "was still waiting"
                if request.status is RequestStatus.WAITING
                else f"had {len(request.output_ids)} tokens"
            )
            message = f"deadline_s {round(request.options.deadline_s or 0, 3):g} has passed: the request {state}"
            expired.append((request, DeadlineError(message, param="deadline_s")))
        return expired

    def forget_ended(self, num_open: int) -> None:
        """Remove ended requests if most entries are ended; ``num_open`` requests have not ended."""
        if len(self._entries) > max(_MIN_ENTRIES, 2 * num_open):
            self._entries = [entry for entry in self._entries if entry[2].status is not RequestStatus.FINISHED]
            heapq.heapify(self._entries)
