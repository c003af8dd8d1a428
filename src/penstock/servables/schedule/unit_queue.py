"""What waits for a unit: its batcher, and batches as processes are given them and give them back."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from penstock.api_errors import RefusalError
from penstock.logs import tell
from penstock.servables.process import stages_pb2 as pb
from penstock.servables.process.columns import joined, read_column
from penstock.servables.schedule.batcher import Batcher, BatchRules

if TYPE_CHECKING:
    from penstock.servables.api.plan import Unit
    from penstock.servables.process.pool import Pool
    from penstock.servables.schedule.flow import Job

__all__ = ["Flight", "UnitQueue"]

_TRIP_S: Final = 0.002
_MAX_OF_TRIP: Final = 64
"""Of stages that take one instance at a time so many go in a trip at most, and fewer when they take long: so that other
processes get some of what waits."""
Piece = tuple["Job", int, int]
"""A job, the first of its instances, and how many."""


class Flight:
    """A batch on its way."""

    __slots__ = ("began", "pieces", "queue", "size")

    def __init__(self, queue: UnitQueue, pieces: Sequence[Piece], size: int) -> None:
        self.queue, self.pieces, self.size = queue, pieces, size
        self.began = 0.0

    def message(self) -> pb.ToStage:
        """As its process gets it."""
        self.began = time.monotonic()
        found = pb.ToStage()
        batch, unit, pieces = found.batch, self.queue.unit, self.pieces
        batch.unit, batch.size = self.queue.index, self.size
        batch.counts.extend([count for _, _, count in pieces])
        for index, spec in enumerate(unit.inputs):
            arrays = [
                job.arrays[index] if count == job.count else job.arrays[index][first : first + count]
                for job, first, count in pieces
            ]
            column = batch.inputs.add(data=joined(spec, arrays))
            if not spec.is_fixed:
                for one in arrays:
                    column.sizes.extend(one.shape[1:])
        return found

    def land(self, result: pb.Result) -> None:
        """Hand over what came back; ValueError when that makes no sense."""
        ended = time.monotonic()
        if result.failures:
            failed = {one.part: one for one in result.failures}
            whole = failed.get(-1)
            if whole is not None:
                self._failed_whole(whole)
                return
            pieces = [one for part, one in enumerate(self.pieces) if part not in failed]
        else:
            failed, pieces = {}, [*self.pieces]
        counts = [count for _, _, count in pieces]
        self.queue.note(self, ended, sum(counts), result.took_ns / 1e9)
        if pieces:
            unit = self.queue.unit
            columns = [
                read_column(spec, column, counts) for spec, column in zip(unit.outputs, result.outputs, strict=True)
            ]
            times = (self.began, ended)
            for index, (job, first, count) in enumerate(pieces):
                job.ran(first, count, [one[index] for one in columns], times)
        for part, failure in failed.items():
            self._failed(self.pieces[part], failure)

    def _failed_whole(self, failure: pb.Failure) -> None:
        """Somebody's instance made a stage fail: alone each request finds out whether it was its own."""
        if self.is_shared:
            self.queue.pool.again(self.alone())
            return
        self._failed(self.pieces[0], failure)

    @property
    def is_shared(self) -> bool:
        """Whether it has instances of several requests, be they over or not."""
        return len({job for job, _, _ in self.pieces}) > 1

    def alone(self) -> list[Flight]:
        """A batch of its own for each of the requests that still wait for it."""
        jobs: dict[Job, list[Piece]] = {}
        for piece in self.pieces:
            jobs.setdefault(piece[0], []).append(piece)
        rules = self.queue.rules
        return [
            Flight(self.queue, pieces, rules.padded(sum(count for _, _, count in pieces)))
            for job, pieces in jobs.items()
            if not job.is_over
        ]

    def _failed(self, piece: Piece, failure: pb.Failure) -> None:
        job, first, _ = piece
        if not job.is_over:
            job.fail(self.queue.refusal(job, failure, first))


