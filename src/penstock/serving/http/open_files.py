"""The limit on open files of this process, and how many connections fit below it."""

from __future__ import annotations

import resource
from contextlib import suppress
from typing import Final

__all__ = ["fitting_connections", "raise_limit"]

_MAX_LIMIT: Final = 1 << 16
"""The soft limit is not raised further: 65,536 is several times what the default limits of a service can use."""
_RESERVE: Final = 192
"""Descriptors that are not client connections: files, listeners, the log, clients that are being refused."""


def raise_limit() -> int:
    """Raise the soft limit on open files to the hard one, or to 65,536 where that is less; return the soft limit.

    Child processes inherit it.  That is safe for code that calls ``select()``, which takes descriptors below 1,024
    only: a child's descriptors begin at 3.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = _MAX_LIMIT if hard == resource.RLIM_INFINITY else min(hard, _MAX_LIMIT)
    if soft == resource.RLIM_INFINITY:
        return _MAX_LIMIT
    if soft < target:
        with suppress(ValueError, OSError):  # a sandbox may forbid it: the service runs with what it has
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def fitting_connections(num_wanted: int, limit: int, num_listeners: int, num_others: int) -> int:
    """Return how many connections each listener may have, ``num_wanted`` at most, so that descriptors never run out.

    ``limit`` is the soft limit on open files; ``num_others`` descriptors are for worker processes and other listeners.
    At least half of the limit is left to connections.
    """
    reserve = min(limit // 2, _RESERVE + num_others)
    return max(1, min(num_wanted, (limit - reserve) // num_listeners))
