"""A private folder for the primary's socket, and the removal of folders that killed processes left behind."""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

__all__ = ["PrivateFolder", "remove_stale"]

_PREFIX: Final = "penstock-"
_LOCK: Final = "owner"
_SOCKET: Final = "primary.sock"
_MAX_SOCKET_PATH: Final = 100
"""The kernel limits the length of a socket's path."""


class PrivateFolder:
    """A folder of mode 0700 in the temporary folder, locked while this process runs.

    The kernel releases the lock when the process ends in any way.  A later process then sees that the folder has no
    owner and removes it.
    """

    def __init__(self) -> None:
        parent = _temporary()
        if len(parent) > _MAX_SOCKET_PATH - 32:
            parent = "/tmp"  # noqa: S108 - mkdtemp makes a new folder in it for this user only
        remove_stale(Path(parent))
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        self.socket = self.path / _SOCKET
        # Under another name until it is locked, so that no other process finds it unlocked.
        unlocked = self.path / f"{_LOCK}.new"
        self._lock = os.open(unlocked, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unlocked.rename(self.path / _LOCK)

    def remove(self) -> None:
        """Remove the folder.  Further calls do nothing."""
        if self._lock >= 0:
            _empty(self.path)
            os.close(self._lock)
            self._lock = -1


def _temporary() -> str:
    """Return the temporary folder.  ``tempfile`` would write a file to test it, which fails on a full disk."""
    for name in ("TMPDIR", "TEMP", "TMP"):
        folder = os.environ.get(name, "")
        if os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK):
            return os.path.abspath(folder)
    return "/tmp"  # noqa: S108 - as above


def remove_stale(parent: Path) -> None:
    """Remove the folders in ``parent`` that killed processes of this user left behind.

    It keeps folders of other users, folders that others may enter, folders without a lock file or with a running owner,
    and folders that hold anything else.
    """
    for path in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # it was removed meanwhile, or has another owner
            _remove_if_stale(path)


def _remove_if_stale(path: Path) -> None:
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) != 0o700:
        return
    lock = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its owner runs
        if {*os.listdir(path)} <= {_SOCKET, _LOCK}:
            _empty(path)
    finally:
        os.close(lock)


def _empty(path: Path) -> None:
    """Remove a folder with its socket and lock file."""
    for name in (_SOCKET, _LOCK):
        with suppress(FileNotFoundError):
            (path / name).unlink()
    with suppress(OSError):
        path.rmdir()
