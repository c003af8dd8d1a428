"""Compressed gRPC messages: they are decompressed here, because gRPC's library would do it without a size limit.

With its decompression turned off, the library passes a message's bytes without its flag and ``grpc-encoding``, so the
compression is detected from the bytes.  This is unambiguous: no protobuf message begins like gzip data (no field has
such a wire type), and no request of the methods here begins like zlib data (its first field would be a varint with the
number 1, 3, 5 ... or 15).
"""

from __future__ import annotations

from typing import Final

from penstock.serving.http.compression import inflated

__all__ = ["ZLIB_FIELDS", "encoding_of", "unpacked"]

ZLIB_FIELDS: Final = frozenset(range(1, 16, 2))
"""Numbers that no varint field of a request may have: the tags would look like the first byte of a zlib stream."""
_GZIP: Final = b"\x1f\x8b"


def encoding_of(data: bytes) -> str:
    """Return gRPC's name for the compression of a message; empty for an uncompressed one."""
    if data[:2] == _GZIP:
        return "gzip"
    is_zlib = len(data) > 1 and data[0] & 0x8F == 8 and (data[0] << 8 | data[1]) % 31 == 0
    return "deflate" if is_zlib else ""


def unpacked(data: bytes, most: int) -> bytes:
    """Return the decompressed message.

    Raises a 413 error as soon as it exceeds ``most`` bytes, a 400 error unless the data is one whole stream.
    """
    encoding = encoding_of(data)
    return inflated(data, encoding, most, "message") if encoding else data
