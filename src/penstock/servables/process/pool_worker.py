"""A process in a pool, and the batch that it runs."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from penstock.processes.supervision import Death
    from penstock.servables.process import worker_messages_pb2 as pb
    from penstock.servables.process.pool_contract import PoolBatch, PoolProcess

__all__ = ["PoolWorker", "WorkerOwner"]


class WorkerOwner(Protocol):
    """The pool of a worker."""

    timeout_s: float

    def batch_done(self, worker: PoolWorker) -> None:
        """Handle the end of a worker's batch."""

    def withdraw(self, worker: PoolWorker) -> None:
        """Send the worker no further batches."""

    def memory_exceeded(self, worker: PoolWorker, used_bytes: int, batch: PoolBatch) -> None:
        """Handle a worker that used more memory than its limit, after ``batch``."""


class PoolWorker:
    """A process in a pool, and the batch that it runs.

    ``gone``: completes with how the process ended, once its batch was passed on.  ``idle``: set when a retired worker
    has finished its last batch.  ``is_over_limit``: set when the process used more memory than its limit.
    """

    def __init__(self, pool: WorkerOwner, process: PoolProcess) -> None:
        self.process, self._pool = process, pool
        self.batch: PoolBatch | None = None
        self.num_batches = 0
        self.is_retired = False
        self.is_over_limit = asyncio.Event()
        self.idle = asyncio.Event()
        self.gone: asyncio.Task[Death]
        self._sent_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        process.on_result, process.on_end = self._on_result, self.retire

    def run(self, batch: PoolBatch) -> bool:
        """Send a batch to the process; False if the process is gone."""
        if not self.process.send_batch(batch.message()):
            return False
        self.batch = batch
        self._sent_at = batch.began
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._pool.timeout_s, self._check_timeout)
        return True

    def _check_timeout(self) -> None:
        """Kill the process if its batch takes too long.  Usually the timer was set for an earlier batch."""
        self._timer = None
        if self.batch is None:
            return
        left_s = self._sent_at + self._pool.timeout_s - time.monotonic()
        if left_s <= 0:
            self.process.is_hung = True
            self.process.kill()
        else:
            self._timer = asyncio.get_running_loop().call_later(left_s, self._check_timeout)

    def _on_result(self, result: pb.Result) -> None:
        batch = self.batch
        if batch is None:
            raise ValueError("a result without a batch")
        batch.complete(result)  # an error closes the stream, as if the process had died with the batch
        self.batch = None
        self.num_batches += 1
        if result.excess_bytes and not self.is_over_limit.is_set():
            self._pool.memory_exceeded(self, result.excess_bytes, batch)
        if self.is_retired:
            self.idle.set()
        self._pool.batch_done(self)

    def retire(self) -> None:
        """Take no further batch."""
        self.is_retired = True
        self._pool.withdraw(self)
        if self.batch is None:
            self.idle.set()

    def close(self) -> None:
        """Retire, and stop watching the time of its batch."""
        self.retire()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
