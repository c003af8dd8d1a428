"""The worker processes that run one version of a model's weights.

A process that crashes, or whose engine makes no progress, is replaced: at once the first time, then after growing
pauses.  If every process crashes again and again, the model is not ready; starting one is still tried at intervals.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from penstock.errors import PenstockError, UnavailableError
from penstock.file_kinds import is_gguf
from penstock.logs import tell
from penstock.processes.supervision import LOOP_DEATHS, LOOP_KILLS, QUICK_DEATH_S, Death, SupervisionPolicy
from penstock.serving.workers.worker_process import EndedEarlyError
from penstock.serving.workers.worker_roles import NO_ROLES, WorkerRoles

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
        """Start a worker and wait until its model is loaded; raises the error of loading.

        ``is_known``: its sizes are those of a worker that ran before, so that no other memory plan waits for it.
        """


class WorkerGroup:
    """``num_workers`` processes with one configuration.

    ``on_change`` is called when a worker becomes ready or ends.  ``deaths`` counts by cause the workers that ended
    without being told to.  ``is_elastic``: their number changes by ``resize``, so each plans its memory with what the
    others leave at the time; otherwise a worker that is replaced leaves its sizes to the next one.
    """

    def __init__(
        self,
        launcher: Launcher,
        config: WorkerConfig,
        num_workers: int,
        on_change: Callable[[], None],
        deaths: Counter[str],
        *,
        is_elastic: bool = False,
        roles: WorkerRoles = NO_ROLES,
    ) -> None:
        self.config = config
        self.error = ""
        self.deaths = deaths
        self.card: ModelCard | None = None
        """The model's description.  ``card``, ``tokenizer`` and ``weights_id`` come from the first ready worker and
        stay known while none is ready."""
        self.tokenizer: Tokenizer | None = None
        self.weights_id = ""
        """The identity of the weights: equal for equal bundles, empty for a checkpoint folder."""
        self.state_id = ""
        """The id of the answers with which the next worker can go on: that of the last one that became ready."""
        self.max_open = 0
        """The number of requests that may be open in a worker; 0 before the first one is ready."""
        self._launcher = launcher
        self._num_workers = num_workers
        self._is_elastic = is_elastic
        self._roles = roles
        self._role_of_slot: dict[int, str] = {}
        self._plans_elsewhere = config.options.stage_server is not None  # with the memory of the stages that join
        self._on_change = on_change
        self._workers: dict[int, WorkerProcess] = {}
        self._ending: set[WorkerProcess] = set()
        self._failing: set[int] = set()
        self._stopping = asyncio.Event()
        self._supervisors: dict[int, asyncio.Task[None]] = {}
        self._retiring: set[asyncio.Task[None]] = set()
        self._slots = count()

    @property
    def connections(self) -> list[WorkerConnection]:
        """The connections of the ready workers, in the order of their slots."""
        return [worker.connection for _, worker in sorted(self._workers.items())]

    @property
    def is_failing(self) -> bool:
        """True if every process crashes again and again."""
        return bool(self._supervisors) and len(self._failing) >= len(self._supervisors)

    async def start(self) -> None:
        """Start all processes; if one fails, stop all and raise its error.

        A process that ends without an error of its own, as one that is killed does, is started again up to twice.
        """
        first_starts: list[asyncio.Future[None]] = []
        for number in range(self._num_workers):
            first_starts.append(asyncio.get_running_loop().create_future())
            self._add(first_starts[-1], self._roles.role_of(number))
        try:
            await asyncio.gather(*first_starts)
        except BaseException:
            await self.stop()
            raise

    def _add(self, first_start: asyncio.Future[None], role: str = "") -> int:
        slot = next(self._slots)
        self._role_of_slot[slot] = role
        self._supervisors[slot] = asyncio.ensure_future(self._supervise(slot, first_start))
        return slot

    def resize(self, num_workers: int) -> None:
        """Start workers, or drain and end those with the fewest open requests, until ``num_workers`` are left.

        A worker that fails to start is started again, as one that crashed.
        """
        if self._stopping.is_set():
            return
        for _ in range(num_workers - len(self._supervisors)):
            started = asyncio.get_running_loop().create_future()
            started.set_result(None)  # no caller waits for it
            self._add(started)
        by_load = sorted(self._supervisors, key=lambda slot: (self._num_open(slot), -slot))
        for slot in by_load[: max(0, len(by_load) - num_workers)]:
            retiring = asyncio.ensure_future(self._retire(slot, self._supervisors.pop(slot)))
            self._retiring.add(retiring)
            retiring.add_done_callback(self._retiring.discard)
            self._failing.discard(slot)

    async def drain_worker(self, connection: WorkerConnection, *, replaces: bool) -> None:
        """Move the open requests of one worker to others or wait for their end up to ``drain_s`` seconds, and end it.

        With ``replaces`` another worker starts first; if that fails, its error is raised and the old one stays.  Raises
        UnavailableError if the worker has ended.
        """
        slot = next((slot for slot, worker in self._workers.items() if worker.connection is connection), None)
        if slot is None or self._stopping.is_set():
            raise UnavailableError(f"{self.config.name}: worker {connection.name} has ended", 1.0)
        if replaces:
            started = asyncio.get_running_loop().create_future()
            new = self._add(started, connection.role)
            try:
                await started
            except BaseException:
                if new in self._supervisors:
                    await self._retire(new, self._supervisors.pop(new))
                raise
        supervisor = self._supervisors.pop(slot, None)
        if supervisor is not None:  # else it was retired meanwhile
            self._failing.discard(slot)
            await self._retire(slot, supervisor)

    def _num_open(self, slot: int) -> int:
        """Return the open requests of a slot's worker, -1 if none is ready."""
        worker = self._workers.get(slot)
        return -1 if worker is None else worker.connection.num_open

    async def _retire(self, slot: int, supervisor: asyncio.Task[None]) -> None:
        """End a slot's worker when its open requests have moved or ended, at the latest after ``drain_s`` seconds."""
        worker = self._workers.get(slot)
        if worker is not None:
            worker.connection.drain()
            self._on_change()
            await worker.connection.empty(self._launcher.supervision.drain_s)
            self._ending.add(worker)
        supervisor.cancel()
        await asyncio.gather(supervisor, return_exceptions=True)
        if worker is not None:
            await worker.stop()
            self._ending.discard(worker)
        self._on_change()

    async def _supervise(self, slot: int, first_start: asyncio.Future[None]) -> None:
        """Run a process, and replace it when it ends; ``first_start`` gets the outcome of the first start."""
        num_deaths = num_crashes = 0
        while not self._stopping.is_set():
            lived_s, num_lost, name, node = 0.0, 0, "", ""
            try:
                config = self._config_of(slot, is_first=not first_start.done())
                is_known = self._plans_elsewhere or (first_start.done() and not self._is_elastic)
                worker = self._workers[slot] = await self._launcher.launch(config, is_known=is_known)
                self._note_ready(slot, worker.connection)
                if not first_start.done():
                    first_start.set_result(None)
                start = time.monotonic()
                death = await worker.wait_exit()
                lived_s = time.monotonic() - start
                gone = worker.connection
                num_lost, name, node = gone.num_lost, gone.name, gone.node
            except Exception as error:  # of any kind: only this task starts the next process
                was_killed = isinstance(error, EndedEarlyError) and error.was_killed
                death = Death("start", str(error) or type(error).__name__, was_killed)
                may_try_again = isinstance(error, EndedEarlyError) and num_deaths + 1 < LOOP_DEATHS
                if not first_start.done() and not may_try_again:
                    first_start.set_exception(
                        error if isinstance(error, PenstockError) else UnavailableError(death.why)
                    )
                    return
            finally:
                self._workers.pop(slot, None)
            if self._stopping.is_set() or slot not in self._supervisors:
                return
            self.error = death.why
            self.deaths[death.cause] += 1
            if lived_s >= QUICK_DEATH_S:
                num_deaths = num_crashes = 0
            num_deaths += 1
            num_crashes += not death.was_killed  # a few kills from outside only lead to pauses
            if num_crashes >= LOOP_DEATHS or num_deaths >= LOOP_KILLS:
                self._failing.add(slot)
            pause_s = self._pause_s(num_deaths)
            tell(
                "worker_gone",
                f"{self.config.name}: a worker ended ({death.why}); the next one starts in {pause_s:g} s",
                logging.WARNING,
                model=self.config.name,
                worker=name,
                node=node,
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

        The first of several workers that start together verifies the bundle: if it is damaged, none becomes ready.  The
        bundle of a folder may be made again meanwhile, so the others check that theirs is the verified one.  The first
        one also prints the notes about its ranks, once.
        """
        config = replace(self.config, says_notes=slot == 0 and is_first, role=self._role_of_slot[slot])
        if slot == 0 or not is_first or config.verify == "never":
            return config
        is_made = Path(config.path).is_dir() or is_gguf(Path(config.path))
        return replace(config, verify="once" if is_made else "never")

    def _note_ready(self, slot: int, connection: WorkerConnection) -> None:
        self._failing.discard(slot)
        self._describe(connection)
        if connection.plan is not None and connection.card is not None:  # a restart gets the same sizes
            limits = replace(self.config.options.limits, context_len=connection.card.max_len)
            if not (self._is_elastic or self._plans_elsewhere):
                limits = replace(limits, num_pages=connection.plan.num_pages)
            self.config = replace(self.config, options=replace(self.config.options, limits=limits))
        place = f" on {connection.node}" if connection.node else ""
        tell(
            "worker_ready",
            f"{self.config.name}: worker {connection.name} (process {connection.pid}{place}) is ready",
            model=self.config.name,
            worker=connection.name,
            pid=connection.pid,
            role=connection.role,
            node=connection.node,
            path=self.config.path,
            version=self.config.version,
            load_s=0.0 if connection.plan is None else round(connection.plan.load_s, 3),
            populate_s=0.0 if connection.plan is None else round(connection.plan.populate_s, 3),
        )
        self._on_change()

    def _describe(self, connection: WorkerConnection) -> None:
        """Keep the first worker's description of the model, unless a later one opened another file at the same path."""
        card, previous = connection.card, self.card
        self.max_open, self.state_id = connection.max_open, connection.state_id
        if card is None or (
            previous is not None
            and replace(card, created=previous.created) == previous
            and (connection.tokenizer, connection.weights_id) == (self.tokenizer, self.weights_id)
        ):
            return
        self.card, self.tokenizer, self.weights_id = card, connection.tokenizer, connection.weights_id

    def _pause_s(self, num_deaths: int) -> float:
        if num_deaths <= 1:
            return 0.0
        supervision = self._launcher.supervision
        return min(supervision.max_pause_s, supervision.min_pause_s * 2.0 ** min(30, num_deaths - 2))

    async def drain(self) -> None:
        """Send no more requests, move open ones or wait for their end up to ``drain_s`` seconds, and stop."""
        self._stopping.set()
        connections = self.connections
        for connection in connections:
            connection.drain()
        await asyncio.gather(*(connection.empty(self._launcher.supervision.drain_s) for connection in connections))
        await self.stop()

    async def stop(self) -> None:
        """End all processes and lose their open requests.  A second call waits for the end as well."""
        self._stopping.set()
        self._ending.update(self._workers.values())
        tasks = [*self._supervisors.values(), *self._retiring]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(worker.stop() for worker in [*self._ending]))
        self._workers.clear()
        self._ending.clear()
        self._on_change()

    def unavailable(self, name: str) -> UnavailableError:
        """Return the error for clients while no worker is ready.  ``error`` has the reason, which may name files."""
        if self.is_failing:
            return UnavailableError(f"{name} is not ready: its workers crash again and again.", 30.0)
        return UnavailableError(f"{name} is not ready: no worker is running now. Retry later.", 1.0)
