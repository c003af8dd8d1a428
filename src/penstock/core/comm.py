"""The connection of a rank with the others of its group, on one host (docs/explanation/ranks.md)."""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Protocol

from penstock import env
from penstock.config import check_number, show
from penstock.core.library import CommStruct, JoinOptions, MpiOptions, SharedOptions, check, library, sized
from penstock.errors import InvalidArgumentError, UnavailableError
from penstock.logs import tell

__all__ = ["MAX_RANKS", "JoinedComm", "MpiComm", "RankComm", "SharedComm", "shared_bytes"]

MAX_RANKS: Final = 64
"""PS_MAX_RANKS of penstock_ranks.h."""
_JOIN_S: Final = 300.0
_MAX_S: Final = 1e9
"""Limit on a timeout; its nanoseconds fit into 64 bits."""
_LATE: Final = " within "
"""In the core's message that the time is up (rendezvous.cpp)."""
_SILENT_S: Final = 2.0
"""After this time a rank that waits for others says so."""


class RankComm(Protocol):
    """A rank's connection with the others of its group: a ``ps_comm``, whatever carries its messages."""

    rank: int
    world: int

    @property
    def address(self) -> int:
        """The address of the struct, for the C API."""

    def abort(self, reason: str) -> None:
        """End every wait of every rank, now and later."""

    def close(self) -> None:
        """Free the connection, after the contexts that use it are closed."""


def shared_bytes(world: int, part_bytes: int) -> int:
    """Return the size in bytes of the memory that ``world`` ranks share, when each sends up to ``part_bytes`` at once.

    Most of it is never touched.
    """
    out = ctypes.c_int64()
    check(library().ps_shared_bytes(world, part_bytes, ctypes.byref(out)))
    return out.value


def _milliseconds(name: str, seconds: float) -> int:
    """Return a timeout in the unit of the core, whose own errors name another field; 0 is its default."""
    return int(check_number(name, seconds, _MAX_S, may_be_zero=True) * 1000)


class SharedComm:
    """A rank's end of the shared memory.

    ``fd``: a file of ``shared_bytes``, all zero at first, which the ranks inherited.  ``memory``: the address of such
    memory instead, for ranks that are threads of one process.  ``epoch``: which run of the group this is.
    ``timeout_s``: how long a rank waits for another within a step.  ``oversubscribed``: the ranks have fewer cores than
    threads.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        part_bytes: int,
        *,
        fd: int = -1,
        memory: int = 0,
        epoch: int = 0,
        timeout_s: float = 0.0,
        oversubscribed: bool = False,
    ) -> None:
        self.rank, self.world = rank, world
        options = sized(
            SharedOptions,
            rank=rank,
            world=world,
            fd=fd,
            memory=memory or None,
            part_bytes=part_bytes,
            timeout_ms=_milliseconds("timeout_s", timeout_s),
            epoch=epoch,
            yield_=int(oversubscribed),
        )
        self._struct = ctypes.POINTER(CommStruct)()
        check(library().ps_shared_open(ctypes.byref(options), ctypes.byref(self._struct)))

    @property
    def address(self) -> int:
        """The address of the struct, for the C API; InvalidArgumentError after ``close``."""
        if not self._struct:
            raise InvalidArgumentError("SharedComm is closed", code="closed")
        return ctypes.addressof(self._struct.contents)

    @property
    def struct(self) -> CommStruct:
        """The functions of the transport."""
        return self._struct.contents

    def abort(self, reason: str) -> None:
        """End every wait of every rank, now and later.  Any thread may call this; the first reason stays."""
        if self._struct:
            struct = self._struct.contents
            struct.abort(struct.self, reason.encode())

    def probe(self, num_bytes: int, count: int) -> list[int]:
        """Return the nanoseconds of each of ``count`` exchanges in which every rank sends ``num_bytes``.

        All ranks call this with the same arguments.
        """
        out = (ctypes.c_int64 * count)()
        check(library().ps_probe_gather(self._struct, num_bytes, count, out))
        return list(out)

    def close(self) -> None:
        """Unmap the memory, after the contexts that use it are closed.  A second call does nothing."""
        if self._struct:
            struct, self._struct = self._struct, ctypes.POINTER(CommStruct)()
            self._close(struct)

    def _close(self, struct: Any) -> None:
        library().ps_shared_close(struct)


class JoinedComm(SharedComm):
    """The same of processes that a launcher started together: they meet here, and the memory comes from rank 0.

    A process that ends without ``close`` ends the group.  ``join_timeout_s``: how long the ranks wait for each other
    here.  Raises UnavailableError if they do not come in time, or one does not fit.  After ``silent_s`` a line in the
    log says which ranks this one waits for.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        part_bytes: int,
        *,
        timeout_s: float = 0.0,
        join_timeout_s: float = 0.0,
        oversubscribed: bool = False,
        silent_s: float = _SILENT_S,
    ) -> None:
        self.rank, self.world = rank, world
        self._struct = ctypes.POINTER(CommStruct)()
        options = sized(
            JoinOptions,
            rank=rank,
            world=world,
            yield_=int(oversubscribed),
            part_bytes=part_bytes,
            timeout_ms=_milliseconds("timeout_s", timeout_s),
            join_timeout_ms=_milliseconds("join_timeout_s", join_timeout_s),
        )
        hint, waited = _meeting_hint(), False

        def tell_waiting() -> None:
            nonlocal waited
            waited = True
            others = "the other ranks" if world > 2 else f"rank {1 - rank}"
            awaited = others if rank == 0 or world == 2 else "rank 0 and the other ranks"
            limit_s = join_timeout_s or _JOIN_S
            text = f"Rank {rank} of {world} waits for {awaited}, at most {limit_s:g} s. {hint}"
            tell("ranks_awaited", text, logging.WARNING, rank=rank, world=world)

        def join() -> None:
            check(library().ps_shared_join(ctypes.byref(options), ctypes.byref(self._struct)))

        try:
            _interruptible(join, silent=(silent_s, tell_waiting))
        except UnavailableError as error:
            if waited and _LATE in str(error):
                raise UnavailableError(f"{error}. {hint}") from None
            raise


