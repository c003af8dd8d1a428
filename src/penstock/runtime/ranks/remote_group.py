"""The stages of a pipeline on other machines, which join over TCP with TLS and a token; they are watched and ended.

Every stage has one connection, from its first rank to rank 0, which passes on what stages send each other.  A beat
every half second shows that a machine is there; when nothing comes for BEAT_LIMIT_S, or a connection ends, the group
ends.  A group takes only the connections that joined it, so a machine that returns after it was lost has to join
another group.  A stage of another bundle than the group's waits, too: the next group may run it.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from typing import Any, Final

from penstock.config import is_integer
from penstock.core.library import CLOSED
from penstock.core.link_comm import PART, ROWS, LinkComm
from penstock.core.rank_layout import RankLayout
from penstock.env import rank_open_s
from penstock.errors import InternalError, InvalidArgumentError, PenstockError, UnavailableError, UnsupportedError
from penstock.processes.frames import FIRST_BYTES, FrameStream
from penstock.processes.listen import peer_address
from penstock.processes.silence import Silence
from penstock.processes.tls import TlsSession, keep_alive, server_context
from penstock.runtime.ranks.rank_group import RankComms, error_of
from penstock.runtime.ranks.stage_links import MAX_FRAME_BYTES, Frame, Kind
from penstock.runtime.ranks.stage_server import StageServer, listen_for_stages
from penstock.version import __version__

__all__ = ["ALPN", "BEAT_LIMIT_S", "BEAT_S", "RemoteGroup", "pause_s"]

ALPN: Final = "penstock-stage"
BEAT_S: Final = 0.5
BEAT_LIMIT_S: Final = 1.7
"""Open requests have to fail within 2 s of the loss of a link; the rest of the time is for ending the group."""
_JOIN_S: Final = 10.0
_SILENCE_S: Final = 30.0
"""A stage that opens its part is busy; one without a message for this time is lost."""
_FLUSH_S: Final = 1.0
_MAX_JOINING: Final = 64
"""Limit on the connections that have not said yet who they are."""


@dataclass(eq=False)
class _Member:
    stream: FrameStream[Frame]
    address: str
    join: dict[str, Any]
    rank: int = 0  # the first one of the stage
    metadata: dict[int, bytes] = field(default_factory=dict)  # by rank
    is_ready: bool = False
    error: dict[str, Any] | None = None


class RemoteGroup:
    """Rank 0's end of a pipeline whose stages are on other machines; it has the methods of a RankGroup.

    ``checksum``: of the whole bundle, of which all stages must have their parts.  Opening listens.  Then come
    ``await_stages``, ``read_metadata`` if needed, ``connect``, ``start`` and ``await_ready``.
    """

    def __init__(self, server: StageServer, layout: RankLayout, checksum: str) -> None:
        if not isinstance(server, StageServer):
            raise InvalidArgumentError(
                f"stage_server: expected a StageServer, got {server!r:.100}", param="stage_server"
            )
        if layout.pp == 1:
            raise UnsupportedError("stage_server: expected pipeline_parallel_size above 1, got 1", param="stage_server")
        self.layout, self._server, self._checksum = layout, server, checksum
        self.pids: list[int] = []
        self._tls = server_context(server.certificate, server.key, [ALPN])
        self._epoch = secrets.randbits(63)
        self._members: list[_Member] = []
        self._awaited: list[_Member] = []  # for which rank 0 has planned
        self._changed = threading.Condition()
        self._is_full = self._is_closed = self._is_ready = self._is_open = False
        self._opening_limit_s = rank_open_s()
        self._num_joining = 0
        self._death = ""
        self._on_death: Callable[[str], None] | None = None
        self._comm: LinkComm | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener = listen_for_stages(server)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="penstock-stages", daemon=True)
        self._thread.start()
        if server.on_listen is not None:
            server.on_listen(int(self._listener.getsockname()[1]))

    # In the thread of the event loop

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._accepting = self._add_task(self._accept())
        self._loop.run_forever()

    def _close_port(self) -> None:
        self._accepting.cancel()
        self._loop.call_soon(self._listener.close)  # after the event loop has forgotten it

    def _add_task(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self) -> None:
        while True:
            try:
                connection, peer = await self._loop.sock_accept(self._listener)
            except OSError:  # no file descriptor is left; the connection stays in the queue
                await asyncio.sleep(BEAT_S)
                continue
            if self._num_joining >= _MAX_JOINING:
                connection.close()
                continue
            self._num_joining += 1
            self._add_task(self._handle(connection, peer_address(peer)))

    async def _handle(self, connection: socket.socket, address: str) -> None:
        """Handle one connection until it ends.  A peer that does not follow the protocol is disconnected."""
        stream: FrameStream[Frame] | None = None
        try:
            try:
                async with asyncio.timeout(_JOIN_S):
                    keep_alive(connection)
                    tls = TlsSession(self._tls)
                    await tls.handshake(connection)
                    stream = FrameStream(connection, Frame.parse, FIRST_BYTES, tls)
                    frame = await stream.read()
            finally:
                self._num_joining -= 1
            if frame is None or frame.kind != Kind.JOIN or tls.protocol != ALPN:
                return
            member = _Member(stream, address, frame.message())
            if refusal := self._refusal(member):
                stream.send(refusal)
                await asyncio.sleep(_FLUSH_S)
                return
            stream.max_bytes = MAX_FRAME_BYTES
            await stream.ended.wait()
            self._drop(member)
        except (PenstockError, OSError, ValueError, struct.error):  # TimeoutError and ssl.SSLError are OSErrors
            pass
        finally:
            if stream is not None:
                stream.close()
            connection.close()

    def _refusal(self, member: _Member) -> Frame | None:
        """Add a stage that fits; return the answer to one that does not fit, or may try again later."""
        token, version = member.join.get("token"), member.join.get("version")
        if not isinstance(token, str) or not hmac.compare_digest(_digest(self._server.token), _digest(token)):
            return Frame.of(Kind.FAILED, message="the token is not known here")
        if version != __version__:
            text = f"rank 0 has Penstock {__version__}, this machine has {str(version)[:40]}"
            return Frame.of(Kind.FAILED, message=text)
        if member.join.get("checksum") != self._checksum:  # that of the weights before or after an update
            return Frame.of(Kind.BUSY, reason="rank 0 runs another bundle")
        rank = member.join.get("rank")
        last = self.layout.num_computing
        if not is_integer(rank, 0, last):
            return Frame.of(Kind.FAILED, message=f"rank: expected one from 1 to {last}, got {rank!r:.20}")
        with self._changed:
            if self._is_full:
                return Frame.of(Kind.BUSY, reason="the group has all its stages")
            if rank and self._stage_of(rank) in map(self._joined_stage, self._members):
                return Frame.of(Kind.BUSY, reason=f"the group has its rank {rank}")
            self._members.append(member)
            self._is_full = len(self._members) == self.layout.pp
            member.stream.listen(lambda frame: self._take(member, frame))
            self._changed.notify_all()
            num_joined = len(self._members)
        if self._server.on_join is not None:
            self._server.on_join(member.address, num_joined)
        return None

    def _stage_of(self, rank: int) -> int:
        return self.layout.place(rank)[0]

    def _joined_stage(self, member: _Member) -> int:
        """Return the stage that a member asked for; -1 for any."""
        return self._stage_of(int(member.join["rank"]))

    def _drop(self, member: _Member) -> None:
        with self._changed:
            if self._comm is None:  # it left before the group began
                self._members.remove(member)
                self._is_full = False
                self._changed.notify_all()
                return
        error = member.stream.error
        why = "closed the connection" if error is None else f"broke the protocol: {error}"
        self._report_death(f"rank {member.rank} at {member.address} {why}")

    def _take(self, member: _Member, frame: Frame) -> None:
        if frame.kind in (ROWS, PART):
            stage = self._stage_of(member.rank)
            if self._comm is None or self._stage_of(frame.source) != stage or frame.target >= self.layout.world:
                raise InternalError(f"rank {member.rank} sent a message that is not its own")
            if frame.epoch != self._epoch:
                raise InternalError(f"rank {member.rank} sent a message of group {frame.epoch}, not {self._epoch}")
            if frame.target == 0:
                self._comm.deliver(frame.kind, frame.source, frame.data)
            else:
                self._members[self._stage_of(frame.target)].stream.send(frame)
        elif frame.kind == Kind.METADATA:
            with self._changed:
                member.metadata[frame.source] = frame.data
                self._changed.notify_all()
        elif frame.kind in (Kind.READY, Kind.FAILED):
            with self._changed:
                member.is_ready = frame.kind == Kind.READY
                if frame.kind == Kind.FAILED:
                    member.error = self._failure_of(member, frame)
                self._changed.notify_all()
            if member.error is not None:
                self._report_death(f"rank {member.error['rank']}: {member.error.get('message')}")
        elif frame.kind == Kind.ENDED:
            self._report_death(str(frame.message().get("reason")))

    def _failure_of(self, member: _Member, frame: Frame) -> dict[str, Any]:
        """Return what a stage reported: its own failure, or that of a rank beside it."""
        failure = frame.message()
        rank: Any = failure.get("rank")
        is_computing = is_integer(rank, 1, self.layout.num_computing)
        if not is_computing or self._stage_of(rank) != self._stage_of(member.rank):
            rank = member.rank
        return {**failure, "rank": rank}

    async def _watch_opening(self) -> None:
        """End a group that does not open in time, or a stage of which is not heard of while it opens."""
        end, silence = time.monotonic() + self._opening_limit_s, Silence()
        while not self._is_open and not self._death:
            if time.monotonic() > end:
                self._report_death(f"the ranks did not open within {self._opening_limit_s:g} s")
            for member in () if self._is_ready else self._members:
                if silence.seconds(member.stream.heard) > _SILENCE_S:
                    self._report_death(
                        f"rank {member.rank} at {member.address} is lost: no message for {_SILENCE_S:g} s"
                    )
            await silence.sleep(BEAT_S)

    async def _beat(self) -> None:
        silence = Silence()
        while not self._death:
            for member in self._members:
                member.stream.send(Frame(Kind.BEAT))
                if silence.seconds(member.stream.heard) > BEAT_LIMIT_S:
                    self._report_death(
                        f"rank {member.rank} at {member.address} is lost: no message for {BEAT_LIMIT_S:g} s"
                    )
            await silence.sleep(pause_s(silence.seconds(member.stream.heard) for member in self._members))

    # In the thread of the engine

    def await_stages(self) -> list[dict[str, Any]]:
        """Wait until all stages have joined, and number them; return what each said of its machine, by stage.

        Those that named no rank get the stages that are left, in the order in which they joined.  Raises
        UnavailableError if they do not come in time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_full, self._server.join_s):
                raise UnavailableError(
                    f"stage_server: {len(self._members)} of {self.layout.pp} stages joined within "
                    f"{self._server.join_s:g} s",
                    param="stage_server",
                )
            free = set(range(self.layout.pp)) - set(map(self._joined_stage, self._members))
            stages = iter(sorted(free))
            for member in self._members:
                stage = self._joined_stage(member) if member.join["rank"] else next(stages)
                member.rank = self.layout.rank_of(stage, 0)
            self._members.sort(key=lambda member: member.rank)
            self._awaited = list(self._members)
            return [member.join for member in self._awaited]

    def read_metadata(self) -> list[bytes]:
        """Return the metadata of the bundle of each rank but 0.  Raises UnavailableError if one does not answer."""
        owners = {rank: self._awaited[self._stage_of(rank)] for rank in range(1, self.layout.world)}
        for rank, member in owners.items():
            member.stream.send(Frame(Kind.METADATA, target=rank))
        with self._changed:
            self._changed.wait_for(
                lambda: all(rank in member.metadata or member not in self._members for rank, member in owners.items()),
                _JOIN_S,
            )
            metadata = [member.metadata[rank] for rank, member in owners.items() if rank in member.metadata]
            if len(metadata) < len(owners):
                raise UnavailableError(
                    "stage_server: a stage left, or did not send the metadata of its bundles", param="stage_server"
                )
            return metadata

    def connect(self, part_bytes: int) -> None:
        """Begin the group.  ``part_bytes``: the most bytes that a rank sends in one exchange.

        Raises UnavailableError if a stage has left since ``await_stages``.
        """
        with self._changed:
            if left := [member.address for member in self._awaited if member not in self._members]:
                raise UnavailableError(
                    f"stage_server: the stage at {', '.join(left)} left before the pipeline began", param="stage_server"
                )
            if self._server.shared:  # the next stages are for other groups
                self._loop.call_soon_threadsafe(self._close_port)
            self._comm = LinkComm(0, self.layout.world, part_bytes, self._transmit, self._tell_end)
        self.comms = RankComms(self._comm)

    def _transmit(self, kind: int, target: int, data: bytes) -> bool:
        stage, place = self.layout.place(target)
        if kind == ROWS and place > 0:
            return True  # the first rank of the stage hands them to the ranks beside it
        return self._members[stage].stream.send(Frame(kind, 0, target, data, self._epoch))

    def start(self, settings: Mapping[str, Any]) -> None:
        """Tell each stage to open its part of the bundle, as ``settings`` say.

        All have ``PENSTOCK_RANK_OPEN_SECONDS`` until ``opened``; after that the group ends.
        """
        comm = self._comm
        if comm is None:
            raise InternalError("stages: started before they were connected")
        group = {"layout": asdict(self.layout), "epoch": self._epoch, "part_bytes": comm.part_bytes}
        for member in self._members:
            member.stream.send(Frame.of(Kind.WELCOME, rank=member.rank, **group, **settings))
        self._loop.call_soon_threadsafe(self._add_task, self._watch_opening())

    def await_ready(self) -> None:
        """Wait until every stage has opened its part.  Raises the error of one that failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._death or all(member.is_ready for member in self._members))
        if self._death:
            raise self.first_error() or UnavailableError(self._death)
        self._is_ready = True
        self._loop.call_soon_threadsafe(self._add_task, self._beat())

    def opened(self) -> None:
        """End the limit on the time for opening, when all ranks have their programs."""
        self._is_open = True

    def first_error(self) -> PenstockError | None:
        """Return the error that a stage reported, if one did."""
        errors = [error_of(member.error) for member in self._members if member.error is not None]
        return errors[0] if errors else None

    @property
    def was_killed(self) -> bool:
        """True if no stage reported an error: one was killed, or its machine is lost."""
        return self.first_error() is None

    def watch(self, on_death: Callable[[str], None]) -> None:
        """Call ``on_death`` with the reason when a stage is lost, from another thread; at once if one is lost."""
        with self._changed:
            self._on_death = on_death
            if self._death:
                on_death(self._death)

    def _report_death(self, reason: str) -> None:
        with self._changed:
            if self._death or self._is_closed:
                return
            self._death = reason
            if self._on_death is not None:
                self._on_death(reason)
            self._changed.notify_all()
        self.abort(reason)

    def _tell_end(self, reason: str) -> None:
        for member in self._members:
            member.stream.send(Frame.of(Kind.ENDED, reason=reason))

    def abort(self, reason: str) -> None:
        """End every wait of every rank."""
        if self._comm is not None:
            self._comm.abort(reason)

    def close(self) -> None:
        """End the group; the stages may join another one.  The contexts that use ``comms`` must be closed."""
        if self._is_closed:
            return
        self._is_closed = True
        self.abort(CLOSED)
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._listener.close()
        if self._comm is not None:
            self._comm.close()

    async def _close(self) -> None:
        deadline = self._loop.time() + _FLUSH_S
        for member in self._members:
            while not member.stream.has_room and self._loop.time() < deadline:
                await asyncio.sleep(0.01)
            member.stream.close()
        others = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*others, return_exceptions=True)


def pause_s(silent_s: Iterable[float]) -> float:
    """Return the seconds until the next beat, or until a silent connection counts as lost if that is earlier."""
    return min(BEAT_S, max(BEAT_LIMIT_S - max(silent_s), 0.0) + 0.01)


def _digest(token: str) -> bytes:
    return sha256(token.encode("utf-8", "surrogatepass")).digest()
