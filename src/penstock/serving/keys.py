"""API keys: read from a file, stored as hashes, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import os
import stat
from pathlib import Path
from typing import Final

from penstock.api_errors import RefusalError
from penstock.errors import FileAccessError, InvalidFileError
from penstock.logs import tell

__all__ = ["ApiKeys", "KeySet", "read_keys", "read_secret"]

MIN_KEY_CHARS: Final = 16
MAX_KEY_CHARS: Final = 512
MAX_KEYS: Final = 1000
MAX_FILE_BYTES: Final = 1 << 20


class KeySet:
    """The keys of one file.  Only salted hashes stay in memory."""

    def __init__(self, keys: list[str]) -> None:
        self._salt = os.urandom(32)
        self._hashes = [self._hash(key.encode()) for key in keys]

    @classmethod
    def read(cls, path: Path) -> KeySet:
        """Read the keys of a file.  Raises what ``read_keys`` does."""
        return cls(read_keys(path))

    def _hash(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, key=self._salt, digest_size=32).digest()

    def id_of(self, authorization: bytes) -> str:
        """Return an opaque id of the key in an Authorization header, which reveals nothing about the key."""
        return self._hash(authorization.partition(b" ")[2].strip())[:8].hex()

    def has_key(self, authorization: bytes | None) -> bool:
        """Return True if an Authorization header has one of the keys; each key is compared in constant time."""
        if authorization is None or len(authorization) > 2 * MAX_KEY_CHARS:
            return False
        scheme, _, key = authorization.partition(b" ")
        key_hash, is_known = self._hash(key.strip()), False
        for stored_hash in self._hashes:
            is_known |= hmac.compare_digest(key_hash, stored_hash)
        return is_known and scheme.lower() == b"bearer"


def _network_of(address: str) -> str:
    """Return an IPv4 address, or the /64 network of an IPv6 address, which one host owns; "" for anything else."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return ""
    if parsed.version == 4:
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, 64), strict=False))


def read_keys(path: Path) -> list[str]:
    """Return the keys of a file, one per line; empty lines and lines that begin with # are skipped.

    Raises InvalidFileError for a file that other users may access, for a file without keys, and for a key that is
    too short or not printable ASCII without spaces.
    """
    data = read_secret(path)
    keys = [line.strip() for line in data.decode("utf-8", "replace").splitlines()]
    keys = [key for key in keys if key and not key.startswith("#")]
    if not keys or len(data) > MAX_FILE_BYTES or len(keys) > MAX_KEYS:
        raise InvalidFileError(f"{path}: expected 1 to {MAX_KEYS} keys, one per line, got {len(keys)}")
    for number, key in enumerate(keys, 1):
        is_plain = key.isascii() and key.isprintable() and " " not in key
        if not MIN_KEY_CHARS <= len(key) <= MAX_KEY_CHARS or not is_plain:
            raise InvalidFileError(
                f"{path}: key {number} must be {MIN_KEY_CHARS} to {MAX_KEY_CHARS} printable ASCII characters "
                f"without spaces, got {len(key)} characters"
            )
    return keys


def read_secret(path: Path) -> bytes:
    """Return up to MAX_FILE_BYTES + 1 bytes of a secret file.

    Raises InvalidFileError if other users may read or write the file, FileAccessError if it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise FileAccessError(f"{path}: {error.strerror}", param="path") from error
    if stat.S_ISREG(mode) and mode & (stat.S_IRGRP | stat.S_IROTH | stat.S_IWGRP | stat.S_IWOTH):
        raise InvalidFileError(
            f"{path}: the key file must not be accessible to other users. Run `chmod 600 {path}`.", param="path"
        )
    return data


class ApiKeys:
    """The API keys and the admin keys of a service; an admin key allows everything that an API key allows.

    Without API keys all clients are admitted; without admin keys there are no admins.  ``keys_file`` and
    ``admin_keys_file`` are the files that the keys were read from.
    """

    def __init__(
        self,
        keys: KeySet | None = None,
        admin_keys: KeySet | None = None,
        keys_file: Path | None = None,
        admin_keys_file: Path | None = None,
    ) -> None:
        self.keys, self.admin_keys = keys, admin_keys
        self._keys_file, self._admin_keys_file = keys_file, admin_keys_file

    @classmethod
    def read(cls, keys_file: Path | None, admin_keys_file: Path | None) -> ApiKeys:
        """Read the keys of both files.  Raises the errors of ``KeySet.read``."""
        keys, admin_keys = (None if file is None else KeySet.read(file) for file in (keys_file, admin_keys_file))
        return cls(keys, admin_keys, keys_file, admin_keys_file)

    def reread(self) -> None:
        """Read the files again and log the result.  If a file is unreadable or invalid, its old keys stay in use."""
        self.keys = _reread(self._keys_file, self.keys)
        self.admin_keys = _reread(self._admin_keys_file, self.admin_keys)

    def admits(self, authorization: bytes | None) -> bool:
        """Return True if a request with this Authorization header is admitted."""
        return self.keys is None or self.keys.has_key(authorization) | self.is_admin(authorization)

    def is_admin(self, authorization: bytes | None) -> bool:
        """Return True if the header has an admin key."""
        return self.admin_keys is not None and self.admin_keys.has_key(authorization)

    def client_of(self, authorization: bytes | None, address: str) -> str:
        """Return the client of a request for fair scheduling: an id of its key, or its address without API keys.
        Without API keys a sent key is ignored, because a client could send a new one with each request.  "" for a unix
        socket.
        """
        if self.keys is not None and authorization is not None:
            return f"key {self.keys.id_of(authorization)}"
        return _network_of(address)

    def check_admin(self, authorization: bytes | None) -> None:
        """Raise a 403 error unless the header has an admin key."""
        if self.admin_keys is None:
            message = "This operation needs an admin key, and the server was started without --admin-key-file."
            raise RefusalError(403, message, code="admin_only")
        if not self.is_admin(authorization):
            raise RefusalError(
                403, "This operation needs an admin key from the server's --admin-key-file.", code="admin_only"
            )


def _reread(file: Path | None, old: KeySet | None) -> KeySet | None:
    if file is None:
        return old
    try:
        keys = KeySet.read(file)
    except (FileAccessError, InvalidFileError) as error:
        message = f"Failed to reload keys. The old ones stay in use: {error}"
        tell("reload_failed", message, logging.ERROR, file=str(file))
        return old
    tell("reloaded", f"Reloaded the keys of {file}.", file=str(file))
    return keys