class MpiComm(SharedComm):
    """A rank's end of a group on several hosts, over MPI; the ranks are started by ``mpiexec``.

    ``trusted_network``: True says that only these ranks use the network, because MPI neither encrypts nor
    authenticates; InvalidArgumentError without it.  The library is the one of the package mpich, or that of
    ``PENSTOCK_MPI_LIBRARY``; UnsupportedError without one.  ``join_timeout_s``: how long the ranks wait for each other
    here, by default 300 s; UnavailableError if they do not come in time.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        part_bytes: int,
        *,
        trusted_network: bool,
        timeout_s: float = 0.0,
        join_timeout_s: float = 0.0,
    ) -> None:
        self.rank, self.world = rank, world
        _milliseconds("join_timeout_s", join_timeout_s)
        self._struct = struct = ctypes.POINTER(CommStruct)()
        path, limit_s = env.mpi_library(), join_timeout_s or _JOIN_S
        options = sized(
            MpiOptions,
            rank=rank,
            world=world,
            trusted_network=int(trusted_network),
            part_bytes=part_bytes,
            timeout_ms=_milliseconds("timeout_s", timeout_s),
            library=path and os.fsencode(path),
        )
        reason = f"ranks: not all of {world} ranks joined over MPI within {limit_s:g} s"

        def join() -> None:
            check(library().ps_mpi_join(ctypes.byref(options), ctypes.byref(struct)))

        def leave() -> None:
            struct.contents.abort(struct.contents.self, reason.encode())

        if not _interruptible(join, limit_s, leave):  # MPI waits for the other ranks without a limit
            self._struct = ctypes.POINTER(CommStruct)()
            atexit.register(_unlink_mpi_memory)  # later: a late rank of this host maps it to learn the reason
            raise UnavailableError(reason)

    def _close(self, struct: Any) -> None:
        library().ps_mpi_close(struct)


def _unlink_mpi_memory() -> None:
    """Remove the files of shared memory that MPICH has opened here; the core does when all ranks have joined."""
    with open("/proc/self/maps") as maps:
        names = {line.split()[-1] for line in maps if "/mpich_shm_" in line}
    for name in names:
        with suppress(OSError):
            os.unlink(name)


def _meeting_hint() -> str:
    """Return what the ranks of a group have in common, by which they find each other, and how to change it."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if address and port:
        return f"All ranks need MASTER_ADDR={show(address)[1:-1]}, MASTER_PORT={show(port)[1:-1]} and the same user."
    return (
        "Ranks find each other by the process that started them. Set MASTER_ADDR and MASTER_PORT to the same values "
        "for all ranks if different processes start them, for example MASTER_ADDR=127.0.0.1 MASTER_PORT=29500."
    )


def _interruptible(
    work: Callable[[], None],
    timeout_s: float | None = None,
    undo: Callable[[], None] = lambda: None,
    silent: tuple[float, Callable[[], None]] | None = None,
) -> bool:
    """Do work in another thread, so that Ctrl-C ends the wait for it.

    Returns False if it is not done within ``timeout_s``; ``undo`` is called if it succeeds later.  ``silent``: a time
    in seconds, and what is called if the work is not done then.
    """
    errors: list[BaseException] = []
    lock = threading.Lock()
    is_done = is_late = False

    def run() -> None:
        nonlocal is_done
        try:
            work()
        except BaseException as error:
            errors.append(error)
        with lock:
            is_done = True
            if is_late and not errors:
                undo()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        if silent is not None:
            thread.join(silent[0])
            if thread.is_alive():
                silent[1]()
        thread.join(timeout_s)
    finally:
        with lock:
            is_late = not is_done
    if errors:
        raise errors[0]
    return not is_late
