"""Verify the checksums of bundles when they are opened, and record the files that were verified.

A verified file is recorded in ``verified/`` of the cache folder by its path, size, modification time, change time and
inode.  The record is an empty file whose name is their digest, so that damage cannot turn it into another record.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from penstock import env
from penstock.config import check_choice
from penstock.core import native
from penstock.core.metadata import stamp_of

__all__ = [
    "VERIFY_MODES", "check_verify", "forget_verified", "is_settled", "open_verified",
    "remember_when_written",
]  # fmt: skip

VERIFY_MODES: Final = ("once", "always", "never")
_FOLDER: Final = "verified"
_RECORD_VERSION: Final = 1
_MAX_RECORDS: Final = 4096
_SETTLED_NS: Final = 2_000_000_000
"""A file that changed more recently is not recorded: some file systems have a time resolution of two seconds, and a
second change within it leaves no trace."""


def check_verify(value: object) -> str:
    """Return a mode of VERIFY_MODES; InvalidArgumentError for anything else."""
    return check_choice("verify", value, VERIFY_MODES)


def open_verified(path: str | os.PathLike[str], verify: str = "once") -> tuple[native.Model, float]:
    """Open a bundle; return it and the seconds spent on verification, 0 without verification.

    ``verify``: "once" verifies a file that has no record, "always" verifies every file, "never" verifies none.  Raises
    InvalidFileError, which names the damaged segment, and what ``Model.open`` raises.
    """
    check_verify(verify)
    if verify == "never":
        return native.Model.open(path), 0.0
    before = _stat(path)
    if verify == "once" and before is not None and _is_remembered(path, before):
        model = native.Model.open(path)
        if model.stamp == stamp_of(before):
            return model, 0.0
        model.close()  # the file was replaced after the lookup
    start = time.perf_counter()
    model = native.Model.open(path, verify=True)
    seconds = time.perf_counter() - start
    if before is not None and model.stamp == stamp_of(before) and is_settled(before):
        _remember(path, before)
    return model, seconds


def remember_when_written(
    path: str | os.PathLike[str], note: Callable[[os.stat_result], None] | None = None
) -> threading.Thread:
    """Record a file whose checksums are known to be right, once it is on the disk.

    A thread waits for the disk, and then calls ``note``.  Without the record the next start verifies the file.
    """
    thread = threading.Thread(target=_remember_written, args=(path, note), name="penstock-write-behind")
    thread.start()
    return thread


def _remember_written(path: str | os.PathLike[str], note: Callable[[os.stat_result], None] | None) -> None:
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
            status = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        _remember(path, status)
        if note is not None:
            note(status)


def forget_verified() -> None:
    """Remove every record."""
    for record in _records():
        with contextlib.suppress(OSError):
            record.unlink()


def _stat(path: str | os.PathLike[str]) -> os.stat_result | None:
    try:
        return os.stat(path)
    except (OSError, ValueError):  # the core reports the error when it opens the path
        return None


def is_settled(status: os.stat_result) -> bool:
    """Return True for a file whose last change is so long ago that a further one would change its times."""
    return time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) > _SETTLED_NS


def _folder() -> Path:
    return env.cache_dir() / _FOLDER


def _record_of(path: str | os.PathLike[str], status: os.stat_result) -> Path:
    times = (status.st_mtime_ns, status.st_ctime_ns)
    identity = [os.path.realpath(os.fsdecode(path)), status.st_size, *times, status.st_ino]
    digest = hashlib.sha256(json.dumps([_RECORD_VERSION, *identity]).encode())
    return _folder() / digest.hexdigest()


def _is_remembered(path: str | os.PathLike[str], status: os.stat_result) -> bool:
    record = _record_of(path, status)
    try:
        if not record.is_file():
            return False
    except OSError:
        return False
    with contextlib.suppress(OSError):
        os.utime(record)  # the least recently used records are removed first
    return True


def _remember(path: str | os.PathLike[str], status: os.stat_result) -> None:
    """Write the record of a file.  If the cache folder is not writable, the file is verified at every start."""
    record = _record_of(path, status)
    with contextlib.suppress(OSError):
        record.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        record.parent.mkdir(mode=0o700, exist_ok=True)
        record.touch(mode=0o600)
        _prune()


def _records() -> list[Path]:
    folder = _folder()
    try:
        return [folder / name for name in os.listdir(folder)]
    except OSError:
        return []


def _prune() -> None:
    records = _records()
    if len(records) <= _MAX_RECORDS:
        return
    ages = []
    for record in records:
        with contextlib.suppress(OSError):
            ages.append((record.stat().st_mtime, record))
    for _, record in sorted(ages)[: len(ages) // 2]:
        with contextlib.suppress(OSError):
            record.unlink()
