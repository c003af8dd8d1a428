"""Compressed bodies: what comes never grows past a bound, what goes is compressed where the client takes it."""

from __future__ import annotations

import zlib
from typing import Final

from penstock.api_errors import RefusalError

__all__ = ["ENCODINGS", "accepted", "deflated", "inflated"]

ENCODINGS: Final = {"gzip": 31, "deflate": 15}
"""HTTP's name of an encoding, and zlib's number for it."""
_LEVEL: Final = 1


def inflated(data: bytes, encoding: str, most: int, noun: str = "body") -> bytes:
    """What was compressed.  413 as soon as it has more than ``most`` bytes, 400 when it is not one whole stream.

    Refusals call it ``noun``.
    """
    unpacker = zlib.decompressobj(ENCODINGS[encoding])
    try:
        found = unpacker.decompress(data, most + 1)
    except zlib.error as error:
        raise _wrong(noun, encoding, str(error)) from None
    if len(found) > most:
        raise RefusalError(413, f"the {noun} has more than {most} bytes once it is unpacked", code="body_too_large")
    if not unpacker.eof or unpacker.unused_data:
        raise _wrong(noun, encoding, "bytes behind its end" if unpacker.eof else "it ends too early")
    return found


def _wrong(noun: str, encoding: str, why: str) -> RefusalError:
    return RefusalError(400, f"the {noun} is not one {encoding} stream: {why}", code="invalid_compression")


def deflated(data: bytes, encoding: str) -> bytes:
    """Compressed, quickly."""
    packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, ENCODINGS[encoding])
    return packer.compress(data) + packer.flush()


def accepted(header: bytes) -> str:
    """The encoding of ENCODINGS that an Accept-Encoding header likes best; empty for none."""
    best, found = 0.0, ""
    for part in header[:256].decode("latin-1").split(","):
        name, *parameters = (piece.strip().lower() for piece in part.split(";"))
        weight = _weight(parameters)
        if name in ENCODINGS and weight > best:
            best, found = weight, name
    return found


def _weight(parameters: list[str]) -> float:
    for one in parameters:
        if one.startswith("q="):
            try:
                return float(one[2:])
            except ValueError:
                return 0.0
    return 1.0
