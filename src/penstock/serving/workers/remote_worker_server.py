"""Workers of other machines at the primary: gRPC over TLS, with a token that they share."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

import grpc

from penstock.errors import FileAccessError, PenstockError
from penstock.serving.grpc.tls import GrpcTls
from penstock.serving.proto import wire_pb2 as pb
from penstock.serving.workers.messages import MESSAGE_OPTIONS, PROTOCOL, WELCOME, bearer, error_to
from penstock.serving.workers.worker_connection import WorkerConnection

if TYPE_CHECKING:
    from penstock.serving.workers.remote_worker_settings import RemoteWorkerSettings

__all__ = ["MAX_CONNECTIONS", "RemoteWorkerServer"]

_METHOD: Final = "penstock.v1.Primary"
_JOIN_S: Final = 10.0
_MAX_STREAMS: Final = 1024
MAX_CONNECTIONS: Final = 256
"""Strangers included, which must not use up the descriptors of the service."""
_OPTIONS: Final = (
    ("grpc.so_reuseport", 0),  # else two services share the workers of a port, and nobody is told
    # of workers far away, who want to know that this machine is there
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
)


class RemoteWorkerServer:
    """Listens where ``door`` says.  ``get_ready`` makes a link ready with what its worker says, ``adopt`` gives it a
    place among a model's workers; who stands for ``hang_s`` is given up.
    """

    def __init__(
        self,
        door: RemoteWorkerSettings,
        get_ready: Callable[[WorkerConnection, pb.Ready], Awaitable[None]],
        adopt: Callable[[WorkerConnection], None],
        hang_s: float,
    ) -> None:
        self._door, self._get_ready, self._adopt, self._hang_s = door, get_ready, adopt, hang_s
        self._server: Any = None
        self._tls: GrpcTls | None = None

    async def open(self) -> int:
        """Begin to listen; the port."""
        door = self._door
        self._server = grpc.aio.server(options=(*MESSAGE_OPTIONS, *_OPTIONS), maximum_concurrent_rpcs=_MAX_STREAMS)
        join = grpc.stream_stream_rpc_method_handler(
            self._join, request_deserializer=pb.FromWorker.FromString, response_serializer=pb.ToWorker.SerializeToString
        )
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_METHOD, {"Join": join}),))
        address = f"[{door.host}]:{door.port}" if ":" in door.host else f"{door.host}:{door.port}"
        try:
            self._tls = GrpcTls(door.key, door.certificate)
            port = int(self._server.add_secure_port(address, self._tls.credentials))
        except RuntimeError as error:
            await self.close()
            raise FileAccessError(f"{address}: cannot listen for workers there: {error}") from error
        await self._server.start()
        return port

    def replace_tls(self, key: bytes, certificate: bytes) -> None:
        """Use another key and certificate, in PEM, for new connections."""
        if self._tls is not None:
            self._tls.replace(key, certificate)

    async def close(self) -> None:
        """Stop listening; workers that are left end with their streams."""
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    async def _join(self, _requests: AsyncIterator[pb.FromWorker], context: Any) -> None:
        """One worker's stream.  Nothing is read of who does not know the token: messages may be large."""
        offered = [value for key, value in context.invocation_metadata() or () if key == "authorization"]
        if not hmac.compare_digest(_digest(bearer(self._door.token)), _digest(str(offered[0]) if offered else "")):
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "the token is not known here")
        await context.send_initial_metadata(((WELCOME, "1"),))
        try:
            first = await asyncio.wait_for(context.read(), _JOIN_S)
        except TimeoutError:
            first = grpc.aio.EOF
        join = first.join if first is not grpc.aio.EOF else pb.Join()
        if join.protocol != PROTOCOL:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, f"protocol {join.protocol} is not spoken here, but {PROTOCOL}"
            )
        link = WorkerConnection(join.model, 0)
        reader = asyncio.ensure_future(self._read(link, context))
        writer = asyncio.ensure_future(self._write(link, context))
        try:
            await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
            refusal = reader.exception() if reader.done() else None
        finally:
            link.fail("the worker's stream ended")
            for task in (reader, writer):
                task.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)
        if isinstance(refusal, PenstockError):
            await self._refuse(context, refusal)

    async def _refuse(self, context: Any, why: PenstockError) -> None:
        """Tell a worker why, and let it go first: a stream that is broken off in the middle of a write says nothing."""
        await context.write(pb.ToWorker(stop=pb.Stop(why=error_to(why))))
        with suppress(TimeoutError):
            async with asyncio.timeout(_JOIN_S):
                while await context.read() is not grpc.aio.EOF:
                    pass

    async def _read(self, link: WorkerConnection, context: Any) -> None:
        """What the worker says, until its stream ends."""
        watch: asyncio.Future[None] | None = None
        try:
            while (message := await context.read()) is not grpc.aio.EOF and not link.gone.is_set():
                if not message.HasField("ready"):
                    link.hear(message)
                    continue
                await self._get_ready(link, message.ready)
                self._adopt(link)
                watch = asyncio.ensure_future(link.watch(self._hang_s))
        finally:
            if watch is not None:
                watch.cancel()

    async def _write(self, link: WorkerConnection, context: Any) -> None:
        async for message in link.outgoing():
            await context.write(message)


def _digest(token: str) -> bytes:
    return sha256(token.encode("utf-8", "surrogatepass")).digest()
