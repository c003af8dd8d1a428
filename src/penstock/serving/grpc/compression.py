"""Compressed messages over gRPC, which are unpacked here: gRPC's own library unpacks them whole, however large.

Told to leave them alone, it gives a message's bytes and tells neither its flag nor ``grpc-encoding``: so the bytes must
tell.  They can: no message begins as gzip does (no field has such a wire type), and no request of a method here as zlib
does (its first field would be a number, and number 1, 3, 5 ... or 15).
"""

from __future__ import annotations

from typing import Final

from penstock.serving.http.compression import inflated

__all__ = ["ZLIB_FIELDS", "encoding_of", "unpacked"]

ZLIB_FIELDS: Final = frozenset(range(1, 16, 2))
"""Fields that no request may have a number in: their tags are the first bytes that a zlib stream may have."""
_GZIP: Final = b"\x1f\x8b"


def encoding_of(data: bytes) -> str:
    """gRPC's name of how a message is packed; empty for one that is not."""
    if data[:2] == _GZIP:
        return "gzip"
    is_zlib = len(data) > 1 and data[0] & 0x8F == 8 and (data[0] << 8 | data[1]) % 31 == 0
    return "deflate" if is_zlib else ""


def unpacked(data: bytes, most: int) -> bytes:
    """The message.  413 as soon as it has more than ``most`` bytes, 400 when it is packed, but not one whole stream."""
    encoding = encoding_of(data)
    return inflated(data, encoding, most, "message") if encoding else data
