"""Remember what was learned about large files: the digest of their content, and the cached bundle that they have.

A record is a file whose name is the digest of what it is about.  It begins with the digest of its name and its text, so
that a damaged one counts as missing.  A file is known by its path, size, modification time, change time and inode.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from penstock.errors import FileAccessError, InvalidFileError
from penstock.runtime.verify import is_settled

__all__ = ["FileRecords", "identify"]

_VERSION: Final = 1
_MAX_RECORDS: Final = 4096
_MAX_RECORD_BYTES: Final = 1 << 20
_PIECE_BYTES: Final = 1 << 20


class FileRecords:
    """The records in ``folder``, which need not exist.  Where it cannot be written, nothing is remembered."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def digest(self, path: Path, progress: Callable[[int, int], None] | None = None) -> str:
        """Return the SHA-256 of a file's content, 64 hexadecimal digits; ``progress(done, total)`` counts bytes.

        Raises FileAccessError, or InvalidFileError for a file that changes meanwhile.
        """
        try:
            with path.open("rb", buffering=0) as file:
                before = os.fstat(file.fileno())
                name = _name(["digest", _identity(path, before)])
                known = self._read(name)
                if isinstance(known, str):
                    return known
                digest, done = hashlib.sha256(), 0
                piece = memoryview(bytearray(_PIECE_BYTES))  # one for all: new memory takes as long as to read
                while num_bytes := file.readinto(piece):
                    digest.update(piece[:num_bytes])
                    done += num_bytes
                    if progress is not None:
                        progress(done, before.st_size)
                after = os.fstat(file.fileno())
        except OSError as error:
            raise FileAccessError(f"{path}: {error.strerror}") from None
        if _identity(path, after) != _identity(path, before):
            raise InvalidFileError(f"{path}: the file changed while it was read")
        if is_settled(after):
            self._write(name, digest.hexdigest())
        return digest.hexdigest()

    def find_key(self, request: Sequence[object]) -> str | None:
        """Return the key that was remembered for a request, if its files are the same as then."""
        record = self._read(_name(["key", request]))
        try:
            files, key = record["files"], record["key"]
            same = all(_identity(Path(file), os.stat(file)) == identity for file, identity in files)
        except (OSError, TypeError, ValueError, KeyError):
            return None
        return key if same and isinstance(key, str) else None

    def remember_key(self, request: Sequence[object], files: Sequence[object], key: str) -> None:
        """Remember the key of a request that depends on ``files``, as ``identify`` returned them; on none: nothing."""
        if files:
            self._write(_name(["key", request]), {"files": files, "key": key})

    def clear(self) -> None:
        """Remove every record."""
        for record in self._records():
            with contextlib.suppress(OSError):
                record.unlink()

    def _read(self, name: str) -> Any:
        path = self.folder / name
        try:
            if path.stat().st_size > _MAX_RECORD_BYTES:
                return None
            check, _, text = path.read_text().partition("\n")
            if check != _digest(name, text):
                return None
            with contextlib.suppress(OSError):
                os.utime(path)  # the least recently used records are removed first
            return json.loads(text)
        except (OSError, ValueError):
            return None

    def _write(self, name: str, value: object) -> None:
        text = json.dumps(value)
        temporary = self.folder / f".{name}.{os.getpid()}"
        with contextlib.suppress(OSError):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            temporary.write_text(f"{_digest(name, text)}\n{text}")
            temporary.replace(self.folder / name)
            self._prune()
            return
        with contextlib.suppress(OSError):  # half a file, on a full disk
            temporary.unlink()

    def _records(self) -> list[Path]:
        try:
            return [self.folder / name for name in os.listdir(self.folder)]
        except OSError:
            return []

    def _prune(self) -> None:
        records = self._records()
        if len(records) <= _MAX_RECORDS:
            return
        ages = []
        for record in records:
            with contextlib.suppress(OSError):
                ages.append((record.stat().st_mtime, record))
        for _, record in sorted(ages)[: len(ages) // 2]:
            with contextlib.suppress(OSError):
                record.unlink()


def identify(files: Iterable[Path]) -> list[list[Any]]:
    """Return what tells these files from changed ones; [] if one is missing or has just changed."""
    records = []
    for path in files:
        try:
            status = os.stat(path)
        except OSError:
            return []
        if not is_settled(status):
            return []
        records.append([str(path), _identity(path, status)])
    return records


def _identity(path: Path, status: os.stat_result) -> list[Any]:
    real = os.path.realpath(path)
    return [real, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _name(about: object) -> str:
    return hashlib.sha256(json.dumps([_VERSION, about]).encode()).hexdigest()


def _digest(name: str, text: str) -> str:
    return hashlib.sha256(f"{name}\n{text}".encode()).hexdigest()