class UnitQueue:
    """A unit's work; ``index`` is the unit's number, ``title`` the servable's name and version for the log."""

    def __init__(self, index: int, unit: Unit, pool: Pool, title: str) -> None:
        self.index, self.unit, self.pool, self.title = index, unit, pool, title
        self.rules = replace(unit.rules or BatchRules(max_size=_MAX_OF_TRIP), max_waiting=pool.max_waiting)
        self._batcher: Batcher[Job] = Batcher(self.rules)
        self._is_each = unit.rules is None
        self._each_s = _TRIP_S
        self._is_prompt = self.rules.max_delay_s == 0
        self._varied = [index for index, spec in enumerate(unit.inputs) if not spec.is_fixed]
        if self._is_each:
            self._varied = []  # taken one by one, they need not have the same shape
        pool.queues.append(self)

    @property
    def max_waiting(self) -> int:
        """Instances that may be in no batch."""
        return self.rules.max_waiting

    @property
    def num_waiting(self) -> int:
        """Instances that are in no batch."""
        return self._batcher.num_waiting

    def add(self, job: Job) -> None:
        """Take a job, and begin it at once where a process is free."""
        self.pool.check()
        count = job.count
        if (
            self._is_prompt
            and not self._batcher.num_waiting
            and count <= self._most
            and self.pool.has_room
            and (count == 1 or _bytes_of(job, 0, count) <= self.pool.max_batch_bytes)
        ):
            self.pool.run(Flight(self, ((job, 0, count),), self.rules.padded(count)))
            return
        kind: Any = ()
        if self._varied:
            kind = tuple(job.arrays[index].shape[1:] for index in self._varied)
        self._batcher.add(job, count, time.monotonic(), priority=job.run.priority, kind=kind)
        self.pool.pump()

    def cancel(self, job: Job) -> None:
        """Take it out if it is queued."""
        self._batcher.cancel(job)

    @property
    def _most(self) -> int:
        """Instances of a trip at most."""
        if not self._is_each:
            return self.rules.max_size
        return max(1, min(_MAX_OF_TRIP, int(_TRIP_S / self._each_s)))

    def take(self, now: float) -> list[Flight]:
        """A batch that is due, cut into several where its stages take long; empty when none is."""
        batch = self._batcher.take(now)
        if batch is None:
            return []
        pieces = [(part.request, part.first, part.count) for part in batch.parts]
        flights = _cut(pieces, self._most) if self._is_each else [pieces]
        limit = self.pool.max_batch_bytes
        return [
            Flight(self, ones, 0 if self._is_each else self.rules.padded(sum(count for _, _, count in ones)))
            for flight in flights
            for ones in _cut_by_bytes(flight, limit)
        ]

    def wake_at(self) -> float:
        """When there may be a batch."""
        return self._batcher.wake_at()

    def note(self, flight: Flight, ended: float, count: int, took_s: float) -> None:
        """Count a batch that ran: for each method that has a request in it, if this is the step that it counts."""
        if not count:  # nothing came of it
            return
        took = ended - flight.began
        if self._is_each:
            self._each_s += (took_s / count - self._each_s) / 8
        routes = {job.run.route for job, _, _ in flight.pieces if job.step == job.run.route.counted}
        for route in routes:
            route.note_batch(count, took)

    def refuse_all(self, error: Exception) -> None:
        """End what waits."""
        batcher, self._batcher = self._batcher, Batcher(self.rules)
        while (batch := batcher.take(float("inf"))) is not None:
            for part in batch.parts:
                part.request.fail(error)

    def refusal(self, job: Job, failure: pb.Failure, first: int) -> RefusalError:
        """What a request is told whose instance a stage failed on; the log has the rest."""
        instance = f", instance {job.run.first + first + failure.instance}" if failure.instance >= 0 else ""
        stage = failure.stage[:128] or " or ".join(self.unit.names)
        if failure.kind == "input":
            return RefusalError(400, f"{stage}{instance}: {failure.text}", code="invalid_input")
        what = failure.text if failure.kind == "result" else f"{failure.text}; the log has more"
        told = f"stage {stage} failed{instance}: {what}"
        tell(
            "stage_failed", f"{self.title}: {told}", logging.WARNING, request_id=job.run.request_id, stage=stage,
            kind=failure.kind, trace=failure.trace,
        )  # fmt: skip
        return RefusalError(500, told, code="stage_failed")

    def lost(self, flight: Flight, at: tuple[int, int], is_hung: bool, why: str) -> None:
        """The process of a batch is gone: each of its requests runs once more, alone; who was alone is refused."""
        alone = flight.alone()
        if flight.is_shared:
            self.pool.again(alone)
            return
        names = self.unit.names
        stage = names[at[0]] if at[0] < len(names) else " or ".join(names)
        for one in alone:
            job, first, _ = one.pieces[0]
            instance = f", instance {job.run.first + first + at[1]}" if at[1] >= 0 and len(one.pieces) == 1 else ""
            if is_hung:
                error = RefusalError(504, f"stage {stage}{instance} took longer than it may", code="stage_hung")
            else:
                error = RefusalError(500, f"stage {stage}{instance} ended its process: {why}", code="stage_died")
            tell("stage_lost", f"{self.title}: {error}", logging.WARNING, request_id=job.run.request_id, stage=stage)
            job.fail(error)


def _cut(pieces: Sequence[Piece], most: int) -> list[list[Piece]]:
    """The same instances in lists of at most so many."""
    found: list[list[Piece]] = [[]]
    room = most
    for job, first, count in pieces:
        while count:
            if not room:
                found.append([])
                room = most
            number = min(count, room)
            found[-1].append((job, first, number))
            first, count, room = first + number, count - number, room - number
    return found


def _bytes_of(job: Job, first: int, count: int) -> int:
    """Of so many instances' inputs."""
    return sum(
        sum(map(len, one[first : first + count].flat)) + 4 * one[first : first + count].size
        if one.dtype.hasobject
        else one.nbytes // job.count * count
        for one in job.arrays
    )


def _cut_by_bytes(pieces: list[Piece], most: int) -> list[list[Piece]]:
    """The same instances in lists of at most so many bytes; an instance that has more is alone in one."""
    if sum(_bytes_of(*piece) for piece in pieces) <= most:
        return [pieces]
    found: list[list[Piece]] = []
    room = 0
    for job, first, count in pieces:
        for number in range(first, first + count):
            size = _bytes_of(job, number, 1)
            if not found or size > room:
                found.append([])
                room = most
            room -= size
            ones = found[-1]
            if ones and ones[-1][0] is job:
                ones[-1] = (job, ones[-1][1], ones[-1][2] + 1)
            else:
                ones.append((job, number, 1))
    return found
