"""Files in /dev/shm that a group of processes has mapped: what a killed program leaves there is removed."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

__all__ = ["SharedFiles"]

_FOLDER: Final = "/dev/shm/"  # noqa: S108


class SharedFiles:
    """The files of /dev/shm that marked processes have mapped.  ``mark``: NAME=VALUE in their environment."""

    def __init__(self, mark: str) -> None:
        self._mark = mark.encode()
        self._seen: set[str] = set()

    def look(self) -> None:
        """Remember the files that the processes have mapped now."""
        for pid in _pids():
            with suppress(OSError):
                if self._mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    self._seen |= _mapped(pid)

    def remove(self) -> list[str]:
        """Remove the files of this user that no process has mapped any more; return their paths."""
        used = set().union(*(_mapped(pid) for pid in _pids())) if self._seen else set()
        removed = []
        for path in sorted(self._seen - used):
            with suppress(OSError):
                if os.lstat(path).st_uid == os.getuid():
                    os.unlink(path)
                    removed.append(path)
        self._seen.clear()
        return removed


def _pids() -> list[str]:
    return [name for name in os.listdir("/proc") if name.isdigit()]


def _mapped(pid: str) -> set[str]:
    """Return the files of /dev/shm in the address space of a process; empty if it has ended or is not ours."""
    paths = set()
    with suppress(OSError), open(f"/proc/{pid}/maps", "rb") as maps:
        for line in maps:
            name = line.rstrip(b"\n").split(None, 5)[5:]
            if name and name[0].startswith(_FOLDER.encode()) and not name[0].endswith(b" (deleted)"):
                paths.add(os.fsdecode(name[0]))
    return paths
