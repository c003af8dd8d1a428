"""The primary's port for workers of other machines: messages over TCP with TLS, and a token that they share."""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from google.protobuf.message import DecodeError

from penstock.errors import FileAccessError, InvalidArgumentError, PenstockError
from penstock.logs import tell
from penstock.processes.frames import FIRST_BYTES, FrameStream
from penstock.processes.listen import open_port, peer_address
from penstock.processes.tls import TlsSession, keep_alive, server_context
from penstock.serving.proto import wire_pb2 as pb
from penstock.serving.servable_machines.machine_port import serve_servable_machine
from penstock.serving.workers import handshake
from penstock.serving.workers.machines.grpc_refusal import refuse_grpc_call
from penstock.serving.workers.worker_connection import WorkerConnection
from penstock.serving.workers.worker_roles import check_role

if TYPE_CHECKING:
    import ssl

    from penstock.servables.process import worker_messages_pb2 as stages_pb
    from penstock.serving.servable_machines.machine_port import ServeMachine

__all__ = ["LOST_S", "MAX_CONNECTIONS", "Expected", "RemoteWorkerServer", "RemoteWorkerSettings"]

Expected: TypeAlias = asyncio.Future[WorkerConnection]
"""Waits for the connection of a worker that was started."""
LOST_S: Final = 2
"""A machine with workers that has not answered for so many seconds is lost."""

MAX_CONNECTIONS: Final = 256
"""Limit on open connections, so that they cannot use up the file descriptors of the service."""
MAX_UNAUTHENTICATED: Final = 64
"""Limit on those of them that are not authenticated yet, so that strangers cannot take the places of workers."""
_BACKLOG: Final = 64
_PAUSE_S: Final = 0.2
_READ_BYTES: Final = 1 << 14


@dataclass(frozen=True)
class RemoteWorkerSettings:
    """Address and secrets of the port where workers of other machines join.

    ``certificate`` and ``key`` are files in PEM.  Each worker that joins by itself proves itself with ``token``.  Port
    0 takes a free one.
    """

    host: str
    port: int
    certificate: Path
    key: Path
    token: str


