"""The digest of a file that is being received, compared with the one that the hub gave for it."""

from __future__ import annotations

import hashlib
from typing import Any

from penstock.hub.remote_model import RemoteFile

__all__ = ["ContentHash"]


class ContentHash:
    """The hashes that the digest of a file may be, by its length.

    64 digits are SHA-256 and 40 are Git's (``git hash-object``).  An ETag of 40 may also be SHA-1, as some mirrors send
    it, and one of 32 is MD5, as stores with the interface of S3 send it.
    """

    def __init__(self, file: RemoteFile) -> None:
        self._digest = file.digest
        if len(file.digest) == 64:
            self._states: list[Any] = [hashlib.sha256()]
        elif len(file.digest) == 32:
            self._states = [hashlib.md5(usedforsecurity=False)]
        else:
            self._states = [hashlib.sha1(f"blob {file.num_bytes}\0".encode(), usedforsecurity=False)]
            if file.by_etag:
                self._states.append(hashlib.sha1(usedforsecurity=False))

    def update(self, data: bytes | bytearray) -> None:
        """Add bytes."""
        for state in self._states:
            state.update(data)

    def matches(self) -> bool:
        """Return True if the bytes have the digest of the file."""
        return any(state.hexdigest() == self._digest for state in self._states)
