"""The processes of the other ranks: started, watched and ended together (docs/explanation/ranks.md).

A rank that ends, whatever the reason, ends the group: each wait of each rank returns at once, and the step fails with
UnavailableError.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any, Final

from penstock import errors
from penstock.core.comm import RankComm, SharedComm, shared_bytes
from penstock.core.library import CLOSED, ENDED
from penstock.core.rank_layout import RankLayout
from penstock.env import child_environment, rank_open_s
from penstock.errors import FileAccessError, PenstockError, UnavailableError, UnsupportedError
from penstock.processes.supervision import has_crashed, is_stopped, signal_name
from penstock.runtime.ranks.stage_links import RankLink

__all__ = ["RankComms", "RankGroup", "error_of", "failure_of"]

_END_S: Final = 0.5
"""A rank has this time to exit by itself before it is killed."""
_LOOK_S: Final = 0.5
"""A rank that is stopped (SIGSTOP) at two looks in a row, this far apart, ends the group."""


@dataclass(frozen=True)
class RankComms:
    """A rank's connections: ``all_ranks``, and of a pipeline whose stages have several ranks, ``stage``."""

    all_ranks: RankComm
    stage: RankComm | None = None

    @classmethod
    def open(cls, settings: Mapping[str, Any], rank: int, layout: RankLayout) -> RankComms:
        """Open the connections of a child process as its group's ``settings`` say."""
        options, links = settings["options"], settings["links"]
        stage, place = layout.place(rank)
        if links:
            link = RankLink(socket.socket(fileno=links[str(rank)]), rank, layout, options["part_bytes"])
            return cls(link.comm, SharedComm(place, layout.stage_ranks, fd=settings["fds"][0], **options))
        all_ranks = SharedComm(rank, layout.world, fd=settings["fds"][0], **options)
        if stage < 0 or len(settings["fds"]) == 1:
            return cls(all_ranks)
        return cls(all_ranks, SharedComm(place, layout.stage_ranks, fd=settings["fds"][1 + stage], **options))

    def abort(self, reason: str) -> None:
        """End every wait of the ranks that this one is connected with."""
        for comm in (self.stage, self.all_ranks):
            if comm is not None:
                comm.abort(reason)


