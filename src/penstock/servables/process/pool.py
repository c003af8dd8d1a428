"""Processes that run the same, kept alive: each has one batch at a time, and who dies, hangs or grows is replaced.

The first replacement starts at once, the next after growing pauses while processes die before they have done anything.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from penstock.errors import PenstockError, UnavailableError
from penstock.llm.backend import WorkerState
from penstock.logs import tell
from penstock.processes.supervision import LOOP_DEATHS, Death, SupervisionPolicy
from penstock.servables.process.pool_worker import PoolWorker
from penstock.servables.process.stage_process import StageProcess, launch

if TYPE_CHECKING:
    from penstock.servables.api.declare import Settings
    from penstock.servables.process import stages_pb2 as pb
    from penstock.servables.schedule.unit_queue import Flight, UnitQueue

__all__ = ["Pool"]

_FAR_ABOVE: Final = 2
"""Times the memory limit: a process that has so much gets no further batch while its replacement starts."""


class Pool:
    """``size`` processes that are started with ``start``.  ``title`` names it to people."""

    def __init__(
        self, title: str, start: pb.Start, size: int, settings: Settings, supervision: SupervisionPolicy
    ) -> None:
        self.title, self.timeout_s = title, settings.timeout_s
        self.max_waiting = settings.max_waiting
        self.max_batch_bytes = settings.max_batch_mib << 20
        self._limit_bytes = (settings.memory_limit_mib or 0) << 20
        self.queues: list[UnitQueue] = []
        self.free: list[PoolWorker] = []
        self.deaths: Counter[str] = Counter()
        self.size = size
        self._start, self._patience = start, supervision
        self._seats: list[PoolWorker] = []
        self._again: deque[Flight] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = float("inf")
        self._keepers: list[asyncio.Task[None]] = []
        self._retiring: set[asyncio.Task[None]] = set()
        self._failing: set[int] = set()
        self._turn = 0
        self._is_stopping = False

    @property
    def is_ready(self) -> bool:
        """Whether there is a process."""
        return bool(self._seats) and not self._is_stopping

    @property
    def pids(self) -> list[int]:
        """Of the processes that it has now."""
        return [one.process.pid for one in self._seats]

    def workers(self) -> list[WorkerState]:
        """Its processes, for operators."""
        return [
            WorkerState(self.title, "draining" if one.is_leaving else "ready", one.process.pid, 0, 0.0,
                        0 if one.flight is None else len(one.flight.pieces))
            for one in self._seats
        ]  # fmt: skip

    def check(self) -> None:
        """UnavailableError when nobody would run what is added."""
        if self._is_stopping:
            raise UnavailableError(f"{self.title} is being unloaded")
        if not self._seats and len(self._failing) == self.size:
            raise self._failing_error()

    def _failing_error(self) -> UnavailableError:
        """The error for clients.  The log has the reason, which may name files of this machine."""
        return UnavailableError(f"{self.title}: its processes crash again and again.", 5.0)

    @property
    def has_room(self) -> bool:
        """Whether a batch can be run now, before which nothing waits that is to run again."""
        return bool(self.free) and not self._again

    def run(self, flight: Flight) -> None:
        """Give a batch to a process that is free.  One that cannot be sent fails."""
        while self.free:
            seat = self.free.pop()
            try:
                if seat.run(flight):
                    return
            except Exception as error:
                self.free.append(seat)
                for job, _, _ in flight.pieces:
                    job.fail(error)
                return
        self._again.appendleft(flight)  # those that seemed free are gone

    def again(self, flights: Sequence[Flight]) -> None:
        """Batches that run before others."""
        self._again.extend(flights)
        self.pump()

    def pump(self) -> None:
        """Give what is due to who is free."""
        if not self.free:
            return
        now = time.monotonic()
        while self.free:
            if not self._again and not self._fill(now):
                break
            if self._again:
                flight = self._again.popleft()
                if not all(job.is_over for job, _, _ in flight.pieces):
                    self.run(flight)
        self._set_timer()

    def _fill(self, now: float) -> bool:
        """Take a due batch of the queue whose turn it is."""
        queues = self.queues
        for offset in range(len(queues)):
            queue = queues[(self._turn + offset) % len(queues)]
            if queue.num_waiting and (flights := queue.take(now)):
                self._turn = (self._turn + offset + 1) % len(queues)
                self._again.extend(flights)
                return True
        return False

    def _set_timer(self) -> None:
        """Wake when a batch is due that is not full, if somebody is free then."""
        at = float("inf")
        if self.free:
            at = min((one.wake_at() for one in self.queues if one.num_waiting), default=at)
        if at == self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_at = at
        if at < float("inf"):
            self._timer = asyncio.get_running_loop().call_at(at, self._wake)

    def _wake(self) -> None:
        self._timer, self._timer_at = None, float("inf")
        self.pump()

    async def start(self, first: StageProcess | None = None) -> None:
        """Start all, ``first`` being one that is there; raises the first one's error and leaves nothing then."""
        loop = asyncio.get_running_loop()
        firsts: list[asyncio.Future[None]] = [loop.create_future() for _ in range(self.size)]
        for place, done in enumerate(firsts):
            seat = None
            if place == 0 and first is not None:  # in its seat at once: whatever happens next, it is ended with that
                seat = self._sit(place, first)
                done.set_result(None)
            self._keepers.append(asyncio.ensure_future(self._keep(place, done, seat)))
        try:
            await asyncio.gather(*firsts)
        except BaseException:
            await self.stop()
            raise

    async def _keep(self, place: int, first: asyncio.Future[None], seat: PoolWorker | None) -> None:
        num_deaths = 0
        while not self._is_stopping:
            try:
                if seat is None:
                    process = await self._launch(first)
                    if process is None:
                        return
                    seat = self._sit(place, process)
                    if not first.done():
                        first.set_result(None)
                death = await self._watch(seat)
                if death is None:
                    seat = await self._replaced(place, seat)
                    continue
            except Exception as error:  # whatever it is, nobody else would start the next one
                death = Death("start", str(error) or type(error).__name__)
            num_deaths = 1 if seat is not None and seat.num_batches > 0 else num_deaths + 1
            if seat is not None:
                await self._bury(seat, death)
            seat = None
            await self._pause(place, death, num_deaths)

    async def _replaced(self, place: int, seat: PoolWorker) -> PoolWorker:
        """The process that takes the place of one that grew; that one, when none can be had yet and it may go on.  That
        it dies meanwhile is found by whoever attends to it.
        """
        try:
            process = await launch(self._start, self._patience.load_s)
        except PenstockError as error:
            tell("stage_gone", f"{self.title}: no replacement: {error}", logging.WARNING, stage=self.title)
            if seat.is_leaving:  # it has far too much, or is gone, so this ends as if it had died
                await self._retire(seat)
                raise
            await asyncio.wait((seat.gone,), timeout=self._patience.max_pause_s)
            seat.is_excessive.clear()
            return seat
        found = self._sit(place, process)
        retiring = asyncio.ensure_future(self._retire(seat))
        self._retiring.add(retiring)
        retiring.add_done_callback(self._retiring.discard)
        await asyncio.wait((retiring, found.gone), return_when=asyncio.FIRST_COMPLETED)
        return found

    async def _launch(self, first: asyncio.Future[None]) -> StageProcess | None:
        """A process; None when the very first one could not be had, which ``first`` says."""
        try:
            return await launch(self._start, self._patience.load_s)
        except Exception as error:
            if first.done():
                raise
            first.set_exception(error)
            return None

    def _sit(self, place: int, process: StageProcess) -> PoolWorker:
        self._failing.discard(place)
        seat = PoolWorker(self, process)
        seat.gone = asyncio.ensure_future(self._attend(seat))
        self._seats.append(seat)
        self.free.append(seat)
        tell("stage_ready", f"{self.title}: process {process.pid} is ready", stage=self.title, pid=process.pid)
        self.pump()
        return seat

    async def _watch(self, seat: PoolWorker) -> Death | None:
        """How its process ended; None when it should be replaced."""
        grown = asyncio.ensure_future(seat.is_excessive.wait())
        try:
            await asyncio.wait((seat.gone, grown), return_when=asyncio.FIRST_COMPLETED)
            return seat.gone.result() if seat.gone.done() else None
        finally:
            grown.cancel()

    async def _attend(self, seat: PoolWorker) -> Death:
        """Until its process has ended, however that came, and what it had is with others."""
        death = await seat.process.ended()
        await self._bury(seat, death)
        return death

    async def _retire(self, seat: PoolWorker) -> None:
        """Let it finish its batch and end."""
        seat.leave()
        idle = asyncio.ensure_future(seat.idle.wait())
        try:
            await asyncio.wait((seat.gone, idle), return_when=asyncio.FIRST_COMPLETED)
        finally:
            idle.cancel()
        if seat.gone.done():
            death = seat.gone.result()
            self.deaths[death.cause] += 1
            tell(
                "stage_gone", f"{self.title}: a process is gone while it was replaced ({death.why})", logging.WARNING,
                stage=self.title, cause=death.cause,
            )  # fmt: skip
            return
        seat.gone.cancel()
        seat.close()
        await seat.process.stop()
        if seat in self._seats:
            self._seats.remove(seat)

    async def _bury(self, seat: PoolWorker, death: Death) -> None:
        """Its process is gone, or is ended now: what it had goes to others.  Doing it again does nothing."""
        seat.close()
        await seat.process.stop()
        if seat in self._seats:
            self._seats.remove(seat)
        flight, seat.flight = seat.flight, None
        if flight is None:
            return
        if seat.process.has_begun:
            flight.queue.lost(flight, seat.process.at(), death.cause == "hang", death.why)
        else:  # whatever ended it, this batch did not
            self.again([flight])

    async def _pause(self, place: int, death: Death, num_deaths: int) -> None:
        """Say what happened, and wait before the next one."""
        self.deaths[death.cause] += 1
        if num_deaths >= LOOP_DEATHS:
            self._failing.add(place)
        if not self._seats and len(self._failing) == self.size:
            self._refuse_all()
        supervision, pause_s = self._patience, 0.0
        if num_deaths > 1:
            pause_s = min(supervision.max_pause_s, supervision.min_pause_s * 2.0 ** min(30, num_deaths - 2))
        tell(
            "stage_gone", f"{self.title}: a process is gone ({death.why}); the next one starts in {pause_s:g} s",
            logging.WARNING, stage=self.title, cause=death.cause, deaths_in_a_row=num_deaths, restart_in_s=pause_s,
        )  # fmt: skip
        await asyncio.sleep(pause_s)

    def note_excess(self, seat: PoolWorker, used_bytes: int, flight: Flight) -> None:
        """A process has more memory than it may: another one is started, and takes its place."""
        seat.is_excessive.set()
        limit = self._limit_bytes
        if used_bytes > _FAR_ABOVE * limit:
            seat.leave()
        tell(
            "stage_grew",
            f"{self.title}: process {seat.process.pid} has {used_bytes >> 20} MiB, above {limit >> 20}, after "
            f"{', '.join(flight.queue.unit.names)}: it is replaced",
            logging.WARNING, stage=self.title, pid=seat.process.pid, bytes=used_bytes,
        )  # fmt: skip

    def _refuse_all(self) -> None:
        error = self._failing_error()
        if self._is_stopping:
            error = UnavailableError(f"{self.title} is being unloaded")
        for flight in self._again:
            for job, _, _ in flight.pieces:
                job.fail(error)
        self._again.clear()
        for queue in self.queues:
            queue.refuse_all(error)

    async def stop(self) -> None:
        """End all processes; what is open is refused."""
        self._is_stopping = True
        tasks = [*self._keepers, *self._retiring, *(one.gone for one in self._seats)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._timer is not None:
            self._timer.cancel()
        seats, self._seats = self._seats, []
        self._refuse_all()
        for seat in seats:
            seat.close()
            if seat.flight is not None:
                for job, _, _ in seat.flight.pieces:
                    job.fail(UnavailableError(f"{self.title} is being unloaded"))
        await asyncio.gather(*(one.process.stop() for one in seats))
