"""A worker that was placed, and its connection: watch it and end it."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from penstock.errors import UnavailableError
from penstock.processes.supervision import Death

if TYPE_CHECKING:
    from penstock.cluster.placement.placement import PlacedGroup
    from penstock.serving.workers.worker_connection import WorkerConnection

__all__ = ["WorkerProcess", "not_started"]

_STOP_S: Final = 5.0


class WorkerProcess:
    """A process and its connection.

    A process whose engine's loop makes no progress for ``hang_s`` seconds is ended.
    """

    def __init__(self, process: PlacedGroup, connection: WorkerConnection, hang_s: float) -> None:
        self.connection = connection
        self._process = process
        self._watch = asyncio.ensure_future(connection.watch(hang_s))

    async def wait_exit(self) -> Death:
        """Wait until the process has ended and return how."""
        exited = asyncio.ensure_future(self._process.wait())
        gone = asyncio.ensure_future(self.connection.gone.wait())
        try:
            await asyncio.wait((exited, gone), return_when=asyncio.FIRST_COMPLETED)
            if not exited.done():  # the connection ended, or the engine hangs: the process is of no more use
                with suppress(TimeoutError):
                    await asyncio.wait_for(asyncio.shield(exited), 0.0 if self.connection.is_hung else _STOP_S)
            self._process.kill()
            status = await exited
        finally:
            gone.cancel()
            exited.cancel()
        if self.connection.is_hung:
            death = Death("hang", "its engine made no progress")
        else:
            death = Death("signal" if status is not None and status < 0 else "exit", _describe(status))
        self._end(death.why)
        self.connection.note_cause(status is not None)
        return death

    async def stop(self) -> None:
        """Tell the process to exit, and kill it if it does not."""
        self.connection.status = "draining"
        self.connection.stop()
        try:
            await asyncio.wait_for(self._process.wait(), _STOP_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        finally:
            self._process.kill()
        self._end("the worker was stopped")

    def _end(self, reason: str) -> None:
        self._watch.cancel()
        self.connection.fail(f"the worker is gone: {reason}")
        self._process.release()


def _describe(status: int | None) -> str:
    """Describe an exit status; None: see PlacedGroup.wait."""
    if status is None:
        return "its machine is lost or does not answer"
    if status < 0:
        return f"it was ended by {signal.Signals(-status).name}"
    return f"it exited with status {status}"


def not_started(status: int | None) -> UnavailableError:
    """Return the error for a process that ended before its model was loaded."""
    return UnavailableError(f"the worker ended while it loaded the model: {_describe(status)}")
