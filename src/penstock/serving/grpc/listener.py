"""The listener of the gRPC door: a port at the host of the HTTP one."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import TYPE_CHECKING, Any, Final

import grpc

from penstock.errors import FileAccessError
from penstock.serving.gateway import LOG
from penstock.serving.grpc.gateway import GrpcGateway
from penstock.serving.grpc.health import HealthMethods
from penstock.serving.grpc.oip_service import oip_methods
from penstock.serving.grpc.reflection import reflection_methods
from penstock.serving.grpc.tls import GrpcTls
from penstock.serving.workers.remote_worker_client import read_bytes

if TYPE_CHECKING:
    from penstock.serving.gateway import Gateway
    from penstock.serving.settings import GatewayLimits

__all__ = ["GrpcListener"]

_LAST_WORDS_S: Final = 5.0
_QUIET_S: Final = 0.02
_MAX_QUIETS: Final = 25
_STREAMS_OF_CONNECTION: Final = 1024


def _options(limits: GatewayLimits) -> tuple[tuple[str, int], ...]:
    return (
        ("grpc.so_reuseport", 0),  # else a second service takes half of the connections of a port, and nobody is told
        ("grpc.max_receive_message_length", limits.body_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", limits.header_bytes),
        ("grpc.absolute_max_metadata_size", limits.header_bytes),
        ("grpc.per_message_decompression", 0),  # gRPC would unpack a message whole, however large
        ("grpc.max_concurrent_streams", _STREAMS_OF_CONNECTION),
        ("grpc.max_allowed_incoming_connections", limits.num_connections),
        ("grpc.max_connection_idle_ms", int(limits.keep_alive_s * 1000)),
        ("grpc.server_handshake_timeout_ms", int(limits.header_s * 1000)),
        ("grpc.keepalive_time_ms", int(limits.write_s * 1000)),  # a client whose machine is gone says nothing
        ("grpc.keepalive_timeout_ms", int(limits.write_s * 1000)),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
    )


def _numeric(host: str) -> str:
    """One address for a name, as HTTP's: gRPC would take any of them that is free, and others' clients at the rest."""
    if ":" in host:
        return f"[{host}]"
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise FileAccessError(f"{host}: {error.strerror or error}") from error


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """Drop what gRPC's core logs as an error when a message cannot be sent: the deadline passed, or the client left.

    The RPC has a line of its own then, with status 504 or 499.
    """
    return not record.getMessage().startswith("ExecuteBatchError raised in core") or LOG.isEnabledFor(logging.DEBUG)


logging.getLogger("grpc._cython.cygrpc").addFilter(_is_worth_a_line)


class GrpcListener:
    """gRPC beside an HTTP door.  ``open`` binds the port, ``serve`` answers until ``stop`` is called."""

    def __init__(self, http: Gateway) -> None:
        settings = http.settings
        self.gateway = GrpcGateway(http, [*oip_methods(), *HealthMethods().methods(), *reflection_methods()])
        self._settings = settings
        self._tls: GrpcTls | None = None
        if settings.tls_certificate is not None and settings.tls_key is not None:
            self._tls = GrpcTls(read_bytes(settings.tls_key), read_bytes(settings.tls_certificate))
        self._server: Any = None
        self._port = settings.grpc_port or 0
        self._stop, self._stop_now = asyncio.Event(), asyncio.Event()

    def open(self) -> str:
        """Bind the port; returns the address.  FileAccessError when the system refuses it."""
        settings = self._settings
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        address = f"{_numeric(settings.host)}:{self._port}"
        limits = settings.limits
        self._server = grpc.aio.server(options=_options(limits), maximum_concurrent_rpcs=limits.num_connections)
        self._server.add_generic_rpc_handlers((self.gateway,))
        try:
            if self._tls is None:
                self._port = self._server.add_insecure_port(address)
            else:
                self._port = self._server.add_secure_port(address, self._tls.credentials)
        except RuntimeError as error:
            raise FileAccessError(f"{address}: cannot listen for gRPC there: {error}") from error
        return f"{host}:{self._port}"

    async def serve(self) -> None:
        """Answer; returns once ``stop`` was called and what ran has ended."""
        if self._server is None:
            self.open()
        while not await self._serve_once():
            LOG.error("gRPC's server ended by itself; it is opened again at port %d", self._port)
            self.open()

    async def _serve_once(self) -> bool:
        """Answer until ``stop`` was called, or (False) until the server ended by itself.

        gRPC 1.84 and 1.85 end it where a method's name is no UTF-8.
        """
        await self._server.start()
        ended = asyncio.ensure_future(self._server.wait_for_termination())  # gRPC's own future: not to be cancelled
        stopped, hurried = (asyncio.ensure_future(one.wait()) for one in (self._stop, self._stop_now))
        try:
            await asyncio.wait((ended, stopped), return_when=asyncio.FIRST_COMPLETED)
            if self._stop.is_set():
                await self._refuse_the_last()
                ending = asyncio.ensure_future(self._server.stop(_LAST_WORDS_S))
                await asyncio.wait((ending, hurried), return_when=asyncio.FIRST_COMPLETED)
            return self._stop.is_set()
        finally:
            stopped.cancel()
            hurried.cancel()
            await self._server.stop(0)
            await asyncio.gather(ended, return_exceptions=True)

    async def _refuse_the_last(self) -> None:
        """Until nobody has asked for a moment, half a second at most.

        What came and was not looked at when gRPC's server stops it cancels, which tells nobody to ask elsewhere.
        """
        for _ in range(_MAX_QUIETS):
            before = self.gateway.num_asked
            await asyncio.sleep(_QUIET_S)
            if self.gateway.num_asked == before or self._stop_now.is_set():
                return

    def stop(self, at_once: bool = False) -> None:
        """Take no more requests; those that run may end unless ``at_once``, streams without any end now."""
        if at_once:
            self._stop_now.set()
        self.gateway.stopping.set()
        self._stop.set()

    def reload_tls(self) -> None:
        """Use the certificate and key that lie in the files now for new connections; FileAccessError."""
        settings = self._settings
        if self._tls is not None and settings.tls_certificate is not None and settings.tls_key is not None:
            self._tls.replace(read_bytes(settings.tls_key), read_bytes(settings.tls_certificate))

    def close(self) -> None:
        """The port is given back when ``serve`` ends; one that never served gives it back with this object."""
        self._server = None
