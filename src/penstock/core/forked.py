"""Refuse, in a forked child, an object that its parent opened: its threads do not exist and its locks may be held."""

from __future__ import annotations

import os

from penstock.errors import InvalidArgumentError

__all__ = ["check_process", "is_forked"]


def is_forked(pid: int) -> bool:
    """Return True if this process is not ``pid``, the one that opened the object.  ``pid`` 0: nothing is open."""
    return pid != 0 and pid != os.getpid()


def check_process(pid: int, name: str, made: str = "opened", make: str = "open") -> None:
    """Raise InvalidArgumentError in a forked child of ``pid``.  Call this before taking a lock, which the fork may have
    copied while it was held."""
    if is_forked(pid):
        raise InvalidArgumentError(
            f"{name}: {made} in process {pid} and used in its forked child {os.getpid()}, where its threads do not "
            f"exist. {make.capitalize()} it in the child, or spawn the child instead of forking."
        )
