"""The processes of a stage on another machine than rank 0: it joins a pipeline, and computes its stage of each step.

The process that joins has the first rank of the stage, and starts the other ranks as its children when rank 0 says how
many there are.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from penstock.core.library import CLOSED, ENDED
from penstock.core.link_comm import PART, ROWS, LinkComm
from penstock.core.rank_layout import RankLayout
from penstock.errors import InternalError, InvalidArgumentError, InvalidFileError, UnavailableError
from penstock.processes.frames import FrameStream
from penstock.processes.reconnect import RetryLines, connection_problem
from penstock.processes.silence import Silence
from penstock.processes.tls import TlsSession, client_context, connect, keep_alive
from penstock.runtime.machine import memory
from penstock.runtime.native import NativeProgram
from penstock.runtime.program import ProgramLimits
from penstock.runtime.ranks.open_ranks import check_rank_bundle, default_threads, graph_of_rank, open_rank, threads_of
from penstock.runtime.ranks.rank_group import RankComms, RankGroup, failure_of
from penstock.runtime.ranks.remote_group import ALPN, BEAT_LIMIT_S, pause_s
from penstock.runtime.ranks.stage_bundle import StageBundle, find_bundle
from penstock.runtime.ranks.stage_links import MAX_FRAME_BYTES, Frame, Kind
from penstock.version import __version__

__all__ = ["StageSource", "join_pipeline"]

_CONNECT_S: Final = 10.0
_PAUSES_S: Final = (0.2, 0.5, 1.0, 2.0)


async def join_pipeline(
    source: StageSource, address: tuple[str, int], token: str, ca: bytes | None, *, threads: int = 0, again: bool = True
) -> int:
    """Compute a stage of one pipeline after another; return the exit status.

    ``source``: the bundle that rank 0 opens, or this machine's part of it.  ``address``: where rank 0 listens.  ``ca``
    holds the trusted certificates in PEM; None trusts those of the system.  ``threads``: of each rank of the stage; 0
    divides the cores.  ``again``: join again when a pipeline has ended or cannot be reached; without it that is an
    UnavailableError, unless rank 0 closed the pipeline or does not listen, since it may be started later.  Raises
    InvalidArgumentError if rank 0 refuses this stage, and the errors of ``find_bundle``.
    """
    try:
        context = client_context(ca, [ALPN])
    except InvalidFileError as error:
        raise InvalidFileError(f"--ca-file: {error}") from error
    where = f"{address[0]}:{address[1]}"
    lines = RetryLines("stage", where, _PAUSES_S)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    while not stopped.is_set():
        with ExitStack() as stack:
            bundle = find_bundle(source.model, source.rank, source.scheme)
            stage = _Stage(await asyncio.to_thread(stack.enter_context, bundle), threads)
            is_absent = False
            try:
                reason = await stage.serve(address, TlsSession(context, address[0]), token, stopped)
            except OSError as error:
                reason, is_absent = connection_problem(error, _CONNECT_S), isinstance(error, ConnectionRefusedError)
        if stopped.is_set() or (reason == CLOSED and not again):
            return 0
        if not again and not is_absent:
            raise UnavailableError(f"{where}: {reason}")
        if stage.has_begun:
            lines.reset()
        if reason == CLOSED:
            print(f"penstock stage: {where}: the pipeline ended; waiting for the next one", file=sys.stderr, flush=True)
            reason = ""
        with suppress(TimeoutError):
            await asyncio.wait_for(stopped.wait(), lines.next_pause_s(reason))
    return 0


@dataclass(frozen=True)
class StageSource:
    """The source of the layers of a stage; the fields are the arguments of ``find_bundle``."""

    model: Path
    rank: int = 0
    scheme: str | None = None


class _OtherRanks:
    """The ranks of a stage beside the first one, which is this process: its children, linked with the ranks elsewhere.

    ``comm``: the connection of the first rank.  ``send_away`` sends a message to a rank of another machine.  Make it in
    the event loop; ``close_links`` belongs there, too.
    """

    def __init__(self, comm: LinkComm, layout: RankLayout, threads: int, send_away: Callable[[Frame], bool]) -> None:
        oversubscribed = default_threads() < layout.stage_ranks * threads
        self._group = RankGroup(layout, comm.part_bytes, oversubscribed=oversubscribed, first=comm.rank)
        self.comms = self._group.comms
        self._comm, self._send_away = comm, send_away
        self._streams = {
            rank: FrameStream(end, Frame.parse, MAX_FRAME_BYTES) for rank, end in self._group.links.items()
        }
        for stream in self._streams.values():
            stream.listen(self._take)
        self._is_ready = self._is_closed = False
        self._first_reason = ""
        self._lock = threading.Lock()  # guards the shared memory

    def deliver(self, frame: Frame) -> None:
        """Take a message from another machine to a rank of this stage; rows are for every rank."""
        if frame.kind != ROWS:
            if frame.target != self._comm.rank and frame.target not in self._streams:
                raise InternalError(f"rank 0 sent a message for rank {frame.target}, which is not of this stage")
            self.send(frame)
            return
        for place, stream in enumerate(self._streams.values(), 1):
            stream.send(replace(frame, source=frame.source + place if frame.source else 0))
        self._comm.deliver(frame.kind, frame.source, frame.data)

    def send(self, frame: Frame) -> bool:
        """Send a message to its target, here or elsewhere, from any thread; False if the connection has ended."""
        if frame.target in self._streams:
            return self._streams[frame.target].send(frame)
        if frame.target == self._comm.rank:
            self._comm.deliver(frame.kind, frame.source, frame.data)
            return True
        return self._send_away(frame)

    def _take(self, frame: Frame) -> None:
        if frame.kind == PART:
            self.send(frame)
        elif frame.kind == Kind.ENDED:
            self._first_reason = self._first_reason or str(frame.message().get("reason"))
            if self._is_ready:
                self._comm.abort(self._first_reason)

    def start(self, parts: list[str], threads: int, limits: dict[str, Any]) -> None:
        """Start the processes.  The arguments are those of ``open_rank``."""
        self._group.start({"parts": parts, "threads": threads, "limits": limits})

    def await_ready(self) -> None:
        """Wait until every process has its weights; from then on one that ends, ends the pipeline.

        Raises the error of one that failed.
        """
        self._group.await_ready()
        self._group.opened()  # rank 0 has the limit for the rest
        self._is_ready = True
        if self._first_reason:
            self._comm.abort(self._first_reason)
        self._group.watch(self._comm.abort)

    @property
    def failure(self) -> dict[str, Any] | None:
        """The report of one of these ranks that failed to open, as ``failure_of`` returns it."""
        return self._group.failure

    def end(self, reason: str) -> None:
        """End every wait of these ranks, from any thread."""
        for stream in self._streams.values():
            stream.send(Frame.of(Kind.ENDED, reason=reason))
        with self._lock:
            if not self._is_closed:
                self._group.abort(reason)

    def close(self) -> None:
        """End the processes, after the context of the first rank is closed."""
        with self._lock:
            self._is_closed = True
        self._group.close()

    def close_links(self) -> None:
        """Close the links."""
        for stream in self._streams.values():
            stream.close()


class _Stage:
    """A stage of one pipeline."""

    def __init__(self, bundle: StageBundle, threads: int) -> None:
        self._bundle, self._threads, self._cores = bundle, threads, default_threads()
        self._stream: FrameStream[Frame] | None = None
        self._comm: LinkComm | None = None
        self._others: _OtherRanks | None = None
        self._epoch = 0
        self._settings: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._reason = ""
        self._is_watching = False  # from the first beat on

    @property
    def has_begun(self) -> bool:
        """True if the pipeline had all its stages."""
        return self._settings.done()

    async def serve(self, address: tuple[str, int], tls: TlsSession, token: str, stopped: asyncio.Event) -> str:
        """Join, and compute until the pipeline ends; return why it did.  Raises OSError."""
        connection = await connect(*address, _CONNECT_S)
        try:
            async with asyncio.timeout(_CONNECT_S):
                keep_alive(connection)
                await tls.handshake(connection)
            if tls.protocol != ALPN:
                raise ConnectionAbortedError("no pipeline waits for stages at this port")
        except BaseException:
            connection.close()
            raise
        stream = self._stream = FrameStream(connection, Frame.parse, MAX_FRAME_BYTES, tls)
        tasks: list[asyncio.Future[Any]] = []
        try:
            machine = memory()
            joining = {"version": __version__, "token": token, "threads": self._threads, "cores": self._cores}
            joining |= {"checksum": self._bundle.checksum, "rank": self._bundle.rank}
            stream.send(Frame.of(Kind.JOIN, available=machine.available if machine.total else 0, **joining))
            stream.listen(self._take)
            ends: list[asyncio.Future[Any]] = [
                asyncio.ensure_future(stopped.wait()),
                asyncio.ensure_future(stream.ended.wait()),
            ]
            tasks = [*ends, asyncio.ensure_future(self._beat())]
            await asyncio.wait([*ends, self._settings], return_when=asyncio.FIRST_COMPLETED)
            if not self._settings.done():
                if stream.error is not None:
                    raise stream.error
                return self._reason or "rank 0 closed the connection"
            work = asyncio.ensure_future(asyncio.to_thread(self._compute, self._settings.result()))
            await asyncio.wait([*ends, work], return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and self._comm is not None:
                why = "was stopped" if stopped.is_set() else "lost its connection with rank 0"
                self._comm.abort(f"rank {self._comm.rank} {why}")
            await work
            return self._reason or work.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.sleep(0)  # what was sent last is on its way
            stream.close()
            if self._others is not None:
                self._others.close_links()

    def _take(self, frame: Frame) -> None:
        self._is_watching = self._is_watching or frame.kind == Kind.BEAT
        if frame.kind == Kind.WELCOME and not self._settings.done():
            self._begin(frame.message())
        elif frame.kind == Kind.METADATA and self._stream is not None:
            self._stream.send(Frame(Kind.METADATA, frame.target, data=self._bundle.of(frame.target).metadata))
        elif frame.kind in (ROWS, PART) and self._comm is not None:
            if frame.epoch != self._epoch:
                self._end(f"rank 0 sent a message of group {frame.epoch}, not {self._epoch}")
            if self._others is not None:
                self._others.deliver(frame)
            else:
                self._comm.deliver(frame.kind, frame.source, frame.data)
        elif frame.kind == Kind.FAILED:
            raise InvalidArgumentError(f"rank 0 refuses this stage: {frame.message().get('message')}")
        elif frame.kind in (Kind.ENDED, Kind.BUSY):
            self._end(str(frame.message().get("reason")))

    def _begin(self, settings: dict[str, Any]) -> None:
        layout = RankLayout(**settings["layout"])
        self._epoch = int(settings["epoch"])
        self._comm = LinkComm(settings["rank"], layout.world, settings["part_bytes"], self._transmit, self._tell_end)
        if layout.stage_ranks > 1:
            threads = threads_of(self._threads, self._cores, layout)
            self._others = _OtherRanks(self._comm, layout, threads, self._send_away)
        self._settings.set_result(settings)
        stage = layout.place(settings["rank"])[0] + 1
        print(f"penstock stage: joined the pipeline as stage {stage} of {layout.pp}", file=sys.stderr, flush=True)

    def _transmit(self, kind: int, target: int, data: bytes) -> bool:
        if self._comm is None:
            return False
        frame = Frame(kind, self._comm.rank, target, data)
        return self._send_away(frame) if self._others is None else self._others.send(frame)

    def _send_away(self, frame: Frame) -> bool:
        return self._stream is not None and self._stream.send(replace(frame, epoch=self._epoch))

    def _tell_end(self, reason: str) -> None:
        if self._stream is not None:
            self._stream.send(Frame.of(Kind.ENDED, reason=reason))
        if self._others is not None:
            self._others.end(reason)

    def _end(self, reason: str) -> None:
        self._reason = self._reason or reason
        if self._comm is not None:
            self._comm.end(reason)
        if self._others is not None:
            self._others.end(reason)

    async def _beat(self) -> None:
        silence = Silence()
        while self._stream is not None and not self._reason:
            self._stream.send(Frame(Kind.BEAT))
            silent_s = silence.seconds(self._stream.heard) if self._is_watching else 0.0
            if silent_s > BEAT_LIMIT_S:
                self._end(f"rank 0 is lost: no message for {BEAT_LIMIT_S:g} s")
            await silence.sleep(pause_s([silent_s]))

    def _compute(self, settings: dict[str, Any]) -> str:
        """Open the stage and follow rank 0 until the group ends; return why it did.  In a thread of its own."""
        comm, stream = self._comm, self._stream
        if comm is None or stream is None:
            return "rank 0 closed the connection"
        program = None
        try:
            program = self._open(comm, settings)
            while True:
                program.core_program.follow()
        except UnavailableError as error:
            comm.abort(str(error).removeprefix(ENDED))  # unless it has ended: a rank of this stage says why
            return comm.reason or str(error)
        except Exception as error:
            failure = None if self._others is None else self._others.failure
            failure = failure or failure_of(comm.rank, error)
            stream.send(Frame.of(Kind.FAILED, **failure))
            text = str(failure["message"])
            self._end(text)
            return text
        finally:
            if program is not None:
                program.close()
            if self._others is not None:
                self._others.close()
            comm.close()

    def _open(self, comm: LinkComm, settings: dict[str, Any]) -> NativeProgram:
        """Open the part of this process, while the other ranks of the stage open theirs."""
        layout = RankLayout(**settings["layout"])
        for rank in range(comm.rank, comm.rank + (layout.stage_ranks if self._bundle.is_part else 1)):
            bundle = self._bundle.of(rank)
            check_rank_bundle(bundle.path, graph_of_rank(bundle.metadata, rank, layout), rank, layout)
        parts, threads = self._bundle.parts(layout), threads_of(self._threads, self._cores, layout)
        comms = RankComms(comm)
        if self._others is not None:
            self._others.start(parts, threads, settings["limits"])
            comms = RankComms(comm, self._others.comms.all_ranks)
        return open_rank(parts, comms, layout, threads, ProgramLimits(**settings["limits"]), self._tell_ready)

    def _tell_ready(self) -> None:
        if self._others is not None:
            self._others.await_ready()
        if self._stream is not None:
            self._stream.send(Frame(Kind.READY))