class RankGroup:
    """Ranks as child processes, and the memory that they share with this process, rank ``first``.

    ``first`` 0: the children are all other ranks.  Else this process has the first rank of a stage of a machine, and
    the children are the other ranks of this stage; ``links`` are its ends of their connections to the ranks elsewhere,
    which the caller closes.
    ``part_bytes``: the greatest number of bytes that a rank sends in one exchange.
    """

    def __init__(self, layout: RankLayout, part_bytes: int, *, oversubscribed: bool, first: int = 0) -> None:
        if not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):
            raise UnsupportedError(
                "tensor_parallel_size: expected Linux, whose shared memory ranks use; use 1",
                param="tensor_parallel_size",
            )
        self._opening_limit_s = rank_open_s()
        self.layout = layout
        self.links: dict[int, socket.socket] = {}
        self._ranks = range(first + 1, first + layout.stage_ranks if first else layout.world)
        self._options: dict[str, Any] = {
            "part_bytes": part_bytes,
            "epoch": secrets.randbits(63),
            "oversubscribed": oversubscribed,
        }
        self._fds: list[int] = []
        self._comms: list[SharedComm] = []  # of all ranks, then of the ranks of each stage; or of one stage
        self._child_ends: dict[int, socket.socket] = {}
        self._children: list[subprocess.Popen[str]] = []
        self._wake, self._waker = os.pipe()
        self._started = threading.Event()
        self._start_error: Exception | None = None
        self._supervisor: threading.Thread | None = None
        self._death = ""
        self._on_death: Callable[[str], None] | None = None
        self.was_killed = False
        """True if a rank was killed or stopped from outside."""
        self._is_open = False
        self._lock = threading.Lock()
        self.failure: dict[str, Any] | None = None
        """The report of a rank that failed to open, once ``await_ready`` or ``first_error`` has raised it."""
        try:
            self._share_memory(layout.stage_ranks if first else layout.world)
            for _ in range(layout.pp if layout.pp > 1 and layout.stage_ranks > 1 and not first else 0):
                self._share_memory(layout.stage_ranks)
            for rank in self._ranks if first else ():
                self.links[rank], self._child_ends[rank] = socket.socketpair()
        except BaseException:
            self._close_descriptors()
            for end in self.links.values():
                end.close()
            raise
        self.comms = RankComms(self._comms[0])
        """The connections of rank 0; those of the first rank of a stage with the other ranks of the stage."""

    def _share_memory(self, world: int) -> None:
        # A file without a name: however the processes end, nothing is left in /dev/shm.
        fd = os.memfd_create("penstock-ranks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._fds.append(fd)
        os.ftruncate(fd, shared_bytes(world, self._options["part_bytes"]))
        # The size stays, because access beyond the end of a file kills a process.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self._comms.append(SharedComm(0, world, fd=fd, **self._options))

    def abort(self, reason: str) -> None:
        """End every wait of every rank."""
        for comm in self._comms:
            comm.abort(reason)

    def start(self, settings: Mapping[str, Any]) -> None:
        """Start the processes, which open their part of the bundle as ``settings`` say.

        They have ``PENSTOCK_RANK_OPEN_SECONDS`` until ``opened``; after that the group ends.
        """
        links = {rank: end.fileno() for rank, end in self._child_ends.items()}
        comms = {"options": self._options, "fds": self._fds, "links": links}
        layout = dataclasses.asdict(self.layout)
        arguments = (json.dumps({**settings, "layout": layout, "comms": comms, "parent": os.getpid()}),)
        # The kernel kills a rank when the thread that started it ends: so that must be the thread that supervises.
        self._supervisor = threading.Thread(target=self._supervise, args=arguments, name="penstock-ranks", daemon=True)
        self._supervisor.start()
        self._started.wait()
        if self._start_error is not None:
            raise FileAccessError(f"The process of a rank failed to start: {self._start_error}")

    def await_ready(self) -> None:
        """Wait until every rank has opened its part, as long as all run.  Raises the error of a rank that failed."""
        for rank, child in zip(self._ranks, self._children, strict=True):
            message = _read_message(child.stdout)
            if "error" in message:
                self.failure = message
                raise error_of(message)
            if "ready" not in message:
                why = f": {self._death}" if self._death else ""
                raise UnavailableError(f"Rank {rank} ended before it was ready{why}.")

    def opened(self) -> None:
        """End the limit on the time for opening, when all ranks have their programs."""
        self._is_open = True

    def first_error(self) -> PenstockError | None:
        """Return the error that a rank reported, if one did; rather that of the rank that failed first."""
        failures = []
        for child in self._children:
            deadline = time.monotonic() + _END_S
            while message := _read_message(child.stdout, deadline):
                if "error" in message:
                    failures.append(message)
                    break
        self.failure = min(failures, key=_is_of_another, default=None)
        return None if self.failure is None else error_of(self.failure)

    def watch(self, on_death: Callable[[str], None]) -> None:
        """Call ``on_death`` with the reason when a rank ends, from another thread and before a step fails; at once if
        one has ended already."""
        with self._lock:
            self._on_death = on_death
            if self._death:
                on_death(self._death)

    @property
    def pids(self) -> list[int]:
        """The process ids of the other ranks."""
        return [child.pid for child in self._children]

    def close(self) -> None:
        """End the processes and free the memory.  The contexts that use ``comm`` must be closed.  A second call does
        nothing."""
        if not self._fds:
            return
        self.abort(CLOSED)
        os.write(self._waker, b"x")
        if self._supervisor is not None:
            self._supervisor.join()
        for child in self._children:
            _close(child.stdin)
            _close(child.stdout)
        for comm in self._comms:
            comm.close()
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        for descriptor in (*self._fds, self._wake, self._waker):
            os.close(descriptor)
        for end in self._child_ends.values():
            end.close()
        self._fds = []

    def _supervise(self, settings: str) -> None:
        try:
            for rank in self._ranks:
                self._children.append(self._spawn(rank, settings))
        except Exception as error:
            self._start_error = error
            self.abort(f"the process of a rank failed to start: {error}")
        self._started.set()
        descriptors = [os.pidfd_open(child.pid) for child in self._children]
        try:
            if self._start_error is None:
                reason = self._first_failure(descriptors)
                if reason:
                    self._report_death(reason)
            self._end_children()
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _first_failure(self, descriptors: list[int]) -> str:
        """Wait until a rank ends, stays stopped or does not open in time, and return what happened; "" if the group is
        closed first."""
        stopped: set[int] = set()
        opening_end = time.monotonic() + self._opening_limit_s
        while True:
            readable, _, _ = select.select([self._wake, *descriptors], [], [], _LOOK_S)
            if self._wake in readable:
                return ""
            for rank, descriptor, child in zip(self._ranks, descriptors, self._children, strict=True):
                if descriptor in readable:
                    self.was_killed = not has_crashed(child.wait())
                    return f"rank {rank} {_how_it_ended(child.wait())}"
            ranks = zip(self._ranks, self.pids, strict=True)
            before, stopped = stopped, {rank for rank, pid in ranks if is_stopped(pid)}
            if lasting := before & stopped:
                self.was_killed = True
                return f"rank {min(lasting)} is stopped by a signal"
            if not self._is_open and time.monotonic() > opening_end:
                return f"the ranks did not open within {self._opening_limit_s:g} s"

    def _report_death(self, reason: str) -> None:
        with self._lock:
            self._death = reason
            if self._on_death is not None:
                self._on_death(reason)
        self.abort(reason)

    def _spawn(self, rank: int, settings: str) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "penstock.runtime.ranks.rank_process", str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env=child_environment(),
            pass_fds=[*self._fds, *(end.fileno() for number, end in self._child_ends.items() if number == rank)],
            start_new_session=True,  # Ctrl-C reaches only this process
        )
        with suppress(BrokenPipeError):  # one that has ended is noticed elsewhere
            if child.stdin is not None:
                child.stdin.write(settings + "\n")
                child.stdin.close()
        return child

    def _end_children(self) -> None:
        deadline = time.monotonic() + _END_S
        for child in self._children:
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()


