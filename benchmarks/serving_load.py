"""Measures what a run uses of the machine, and how late a client on the same machine is."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

LOOK_S = 0.005


@dataclass(frozen=True)
class Taken:
    """Seconds of processor time, and seconds in which runnable threads had no core."""

    used_s: float = 0.0
    waited_s: float = 0.0

    def since(self, before: Taken) -> Taken:
        """Return the increase since an earlier measurement."""
        return Taken(self.used_s - before.used_s, self.waited_s - before.waited_s)

    def __str__(self) -> str:
        return f"{self.used_s:.1f} s of processor time, {self.waited_s:.1f} s without a core"


def taken_by(pids: Iterable[int]) -> Taken:
    """Return the sum over the current threads of processes; a thread that ended meanwhile is skipped."""
    used = waited = 0
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").glob("*"):
            with suppress(OSError, ValueError):
                ran, stood, _ = (task / "schedstat").read_text().split()
                used, waited = used + int(ran), waited + int(stood)
    return Taken(used / 1e9, waited / 1e9)


class Machine:
    """The parts of a run: the client (this process), the primary of the service, and its workers."""

    def __init__(self, primary: int, workers: Iterable[int]) -> None:
        self._parts = {"client": [os.getpid()], "primary": [primary], "workers": [*workers]}
        self._before = self._now()
        self.late: list[float] = []
        """Seconds by which this event loop came late to a look each LOOK_S: its own part of every time it measures."""

    def _now(self) -> dict[str, Taken]:
        return {name: taken_by(pids) for name, pids in self._parts.items()}

    async def look(self) -> None:
        """Measure until cancelled."""
        while True:
            due = time.perf_counter() + LOOK_S
            await asyncio.sleep(LOOK_S)
            self.late.append(max(0.0, time.perf_counter() - due))

    def taken(self) -> dict[str, Taken]:
        """Return the usage of each part since this object was created."""
        return {name: one.since(self._before[name]) for name, one in self._now().items()}
