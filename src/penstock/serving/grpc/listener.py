"""The gRPC listener: a port on the host of the HTTP listener."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import TYPE_CHECKING, Any, Final

import grpc

from penstock.errors import FileAccessError
from penstock.logs import LOG
from penstock.serving.grpc.gateway import GrpcGateway
from penstock.serving.grpc.health import HealthMethods
from penstock.serving.grpc.oip_service import oip_methods
from penstock.serving.grpc.reflection import reflection_methods
from penstock.serving.grpc.tls import GrpcTls
from penstock.serving.workers.machines.remote_worker_client import read_bytes

if TYPE_CHECKING:
    from penstock.serving.admission import Admission
    from penstock.serving.settings import GatewayLimits

__all__ = ["GrpcListener"]

_FLUSH_S: Final = 5.0
_QUIET_S: Final = 0.02
_MAX_QUIETS: Final = 25
_STREAMS_OF_CONNECTION: Final = 1024


def _options(limits: GatewayLimits) -> tuple[tuple[str, int], ...]:
    return (
        ("grpc.so_reuseport", 0),  # otherwise a second service could share the port, unnoticed
        ("grpc.max_receive_message_length", limits.body_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", limits.header_bytes),
        ("grpc.absolute_max_metadata_size", limits.header_bytes),
        ("grpc.per_message_decompression", 0),  # gRPC would decompress without a size limit
        ("grpc.max_concurrent_streams", _STREAMS_OF_CONNECTION),
        ("grpc.max_allowed_incoming_connections", limits.num_connections),
        ("grpc.max_connection_idle_ms", int(limits.keep_alive_s * 1000)),
        ("grpc.server_handshake_timeout_ms", int(limits.header_s * 1000)),
        ("grpc.keepalive_time_ms", int(limits.write_s * 1000)),  # detects clients whose machine is down
        ("grpc.keepalive_timeout_ms", int(limits.write_s * 1000)),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
    )


def _numeric(host: str) -> str:
    """Return one address for a host name, like the HTTP listener; gRPC would bind any free address of the name."""
    if ":" in host:
        return f"[{host}]"
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise FileAccessError(f"{host}: {error.strerror or error}") from error


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """Return False for errors of gRPC's core about messages that cannot be sent: a passed deadline, a lost client.

    The RPC itself is logged with status 504 or 499.
    """
    return not record.getMessage().startswith("ExecuteBatchError raised in core") or LOG.isEnabledFor(logging.DEBUG)


logging.getLogger("grpc._cython.cygrpc").addFilter(_is_worth_a_line)


class GrpcListener:
    """Serves gRPC: ``open`` binds the port, ``serve`` handles RPCs until ``stop`` is called."""

    def __init__(self, admission: Admission) -> None:
        settings = admission.settings
        self.gateway = GrpcGateway(admission, [*oip_methods(), *HealthMethods().methods(), *reflection_methods()])
        self._settings = settings
        self._tls: GrpcTls | None = None
        if settings.tls_certificate is not None and settings.tls_key is not None:
            self._tls = GrpcTls(read_bytes(settings.tls_key), read_bytes(settings.tls_certificate))
        self._server: Any = None
        self._port = settings.grpc_port or 0
        self._stop, self._stop_now = asyncio.Event(), asyncio.Event()

    def open(self) -> str:
        """Bind the port; return the address.  Raises FileAccessError if binding fails."""
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
            raise FileAccessError(f"{address}: failed to listen for gRPC: {error}") from error
        return f"{host}:{self._port}"

    async def serve(self) -> None:
        """Handle RPCs; return after ``stop`` was called and running RPCs have ended."""
        if self._server is None:
            self.open()
        while not await self._serve_once():
            LOG.error("The gRPC server stopped unexpectedly. Restarting it on port %d.", self._port)
            self.open()

    async def _serve_once(self) -> bool:
        """Handle RPCs; return True after ``stop`` was called, False if the server stopped by itself.

        gRPC 1.84 and 1.85 stop it when the name of a method is not UTF-8.
        """
        await self._server.start()
        terminated = asyncio.ensure_future(self._server.wait_for_termination())  # gRPC's future: never cancel it
        stopped, stop_now = (asyncio.ensure_future(event.wait()) for event in (self._stop, self._stop_now))
        try:
            await asyncio.wait((terminated, stopped), return_when=asyncio.FIRST_COMPLETED)
            if self._stop.is_set():
                await self._refuse_the_last()
                ending = asyncio.ensure_future(self._server.stop(_FLUSH_S))
                await asyncio.wait((ending, stop_now), return_when=asyncio.FIRST_COMPLETED)
            return self._stop.is_set()
        finally:
            stopped.cancel()
            stop_now.cancel()
            await self._server.stop(0)
            await asyncio.gather(terminated, return_exceptions=True)

    async def _refuse_the_last(self) -> None:
        """Wait for a moment without new RPCs, for at most half a second.

        RPCs that were received but not handled when gRPC's server stops are cancelled, and their clients would not
        learn that they should retry elsewhere.
        """
        for _ in range(_MAX_QUIETS):
            before = self.gateway.num_asked
            await asyncio.sleep(_QUIET_S)
            if self.gateway.num_asked == before or self._stop_now.is_set():
                return

    def stop(self, at_once: bool = False) -> None:
        """Stop taking RPCs; running requests may finish unless ``at_once``; idle streams end now."""
        if at_once:
            self._stop_now.set()
        self.gateway.stopping.set()
        self._stop.set()

    def reload_tls(self) -> None:
        """Use the current contents of the certificate and key files for new connections.  Raises FileAccessError."""
        settings = self._settings
        if self._tls is not None and settings.tls_certificate is not None and settings.tls_key is not None:
            self._tls.replace(read_bytes(settings.tls_key), read_bytes(settings.tls_certificate))

    def close(self) -> None:
        """Drop the server.  ``serve`` closes its port at the end; otherwise the port closes with the server object."""
        self._server = None
