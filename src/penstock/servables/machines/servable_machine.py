"""A machine that has joined and the servable workers that it runs, as the primary sees them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from itertools import count
from typing import TYPE_CHECKING, Final

from penstock.errors import InvalidFileError, UnavailableError
from penstock.processes.silence import SILENT_S, until_silent
from penstock.processes.supervision import Death
from penstock.servables.process import worker_messages_pb2 as pb
from penstock.servables.process.progress import NO_STAGE

if TYPE_CHECKING:
    from penstock.processes.frames import FrameStream
    from penstock.servables.process.pool_contract import PoolMachine, PoolProcess

    def _fits(machine: ServableMachine, process: MachineProcess) -> tuple[PoolMachine, PoolProcess]:
        return machine, process


__all__ = ["KILLED", "MachineProcess", "ServableMachine"]

_STOP_S: Final = 5.0
"""The time that a machine may take to end a process; after that the process counts as ended."""
_CAUSES: Final = ("signal", "exit", "stream")
KILLED: Final = "killed"
"""The cause that a machine reports for a process that a signal from outside ended."""


class MachineProcess:
    """A servable worker on another machine; see PoolProcess.

    ``manifest``: the manifest of the servable in JSON, once it is ready; empty for a process that runs a model.
    """

    def __init__(self, machine: ServableMachine, number: int) -> None:
        self.pid, self.label, self.is_joined = 0, f"process {number} on {machine.name}", True
        self.manifest = ""
        self.is_hung = False
        self.on_result: Callable[[pb.Result], None] = lambda result: None
        self.on_end: Callable[[], None] = lambda: None
        self.started: asyncio.Future[pb.Ready] = asyncio.get_running_loop().create_future()
        self._ended: asyncio.Future[pb.Ended | None] = asyncio.get_running_loop().create_future()
        self._machine, self._number = machine, number
        self._num_sent = 0
        self._awaited = 0  # the number of the batch that it runs; 0: none
        self._timer: asyncio.TimerHandle | None = None

    def send_batch(self, message: pb.ToStage) -> bool:
        """See PoolProcess."""
        if self._ended.done():
            return False
        self._num_sent += 1
        self._awaited = message.batch.number = self._num_sent
        return self._machine.send(pb.ToMachine(batch=message.batch, process=self._number))

    @property
    def has_begun(self) -> bool:
        """See PoolProcess.  A process that hangs has."""
        ended = self._ended.result() if self._ended.done() else None
        return self.is_hung or (ended is not None and ended.has_begun)

    def position(self) -> tuple[int, int]:
        """See PoolProcess.  It is known once the process has ended."""
        ended = self._ended.result() if self._ended.done() else None
        return (NO_STAGE, -1) if ended is None else (ended.stage, max(-1, ended.instance))

    def on_message(self, message: pb.FromMachine) -> None:
        """Take a message of the process.  Raises ValueError for a result that is not that of the current batch."""
        kind = message.WhichOneof("what")
        if kind == "result":
            number = message.result.number
            if not number or number != self._awaited:
                raise ValueError(f"expected the result of batch {self._awaited}, got that of batch {number}")
            self._awaited = 0
            self.on_result(message.result)
        elif kind == "ended":
            self.end(message.ended)
        elif kind in ("ready", "failed"):
            if self.started.done():  # the start was given up meanwhile
                return
            if kind == "ready":
                self.started.set_result(message.ready)
                return
            self.started.set_exception(InvalidFileError(f"{self._machine.name}: {message.failed.text}"))
            self.started.exception()  # marks it as retrieved: there may be no reader
            self.end(pb.Ended(cause="exit"))
        else:
            raise ValueError(f"unexpected message of a servable worker: {kind}")

    def end(self, ended: pb.Ended | None) -> None:
        """Note that the process has ended; None if its machine was lost or did not say how."""
        if not self._ended.done():
            self._ended.set_result(ended)
        if not self.started.done():
            why = f"{self._machine.name} has left" if ended is None else f"{self._machine.name}: {ended.why}"
            self.started.set_exception(UnavailableError(why))
            self.started.exception()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def wait_ended(self) -> Death:
        """See PoolProcess."""
        await asyncio.wait((self._ended,))
        self.on_end()
        ended = self._ended.result()
        if self.is_hung:
            return Death("hang", "it took longer than timeout_s")
        if ended is None:
            return Death("lost", f"the connection to {self._machine.name} ended")
        if ended.cause == KILLED:
            return Death("signal", ended.why[:500], was_killed=True)
        return Death(ended.cause if ended.cause in _CAUSES else "exit", ended.why[:500])

    def kill(self) -> None:
        """See PoolProcess."""
        if self._ended.done() or self._timer is not None:
            return
        if not self._machine.send(pb.ToMachine(end=pb.EndProcess(), process=self._number)):
            self.end(None)
            return
        self._timer = asyncio.get_running_loop().call_later(_STOP_S, self.end, None)

    async def stop(self) -> None:
        """See PoolProcess."""
        self.kill()
        await asyncio.wait((self._ended,))
        self._machine.forget(self._number)


class ServableMachine:
    """A machine that has joined over ``stream``; see PoolMachine.

    ``digests``: by servable and version, the digest of the files that it has.
    """

    def __init__(
        self, stream: FrameStream[pb.FromMachine], name: str, num_processes: int,
        digests: Mapping[tuple[str, str], bytes],
    ) -> None:  # fmt: skip
        self.name, self.num_processes, self.digests = name, num_processes, digests
        self.leaving = asyncio.Event()
        self.is_silent = False
        """True if it was given up because nothing came from it any more."""
        self._stream = stream
        self._numbers = count(1)
        self._processes: dict[int, MachineProcess] = {}

    def send(self, message: pb.ToMachine) -> bool:
        """Send a message; False if the machine is gone."""
        return self._stream.send(message)

    def forget(self, number: int) -> None:
        """Ignore further messages of a process."""
        self._processes.pop(number, None)

    async def start(self, start: pb.Start, load_s: float) -> MachineProcess:
        """See PoolMachine."""
        number = next(self._numbers)
        process = self._processes[number] = MachineProcess(self, number)
        try:
            if not self.send(pb.ToMachine(start=start, process=number)):
                raise UnavailableError(f"{self.name} has left")
            async with asyncio.timeout(load_s):
                process.manifest = (await process.started).manifest
        except BaseException as error:
            await process.stop()
            if isinstance(error, TimeoutError):
                raise UnavailableError(f"{self.name}: not loaded within {load_s:g} s") from None
            raise
        return process

    async def serve(self) -> None:
        """Pass on its messages until the connection ends or is silent for ``SILENT_S``; then its processes are lost."""
        self._stream.listen(self._on_message)
        try:
            self.is_silent = await until_silent(self._stream, SILENT_S)
        finally:
            self._stream.close()
            self.leaving.set()
            for process in [*self._processes.values()]:
                process.end(None)

    def _on_message(self, message: pb.FromMachine) -> None:
        """Take a message.  Raises ValueError, which ends the connection, for one that may not come here."""
        kind = message.WhichOneof("what")
        if kind == "alive":
            return
        if kind == "leave":
            self.leaving.set()
            return
        process = self._processes.get(message.process)
        if process is not None:  # else it was ended, and what it still sent does not matter
            process.on_message(message)
