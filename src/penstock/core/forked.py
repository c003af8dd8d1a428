"""Refusing what was opened before a fork in the child, where its threads do not exist and its locks may be held."""

from __future__ import annotations

import os

from penstock.errors import InvalidArgumentError

__all__ = ["check_process", "is_forked"]


def is_forked(pid: int) -> bool:
    """Return True in a process other than ``pid``, which opened the object; 0: nothing is open yet."""
    return pid != 0 and pid != os.getpid()


def check_process(pid: int, name: str, made: str = "opened", make: str = "open") -> None:
    """Raise InvalidArgumentError in a forked child of ``pid``.  Call it before taking a lock that may never be free."""
    if is_forked(pid):
        raise InvalidArgumentError(
            f"{name}: {made} in process {pid} and used in its forked child {os.getpid()}, where its threads do not "
            f"exist; {make} it in the child, or spawn instead of forking"
        )
