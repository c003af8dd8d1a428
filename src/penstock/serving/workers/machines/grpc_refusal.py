"""Refuse workers of protocol 1, which use gRPC, in a way that they understand.

They report the status of a gRPC call.  This module speaks just enough HTTP/2 (RFC 9113) to refuse one call, so that no
gRPC server is needed.
"""

from __future__ import annotations

from typing import Final, Protocol
from urllib.parse import quote

__all__ = ["refuse_grpc_call"]

_PREFACE_BYTES: Final = 24
_HEAD_BYTES: Final = 9
_MAX_BYTES: Final = 1 << 16
_HEADERS, _SETTINGS = 1, 4
_ACK, _END_STREAM, _END_HEADERS = 1, 1, 4
_FAILED_PRECONDITION: Final = "9"
_STATUS_200: Final = b"\x88"  # the header ":status: 200" in HPACK's static table


class ByteStream(Protocol):
    """A connection that carries bytes."""

    async def receive(self) -> bytes:
        """Return the bytes that came next; b"" at the end of the connection."""

    async def send(self, data: bytes) -> None:
        """Send bytes."""


async def refuse_grpc_call(connection: ByteStream, reason: str) -> None:
    """Answer the first call of a gRPC client with status FAILED_PRECONDITION and ``reason``.

    Returns early if the client ends the connection or sends more than 64 KiB before its call.
    """
    await connection.send(_frame(_SETTINGS, 0, 0, b"") + _frame(_SETTINGS, _ACK, 0, b""))
    received = b""
    while (stream_id := _call_of(received)) == 0:
        data = await connection.receive()
        if not data or len(received) > _MAX_BYTES:
            return
        received += data
    headers = _STATUS_200 + _header("content-type", "application/grpc")
    headers += _header("grpc-status", _FAILED_PRECONDITION) + _header("grpc-message", quote(reason, safe=" :;,.()'"))
    await connection.send(_frame(_HEADERS, _END_STREAM | _END_HEADERS, stream_id, headers))
    while await connection.receive():  # until the client has read that and ends the connection
        pass


def _call_of(received: bytes) -> int:
    """Return the stream of the first call in a client's bytes; 0 if it has not arrived."""
    start = _PREFACE_BYTES
    while len(received) >= start + _HEAD_BYTES:
        size, kind = int.from_bytes(received[start : start + 3], "big"), received[start + 3]
        if kind == _HEADERS:
            return int.from_bytes(received[start + 5 : start + 9], "big") & 0x7FFFFFFF
        start += _HEAD_BYTES + size
    return 0


def _frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream_id.to_bytes(4, "big") + payload


def _header(name: str, value: str) -> bytes:
    """Encode a header in HPACK (RFC 7541) as a literal without indexing and without Huffman coding."""
    return b"\0" + _text(name) + _text(value)


def _text(text: str) -> bytes:
    data = text.encode("ascii")
    if len(data) < 127:
        return bytes((len(data),)) + data
    remaining, head = len(data) - 127, bytearray((127,))
    while remaining >= 128:
        head.append(remaining % 128 + 128)
        remaining //= 128
    head.append(remaining)
    return bytes(head) + data
