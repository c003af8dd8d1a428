"""TLS for connections between processes of two machines."""

from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path
from typing import Final

from penstock.errors import FileAccessError, InvalidFileError

__all__ = [
    "MAX_HANDSHAKE_BYTES",
    "TlsSession",
    "client_context",
    "connect",
    "connect_tls",
    "keep_alive",
    "server_context",
]

MAX_HANDSHAKE_BYTES: Final = 1 << 16
"""Limit on the bytes that the peer may send before the handshake is complete."""
_READ_BYTES: Final = 1 << 14


def server_context(certificate: Path, key: Path, protocols: list[str]) -> ssl.SSLContext:
    """Return the TLS settings of a server.

    ``certificate`` and ``key`` are files in PEM, the key without a password.  ``protocols`` are ALPN names, the
    preferred one first.  Raises FileAccessError and InvalidFileError.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.num_tickets = 0
    context.set_alpn_protocols(protocols)
    try:
        context.load_cert_chain(certificate, key, password=_refuse_password)
    except (ssl.SSLError, ValueError) as error:
        raise InvalidFileError(
            f"{certificate} and {key}: expected a certificate and its key in PEM, the key without a password: {error}"
        ) from error
    except OSError as error:
        raise FileAccessError(f"{certificate} or {key}: {error.strerror}") from error
    return context


def _refuse_password() -> str:
    raise ValueError("the key has a password")


def client_context(ca: bytes | None, protocols: list[str]) -> ssl.SSLContext:
    """Return the TLS settings of a client, which checks the server's certificate and host name.

    ``ca`` holds the trusted certificates in PEM; None trusts those of the system.  A certificate of the server itself
    is accepted as ``ca`` too.  ``protocols`` are ALPN names.  Raises InvalidFileError.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | ssl.VERIFY_X509_TRUSTED_FIRST
    context.set_alpn_protocols(protocols)
    if ca is None:
        context.load_default_certs(ssl.Purpose.SERVER_AUTH)
        return context
    try:
        context.load_verify_locations(cadata=ca.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise InvalidFileError("expected trusted certificates in PEM, got none or a damaged one") from error
    return context


async def connect(host: str, port: int, timeout_s: float) -> socket.socket:
    """Connect to the first address of a host that accepts, each within ``timeout_s``; OSError of the last one."""
    loop = asyncio.get_running_loop()
    failure = OSError(f"{host} has no address")
    for family, kind, protocol, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        connection = socket.socket(family, kind, protocol)
        connection.setblocking(False)
        try:
            async with asyncio.timeout(timeout_s):
                await loop.sock_connect(connection, address)
            return connection
        except OSError as error:
            connection.close()
            failure = error
        except BaseException:
            connection.close()
            raise
    raise failure


def keep_alive(connection: socket.socket, lost_s: int = 40) -> None:
    """Let the kernel end a TCP connection ``lost_s`` s after the other machine stops answering.

    Also send small messages at once.  The kernel of the other machine answers, so a process that is stopped counts as
    there.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    settings = (
        (socket.TCP_KEEPIDLE, lost_s // 2),
        (socket.TCP_KEEPINTVL, max(1, lost_s // 8)),
        (socket.TCP_KEEPCNT, 4),
        (socket.TCP_USER_TIMEOUT, 1000 * lost_s),  # keep-alive probes do not run while data is unacknowledged
    )
    for option, value in settings:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


class TlsSession:
    """The TLS layer of one connection: it turns bytes to send into encrypted bytes, and received ones back.

    With ``server_hostname`` it is the client's end, which checks that name or address; without it the server's.  After
    ``handshake`` only one thread at a time may call it.
    """

    def __init__(self, context: ssl.SSLContext, server_hostname: str | None = None) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_hostname is None, server_hostname=server_hostname
        )
        self.has_ended = False
        """True after the peer has closed its side."""

    @property
    def protocol(self) -> str | None:
        """The ALPN protocol that both sides agreed on."""
        return self._tls.selected_alpn_protocol()

    async def handshake(self, connection: socket.socket) -> None:
        """Agree on keys over a connected, non-blocking socket.  Raises OSError (ssl.SSLError) if that fails.

        It takes as long as the peer: set a timeout around it.
        """
        loop, num_bytes = asyncio.get_running_loop(), 0
        while True:
            try:
                self._tls.do_handshake()
                is_done = True
            except ssl.SSLWantReadError:
                is_done = False
            finally:  # an alert tells the peer why
                if data := self._outgoing.read():
                    await loop.sock_sendall(connection, data)
            if is_done:
                return
            data = await loop.sock_recv(connection, _READ_BYTES)
            if not data:
                raise ConnectionResetError("the peer closed the connection during the TLS handshake")
            num_bytes += len(data)
            if num_bytes > MAX_HANDSHAKE_BYTES:
                raise ConnectionAbortedError(f"the TLS handshake exceeds {MAX_HANDSHAKE_BYTES} bytes")
            self._incoming.write(data)

    def encrypt(self, data: bytes) -> bytes:
        """Return the bytes to send for ``data``; ssl.SSLError after the connection has failed."""
        remaining = memoryview(data)
        while remaining:
            remaining = remaining[self._tls.write(remaining) :]
        return self._outgoing.read()

    def decrypt(self, data: bytes) -> bytes:
        """Return what the received bytes ``data`` contain, as far as they are complete.

        Raises ssl.SSLError for bytes that are not part of the connection.
        """
        self._incoming.write(data)
        parts = []
        try:
            while part := self._tls.read(_READ_BYTES):
                parts.append(part)
            self.has_ended = True
        except ssl.SSLWantReadError:
            pass
        return b"".join(parts)

    def replies(self) -> bytes:
        """Return the bytes that TLS itself wants to send, such as the answer to a key update."""
        return self._outgoing.read()


async def connect_tls(address: str, context: ssl.SSLContext, timeout_s: float) -> tuple[socket.socket, TlsSession]:
    """Connect to ``address`` (HOST:PORT) and agree on keys, each step within ``timeout_s``; OSError if that fails."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    connection = await connect(host, int(port), timeout_s)
    try:
        keep_alive(connection)
        tls = TlsSession(context, host)
        async with asyncio.timeout(timeout_s):
            await tls.handshake(connection)
    except BaseException:
        connection.close()
        raise
    return connection, tls
