"""The queue of a unit: its batcher, and the batches that are sent to processes."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from penstock.api_errors import RefusalError
from penstock.errors import UnavailableError
from penstock.logs import tell
from penstock.servables.api.batch_rules import BatchRules
from penstock.servables.process import worker_messages_pb2 as pb
from penstock.servables.process.columns import encode_arrays, read_column
from penstock.servables.schedule.batcher import Batcher

if TYPE_CHECKING:
    from penstock.servables.api.manifest import Unit
    from penstock.servables.process.pool import Pool
    from penstock.servables.process.pool_contract import PoolBatch, PoolQueue
    from penstock.servables.schedule.method_run import Job, StepQueue

    def _fits(batch: UnitBatch, queue: UnitQueue) -> tuple[PoolBatch, PoolQueue, StepQueue]:
        return batch, queue, queue


__all__ = ["UnitBatch", "UnitQueue"]

_TRIP_S: Final = 0.002
"""The target duration of a round trip for stages that take one instance at a time."""
_MAX_TRIP_SIZE: Final = 64
"""The maximum number of instances in a round trip.  Slow stages get fewer, so that other processes share the work."""
_MAX_LOSSES: Final = 2
"""After so many losses of its process or machine, a batch is taken for the cause and does not run again."""
Piece = tuple["Job", int, int]
"""A job, the first of its instances in the piece, and their number."""


class UnitBatch:
    """A batch that is sent to a process.

    ``size``: its rows including padding; 0 for stages that take one instance at a time.
    ``began``: when it was sent, in seconds of the monotonic clock.  ``num_lost``: how often the machine that ran it was
    lost, or a signal from outside ended its process.
    """

    __slots__ = ("began", "num_lost", "pieces", "queue", "size")

    def __init__(self, queue: UnitQueue, pieces: Sequence[Piece], size: int) -> None:
        self.queue, self.pieces, self.size = queue, pieces, size
        self.began = 0.0
        self.num_lost = 0

    @property
    def num_parts(self) -> int:
        """See PoolBatch."""
        return len(self.pieces)

    @property
    def stage_names(self) -> Sequence[str]:
        """See PoolBatch."""
        return self.queue.unit.names

    @property
    def is_abandoned(self) -> bool:
        """See PoolBatch."""
        return all(job.is_over for job, _, _ in self.pieces)

    def message(self) -> pb.ToStage:
        """Return the message for the process, and record when it is sent."""
        self.began = time.monotonic()
        message = pb.ToStage()
        batch, unit, pieces = message.batch, self.queue.unit, self.pieces
        batch.unit, batch.size = self.queue.index, self.size
        batch.counts.extend([count for _, _, count in pieces])
        for index, spec in enumerate(unit.inputs):
            arrays = [
                job.arrays[index] if count == job.count else job.arrays[index][first : first + count]
                for job, first, count in pieces
            ]
            column = batch.inputs.add(data=encode_arrays(spec, arrays))
            if not spec.is_fixed:
                for array in arrays:
                    column.sizes.extend(array.shape[1:])
        return message

    def complete(self, result: pb.Result) -> None:
        """Pass the outputs and failures to their jobs.  Raises ValueError if the result does not fit the batch."""
        ended = time.monotonic()
        if result.failures:
            failed = {failure.part: failure for failure in result.failures}
            whole = failed.get(-1)
            if whole is not None:
                self._fail_whole(whole)
                return
            pieces = [piece for part, piece in enumerate(self.pieces) if part not in failed]
        else:
            failed, pieces = {}, [*self.pieces]
        counts = [count for _, _, count in pieces]
        self.queue.note_batch(self, ended, sum(counts), result.took_ns / 1e9)
        if pieces:
            unit = self.queue.unit
            columns = [
                read_column(spec, column, counts) for spec, column in zip(unit.outputs, result.outputs, strict=True)
            ]
            times = (self.began, ended)
            for index, (job, first, count) in enumerate(pieces):
                job.add_result(first, count, [column[index] for column in columns], times)
        for part, failure in failed.items():
            self._fail_piece(self.pieces[part], failure)

    def _fail_whole(self, failure: pb.Failure) -> None:
        """Handle the failure of a stage that takes batches: rerun each request separately to find the one at fault."""
        if self.is_shared:
            self.queue.pool.rerun(self.split_by_request())
            return
        self._fail_piece(self.pieces[0], failure)

    @property
    def is_shared(self) -> bool:
        """Return True if it contains instances of several requests, including requests that have ended."""
        return len({job for job, _, _ in self.pieces}) > 1

    def split_by_request(self) -> list[UnitBatch]:
        """Return a separate batch for each request that is still open."""
        jobs: dict[Job, list[Piece]] = {}
        for piece in self.pieces:
            jobs.setdefault(piece[0], []).append(piece)
        rules = self.queue.rules
        return [
            UnitBatch(self.queue, pieces, rules.padded(sum(count for _, _, count in pieces)))
            for job, pieces in jobs.items()
            if not job.is_over
        ]

    def _fail_piece(self, piece: Piece, failure: pb.Failure) -> None:
        job, first, _ = piece
        if not job.is_over:
            job.fail(self.queue.failure_error(job, failure, first))

    def fail(self, error: Exception) -> None:
        """End its requests with an error."""
        for job, _, _ in self.pieces:
            job.fail(error)

    def process_lost(self, position: tuple[int, int], is_hung: bool, why: str) -> None:
        """Handle the death of its process: rerun each request separately, or refuse the only one.

        ``position``: the stage of the unit and the instance of the batch that ran, -1 for all instances.
        """
        batches = self.split_by_request()
        if self.is_shared:
            self.queue.pool.rerun(batches)
            return
        for batch in batches:
            self.queue.refuse_lost(batch.pieces, position, is_hung, why)

    def process_killed(self, why: str) -> None:
        """See PoolBatch.  Its request is not known to be the reason, but counts as one if that happens again."""
        if not self.is_shared:
            self.machine_lost(why)
            return
        batches = self.split_by_request()
        for batch in batches:
            batch.num_lost = self.num_lost + 1
        self.queue.pool.rerun(batches)

    def machine_lost(self, why: str) -> None:
        """See PoolBatch."""
        self.num_lost += 1
        if self.num_lost < _MAX_LOSSES:
            self.queue.pool.rerun([self])
        else:
            self.fail(UnavailableError(f"{' or '.join(self.stage_names)}: {why}; retry later", 1.0))


class UnitQueue:
    """The queue of a unit.

    ``index``: the number of the unit.  ``title``: the name and version of the servable, for the log.
    """

    def __init__(self, index: int, unit: Unit, pool: Pool, title: str) -> None:
        self.index, self.unit, self.pool, self.title = index, unit, pool, title
        self.rules = replace(unit.rules or BatchRules(max_size=_MAX_TRIP_SIZE), max_waiting=pool.max_waiting)
        self._batcher: Batcher[Job] = Batcher(self.rules)
        self._is_each = unit.rules is None  # its stages take one instance at a time
        self._instance_s = _TRIP_S
        self._starts_at_once = self.rules.max_delay_s == 0 and (self._is_each or self.rules.max_size == 1)
        self._combines = self.rules.max_delay_s == 0 and not self._starts_at_once
        self._varied_inputs = [index for index, spec in enumerate(unit.inputs) if not spec.is_fixed]
        if self._is_each:
            self._varied_inputs = []  # instances that run one by one need not have the same shape
        pool.queues.append(self)

    @property
    def max_waiting(self) -> int:
        """The maximum number of instances that may wait."""
        return self.rules.max_waiting

    @property
    def num_waiting(self) -> int:
        """The number of instances that are not in a batch yet."""
        return self._batcher.num_waiting

    def add(self, job: Job) -> None:
        """Queue a job, or run it at once if a process is free.  Raises QueueFullError and UnavailableError.

        A stage or model that takes batches runs at the end of this turn of the event loop, without any further delay.
        Requests that arrive together, or that leave the previous step together, are then in one batch.
        """
        self.pool.check_available()
        count = job.count
        if (
            self._starts_at_once
            and not self._batcher.num_waiting
            and count <= self._max_trip_size
            and self.pool.has_room
            and (count == 1 or _num_bytes(job, 0, count) <= self.pool.max_batch_bytes)
        ):
            self.pool.run(UnitBatch(self, ((job, 0, count),), self.rules.padded(count)))
            return
        kind: Any = ()
        if self._varied_inputs:
            kind = tuple(job.arrays[index].shape[1:] for index in self._varied_inputs)
        waiting = self._batcher.num_waiting
        if self._combines and waiting and waiting + count > self.max_waiting:
            self.pool.dispatch()  # those that wait only for the end of this turn
        self._batcher.add(job, count, time.monotonic(), priority=job.run.priority, kind=kind)
        if self._combines:
            self.pool.dispatch_soon()
        else:
            self.pool.dispatch()

    def cancel(self, job: Job) -> None:
        """Remove a job if it is queued."""
        self._batcher.cancel(job)

    @property
    def _max_trip_size(self) -> int:
        """The maximum number of instances in a trip."""
        if not self._is_each:
            return self.rules.max_size
        return max(1, min(_MAX_TRIP_SIZE, int(_TRIP_S / self._instance_s)))

    def take(self, now: float) -> list[UnitBatch]:
        """Return a batch that is due, divided into several if its stages are slow; empty if none is due."""
        batch = self._batcher.take(now)
        if batch is None:
            return []
        pieces = [(part.request, part.first, part.count) for part in batch.parts]
        trips = _cut_by_count(pieces, self._max_trip_size) if self._is_each else [pieces]
        limit = self.pool.max_batch_bytes
        return [
            UnitBatch(self, some, 0 if self._is_each else self.rules.padded(sum(count for _, _, count in some)))
            for trip in trips
            for some in _cut_by_bytes(trip, limit)
        ]

    def wake_at(self) -> float:
        """Return when the next batch may be due."""
        return self._batcher.wake_at()

    def note_batch(self, batch: UnitBatch, ended: float, count: int, took_s: float) -> None:
        """Count a batch for each method with a request in it whose statistics count this step.

        ``count``: the instances that did not fail.  ``took_s``: the time in the process, without transport.
        """
        if not count:
            return
        if self._is_each:
            self._instance_s += (took_s / count - self._instance_s) / 8
        routes = {job.run.route for job, _, _ in batch.pieces if job.step == job.run.route.counted}
        for route in routes:
            route.note_batch(count, ended - batch.began)

    def refuse_all(self, error: Exception) -> None:
        """End everything that waits with an error."""
        batcher, self._batcher = self._batcher, Batcher(self.rules)
        while (batch := batcher.take(float("inf"))) is not None:
            for part in batch.parts:
                part.request.fail(error)

    def failure_error(self, job: Job, failure: pb.Failure, first: int) -> RefusalError:
        """Return the error for a request whose instance made a stage fail, and log the details."""
        instance = f", instance {job.run.first + first + failure.instance}" if failure.instance >= 0 else ""
        stage = failure.stage[:128] or " or ".join(self.unit.names)
        if failure.kind == "input":
            return RefusalError(400, f"{stage}{instance}: {failure.text}", code="invalid_input")
        reason = failure.text if failure.kind == "result" else f"{failure.text}; see the log for details"
        message = f"stage {stage} failed{instance}: {reason}"
        tell(
            "stage_failed", f"{self.title}: {message}", logging.WARNING, request_id=job.run.request_id, stage=stage,
            kind=failure.kind, trace=failure.trace,
        )  # fmt: skip
        return RefusalError(500, message, code="stage_failed")

    def refuse_lost(self, pieces: Sequence[Piece], position: tuple[int, int], is_hung: bool, why: str) -> None:
        """Refuse a request that was running without others when its process died or hung."""
        names = self.unit.names
        stage_index, instance_index = position
        stage = names[stage_index] if stage_index < len(names) else " or ".join(names)
        job, first, _ = pieces[0]
        instance = ""
        if instance_index >= 0 and len(pieces) == 1:
            instance = f", instance {job.run.first + first + instance_index}"
        if is_hung:
            message = f"stage {stage}{instance} exceeded its time limit of {self.pool.timeout_s:g} s"
            error = RefusalError(504, message, code="stage_hung")
        else:
            error = RefusalError(500, f"stage {stage}{instance} ended its process: {why}", code="stage_died")
        tell("stage_lost", f"{self.title}: {error}", logging.WARNING, request_id=job.run.request_id, stage=stage)
        job.fail(error)


def _cut_by_count(pieces: Sequence[Piece], max_count: int) -> list[list[Piece]]:
    """Divide pieces into lists of at most ``max_count`` instances."""
    lists: list[list[Piece]] = [[]]
    room = max_count
    for job, first, count in pieces:
        while count:
            if not room:
                lists.append([])
                room = max_count
            number = min(count, room)
            lists[-1].append((job, first, number))
            first, count, room = first + number, count - number, room - number
    return lists


def _num_bytes(job: Job, first: int, count: int) -> int:
    """Return the size of the inputs of ``count`` instances in bytes."""
    return sum(
        sum(map(len, array[first : first + count].flat)) + 4 * array[first : first + count].size
        if array.dtype.hasobject
        else array.nbytes // job.count * count
        for array in job.arrays
    )


def _cut_by_bytes(pieces: list[Piece], max_bytes: int) -> list[list[Piece]]:
    """Divide pieces into lists of at most ``max_bytes``; an instance that is larger gets a separate list."""
    if sum(_num_bytes(*piece) for piece in pieces) <= max_bytes:
        return [pieces]
    lists: list[list[Piece]] = []
    room = 0
    for job, first, count in pieces:
        for index in range(first, first + count):
            size = _num_bytes(job, index, 1)
            if not lists or size > room:
                lists.append([])
                room = max_bytes
            room -= size
            current = lists[-1]
            if current and current[-1][0] is job:
                current[-1] = (job, current[-1][1], current[-1][2] + 1)
            else:
                current.append((job, index, 1))
    return lists
