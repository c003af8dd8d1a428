"""The interface of batches and of their queues that a process pool needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.servables.process import stages_pb2 as pb

__all__ = ["PoolBatch", "PoolQueue"]


class PoolBatch(Protocol):
    """A batch that a process of a pool runs."""

    @property
    def began(self) -> float:
        """The time when it was sent, in seconds of the monotonic clock."""

    @property
    def num_parts(self) -> int:
        """The number of parts of requests in it."""

    @property
    def stage_names(self) -> Sequence[str]:
        """The names of the stages or the model that run it."""

    @property
    def is_abandoned(self) -> bool:
        """Return True if all of its requests have ended."""

    def message(self) -> pb.ToStage:
        """Return the message for the process, and record the time in ``began``."""

    def complete(self, result: pb.Result) -> None:
        """Pass the result to the requests.  Raises ValueError if the result does not fit the batch."""

    def fail(self, error: Exception) -> None:
        """End its requests with an error."""

    def process_lost(self, position: tuple[int, int], is_hung: bool, why: str) -> None:
        """Rerun the batch by request, or end its only request: its process died or hung at ``position``."""


class PoolQueue(Protocol):
    """A queue whose batches a pool runs."""

    @property
    def num_waiting(self) -> int:
        """The number of instances that wait."""

    def take(self, now: float) -> Sequence[PoolBatch]:
        """Return batches that are due at ``now``; empty if none is due."""

    def wake_at(self) -> float:
        """Return when the next batch is due."""

    def refuse_all(self, error: Exception) -> None:
        """End everything that waits with an error."""
