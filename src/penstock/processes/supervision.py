"""Supervision of child processes: how a process ended, and the times to wait for it and before the next one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["CAUSES", "LOOP_DEATHS", "QUICK_DEATH_S", "Death", "SupervisionPolicy"]

CAUSES: Final = ("signal", "exit", "hang", "start")
"""Causes of a worker's end: a signal, its own exit, an engine without progress, a start that failed."""
QUICK_DEATH_S: Final = 10.0
"""A process that ends within this time of its start counts as crashing repeatedly."""
LOOP_DEATHS: Final = 3
"""Number of such ends in a row after which the process counts as failing."""


@dataclass(frozen=True)
class Death:
    """The end of a process.

    ``cause``: one of ``CAUSES``, or "stream" for a process that sent an invalid message.  ``why`` is a sentence for
    people.
    """

    cause: str
    why: str


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