def _close(stream: IO[str] | None) -> None:
    if stream is not None:
        with suppress(BrokenPipeError):  # unsent text for a rank that has ended
            stream.close()


def _read_message(stream: IO[str] | None, deadline: float | None = None) -> dict[str, Any]:
    """Return the next line of a rank; empty if it ended or the time is up."""
    while stream is not None:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not select.select([stream], [], [], left)[0]:
            break
        line = stream.readline()
        if not line:
            break
        with suppress(ValueError):
            message = json.loads(line)
            if isinstance(message, dict):
                return message
    return {}


def failure_of(rank: int, error: Exception) -> dict[str, Any]:
    """Return what a rank reports when it fails: ``rank``, the name of the class of ``error``, and its ``message``."""
    name = type(error).__name__ if isinstance(error, PenstockError) else ""
    return {"rank": rank, "error": name, "message": str(error) if name else f"{type(error).__name__}: {error}"}


def _is_of_another(failure: Mapping[str, Any]) -> bool:
    """Return True for a failure of a rank whose group was ended; the reason names the rank that did."""
    return str(failure.get("message")).startswith(ENDED)


def error_of(failure: Mapping[str, Any]) -> PenstockError:
    """Return the error of a failure that a rank reported, whose message names one rank."""
    kind = getattr(errors, str(failure.get("error")), None)
    message = str(failure.get("message"))
    text = message if _is_of_another(failure) else f"Rank {failure.get('rank')}: {message}"
    if isinstance(kind, type) and issubclass(kind, PenstockError) and kind is not errors.ServiceError:
        return kind(text)
    return UnavailableError(text)


def _how_it_ended(code: int) -> str:
    return f"was killed by {signal_name(-code)}" if code < 0 else f"exited with status {code}"
