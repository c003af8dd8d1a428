"""A process in a pool, and the batch that it has."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.processes.supervision import Death
    from penstock.servables.process import stages_pb2 as pb
    from penstock.servables.process.pool import Pool
    from penstock.servables.process.stage_process import StageProcess
    from penstock.servables.schedule.unit_queue import Flight

__all__ = ["PoolWorker"]


class PoolWorker:
    """A process in the pool, and the batch that it has."""

    def __init__(self, pool: Pool, process: StageProcess) -> None:
        self.process, self.pool = process, pool
        self.flight: Flight | None = None
        self.num_batches = 0
        self.is_leaving = False
        self.is_excessive = asyncio.Event()
        self.idle = asyncio.Event()
        self.gone: asyncio.Task[Death]
        """How its process ended, once what it had is with others."""
        self._since = 0.0
        self._timer: asyncio.TimerHandle | None = None
        process.on_result, process.on_end = self._hear, self.leave

    def run(self, flight: Flight) -> bool:
        """Give it a batch; False when its process is gone."""
        if not self.process.give(flight.message()):
            return False
        self.flight = flight
        self._since = flight.began
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.pool.timeout_s, self._look)
        return True

    def _look(self) -> None:
        """Whether its batch takes too long; the timer is that of a batch before, most often."""
        self._timer = None
        if self.flight is None:
            return
        left_s = self._since + self.pool.timeout_s - time.monotonic()
        if left_s <= 0:
            self.process.is_hung = True
            self.process.kill()
        else:
            self._timer = asyncio.get_running_loop().call_later(left_s, self._look)

    def _hear(self, result: pb.Result) -> None:
        flight = self.flight
        if flight is None:
            raise ValueError("a result of no batch")
        flight.land(result)  # an error ends its stream: then it is as if it had died with the batch
        self.flight = None
        self.num_batches += 1
        if result.excess_bytes and not self.is_excessive.is_set():
            self.pool.note_excess(self, result.excess_bytes, flight)
        if self.is_leaving:
            self.idle.set()
        else:
            self.pool.free.append(self)
        self.pool.pump()

    def leave(self) -> None:
        """Give it no further batch."""
        self.is_leaving = True
        with suppress(ValueError):
            self.pool.free.remove(self)
        if self.flight is None:
            self.idle.set()

    def close(self) -> None:
        """It is gone."""
        self.leave()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
