"""A unix socket that only its owner may open, and whose path is removed at the end."""

from __future__ import annotations

import errno
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

from penstock.errors import FileAccessError, InvalidArgumentError

__all__ = ["UnixSocket"]

_BACKLOG: Final = 64
_KNOCK_S: Final = 2.0


class UnixSocket:
    """A listening unix socket with mode 0600: only its owner may connect.

    Raises InvalidArgumentError if the path is something else than a socket, if a process listens on it, or if other
    users may write to its folder; FileAccessError if the system refuses the path.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        _check_folder(self.path)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _make_room(self.path)
            self.socket.bind(str(self.path))
            self._status = self.path.lstat()
            self.path.chmod(0o600)  # safe, because no client can connect before ``listen``
            self.socket.listen(_BACKLOG)
        except OSError as error:
            self.close()
            if isinstance(error, FileAccessError):
                raise
            raise FileAccessError(f"{self.path}: failed to listen: {error.strerror or error}") from error
        except BaseException:
            self.close()
            raise

    _status: os.stat_result | None = None

    def close(self) -> None:
        """Stop listening and remove the path, unless another socket has replaced it."""
        self.socket.close()
        with suppress(OSError):
            own, status = self._status, self.path.lstat()
            if own is not None and (own.st_dev, own.st_ino) == (status.st_dev, status.st_ino):
                self.path.unlink()
        self._status = None


def _check_folder(path: Path) -> None:
    """Check the socket's folder: a user who may write to it could replace the socket."""
    try:
        status = path.parent.stat()
    except OSError as error:
        raise FileAccessError(f"{path.parent}: {error.strerror}") from error
    if not stat.S_ISDIR(status.st_mode):
        raise InvalidArgumentError(f"{path.parent}: expected a folder for the socket, got a file", param="path")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise InvalidArgumentError(
            f"{path.parent}: other users may write to the socket's folder. Use a private folder (mkdir -m 700).",
            param="path",
        )


def _make_room(path: Path) -> None:
    """Remove a socket that no process listens on; refuse anything else."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise InvalidArgumentError(
            f"{path}: expected a free path for the socket, got a file that is not a socket", param="path"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as knock:
        knock.settimeout(_KNOCK_S)
        code = knock.connect_ex(str(path))
    if code != errno.ECONNREFUSED:
        raise InvalidArgumentError(f"{path}: the socket is in use", param="path")
    path.unlink()
