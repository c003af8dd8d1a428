"""Download the files of a plan into the cache of ``huggingface_hub``.

Each file grows as ``blobs/DIGEST.incomplete`` and takes its name when its digest matches, so that a download that was
interrupted at any point goes on from there.  (``huggingface_hub`` itself drops a file that it did not finish.)  When
all files are there, ``huggingface_hub`` links them into the snapshot.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Final

from penstock.errors import FileAccessError, InvalidFileError, UnavailableError
from penstock.hub.downloaded import INCOMPLETE, cache_folder, repository_folder
from penstock.hub.plan import DownloadPlan
from penstock.hub.remote import RemoteFile, RemoteModel, request_headers, translated_errors

__all__ = ["download"]

_PIECE_BYTES: Final = 1 << 20
_ATTEMPTS: Final = 3
"""Attempts in a row without a byte before a download stops; ``huggingface_hub`` makes some of its own in each."""
_PAUSE_S: Final = 1.0

OnBytes = Callable[[int, int], None]


def download(plan: DownloadPlan, on_bytes: OnBytes | None = None) -> Path:
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
        return _link(plan)
    except OSError as error:
        if isinstance(error, FileAccessError) or error.errno is None:
            raise
        raise FileAccessError(f"{error.filename or cache_folder()}: {error.strerror}") from None


def _offset(on_bytes: OnBytes, before: int, total: int) -> Callable[[int], None]:
    return lambda done: on_bytes(before + done, total)


def _fetch(model: RemoteModel, file: RemoteFile, blobs: Path, report: Callable[[int], None] | None) -> None:
    """Complete one blob.  Two processes that want the same one wait for each other."""
    blob, part = blobs / file.digest, blobs / f"{file.digest}{INCOMPLETE}"
    if blob.exists():
        if report is not None:
            report(file.num_bytes)
        return
    with part.open("ab") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        if blob.exists():  # another process completed it
            part.unlink(missing_ok=True)
            if report is not None:
                report(file.num_bytes)
            return
        sink = _Sink(part, stream, file, report)
        if stream.tell() > file.num_bytes:
            sink.truncate(0)
        _receive(model, file, sink)
        stream.flush()
        os.fsync(stream.fileno())
        if sink.digest() != file.digest:
            part.unlink()
            raise InvalidFileError(
                f"{model.name}: {file.name}: the content does not match the digest in the hub's listing. It was "
                "removed. Run the command again."
            )
        part.replace(blob)


def _receive(model: RemoteModel, file: RemoteFile, sink: _Sink) -> None:
    """Receive the rest of a file; resume after a broken connection as long as bytes arrive."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get

    url = hf_hub_url(model.name.repository, file.name, revision=model.commit)
    failures = 0
    while sink.tell() < file.num_bytes or not file.num_bytes:
        before = sink.tell()
        try:
            with translated_errors(model.name):
                http_get(url, sink, resume_size=before, headers=request_headers(), expected_size=file.num_bytes)
            return
        except UnavailableError:
            failures = 0 if sink.tell() > before else failures + 1
            if failures >= _ATTEMPTS:
                raise
            time.sleep(_PAUSE_S)
        except OSError as error:
            if type(error) is not OSError or error.errno is not None:
                raise
            size = sink.tell()  # huggingface_hub: the response was complete, but is not as long as the listing says
            sink.truncate()
            raise InvalidFileError(
                f"{model.name}: {file.name}: expected the {file.num_bytes} bytes of the hub's listing, got {size}"
            ) from None


class _Sink:
    """The open part of a file: reports its length, and computes its digest while it grows."""

    def __init__(self, path: Path, stream: IO[bytes], file: RemoteFile, report: Callable[[int], None] | None) -> None:
        self._path, self._stream, self._file, self._report = path, stream, file, report
        self._hash = self._start()

    def _start(self) -> Any:
        """Return the hash of the bytes on disk: SHA-256, or Git's for a small file (``git hash-object``)."""
        if len(self._file.digest) == 64:
            state: Any = hashlib.sha256()
        else:
            state = hashlib.sha1(f"blob {self._file.num_bytes}\0".encode(), usedforsecurity=False)
        with self._path.open("rb") as present:
            while piece := present.read(_PIECE_BYTES):
                state.update(piece)
        return state

    def write(self, data: bytes) -> int:
        """Append bytes."""
        if self.tell() + len(data) > self._file.num_bytes:
            raise InvalidFileError(
                f"{self._file.name}: the hub sends more than the {self._file.num_bytes} bytes of its listing"
            )
        count = self._stream.write(data)
        self._hash.update(data)
        if self._report is not None:
            self._report(self.tell())
        return count

    def tell(self) -> int:
        """Return the number of bytes on disk."""
        return self._stream.tell()

    def seek(self, position: int) -> int:
        """Do nothing: ``truncate`` follows, and bytes are always appended."""
        return position

    def truncate(self, size: int = 0) -> int:
        """Drop everything: the hub ignored the range and sends the file from its beginning."""
        self._stream.truncate(size)
        self._stream.seek(size)
        self._hash = self._start()
        return size

    def digest(self) -> str:
        """Return the digest of the bytes on disk."""
        text: str = self._hash.hexdigest()
        return text


def _link(plan: DownloadPlan) -> Path:
    """Link every blob into the snapshot, the weights last; then record the commit of the revision."""
    from huggingface_hub import hf_hub_download

    model = plan.model
    with translated_errors(model.name):
        for file in plan.files:
            hf_hub_download(model.name.repository, file.name, revision=model.commit, library_name="penstock")
    if model.name.revision != model.commit:
        ref = repository_folder(model.name) / "refs" / model.name.revision
        ref.parent.mkdir(parents=True, exist_ok=True)
        temporary = ref.with_name(f"{ref.name}.{os.getpid()}{INCOMPLETE}")
        temporary.write_text(model.commit)
        temporary.replace(ref)
    return repository_folder(model.name) / "snapshots" / model.commit
