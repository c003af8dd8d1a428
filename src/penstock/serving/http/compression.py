"""Compressed bodies: decompress requests up to a size limit, compress responses if the client accepts it."""

from __future__ import annotations

import zlib
from typing import Final

from penstock.api_errors import RefusalError

__all__ = ["ENCODINGS", "accepted", "deflated", "inflated"]

ENCODINGS: Final = {"gzip": 31, "deflate": 15}
"""HTTP's names of encodings, and zlib's ``wbits`` for each."""
_LEVEL: Final = 1


def inflated(data: bytes, encoding: str, most: int, noun: str = "body") -> bytes:
    """Return the decompressed data, which is called ``noun`` in errors.

    Raises a 413 error as soon as the result exceeds ``most`` bytes, a 400 error unless the data is one whole stream.
    """
    unpacker = zlib.decompressobj(ENCODINGS[encoding])
    try:
        body = unpacker.decompress(data, most + 1)
    except zlib.error as error:
        raise _invalid_stream(noun, encoding, str(error)) from None
    if len(body) > most:
        raise RefusalError(413, f"The decompressed {noun} has more than {most} bytes.", code="body_too_large")
    if not unpacker.eof or unpacker.unused_data:
        raise _invalid_stream(noun, encoding, "data after its end" if unpacker.eof else "it is truncated")
    return body


def _invalid_stream(noun: str, encoding: str, why: str) -> RefusalError:
    return RefusalError(400, f"The {noun} is not a valid {encoding} stream: {why}.", code="invalid_compression")


def deflated(data: bytes, encoding: str, level: int = _LEVEL) -> bytes:
    """Return the data compressed at one of zlib's levels, 1 (the fastest) to 9."""
    packer = zlib.compressobj(level, zlib.DEFLATED, ENCODINGS[encoding])
    return packer.compress(data) + packer.flush()


def accepted(header: bytes) -> str:
    """Return the encoding of ENCODINGS that an Accept-Encoding header prefers; empty for none."""
    best, coding = 0.0, ""
    for part in header[:256].decode("latin-1").split(","):
        name, *parameters = (piece.strip().lower() for piece in part.split(";"))
        weight = _weight(parameters)
        if name in ENCODINGS and weight > best:
            best, coding = weight, name
    return coding


def _weight(parameters: list[str]) -> float:
    for parameter in parameters:
        if parameter.startswith("q="):
            try:
                return float(parameter[2:])
            except ValueError:
                return 0.0
    return 1.0
