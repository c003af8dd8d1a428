"""The counters of workers that have ended, which stay in the sums of their model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from penstock.serving.workers.messages import stats_from, stats_to

if TYPE_CHECKING:
    from penstock.engine.stats import EngineStats
    from penstock.serving.proto import wire_pb2 as pb
    from penstock.serving.workers.worker_connection import WorkerConnection

__all__ = ["PastStats"]

_GAUGES: Final = ("num_running", "num_waiting", "num_pages", "num_held_pages", "num_named_pages")


class PastStats:
    """Keeps the sum of the last counters of workers that are gone, without their gauges."""

    def __init__(self) -> None:
        self._sum: pb.Stats | None = None
        self._known: dict[str, WorkerConnection] = {}

    def note(self, connections: Sequence[WorkerConnection]) -> None:
        """Note the workers that there are now."""
        now = {connection.name: connection for connection in connections}
        for name, connection in self._known.items():
            if name not in now and connection.stats is not None:
                for gauge in _GAUGES:
                    connection.stats.numbers.pop(gauge, None)
                self._sum = stats_to(stats_from(self._with_past([connection.stats])))
        self._known = now

    def total(self, connections: Sequence[WorkerConnection]) -> EngineStats | None:
        """Return the sums of these workers and of the past ones; None before the first heartbeat."""
        stats = self._with_past([connection.stats for connection in connections if connection.stats is not None])
        return stats_from(stats) if stats else None

    def _with_past(self, stats: list[pb.Stats]) -> list[pb.Stats]:
        return stats if self._sum is None else [*stats, self._sum]
