"""A pool of identical processes: each runs one batch at a time, and one that dies, hangs or grows is replaced.

The first replacement starts at once.  While processes die before they finish a batch, the pauses between restarts grow.
Other machines may join and run further processes of the pool, which get a batch when no process here is free.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar

from penstock.errors import InvalidFileError, PenstockError, UnavailableError
from penstock.llm.backend import WorkerState
from penstock.logs import tell
from penstock.processes.supervision import LOOP_DEATHS, Death, SupervisionPolicy
from penstock.servables.process.pool_worker import PoolWorker
from penstock.servables.process.servable_worker import ServableWorker, start_servable_worker

if TYPE_CHECKING:
    from penstock.servables.api.settings import Settings
    from penstock.servables.process import worker_messages_pb2 as pb
    from penstock.servables.process.pool_contract import PoolBatch, PoolMachine, PoolProcess, PoolQueue
    from penstock.servables.process.pool_worker import WorkerOwner

    def _fits(pool: Pool) -> WorkerOwner:
        return pool


__all__ = ["Pool"]

T = TypeVar("T")

_JOINED: Final = -1
"""The index of a process on another machine, which has no place among the ``size`` processes."""
_RETIRE_FACTOR: Final = 2
"""A process above this multiple of its memory limit gets no further batch while its replacement starts."""


class Pool:
    """``size`` processes that are started with ``start``.  ``title`` names the pool in messages and logs.

    ``cores``: those on which each process runs; empty: any.
    """

    def __init__(
        self, title: str, start: pb.Start, size: int, settings: Settings, supervision: SupervisionPolicy,
        cores: Sequence[Sequence[int]] = (),
    ) -> None:  # fmt: skip
        self.title, self.timeout_s = title, settings.timeout_s
        self.max_waiting = settings.max_waiting
        self.max_batch_bytes = settings.max_batch_mib << 20
        self._limit_bytes = (settings.memory_limit_mib or 0) << 20
        self.queues: list[PoolQueue] = []
        self.workers: list[PoolWorker] = []
        self.free: list[PoolWorker] = []
        self.deaths: Counter[str] = Counter()
        self.size = size
        self._start, self._supervision, self._cores = start, supervision, cores
        self._ready_batches: deque[PoolBatch] = deque()
        self._dispatching: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = float("inf")
        self._supervisors: list[asyncio.Task[None]] = []
        self._retiring: set[asyncio.Task[None]] = set()
        self._joined: set[asyncio.Task[None]] = set()
        self._failing: set[int] = set()
        self._next_queue = 0
        self._manifest = ""
        self._is_stopping = False

    @property
    def is_ready(self) -> bool:
        """Return True if at least one process runs."""
        return bool(self.workers) and not self._is_stopping

    @property
    def pids(self) -> list[int]:
        """The ids of the processes that run on this machine now."""
        return [worker.process.pid for worker in self.workers if not worker.process.is_joined]

    def worker_states(self) -> list[WorkerState]:
        """Return the states of the processes, for operators."""
        return [
            WorkerState(self.title, "draining" if worker.is_retired else "ready", worker.process.pid, 0, 0.0,
                        0 if worker.batch is None else worker.batch.num_parts)
            for worker in self.workers
        ]  # fmt: skip

    def check_available(self) -> None:
        """Raise UnavailableError if no process would run a new batch."""
        if self._is_stopping:
            raise UnavailableError(f"{self.title} is being unloaded")
        if not self.workers and len(self._failing) == self.size:
            raise self._crash_loop_error()

    def _crash_loop_error(self) -> UnavailableError:
        """Return the error for clients.  Only the log says why processes die: the reason may name local files."""
        return UnavailableError(f"{self.title}: the processes crash repeatedly; retry later", 5.0)

    @property
    def has_room(self) -> bool:
        """Return True if a batch can run now: a process is free, and no batch waits to be rerun."""
        return bool(self.free) and not self._ready_batches

    def run(self, batch: PoolBatch) -> None:
        """Send a batch to a free process.  A batch that cannot be encoded fails."""
        while self.free:
            worker = self.free.pop()
            try:
                if worker.run(batch):
                    return
            except Exception as error:
                self.free.append(worker)
                batch.fail(error)
                return
        self._ready_batches.appendleft(batch)  # the processes that seemed free are gone

    def rerun(self, batches: Sequence[PoolBatch]) -> None:
        """Run these batches before any that wait in queues."""
        self._ready_batches.extend(batches)
        self.dispatch()

    def dispatch_soon(self) -> None:
        """Call ``dispatch`` after everything else that runs in this turn of the event loop."""
        if self.free and self._dispatching is None:
            self._dispatching = asyncio.get_running_loop().call_soon(self.dispatch)

    def dispatch(self) -> None:
        """Send batches that are due to free processes."""
        if self._dispatching is not None:
            self._dispatching.cancel()
            self._dispatching = None
        if not self.free:
            return
        now = time.monotonic()
        while self.free:
            if not self._ready_batches and not self._take_due_batches(now):
                break
            if self._ready_batches:
                batch = self._ready_batches.popleft()
                if not batch.is_abandoned:
                    self.run(batch)
        self._set_timer()

    def _take_due_batches(self, now: float) -> bool:
        """Take due batches from the queues in turn; False if none is due."""
        queues = self.queues
        for offset in range(len(queues)):
            queue = queues[(self._next_queue + offset) % len(queues)]
            if queue.num_waiting and (batches := queue.take(now)):
                self._next_queue = (self._next_queue + offset + 1) % len(queues)
                self._ready_batches.extend(batches)
                return True
        return False

    def _set_timer(self) -> None:
        """Wake up when a batch that is not full becomes due, if a process is free then."""
        at = float("inf")
        if self.free:
            at = min((queue.wake_at() for queue in self.queues if queue.num_waiting), default=at)
        if at == self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_at = at
        if at < float("inf"):
            self._timer = asyncio.get_running_loop().call_at(at, self._on_timer)

    def _on_timer(self) -> None:
        self._timer, self._timer_at = None, float("inf")
        self.dispatch()

    async def start(self, first: ServableWorker | None = None) -> None:
        """Start all processes; ``first`` is one that runs already.

        If a process fails to start, all are stopped and its error is raised.
        """
        self._manifest = "" if first is None else first.manifest
        loop = asyncio.get_running_loop()
        started: list[asyncio.Future[None]] = [loop.create_future() for _ in range(self.size)]
        for index, future in enumerate(started):
            worker = None
            if index == 0 and first is not None:  # added at once, so that ``stop`` ends it whatever happens next
                worker = self._add_worker(index, first)
                future.set_result(None)
            self._supervisors.append(asyncio.ensure_future(self._supervise(index, future, worker)))
        try:
            await asyncio.gather(*started)
        except BaseException:
            await self.stop()
            raise

    async def _supervise(self, index: int, started: asyncio.Future[None], worker: PoolWorker | None) -> None:
        """Keep the process number ``index`` running."""
        num_deaths = 0
        while not self._is_stopping:
            try:
                if worker is None:
                    process: PoolProcess | None = await self._start_process(index, started)
                    if process is None:
                        return
                    worker = self._add_worker(index, process)
                    if not started.done():
                        started.set_result(None)
                death = await self._watch(worker)
                if death is None:
                    worker = await self._replace(index, worker)
                    continue
            except Exception as error:  # any error: without this task no replacement would ever start
                death = Death("start", str(error) or type(error).__name__)
            num_deaths = 1 if worker is not None and worker.num_batches > 0 else num_deaths + 1
            if worker is not None:
                await self._discard(worker, death)
            worker = None
            await self._pause(index, death, num_deaths)

    async def _replace(self, index: int, worker: PoolWorker) -> PoolWorker:
        """Return the process that replaces one that grew.

        If no replacement starts and the old process may continue, return the old one.  If it dies meanwhile, the next
        ``_watch`` notices.
        """
        try:
            process = await start_servable_worker(self._start_of(index), self._supervision.load_s)
        except PenstockError as error:
            tell("stage_gone", f"{self.title}: no replacement started: {error}", logging.WARNING, stage=self.title)
            if worker.is_retired:  # it is far above its limit, or gone: handle this as a death
                await self._retire(worker)
                raise
            await asyncio.wait((worker.gone,), timeout=self._supervision.max_pause_s)
            worker.is_over_limit.clear()
            return worker
        replacement = self._add_worker(index, process)
        retiring = asyncio.ensure_future(self._retire(worker))
        self._retiring.add(retiring)
        retiring.add_done_callback(self._retiring.discard)
        await asyncio.wait((retiring, replacement.gone), return_when=asyncio.FIRST_COMPLETED)
        return replacement

    def _start_of(self, index: int) -> pb.Start:
        """Return the first message to the process number ``index``."""
        if not self._cores:
            return self._start
        start = type(self._start)()
        start.CopyFrom(self._start)
        start.cores.extend(self._cores[index])
        return start

    async def _start_process(self, index: int, started: asyncio.Future[None]) -> ServableWorker | None:
        """Start a process.  Return None if the very first start fails; ``started`` has the error then."""
        try:
            return await start_servable_worker(self._start_of(index), self._supervision.load_s)
        except Exception as error:
            if started.done():
                raise
            started.set_exception(error)
            return None

    def _add_worker(self, index: int, process: PoolProcess) -> PoolWorker:
        self._failing.discard(index)
        worker = PoolWorker(self, process)
        worker.gone = asyncio.ensure_future(self._wait_gone(worker))
        self.workers.append(worker)
        self._release(worker)
        tell("stage_ready", f"{self.title}: {process.label} is ready", stage=self.title, pid=process.pid)
        self.dispatch()
        return worker

    def _release(self, worker: PoolWorker) -> None:
        """Note that a process is free.  The last one in the list gets the next batch, those of this machine first."""
        if worker.process.is_joined:
            self.free.insert(0, worker)
        else:
            self.free.append(worker)

    def join(self, machine: PoolMachine) -> None:
        """Run further processes on another machine until it leaves."""
        for _ in range(0 if self._is_stopping else machine.num_processes):
            task = asyncio.ensure_future(self._supervise_joined(machine))
            self._joined.add(task)
            task.add_done_callback(self._joined.discard)

    async def _supervise_joined(self, machine: PoolMachine) -> None:
        """Keep one process on another machine running until that machine leaves."""
        leaving: asyncio.Future[Any] = asyncio.ensure_future(machine.leaving.wait())
        num_deaths = 0
        try:
            while not leaving.done():
                worker = None
                try:
                    starting = machine.start(self._start, self._supervision.load_s)
                    process = await _unless(leaving, starting, lambda process: process.stop())
                    if process is None:
                        return
                    if process.manifest != self._manifest:
                        await process.stop()
                        raise InvalidFileError(f"{self.title}: servable.py declares something else on {machine.name}")
                    worker = self._add_worker(_JOINED, process)
                    await _unless(leaving, self._watch(worker))
                    if not worker.gone.done():  # it grew, or its machine is about to leave
                        await self._retire(worker)
                        continue
                    death = worker.gone.result()
                except Exception as error:  # any error, as for the processes of this machine
                    death = Death("start", str(error) or type(error).__name__)
                num_deaths = 1 if worker is not None and worker.num_batches > 0 else num_deaths + 1
                pause_s = self._pause_s(num_deaths)
                self.deaths[death.cause] += 1
                tell(
                    "stage_gone", f"{self.title}: a process on {machine.name} ended ({death.why})", logging.WARNING,
                    stage=self.title, cause=death.cause, deaths_in_a_row=num_deaths, restart_in_s=pause_s,
                )  # fmt: skip
                await asyncio.wait((leaving,), timeout=pause_s)
        finally:
            leaving.cancel()
            if not self._is_stopping:
                self._refuse_if_failing()

    async def _watch(self, worker: PoolWorker) -> Death | None:
        """Wait until the process ends and return how; return None if it exceeds its memory limit before that."""
        over_limit = asyncio.ensure_future(worker.is_over_limit.wait())
        try:
            await asyncio.wait((worker.gone, over_limit), return_when=asyncio.FIRST_COMPLETED)
            return worker.gone.result() if worker.gone.done() else None
        finally:
            over_limit.cancel()

    async def _wait_gone(self, worker: PoolWorker) -> Death:
        """Wait until the process has ended and its batch was passed on."""
        death = await worker.process.wait_ended()
        await self._discard(worker, death)
        return death

    async def _retire(self, worker: PoolWorker) -> None:
        """Let a worker finish its batch, then end its process."""
        worker.retire()
        idle = asyncio.ensure_future(worker.idle.wait())
        try:
            await asyncio.wait((worker.gone, idle), return_when=asyncio.FIRST_COMPLETED)
        finally:
            idle.cancel()
        if worker.gone.done():
            death = worker.gone.result()
            self.deaths[death.cause] += 1
            tell(
                "stage_gone", f"{self.title}: a process ended while it was being replaced ({death.why})",
                logging.WARNING, stage=self.title, cause=death.cause,
            )  # fmt: skip
            return
        worker.gone.cancel()
        worker.close()
        await worker.process.stop()
        if worker in self.workers:
            self.workers.remove(worker)

    async def _discard(self, worker: PoolWorker, death: Death) -> None:
        """End the process if it still runs, and pass its batch to others.  Repeated calls have no effect."""
        worker.close()
        await worker.process.stop()
        if worker in self.workers:
            self.workers.remove(worker)
        batch, worker.batch = worker.batch, None
        if batch is None:
            return
        if death.cause == "lost":
            batch.machine_lost(death.why)
        elif worker.process.has_begun and death.was_killed:
            batch.process_killed(death.why)
        elif worker.process.has_begun:
            batch.process_lost(worker.process.position(), death.cause == "hang", death.why)
        else:  # the process never read the batch, so the batch did not cause its death
            self.rerun([batch])

    async def _pause(self, index: int, death: Death, num_deaths: int) -> None:
        """Log a death, and wait before the next start."""
        self.deaths[death.cause] += 1
        if num_deaths >= LOOP_DEATHS:
            self._failing.add(index)
        self._refuse_if_failing()
        pause_s = self._pause_s(num_deaths)
        tell(
            "stage_gone", f"{self.title}: a process ended ({death.why}); the next one starts in {pause_s:g} s",
            logging.WARNING, stage=self.title, cause=death.cause, deaths_in_a_row=num_deaths, restart_in_s=pause_s,
        )  # fmt: skip
        await asyncio.sleep(pause_s)

    def _pause_s(self, num_deaths: int) -> float:
        """Return the pause before the next start after so many deaths in a row."""
        if num_deaths <= 1:
            return 0.0
        supervision = self._supervision
        return min(supervision.max_pause_s, supervision.min_pause_s * 2.0 ** min(30, num_deaths - 2))

    def batch_done(self, worker: PoolWorker) -> None:
        """See WorkerOwner."""
        if not worker.is_retired:
            self._release(worker)
        self.dispatch()

    def withdraw(self, worker: PoolWorker) -> None:
        """See WorkerOwner."""
        with suppress(ValueError):
            self.free.remove(worker)

    def memory_exceeded(self, worker: PoolWorker, used_bytes: int, batch: PoolBatch) -> None:
        """See WorkerOwner.  A replacement starts and takes the place of the process."""
        worker.is_over_limit.set()
        limit = self._limit_bytes
        if used_bytes > _RETIRE_FACTOR * limit:
            worker.retire()
        tell(
            "stage_grew",
            f"{self.title}: {worker.process.label} uses {used_bytes >> 20} MiB, above its limit of "
            f"{limit >> 20} MiB, after {', '.join(batch.stage_names)}; it will be replaced",
            logging.WARNING, stage=self.title, pid=worker.process.pid, bytes=used_bytes,
        )  # fmt: skip

    def _refuse_if_failing(self) -> None:
        """End everything that waits with an error if no process runs and all of this machine crash repeatedly."""
        if not self.workers and len(self._failing) == self.size:
            self._refuse_all()

    def _refuse_all(self) -> None:
        """End everything that waits with an error."""
        error = self._crash_loop_error()
        if self._is_stopping:
            error = UnavailableError(f"{self.title} is being unloaded")
        for batch in self._ready_batches:
            batch.fail(error)
        self._ready_batches.clear()
        for queue in self.queues:
            queue.refuse_all(error)

    async def stop(self) -> None:
        """End all processes; open requests are refused."""
        self._is_stopping = True
        tasks = [*self._supervisors, *self._joined, *self._retiring, *(worker.gone for worker in self.workers)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for handle in (self._timer, self._dispatching):
            if handle is not None:
                handle.cancel()
        workers, self.workers = self.workers, []
        self._refuse_all()
        for worker in workers:
            worker.close()
            if worker.batch is not None:
                worker.batch.fail(UnavailableError(f"{self.title} is being unloaded"))
        await asyncio.gather(*(worker.process.stop() for worker in workers))


async def _unless(
    stopping: asyncio.Future[Any], work: Coroutine[Any, Any, T], undo: Callable[[T], Awaitable[None]] | None = None
) -> T | None:
    """Return the result of ``work``; cancel it and return None if ``stopping`` is done first.

    ``undo`` is called with a result that the caller does not get, because it was cancelled at that moment.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait((task, stopping), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    except asyncio.CancelledError:
        if undo is not None and task.done() and not task.cancelled() and task.exception() is None:
            await undo(task.result())
        raise
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
