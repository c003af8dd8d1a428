"""Looks at the load of a running service at intervals, and has its replicas started and ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from penstock.cluster.autoscale import SAMPLE_S, Autoscaler

if TYPE_CHECKING:
    from penstock.cluster.autoscale import Load, ScalePolicy

__all__ = ["ScaleLoop"]

LOG: Final = logging.getLogger("penstock.serving")


class ScaleLoop:
    """Asks ``load`` for the load every half second, and calls ``resize`` with another number of replicas.

    ``num_replicas``: how many there are at first.
    """

    def __init__(
        self, policy: ScalePolicy, num_replicas: int, load: Callable[[], Load], resize: Callable[[int], None]
    ) -> None:
        self.policy = policy
        self._scaler = Autoscaler(policy, num_replicas)
        self._load, self._resize = load, resize
        self._is_due = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def wanted(self) -> int:
        """The number of replicas that should run."""
        return self._scaler.wanted

    def start(self) -> None:
        """Begin to look at the load.  A second call does nothing."""
        if self._task is None:
            self._task = asyncio.ensure_future(self._run())

    def look(self) -> None:
        """Look at the load soon: a request waits for the first replica."""
        self._is_due.set()

    async def stop(self) -> None:
        """End; the number of replicas does not change any more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._is_due.clear()
            try:
                before = self.wanted
                if self._scaler.update(loop.time(), self._load()) != before:
                    self._resize(self.wanted)
            except Exception:  # of any kind: without this task no replica would be started again
                LOG.exception("failed to look at the load")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_due.wait(), SAMPLE_S)
