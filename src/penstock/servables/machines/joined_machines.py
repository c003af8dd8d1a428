"""The machines that have joined a service to run servable workers, and what each of them runs."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

from penstock.errors import FileAccessError, InvalidArgumentError, UnavailableError
from penstock.logs import tell
from penstock.processes.silence import SILENT_S
from penstock.servables.api.settings import MAX_PROCESSES
from penstock.servables.machines.digest import version_digest
from penstock.servables.machines.servable_machine import ServableMachine
from penstock.servables.process import worker_messages_pb2 as pb
from penstock.servables.process.worker_main import MAX_FRAME_BYTES

if TYPE_CHECKING:
    from penstock.processes.frames import FrameStream
    from penstock.servables.lifecycle.loaded_version import LoadedVersion
    from penstock.servables.lifecycle.repository import ServableRepository

__all__ = ["JoinedMachines"]

_MAX_NAME_CHARS: Final = 64


class JoinedMachines:
    """Lets each machine that joins run processes of the versions whose files it has, also of those loaded later."""

    def __init__(self, servables: ServableRepository) -> None:
        self._servables = servables
        self._machines: set[ServableMachine] = set()
        self._digests: WeakKeyDictionary[LoadedVersion, asyncio.Task[bytes]] = WeakKeyDictionary()
        self._tasks: set[asyncio.Task[None]] = set()
        servables.on_loaded = self._on_loaded

    async def serve(self, stream: FrameStream[pb.FromMachine], address: str) -> None:
        """Serve a machine that was welcomed until its connection ends.

        Raises InvalidArgumentError if it may not join, and UnavailableError if it may join later.
        """
        stream.max_bytes = MAX_FRAME_BYTES
        first = await stream.read()
        if first is None or not first.HasField("offer"):
            return
        offer = first.offer
        name = "".join(char for char in offer.machine if char.isprintable())[:_MAX_NAME_CHARS] or address
        digests = {(offered.servable, offered.version): offered.digest for offered in offer.versions}
        if not 1 <= offer.num_processes <= MAX_PROCESSES:
            raise InvalidArgumentError(
                f"processes: expected 1 to {MAX_PROCESSES}, got {offer.num_processes}", param="processes"
            )
        await self._check(digests)
        machine = ServableMachine(stream, name, offer.num_processes, digests)
        stream.send(pb.ToMachine(accepted=pb.Accepted()))
        tell("machine_joined", f"Machine {name} joined to run servable workers.", machine=name, address=address)
        self._machines.add(machine)
        for version in self._versions():
            self._start_to_join(version, machine)
        try:
            await machine.serve()
        finally:
            self._machines.discard(machine)
            message = f"Machine {name} with servable workers has left."
            if machine.is_silent:
                message = f"Machine {name} with servable workers is lost: nothing has come from it for {SILENT_S:g} s."
            tell("machine_left", message, logging.WARNING, machine=name, address=address)

    async def _check(self, digests: dict[tuple[str, str], bytes]) -> None:
        """Compare the files of a machine with those of the versions that are served; raise as ``serve`` does."""
        versions = self._versions()
        if not versions:
            raise UnavailableError("the service has loaded no servable yet")
        shared = [version for version in versions if _key(version) in digests]
        if not shared:
            names = ", ".join(" ".join(_key(version)) for version in versions)
            raise InvalidArgumentError(
                f"expected versions that the service runs ({names}); this machine has none", param="versions"
            )
        for version in shared:
            own, offered = await self._digest(version), digests[_key(version)]
            if own != offered:
                raise InvalidArgumentError(
                    f"{' '.join(_key(version))}: its files on this machine differ from those of the service "
                    f"(SHA-256 {offered.hex()[:12]} and {own.hex()[:12]})"
                )

    def _versions(self) -> list[LoadedVersion]:
        return [version for servable in self._servables.all() for version in servable.versions.values()]

    async def _digest(self, version: LoadedVersion) -> bytes:
        task = self._digests.get(version)
        if task is None:
            task = asyncio.ensure_future(asyncio.to_thread(version_digest, version.source))
            self._digests[version] = task
        return await asyncio.shield(task)

    def _on_loaded(self, version: LoadedVersion) -> None:
        for machine in self._machines:
            self._start_to_join(version, machine)

    def _start_to_join(self, version: LoadedVersion, machine: ServableMachine) -> None:
        if _key(version) in machine.digests:
            task = asyncio.ensure_future(self._join(version, machine))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _join(self, version: LoadedVersion, machine: ServableMachine) -> None:
        """Let a machine run processes of a version if it has the same files."""
        name = " ".join(_key(version))
        try:
            is_equal = await self._digest(version) == machine.digests[_key(version)]
        except FileAccessError as error:
            tell("machine_differs", f"{name}: {error}", logging.WARNING, machine=machine.name)
            return
        if not is_equal:
            message = f"{name}: the files on machine {machine.name} differ, so it does not run this version"
            tell("machine_differs", message, logging.WARNING, machine=machine.name)
            return
        for pool in version.pools:
            pool.join(machine)


def _key(version: LoadedVersion) -> tuple[str, str]:
    return version.source.name, version.source.version
