"""Download the files of a plan into the cache of ``huggingface_hub``.

Each file grows as ``blobs/DIGEST.incomplete`` and takes its name when its digest matches, so that a download that was
interrupted at any point goes on from there.  (``huggingface_hub`` itself drops a file that it did not finish.)  When
all files are there, they are linked into the snapshot.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Final

from penstock.errors import FileAccessError, InvalidFileError
from penstock.hub.content_hash import ContentHash
from penstock.hub.download_estimate import DownloadEstimate
from penstock.hub.downloaded import INCOMPLETE, cache_folder
from penstock.hub.remote import file_url
from penstock.hub.remote_model import RemoteFile, RemoteModel
from penstock.hub.snapshot import link_snapshot
from penstock.hub.transfer import receive

__all__ = ["download"]

_PIECE_BYTES: Final = 1 << 20

OnBytes = Callable[[int, int], None]


def download(plan: DownloadEstimate, on_bytes: OnBytes | None = None) -> Path:
    """Download the missing files and return the folder of the snapshot.

    ``on_bytes`` is called with the bytes on this machine and the total.  Raises UnavailableError when the connection
    fails, FileAccessError when the hub or the disk refuses, and InvalidFileError for a file that is not what the hub's
    listing says.
    """
    try:
        plan.blobs.mkdir(parents=True, exist_ok=True)
        before = 0
        for file in plan.files:
            report = None if on_bytes is None else _offset(on_bytes, before, plan.total_bytes)
            _fetch(plan.model, file, plan.blobs, report)
            before += file.num_bytes
        return link_snapshot(plan)
    except OSError as error:
        if isinstance(error, FileAccessError) or error.errno is None:
            raise
        raise FileAccessError(f"{error.filename or cache_folder()}: {error.strerror}") from None


def _offset(on_bytes: OnBytes, before: int, total: int) -> Callable[[int], None]:
    return lambda done: on_bytes(before + done, total)


def _fetch(model: RemoteModel, file: RemoteFile, blobs: Path, report: Callable[[int], None] | None) -> None:
    """Complete one blob.  Two processes that want the same one wait for each other."""
    blob, part = blobs / file.digest, blobs / f"{file.digest}{INCOMPLETE}"
    if _is_complete(blob, file):
        if report is not None:
            report(file.num_bytes)
        return
    with _open_locked(part) as stream:
        if _is_complete(blob, file):  # another process completed it
            part.unlink(missing_ok=True)
            if report is not None:
                report(file.num_bytes)
            return
        sink = _Part(part, stream, file, report)
        if sink.tell() > file.num_bytes:
            sink.restart()
        try:
            receive(model.name, file, file_url(model, file.name), sink)
            stream.flush()
            os.fsync(stream.fileno())
            if not sink.is_right():
                raise InvalidFileError(
                    f"{model.name}: {file.name}: the content does not match {file.digest_source}. It was removed. Run "
                    "the command again.",
                    code="wrong_digest",
                )
        except InvalidFileError:
            part.unlink()
            raise
        part.replace(blob)


def _open_locked(part: Path) -> IO[bytes]:
    """Open a part at its end, with a lock.  During the wait another process may have completed or removed it."""
    while True:
        stream = part.open("ab")
        try:
            fcntl.flock(stream, fcntl.LOCK_EX)
            if _is_file(stream, part):
                stream.seek(0, os.SEEK_END)  # another process may have added bytes
                return stream
        except BaseException:
            stream.close()
            raise
        stream.close()


def _is_file(stream: IO[bytes], path: Path) -> bool:
    """Return True if an open file is the one that has the path now."""
    try:
        return os.path.samestat(os.fstat(stream.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _is_complete(blob: Path, file: RemoteFile) -> bool:
    return blob.is_file() and blob.stat().st_size == file.num_bytes


class _Part:
    """The open part of a file: reports its length, and computes its digest while it grows."""

    def __init__(self, path: Path, stream: IO[bytes], file: RemoteFile, report: Callable[[int], None] | None) -> None:
        self._stream, self._file, self._report = stream, file, report
        self._hash = ContentHash(file)
        with path.open("rb") as present:
            while piece := present.read(_PIECE_BYTES):
                self._hash.update(piece)

    def write(self, data: bytes) -> None:
        """Append bytes."""
        self._stream.write(data)
        self._hash.update(data)
        if self._report is not None:
            self._report(self.tell())

    def tell(self) -> int:
        """Return the number of bytes on disk."""
        return self._stream.tell()

    def restart(self) -> None:
        """Drop every byte."""
        self._stream.truncate(0)
        self._stream.seek(0)
        self._hash = ContentHash(self._file)

    def is_right(self) -> bool:
        """Return True if the bytes on disk have the digest of the file."""
        return self._hash.matches()
