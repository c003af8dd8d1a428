"""The HTTP listener: uvicorn on a socket that this module opens."""

from __future__ import annotations

import contextlib
import errno
import socket
import ssl
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import uvicorn

from penstock.errors import FileAccessError, InvalidFileError
from penstock.processes.listen import open_port
from penstock.serving.http.acceptor import Acceptor
from penstock.serving.http.http1 import MAX_REFUSED, TOO_MANY_CONNECTIONS, BoundedProtocol
from penstock.serving.http.unix_socket import UnixSocket

if TYPE_CHECKING:
    from penstock.serving.gateway import Gateway
    from penstock.serving.settings import GatewayLimits, GatewaySettings

__all__ = ["Listener", "check_tls"]

_BACKLOG: Final = 1024


class _Server(uvicorn.Server):
    """uvicorn's server with the Acceptor; it does not handle signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept connections."""
        await super().startup(sockets=[])
        config, connections = self.config, self.server_state.connections
        limits: GatewayLimits = config.app.settings.limits  # type: ignore[union-attr]

        def make(connected: Callable[[], None]) -> BoundedProtocol:
            return BoundedProtocol(config, self.server_state, self.lifespan.state, connected=connected)

        def is_full(num_opening: int) -> bool:
            return num_opening + len(connections) >= limits.num_connections + MAX_REFUSED

        for listening_socket in sockets or ():
            acceptor = Acceptor(listening_socket, make, is_full, TOO_MANY_CONNECTIONS, config.ssl, limits.header_s)
            self.servers.append(acceptor)  # type: ignore[arg-type]


class Listener:
    """Serves a gateway on a socket: ``open`` binds it, ``serve`` handles requests until ``stop`` is called.

    With ``path`` the socket is a unix socket that only its owner may open, otherwise a TCP port.
    """

    def __init__(self, app: Gateway, settings: GatewaySettings, path: Path | None = None) -> None:
        self._settings = settings
        self.gateway = app
        self._path = path
        self._socket: socket.socket | None = None
        self._unix: UnixSocket | None = None
        check_tls(settings)
        self._server = _Server(
            uvicorn.Config(
                app,
                http=BoundedProtocol,
                ws="none",
                lifespan="off",
                loop="none",
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=True,
                proxy_headers=False,
                timeout_keep_alive=int(settings.limits.keep_alive_s),
                ssl_certfile=settings.tls_certificate,
                ssl_keyfile=settings.tls_key,
            )
        )

    @property
    def connections(self) -> Collection[object]:
        """The open connections."""
        return self._server.server_state.connections

    def open(self) -> str:
        """Bind the address; return the URL.  Raises FileAccessError if binding fails, and the errors of UnixSocket."""
        settings = self._settings
        if self._path is not None:
            self._unix = UnixSocket(self._path)
            self._socket = self._unix.socket
            return f"unix:{self._unix.path}"
        try:
            self._socket = open_port(settings.host, settings.port, _BACKLOG)
        except OSError as error:
            address = f"{settings.host}:{settings.port}"
            if error.errno == errno.EADDRINUSE:  # its own text has the address again
                raise FileAccessError(f"port: {address} is in use. Choose another port.", param="port") from error
            raise FileAccessError(f"{address}: {error.strerror or error}") from error
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        scheme = "http" if settings.tls_certificate is None else "https"
        return f"{scheme}://{host}:{self._socket.getsockname()[1]}"

    async def serve(self) -> None:
        """Handle requests; return after ``stop`` was called and running requests have ended."""
        if self._socket is None:
            self.open()
        if self._socket is not None:
            try:
                await self._server.serve(sockets=[self._socket])
            finally:
                self.close()

    def stop(self, at_once: bool = False) -> None:
        """Stop accepting connections; running requests may finish unless ``at_once``."""
        self._server.should_exit = True
        if at_once:
            self._server.force_exit = True

    def reload_tls(self) -> None:
        """Use the current contents of the certificate and key files, which were checked, for new connections."""
        tls, settings = self._server.config.ssl, self._settings
        if tls is not None and settings.tls_certificate is not None:
            tls.load_cert_chain(settings.tls_certificate, settings.tls_key, password=_no_password)

    def close(self) -> None:
        """Close the socket, if there is one."""
        if self._unix is not None:
            self._unix.close()
        elif self._socket is not None:
            self._socket.close()


def check_tls(settings: GatewaySettings) -> None:
    """Check the certificate and its key before anything runs; uvicorn's own errors do not name the files."""
    certificate, key = settings.tls_certificate, settings.tls_key
    if certificate is None or key is None:
        return
    for name, path in (("tls_certificate", certificate), ("tls_key", key)):
        try:
            path.read_bytes()
        except OSError as error:
            raise FileAccessError(f"{name}: {path}: {error.strerror}") from error
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        raise InvalidFileError(
            f"tls_certificate {certificate} and tls_key {key}: expected a certificate and its key in PEM, "
            f"the key without a password: {error}"
        ) from error


def _no_password() -> str:
    raise ValueError("the key has a password")
