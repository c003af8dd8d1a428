"""A folder for bundles that are used once: on the disk, or in memory."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Final

from penstock.errors import FileAccessError, PenstockError

__all__ = ["temporary_folder"]

_MEMORY = "/dev/shm"  # noqa: S108 - files in memory
_PREFIX: Final = "penstock-held-"
_GRACE_SECONDS: Final = 5.0


class _HeldFolder(tempfile.TemporaryDirectory[str]):
    """A temporary folder that is locked while its process lives.

    A killed process leaves an unlocked one, which the next process that needs a folder in the same place removes.
    """

    def __init__(self, place: str | None) -> None:
        super().__init__(prefix=_PREFIX, dir=place)
        self._lock = _open_locked(Path(self.name))

    def cleanup(self) -> None:
        """Remove the folder, and release its lock."""
        super().cleanup()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _open_locked(folder: Path) -> int | None:
    """Return the descriptor of a folder that is now locked; None if that failed, as where locks are not supported."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _remove_abandoned(place: str | None) -> None:
    """Remove the folders of this user's killed processes."""
    with contextlib.suppress(OSError):
        for path in Path(place or tempfile.gettempdir()).glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError):  # another process removed it
                status = path.lstat()
                if status.st_uid != os.getuid() or time.time() - status.st_mtime < _GRACE_SECONDS:
                    continue  # a new one may not be locked yet
                descriptor = _open_locked(path)
                if descriptor is not None:
                    shutil.rmtree(path, ignore_errors=True)
                    os.close(descriptor)


def temporary_folder(source: Path | None = None) -> tempfile.TemporaryDirectory[str]:
    """Return a folder on the disk; in memory if no disk can be written, or if only memory has room for ``source``.

    ``source``: a folder or file of weights, about as large as what is written.  Folders that killed processes left are
    removed first.  Raises FileAccessError.
    """
    places = [None, _MEMORY]
    free = _free_bytes(None)
    if source is not None and free < _num_bytes(source) and free < _free_bytes(_MEMORY):
        places.reverse()
    reason: str | None = ""
    for place in places:
        try:
            _remove_abandoned(place)
            return _HeldFolder(place)
        except OSError as error:
            reason = reason or error.strerror
    raise FileAccessError(f"The bundle needs a temporary folder: {reason}. Set TMPDIR to a writable folder.")


def _free_bytes(folder: str | None) -> int:
    """Return the room in a folder, by default that of temporary files; -1 if it cannot be used."""
    try:
        return shutil.disk_usage(folder or tempfile.gettempdir()).free
    except OSError:
        return -1


def _num_bytes(source: Path) -> int:
    """Return the size of a folder's weights, or of a file with the other splits of a GGUF model; 0 if unknown."""
    from penstock.checkpoint.gguf.file_name import split_names  # not needed by ranks, which start with this module
    from penstock.checkpoint.side_files import model_folder
    from penstock.checkpoint.stored.shards import weight_names

    try:
        if source.is_dir():
            homes = sorted(source.glob("rank_*/")) or [model_folder(source)]
            return sum((home / name).stat().st_size for home in homes for name in weight_names(home))
        paths = map(source.with_name, split_names(source.name))
        return sum(path.stat().st_size for path in paths if path.is_file())
    except (OSError, PenstockError):  # opening the model says what is wrong
        return 0
