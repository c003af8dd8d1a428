"""Frames of HTTP/2 with messages of gRPC, sent without a library."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType

from tests.support.grpc_client import SERVICE
from tests.support.http_service import SECONDS, Service


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """One of HTTP/2."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def headers(method: bytes, stream: int, more: Mapping[bytes, bytes] = MappingProxyType({})) -> bytes:
    """Of a call, spelt out."""
    fields = {
        b":method": b"POST", b":scheme": b"http", b":path": method, b":authority": b"localhost", b"te": b"trailers",
        b"content-type": b"application/grpc", **more,
    }  # fmt: skip
    block = b"".join(b"\x00" + bytes([len(k)]) + k + bytes([len(v)]) + v for k, v in fields.items())
    return frame(1, 4, stream, block)


def answers_to(service: Service, data: bytes, pause_s: float = 0.0, text: bytes = b"") -> bytes:
    """All that comes back until the service hangs up, which it does when the client has nothing more to send: after a
    pause, and once it has found ``text``.
    """
    host, _, port = service.grpc_address.rpartition(":")
    found = b""
    with suppress(OSError), socket.create_connection((host, int(port)), SECONDS) as connection:
        connection.sendall(data)
        while text not in found and (piece := connection.recv(65536)):
            found += piece
        time.sleep(pause_s)
        connection.shutdown(socket.SHUT_WR)
        while piece := connection.recv(65536):
            found += piece
    return found


def packed(data: bytes, method: str = SERVICE + "ModelInfer", encoding: bytes = b"gzip") -> bytes:
    """A call whose message says that it is packed, byte by byte: a client's library would hold what it grows to."""
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"")
    message = b"\x01" + struct.pack(">I", len(data)) + data
    parts = [message[at : at + 16_000] for at in range(0, len(message), 16_000)]
    frames = [frame(0, int(one is parts[-1]), 1, one) for one in parts]
    return preface + headers(method.encode(), 1, {b"grpc-encoding": encoding}) + b"".join(frames)
