"""A worker process on this machine: start it with its configuration on standard input, watch it and end it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from penstock.errors import UnavailableError
from penstock.processes.supervision import Death

if TYPE_CHECKING:
    from penstock.serving.workers.worker_config import WorkerConfig
    from penstock.serving.workers.worker_connection import WorkerConnection

__all__ = ["COMMAND", "WorkerProcess", "not_started", "start_process"]

_STOP_S: Final = 5.0


COMMAND: Final = (sys.executable, "-P", "-m", "penstock.serving.workers.worker")
"""-P keeps Python from importing a package named penstock in the folder where the service was started."""


async def start_process(config: WorkerConfig, command: Sequence[str] = COMMAND) -> asyncio.subprocess.Process:
    """Start a fresh interpreter; a fork would break threads and event loops."""
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL
    )
    if process.stdin is not None:  # the line fits into the pipe, so there is nothing to wait for
        process.stdin.write(config.to_json().encode() + b"\n")
    return process


class WorkerProcess:
    """A process and its connection.

    A process whose engine's loop makes no progress for ``hang_s`` seconds is ended.
    """

    def __init__(self, process: asyncio.subprocess.Process, connection: WorkerConnection, hang_s: float) -> None:
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
            self._kill()
            await exited
        finally:
            gone.cancel()
            exited.cancel()
        status = self._process.returncode
        if self.connection.is_hung:
            death = Death("hang", "its engine made no progress")
        else:
            death = Death("signal" if status is not None and status < 0 else "exit", _describe(status))
        self._end(death.why)
        return death

    async def stop(self) -> None:
        """Tell the process to exit, and kill it if it does not."""
        self.connection.status = "draining"
        self.connection.stop()
        try:
            await asyncio.wait_for(self._process.wait(), _STOP_S)
        except TimeoutError:
            self._kill()
            await self._process.wait()
        finally:
            self._kill()
        self._end("the worker was stopped")

    def _end(self, reason: str) -> None:
        self._watch.cancel()
        self.connection.fail(f"the worker is gone: {reason}")
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _kill(self) -> None:
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)


def _describe(status: int | None) -> str:
    """Describe an exit status."""
    if status is None:
        return "it exited without an error message"
    if status < 0:
        return f"it was ended by {signal.Signals(-status).name}"
    return f"it exited with status {status}"


def not_started(status: int | None) -> UnavailableError:
    """Return the error for a process that ended before its model was loaded."""
    return UnavailableError(f"the worker ended while it loaded the model: {_describe(status)}")
