"""The machine's side: it starts servable workers for a service, and passes messages between them and the service."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.errors import InvalidArgumentError, InvalidFileError, PenstockError, UnavailableError
from penstock.processes.silence import HEARTBEAT_S
from penstock.servables.api.manifest import model_from_json
from penstock.servables.lifecycle.folder_scan import SCRIPT, scan_folder, scan_servable
from penstock.servables.lifecycle.open_version import VersionSource, read_script
from penstock.servables.machines.digest import version_digest
from penstock.servables.machines.servable_machine import KILLED
from penstock.servables.process import worker_messages_pb2 as pb
from penstock.servables.process.servable_worker import ServableWorker, start_servable_worker

if TYPE_CHECKING:
    from penstock.processes.frames import FrameStream

__all__ = ["ServableHost", "find_versions", "offer_of"]

_LOAD_S: Final = 86_400.0
"""The service has its own limit, and ends a process that exceeds it."""
_MAX_INSTANCE: Final = 2**31 - 1


def find_versions(folders: Sequence[Path]) -> list[VersionSource]:
    """Return the versions of the servables in folders, each of them a folder of servables or a servable.

    Raises the errors of scanning, and InvalidArgumentError if there are none or a name occurs twice.
    """
    sources: dict[tuple[str, str], VersionSource] = {}
    for folder in folders:
        root = folder.absolute()
        if (root / SCRIPT).is_file():
            servables = {root.name: scan_servable(root.parent, root.name)}
            root = root.parent
        else:
            servables, refused = scan_folder(root)
            for name, reason in refused.items():
                raise InvalidFileError(f"{root / name}: {reason}")
        for name, servable in servables.items():
            text = read_script(servable.script)
            for number in servable.versions:
                key = name, str(number)
                if key in sources:
                    raise InvalidArgumentError(f"two folders contain version {number} of the servable {name}")
                sources[key] = VersionSource(
                    name, servable.script, text, str(number), servable.version_path(number), root
                )
    if not sources:
        names = ", ".join(map(str, folders))
        raise InvalidArgumentError(
            f"{names}: expected a folder with servables that have versions, got none", param="folders"
        )
    return [*sources.values()]


def offer_of(sources: Iterable[VersionSource], machine: str, num_processes: int) -> pb.Offer:
    """Return the message that offers versions, with the digests of their files; FileAccessError."""
    offer = pb.Offer(machine=machine, num_processes=num_processes)
    for source in sources:
        offer.versions.add(servable=source.name, version=source.version, digest=version_digest(source))
    return offer


class ServableHost:
    """Runs the processes that a service asks for.  ``sources``: the versions that it was offered."""

    def __init__(self, stream: FrameStream[pb.ToMachine], sources: Iterable[VersionSource]) -> None:
        self._stream = stream
        self._sources: Mapping[tuple[str, str], VersionSource] = {
            (source.name, source.version): source for source in sources
        }
        self._running: dict[int, asyncio.Task[None]] = {}
        self._processes: dict[int, ServableWorker] = {}
        self._is_leaving = False

    async def run(self, offer: pb.Offer, on_accept: Callable[[], None] = lambda: None) -> None:
        """Offer the versions, and run processes until the connection ends or a leave is complete.

        ``on_accept`` is called when the service has accepted the offer.  Raises InvalidArgumentError if it refuses the
        offer, UnavailableError if a later one may be accepted.
        """
        self._stream.send(pb.FromMachine(offer=offer))
        answer = await self._stream.read()
        if answer is None:
            raise UnavailableError("the service closed the connection")
        if answer.HasField("refusal"):
            kind = UnavailableError if answer.refusal.may_retry else InvalidArgumentError
            raise kind(answer.refusal.text)
        on_accept()
        self._stream.listen(self._on_message)
        beating = asyncio.ensure_future(self._beat())
        try:
            await self._stream.ended.wait()
        finally:
            self._stream.close()
            tasks = [beating, *self._running.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _beat(self) -> None:
        """Send heartbeats, without which the service takes this machine as lost."""
        while True:
            self._stream.send(pb.FromMachine(alive=pb.Alive()))
            await asyncio.sleep(HEARTBEAT_S)

    def leave(self) -> None:
        """Let the batches that run end, then close the connection."""
        self._is_leaving = True
        self._stream.send(pb.FromMachine(leave=pb.Leave()))
        if not self._running:
            self._stream.close()

    def _on_message(self, message: pb.ToMachine) -> None:
        """Handle a message.  Raises ValueError, which ends the connection, for one that may not come here."""
        number, kind = message.process, message.WhichOneof("what")
        if kind == "start":
            if number in self._running:
                raise ValueError(f"process {number} runs already")
            task = asyncio.ensure_future(self._run(number, message.start))
            self._running[number] = task
        elif kind == "batch":
            process = self._processes.get(number)
            if process is not None:  # else it has ended, which the service is told soon
                process.send_batch(pb.ToStage(batch=message.batch))
        elif kind == "end":
            if number in self._running:
                self._running[number].cancel()
        elif kind != "accepted":
            raise ValueError(f"unexpected message from the service: {kind}")

    async def _run(self, number: int, start: pb.Start) -> None:
        """Run one process until it ends or is cancelled."""
        process = None
        ended = pb.Ended(cause="exit", why="it was told to end")
        try:
            process = await start_servable_worker(self._own(start), _LOAD_S)
            self._processes[number] = process
            process.on_result = lambda result: self._send(number, result=result)
            self._send(number, ready=pb.Ready(manifest=process.manifest))
            death = await process.wait_ended()
            ended = pb.Ended(cause=KILLED if death.was_killed else death.cause, why=death.why)
        except PenstockError as error:
            if process is None:
                self._send(number, failed=pb.Failed(text=str(error)[:2000]))
        finally:
            self._processes.pop(number, None)
            if process is not None:
                process.on_result = lambda result: None
                process.kill()
                with suppress(asyncio.CancelledError):
                    await process.stop()
                stage, instance = process.position()
                ended.has_begun, ended.stage, ended.instance = process.has_begun, stage, min(instance, _MAX_INSTANCE)
            self._send(number, ended=ended)
            del self._running[number]
            if self._is_leaving and not self._running:
                self._stream.close()

    def _own(self, start: pb.Start) -> pb.Start:
        """Return the message for a process of this machine: with its own paths and its own text of servable.py."""
        source = self._sources.get((start.servable, start.version))
        if source is None:
            raise InvalidFileError(f"{start.servable} {start.version}: this machine does not have that version")
        if start.model:
            source.check_file(model_from_json(start.model).path)
        own = pb.Start()
        own.CopyFrom(start)
        own.folder, own.file = str(source.folder), str(source.file)
        own.source = b"" if start.model else source.text
        return own

    def _send(self, number: int, **what: pb.Ready | pb.Failed | pb.Result | pb.Ended) -> None:
        self._stream.send(pb.FromMachine(process=number, **what))