class RemoteWorkerServer:
    """Accepts the workers of other machines.

    ``serve`` is called with each worker that has joined and with its stream; the connection lasts until it returns.
    ``find`` returns who waits for a worker that was placed with a token of its own, or None; its connection goes there.
    ``serve_machine`` is called with the stream of a machine that has joined to run servable workers, and its address.
    The kernel ends that connection ``LOST_S`` seconds after the worker's machine stops answering.
    """

    def __init__(
        self,
        settings: RemoteWorkerSettings,
        serve: Callable[[WorkerConnection, FrameStream[pb.FromWorker], Expected | None], Awaitable[None]],
        find: Callable[[str], Expected | None],
        serve_machine: ServeMachine,
    ) -> None:
        self._settings, self._serve, self._find, self._serve_machine = settings, serve, find, serve_machine
        self._tls: ssl.SSLContext | None = None
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._unauthenticated: set[asyncio.Task[None]] = set()

    async def open(self) -> int:
        """Start to listen and return the port.  Raises FileAccessError and InvalidFileError."""
        host, port = self._settings.host, self._settings.port
        self.reload_tls()
        try:
            self._listener = open_port(host, port, _BACKLOG)
        except OSError as error:
            address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            raise FileAccessError(f"{address}: failed to listen for workers: {error.strerror or error}") from error
        self._listener.setblocking(False)
        self._accepting = asyncio.ensure_future(self._accept(self._listener))
        return int(self._listener.getsockname()[1])

    def reload_tls(self) -> None:
        """Read certificate and key again for new connections.  Raises FileAccessError and InvalidFileError."""
        settings = self._settings
        protocols = [handshake.ALPN, handshake.STAGE_ALPN, handshake.GRPC_ALPN]
        self._tls = server_context(settings.certificate, settings.key, protocols)

    async def close(self) -> None:
        """Stop listening and end all connections."""
        tasks = [*self._connections, *([] if self._accepting is None else [self._accepting])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, peer = await loop.sock_accept(listener)
            except OSError:  # no file descriptor is left; the connection stays in the queue
                await asyncio.sleep(_PAUSE_S)
                continue
            if len(self._connections) >= MAX_CONNECTIONS or len(self._unauthenticated) >= MAX_UNAUTHENTICATED:
                connection.close()
                continue
            task = asyncio.ensure_future(self._handle(connection, peer_address(peer)))
            for group in (self._connections, self._unauthenticated):
                group.add(task)
                task.add_done_callback(group.discard)

    async def _handle(self, connection: socket.socket, address: str) -> None:
        """Handle one connection until it ends.  A peer that does not follow the protocol is disconnected."""
        stream: FrameStream[pb.FromWorker] | None = None
        if self._tls is None:
            connection.close()
            return
        try:
            async with asyncio.timeout(handshake.JOIN_S):
                keep_alive(connection)
                tls = TlsSession(self._tls)
                await tls.handshake(connection)
                if tls.protocol == handshake.GRPC_ALPN:
                    await self._refuse_grpc(connection, tls, address)
                    return
                if tls.protocol != handshake.STAGE_ALPN:
                    stream = FrameStream(connection, pb.FromWorker.FromString, FIRST_BYTES, tls)
                    request = await handshake.receive_join(stream)
            if stream is None:
                await serve_servable_machine(connection, tls, self._settings.token, address, self._serve_known)
                return
            expected = self._find(request.token)
            if expected is None and not hmac.compare_digest(_digest(self._settings.token), _digest(request.token)):
                error = InvalidArgumentError("unknown worker token")
                await handshake.refuse(stream, error, is_known=False)
                return
            if request.protocol != handshake.PROTOCOL:
                error = handshake.protocol_error(handshake.PROTOCOL, request.protocol, request.model)
                _tell_refused(address, request.protocol, error)
                await handshake.refuse(stream, error)
                return
            self._note_known()
            handshake.welcome(stream)
            keep_alive(connection, LOST_S)
            worker = WorkerConnection(request.model, 0 if expected is None else request.pid, is_remote=True)
            worker.node = address.rpartition(":")[0]
            worker.role = check_role(request.role)
            await self._serve(worker, stream, expected)
        except (PenstockError, OSError, ValueError, DecodeError):  # TimeoutError and ssl.SSLError are OSErrors
            pass
        finally:
            if stream is not None:
                stream.close()
            connection.close()

    def _note_known(self) -> None:
        """Note that the peer of the connection that the present task handles is authenticated."""
        task = asyncio.current_task()
        if task is not None:
            self._unauthenticated.discard(task)

    async def _serve_known(self, stream: FrameStream[stages_pb.FromMachine], address: str) -> None:
        self._note_known()
        await self._serve_machine(stream, address)

    async def _refuse_grpc(self, connection: socket.socket, tls: TlsSession, address: str) -> None:
        error = handshake.protocol_error(handshake.PROTOCOL, handshake.GRPC_PROTOCOL)
        _tell_refused(address, handshake.GRPC_PROTOCOL, error)
        await refuse_grpc_call(_TlsBytes(connection, tls), str(error))


class _TlsBytes:
    """A TLS connection that carries bytes."""

    def __init__(self, connection: socket.socket, tls: TlsSession) -> None:
        self._connection, self._tls = connection, tls
        self._loop = asyncio.get_running_loop()

    async def receive(self) -> bytes:
        """Return the bytes that came next; b"" at the end of the connection."""
        data = self._tls.decrypt(b"")  # what came with the end of the handshake
        while not data and not self._tls.has_ended:
            encrypted = await self._loop.sock_recv(self._connection, _READ_BYTES)
            if not encrypted:
                break
            data = self._tls.decrypt(encrypted)
        return data

    async def send(self, data: bytes) -> None:
        """Send bytes."""
        await self._loop.sock_sendall(self._connection, self._tls.encrypt(data))


def _tell_refused(address: str, protocol: int, error: PenstockError) -> None:
    tell(
        "worker_refused",
        f"Refused a worker at {address}: {error}.",
        logging.WARNING,
        address=address,
        worker_protocol=protocol,
        protocol=handshake.PROTOCOL,
    )


def _digest(token: str) -> bytes:
    return sha256(token.encode("utf-8", "surrogatepass")).digest()
