"""A worker that was placed, and its connection: watch it and end it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from penstock.errors import UnavailableError
from penstock.processes.supervision import LOST_RANK_STATUS, Death, has_crashed, is_stopped, signal_name

if TYPE_CHECKING:
    from penstock.cluster.placement.placement import PlacedGroup
    from penstock.runtime.machine import OomKills
    from penstock.serving.workers.worker_connection import WorkerConnection

__all__ = ["EndedEarlyError", "WorkerProcess"]

_STOP_S: Final = 5.0


class WorkerProcess:
    """A process and its connection.

    A process whose engine's loop makes no progress for ``hang_s`` seconds is ended.  ``oom_kills`` is shared by the
    processes of this machine; None for those of other machines.
    """

    def __init__(
        self, process: PlacedGroup, connection: WorkerConnection, hang_s: float, oom_kills: OomKills | None = None
    ) -> None:
        self.connection = connection
        self._process = process
        self._oom_kills = oom_kills
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
            was_killed_here = not exited.done()
            was_stopped = was_killed_here and self._oom_kills is not None and is_stopped(self._process.pid)
            self._process.kill()
            status = await exited
        finally:
            gone.cancel()
            exited.cancel()
        was_oom = _was_oom(status, self._oom_kills)
        if self.connection.is_hung:
            death = Death("hang", "it was stopped by a signal" if was_stopped else "its engine made no progress")
        elif was_killed_here and status is not None:
            death = Death("exit", "it closed its connection and did not exit")
        else:
            cause = "signal" if status is not None and status < 0 else "exit"
            death = Death(cause, _describe(status, was_oom=was_oom))
        self._end(death.why)
        is_own_end = status is not None and (was_killed_here or was_oom or has_crashed(status)) and not was_stopped
        self.connection.note_cause(is_own_end)
        return replace(death, was_killed=not is_own_end)

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
        self.connection.note_cause(False)

    def _end(self, reason: str) -> None:
        self._watch.cancel()
        self.connection.fail(f"the worker is gone: {reason}")
        self._process.release()


def _was_oom(status: int | None, oom_kills: OomKills | None) -> bool:
    """Return True if the kernel ended the process for lack of memory, as far as it says so."""
    return not has_crashed(status) and oom_kills is not None and oom_kills.look()


def _describe(status: int | None, *, was_oom: bool) -> str:
    """Describe an exit status; None: see PlacedGroup.wait."""
    if was_oom:
        return f"{_describe(status, was_oom=False)}, as the kernel had no memory left"
    if status is None:
        return "its machine is lost or does not answer"
    if status < 0:
        return f"it was ended by {signal_name(-status)}"
    if status == LOST_RANK_STATUS:
        return "one of its ranks was killed, or the machine of a rank is lost"
    return f"it exited with status {status}"


class EndedEarlyError(UnavailableError):
    """A process ended before its model was loaded, without an error of its own; ``was_killed``: as in ``Death``."""

    def __init__(self, status: int | None, oom_kills: OomKills | None = None) -> None:
        was_oom = _was_oom(status, oom_kills)
        super().__init__(f"the worker ended while it loaded the model: {_describe(status, was_oom=was_oom)}")
        self.was_killed = not was_oom and not has_crashed(status)
