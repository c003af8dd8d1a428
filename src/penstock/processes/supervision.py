"""Supervision of child processes: how a process ended, and the times to wait for it and before the next one."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Final

__all__ = [
    "CAUSES", "LOOP_DEATHS", "LOOP_KILLS", "LOST_RANK_STATUS", "QUICK_DEATH_S", "Death", "SupervisionPolicy",
    "has_crashed", "is_stopped", "signal_name",
]  # fmt: skip

CAUSES: Final = ("signal", "exit", "hang", "start")
"""Causes of a worker's end: a signal, its own exit, an engine without progress, a start that failed."""
QUICK_DEATH_S: Final = 10.0
"""A process that ends within this time of its start counts as crashing repeatedly."""
LOOP_DEATHS: Final = 3
"""Number of such ends in a row after which the process counts as failing."""
LOOP_KILLS: Final = 10
"""Number of such ends in a row, kills from outside included, after which a worker counts as failing.

Where the kernel does not count its kills for lack of memory, they look like kills from outside.
"""

LOST_RANK_STATUS: Final = 75
"""The exit status of a worker one of whose ranks was killed from outside, or whose machine was lost."""
_CRASH_SIGNALS: Final = frozenset(
    {
        signal.SIGABRT, signal.SIGALRM, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGINT, signal.SIGPIPE,
        signal.SIGPROF, signal.SIGSEGV, signal.SIGSYS, signal.SIGTRAP, signal.SIGVTALRM, signal.SIGXCPU, signal.SIGXFSZ,
    }
)  # fmt: skip
"""The signals that a process gets because of what it does: SIGINT is how Python ends after KeyboardInterrupt.

Others come from outside.
"""


def has_crashed(status: int | None) -> bool:
    """Return True if a process with this exit status ended by itself, not by a signal from outside.

    ``status``: negative for a signal; None if the machine is lost.  The kernel sends SIGKILL when memory is used up,
    which the status does not show.
    """
    if status is None or status == LOST_RANK_STATUS:
        return False
    return status >= 0 or -status in _CRASH_SIGNALS


def is_stopped(pid: int) -> bool:
    """Return True if a signal has stopped a process of this machine."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2][:1] == b"T"  # "t" is a debugger's stop
    except OSError:  # it has just ended, or there is no /proc
        return False


def signal_name(number: int) -> str:
    """Return the name of a signal, or its number if it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass(frozen=True)
class Death:
    """The end of a process.

    ``cause``: one of ``CAUSES``, "stream" for a process that sent an invalid message, or "lost" with its machine.
    ``why`` is a sentence for people.  ``was_killed``: a signal from outside ended it, or a
    worker's machine was lost.
    """

    cause: str
    why: str
    was_killed: bool = False


@dataclass(frozen=True)
class SupervisionPolicy:
    """Limits in seconds.

    ``hang_s``: an engine that makes no progress for this long is killed; no step may take longer.  ``load_s``: loading
    a model fails after this time.  ``drain_s``: how long open requests may take to end.  ``min_pause_s``,
    ``max_pause_s``: the pause before the second restart in a row, and the limit to which it doubles.
    """

    hang_s: float = 30.0
    load_s: float = 600.0
    drain_s: float = 30.0
    min_pause_s: float = 0.2
    max_pause_s: float = 30.0
