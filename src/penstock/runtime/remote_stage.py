"""The process of a stage on another machine than rank 0: it joins a pipeline, and computes its stage of each step."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from penstock.core.library import CLOSED
from penstock.core.link_comm import PART, ROWS, LinkComm
from penstock.core.rank_layout import RankLayout
from penstock.errors import InvalidArgumentError, PenstockError, UnavailableError
from penstock.processes.frames import FrameStream
from penstock.processes.tls import TlsSession, client_context, connect, keep_alive
from penstock.runtime.machine import memory
from penstock.runtime.program import ProgramLimits
from penstock.runtime.rank_group import RankComms
from penstock.runtime.ranks import check_rank_bundle, default_threads, graph_of_rank, open_rank
from penstock.runtime.remote_group import ALPN, BEAT_LIMIT_S, BEAT_S, MAX_FRAME_BYTES, Frame, Kind, pause_s
from penstock.runtime.stage_bundle import StageBundle, find_bundle
from penstock.version import __version__

__all__ = ["StageSource", "join_pipeline"]

_CONNECT_S: Final = 10.0
_PAUSES_S: Final = (0.2, 0.5, 1.0, 2.0)


async def join_pipeline(
    source: StageSource, address: tuple[str, int], token: str, ca: bytes | None, *, threads: int = 0, again: bool = True
) -> int:
    """Compute a stage of one pipeline after another; return the exit status.

    ``source``: the bundle that rank 0 opens, or this machine's part of it.  ``address``: where rank 0 listens.  ``ca``
    holds the trusted certificates in PEM; None trusts those of the system.  ``threads``: 0 takes all.  ``again``: join
    again when a pipeline has ended or cannot be reached; without it that is an UnavailableError, unless rank 0 closed
    the pipeline.  Raises InvalidArgumentError if rank 0 refuses this stage, and the errors of ``find_bundle``.
    """
    context = client_context(ca, [ALPN])
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    num_tries = 0
    while not stopped.is_set():
        with ExitStack() as stack:
            found = find_bundle(source.model, source.rank, source.scheme)
            stage = _Stage(await asyncio.to_thread(stack.enter_context, found), threads or default_threads())
            try:
                reason = await stage.serve(address, TlsSession(context, address[0]), token, stopped)
            except OSError as error:
                reason = error.strerror or str(error) or f"no answer within {_CONNECT_S:g} s"  # of asyncio.timeout
        if stopped.is_set() or (reason == CLOSED and not again):
            return 0
        where = f"{address[0]}:{address[1]}"
        if not again:
            raise UnavailableError(f"{where}: {reason}")
        num_tries = 0 if stage.has_begun else num_tries + 1
        pause_s = _PAUSES_S[min(num_tries, len(_PAUSES_S) - 1)]
        if reason != CLOSED:
            print(f"penstock stage: {where}: {reason}; trying again in {pause_s:g} s", file=sys.stderr, flush=True)
        with suppress(TimeoutError):
            await asyncio.wait_for(stopped.wait(), pause_s)
    return 0


@dataclass(frozen=True)
class StageSource:
    """Where a stage has its layers from; the fields are the arguments of ``find_bundle``."""

    model: Path
    rank: int = 0
    scheme: str | None = None


class _Stage:
    """A stage of one pipeline."""

    def __init__(self, bundle: StageBundle, threads: int) -> None:
        self._bundle, self._threads = bundle, threads
        self._stream: FrameStream[Frame] | None = None
        self._comm: LinkComm | None = None
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
            joining = {"version": __version__, "token": token, "threads": self._threads}
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

    def _take(self, frame: Frame) -> None:
        self._is_watching = self._is_watching or frame.kind == Kind.BEAT
        if frame.kind == Kind.WELCOME and not self._settings.done():
            settings = frame.message()
            layout = RankLayout(**settings["layout"])
            self._epoch = int(settings["epoch"])
            self._comm = LinkComm(
                settings["rank"], layout.world, settings["part_bytes"], self._transmit, self._tell_end
            )
            self._settings.set_result(settings)
        elif frame.kind == Kind.METADATA and self._stream is not None:
            self._stream.send(Frame(Kind.METADATA, data=self._bundle.metadata))
        elif frame.kind in (ROWS, PART) and self._comm is not None:
            if frame.epoch != self._epoch:
                self._end(f"rank 0 sent a message of group {frame.epoch}, not {self._epoch}")
            self._comm.deliver(frame.kind, frame.source, frame.data)
        elif frame.kind == Kind.FAILED:
            raise InvalidArgumentError(f"rank 0 refuses this stage: {frame.message().get('message')}")
        elif frame.kind in (Kind.ENDED, Kind.BUSY):
            self._end(str(frame.message().get("reason")))

    def _transmit(self, kind: int, target: int, data: bytes) -> bool:
        if self._comm is None or self._stream is None:
            return False
        return self._stream.send(Frame(kind, self._comm.rank, target, data, self._epoch))

    def _tell_end(self, reason: str) -> None:
        if self._stream is not None:
            self._stream.send(Frame.of(Kind.ENDED, reason=reason))

    def _end(self, reason: str) -> None:
        self._reason = self._reason or reason
        if self._comm is not None:
            self._comm.end(reason)

    async def _beat(self) -> None:
        while self._stream is not None and not self._reason:
            self._stream.send(Frame(Kind.BEAT))
            if self._is_watching and time.monotonic() - self._stream.heard > BEAT_LIMIT_S:
                self._end(f"rank 0 is lost: no message for {BEAT_LIMIT_S:g} s")
            await asyncio.sleep(pause_s([self._stream.heard]) if self._is_watching else BEAT_S)

    def _compute(self, settings: dict[str, Any]) -> str:
        """Open the stage and follow rank 0 until the group ends; return why it did.  In a thread of its own."""
        comm, stream = self._comm, self._stream
        if comm is None or stream is None:
            return "rank 0 closed the connection"
        program = None
        try:
            layout = RankLayout(**settings["layout"])
            graph = graph_of_rank(self._bundle.metadata, comm.rank, layout)
            check_rank_bundle(self._bundle.path, graph, comm.rank, layout)
            program = open_rank(
                self._bundle.parts(layout),
                RankComms(comm),
                layout,
                self._threads,
                ProgramLimits(**settings["limits"]),
                lambda: (stream.send(Frame(Kind.READY, comm.rank)), None)[1],
            )
            while True:
                program.core_program.follow()
        except UnavailableError as error:
            return comm.reason or str(error)
        except Exception as error:
            name = type(error).__name__
            text = str(error) if isinstance(error, PenstockError) else f"{name}: {error}"
            stream.send(Frame.of(Kind.FAILED, error=name if isinstance(error, PenstockError) else "", message=text))
            comm.end(text)
            return text
        finally:
            if program is not None:
                program.close()
            comm.close()
