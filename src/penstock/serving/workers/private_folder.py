"""A folder of this process's own for a socket, and the end of those that processes which were killed left behind."""

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
"""The kernel bounds a socket's name."""


class PrivateFolder:
    """A folder of mode 0700 in the temporary folder, locked for as long as this process lives.

    The kernel frees the lock of a process that ends, however it ends: that is how a later one knows that the folder is
    nobody's any more, and removes it.
    """

    def __init__(self) -> None:
        parent = _temporary()
        if len(parent) > _MAX_SOCKET_PATH - 32:
            parent = "/tmp"  # noqa: S108 - the folder in it is made afresh, for this user alone
        remove_stale(Path(parent))
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        self.socket = self.path / _SOCKET
        # Under another name until it is locked: nobody may find it free in between.
        making = self.path / f"{_LOCK}.new"
        self._lock = os.open(making, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        making.rename(self.path / _LOCK)

    def remove(self) -> None:
        """Remove it; calling it again does nothing."""
        if self._lock >= 0:
            _empty(self.path)
            os.close(self._lock)
            self._lock = -1


def _temporary() -> str:
    """Where it lies, without the file that Python writes to try a folder: a full disk has room for a folder still."""
    for name in ("TMPDIR", "TEMP", "TMP"):
        found = os.environ.get(name, "")
        if os.path.isdir(found) and os.access(found, os.W_OK | os.X_OK):
            return os.path.abspath(found)
    return "/tmp"  # noqa: S108 - as above


def remove_stale(parent: Path) -> None:
    """Remove the folders in ``parent`` that processes of this user left when they were killed.

    Left alone are: another user's, one that others may enter, one without the lock of its owner or whose owner lives,
    and one that holds anything else.
    """
    for path in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # it went away, or is not ours after all
            _remove_if_stale(path)


def _remove_if_stale(path: Path) -> None:
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) != 0o700:
        return
    lock = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # refused while its owner lives
        if {*os.listdir(path)} <= {_SOCKET, _LOCK}:
            _empty(path)
    finally:
        os.close(lock)


def _empty(path: Path) -> None:
    """Remove a folder and what belongs there."""
    for name in (_SOCKET, _LOCK):
        with suppress(FileNotFoundError):
            (path / name).unlink()
    with suppress(OSError):
        path.rmdir()
