"""Supervision of child processes: how one ended, and how long to wait for it and before the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["CAUSES", "LOOP_DEATHS", "QUICK_DEATH_S", "Death", "SupervisionPolicy"]

CAUSES: Final = ("signal", "exit", "hang", "start")
"""Of a worker's death: a signal ended it, it ended itself, its engine's loop stood still, it never was ready."""
QUICK_DEATH_S: Final = 10.0
LOOP_DEATHS: Final = 3


@dataclass(frozen=True)
class Death:
    """How a process ended.  ``cause``: "signal", "exit", "hang", "stream"; ``why`` is for people.

    "stream": the process sent something that does not belong there.
    """

    cause: str
    why: str


@dataclass(frozen=True)
class SupervisionPolicy:
    """Seconds.  ``hang_s``: an engine whose loop has not turned for so long is killed; a step may take no longer.
    ``load_s``: a model that loads longer has failed.  ``drain_s``: open requests get so long to end.
    ``min_pause_s``, ``max_pause_s``: between restarts after the first, doubling.
    """

    hang_s: float = 30.0
    load_s: float = 600.0
    drain_s: float = 30.0
    min_pause_s: float = 0.2
    max_pause_s: float = 30.0
