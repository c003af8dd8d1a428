"""The processes that run one version of a model's weights, kept alive until they are drained.

A process that dies or whose engine's loop stops turning is replaced, at once the first time and then after growing
pauses; one that dies again and again leaves the model not ready, and is still tried now and then.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from penstock.errors import PenstockError, UnavailableError
from penstock.logs import tell
from penstock.processes.supervision import LOOP_DEATHS, QUICK_DEATH_S, Death, SupervisionPolicy

if TYPE_CHECKING:
    from penstock.llm.backend import ModelCard
    from penstock.serving.workers.worker_config import WorkerConfig
    from penstock.serving.workers.worker_connection import WorkerConnection
    from penstock.serving.workers.worker_process import WorkerProcess
    from penstock.text.tokenizer import Tokenizer

__all__ = ["Launcher", "WorkerGroup"]


class Launcher(Protocol):
    """Starts worker processes."""

    supervision: SupervisionPolicy

    async def launch(self, config: WorkerConfig, *, is_known: bool = False) -> WorkerProcess:
        """A worker whose model is loaded; raises what loading raised.

        ``is_known``: its sizes are those of one that ran, so that nobody's plan waits for it.
        """


class WorkerGroup:
    """``num_workers`` processes of one configuration; ``on_change`` is called when one comes or goes.

    ``deaths`` counts, by cause, those that ended without being asked to.
    """

    def __init__(
        self,
        launcher: Launcher,
        config: WorkerConfig,
        num_workers: int,
        on_change: Callable[[], None],
        deaths: Counter[str],
    ) -> None:
        self.config = config
        self.error = ""
        self.deaths = deaths
        self.card: ModelCard | None = None
        """Of the first worker that was ready, as the next two: workers come and go, the model's description stays."""
        self.tokenizer: Tokenizer | None = None
        self.weights_id = ""
        """Empty for a bundle made of a folder."""
        self._launcher = launcher
        self._num_workers = num_workers
        self._on_change = on_change
        self._workers: dict[int, WorkerProcess] = {}
        self._ending: set[WorkerProcess] = set()
        self._failing: set[int] = set()
        self._stopping = asyncio.Event()
        self._keepers: list[asyncio.Task[None]] = []

    @property
    def links(self) -> list[WorkerConnection]:
        """The workers that have joined, in the order of their slots."""
        return [worker.link for _, worker in sorted(self._workers.items())]

    @property
    def is_failing(self) -> bool:
        """Whether all its processes die again and again."""
        return len(self._failing) == self._num_workers

    async def start(self) -> None:
        """Start all; raises the first one's error, and leaves nothing then."""
        firsts: list[asyncio.Future[None]] = []
        for slot in range(self._num_workers):
            firsts.append(asyncio.get_running_loop().create_future())
            self._keepers.append(asyncio.ensure_future(self._keep(slot, firsts[-1])))
        try:
            await asyncio.gather(*firsts)
        except BaseException:
            await self.stop()
            raise

    async def _keep(self, slot: int, first: asyncio.Future[None]) -> None:
        num_deaths = 0
        while not self._stopping.is_set():
            lived_s, num_lost, link = 0.0, 0, ""
            try:
                config = self._config_of(slot, is_first=not first.done())
                worker = self._workers[slot] = await self._launcher.launch(config, is_known=first.done())
                self._note_ready(slot, worker.link)
                if not first.done():
                    first.set_result(None)
                start = time.monotonic()
                death = await worker.ended()
                lived_s = time.monotonic() - start
                num_lost, link = worker.link.num_lost, worker.link.name
            except Exception as error:  # whatever it is, nobody else would start the next one
                death = Death("start", str(error) or type(error).__name__)
                if not first.done():
                    first.set_exception(error if isinstance(error, PenstockError) else UnavailableError(death.why))
                    return
            finally:
                self._workers.pop(slot, None)
            if self._stopping.is_set():
                return
            self.error = death.why
            self.deaths[death.cause] += 1
            num_deaths = num_deaths + 1 if lived_s < QUICK_DEATH_S else 1
            if num_deaths >= LOOP_DEATHS:
                self._failing.add(slot)
            pause_s = self._pause_s(num_deaths)
            tell(
                "worker_gone",
                f"{self.config.name}: a worker is gone ({death.why}); the next one starts in {pause_s:g} s",
                logging.WARNING,
                model=self.config.name,
                worker=link,
                cause=death.cause,
                lived_s=round(lived_s, 3),
                open_requests=num_lost,
                deaths_in_a_row=num_deaths,
                restart_in_s=pause_s,
            )
            self._on_change()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause_s)

    def _config_of(self, slot: int, is_first: bool) -> WorkerConfig:
        """Return the configuration of the next worker.

        A bundle is verified by the first of the workers that start together: if it is damaged, none becomes ready.  A
        folder's bundle may be made again meanwhile, so the others look whether theirs is the verified one.
        """
        if slot == 0 or not is_first or self.config.verify == "never":
            return self.config
        return replace(self.config, verify="once" if Path(self.config.path).is_dir() else "never")

    def _note_ready(self, slot: int, link: WorkerConnection) -> None:
        self._failing.discard(slot)
        self._describe(link)
        if link.plan is not None and link.card is not None:  # a restart gets the same sizes, whatever is free then
            limits = replace(self.config.options.limits, num_pages=link.plan.num_pages, context_len=link.card.max_len)
            self.config = replace(self.config, options=replace(self.config.options, limits=limits))
        tell(
            "worker_ready",
            f"{self.config.name}: worker {link.name} (process {link.pid}) is ready",
            model=self.config.name,
            worker=link.name,
            pid=link.pid,
            path=self.config.path,
            version=self.config.version,
            load_s=0.0 if link.plan is None else round(link.plan.load_s, 3),
            populate_s=0.0 if link.plan is None else round(link.plan.populate_s, 3),
        )
        self._on_change()

    def _describe(self, link: WorkerConnection) -> None:
        """Keep what the first worker tells of the model, unless a later one opened another file at the same path."""
        card, known = link.card, self.card
        if card is None or (
            known is not None
            and replace(card, created=known.created) == known
            and (link.tokenizer, link.weights_id) == (self.tokenizer, self.weights_id)
        ):
            return
        self.card, self.tokenizer, self.weights_id = card, link.tokenizer, link.weights_id

    def _pause_s(self, num_deaths: int) -> float:
        if num_deaths <= 1:
            return 0.0
        supervision = self._launcher.supervision
        return min(supervision.max_pause_s, supervision.min_pause_s * 2.0 ** min(30, num_deaths - 2))

    async def drain(self) -> None:
        """Give them no more requests, let those that are open end within ``drain_s``, and stop."""
        self._stopping.set()
        links = self.links
        for link in links:
            link.drain()
        if any(link.num_open for link in links):
            with suppress(TimeoutError):
                await asyncio.wait_for(
                    asyncio.gather(*(link.idle() for link in links)), self._launcher.supervision.drain_s
                )
        await self.stop()

    async def stop(self) -> None:
        """End all processes; what is open is lost.  Whoever calls it while they end waits for the end, too."""
        self._stopping.set()
        self._ending.update(self._workers.values())
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await asyncio.gather(*(worker.stop() for worker in [*self._ending]))
        self._workers.clear()
        self._ending.clear()
        self._on_change()

    def unavailable(self, name: str) -> UnavailableError:
        """The error for clients when no worker takes requests; ``error`` has the reason, which may name files."""
        if self.is_failing:
            return UnavailableError(f"{name} is not ready: its workers crash again and again.", 30.0)
        return UnavailableError(f"{name} is not ready: no worker is running now. Retry later.", 1.0)
