"""A request on its way through a method: the steps that can start, and the results of the finished ones."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from penstock.api_errors import RefusalError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.servables.api.manifest import MethodManifest
    from penstock.tensors import MethodStatistics

__all__ = ["Job", "MethodGraph", "MethodRun", "StepQueue"]


class StepQueue(Protocol):
    """The queue of a unit.  It calls the methods of the jobs when they have run."""

    @property
    def max_waiting(self) -> int:
        """The maximum number of instances that may wait."""

    @property
    def num_waiting(self) -> int:
        """The number of instances that wait."""

    def add(self, job: Job) -> None:
        """Queue a job.  Raises QueueFullError and UnavailableError."""

    def cancel(self, job: Job) -> None:
        """Drop a job: its request has ended."""


class MethodGraph:
    """The steps of a method, prepared: the queue of each step, and which steps each value feeds.

    ``counted``: the step whose batches the method's statistics count: the last one with a model, or the last one.
    """

    __slots__ = ("counted", "feeds", "manifest", "num_open", "queues", "statistics", "waits")

    def __init__(
        self, manifest: MethodManifest, queues: Sequence[StepQueue], statistics: MethodStatistics, counted: int
    ) -> None:
        self.manifest, self.statistics, self.counted = manifest, statistics, counted
        self.num_open = 0
        self.queues = [queues[step.unit] for step in manifest.steps]
        self.waits = [len(set(step.inputs)) for step in manifest.steps]
        self.feeds: list[list[int]] = [[] for _ in range(manifest.num_values)]
        for index, step in enumerate(manifest.steps):
            for value in set(step.inputs):
                self.feeds[value].append(index)

    @property
    def has_room(self) -> bool:
        """Return True if each of its queues would accept an instance."""
        return all(queue.num_waiting < queue.max_waiting for queue in self.queues)

    def note_batch(self, size: int, took_s: float) -> None:
        """Count a batch of ``size`` instances that took ``took_s`` seconds."""
        statistics = self.statistics
        statistics.num_executions += 1
        number, ns = statistics.batch_sizes.get(size, (0, 0))
        statistics.batch_sizes[size] = (number + 1, ns + int(took_s * 1e9))


class MethodRun:
    """One run of a method: a request, or some of its instances.

    ``first``: the number in the request of the first instance; errors name instances by these numbers.
    ``outcome``: a future for the output arrays, or for the error.
    ``queue_s`` and ``compute_s``: seconds that its steps waited and ran.
    """

    __slots__ = (
        "_jobs", "_num_left", "_values", "_waits", "compute_s", "count", "first", "outcome", "priority", "queue_s",
        "request_id", "route",
    )  # fmt: skip

    def __init__(self, route: MethodGraph, count: int, priority: int, request_id: str, first: int = 0) -> None:
        self.route, self.count, self.priority, self.request_id, self.first = route, count, priority, request_id, first
        self.outcome: asyncio.Future[list[NDArray[Any]]] = asyncio.get_running_loop().create_future()
        self.queue_s = self.compute_s = 0.0
        self._values: list[NDArray[Any] | None] = [None] * route.manifest.num_values
        self._waits = [*route.waits]
        self._num_left = len(route.waits)
        self._jobs: set[Job] = set()

    def start(self, arrays: Sequence[NDArray[Any]]) -> None:
        """Start with the inputs, [count, ...] each.  Raises the error with which a first step refuses the run."""
        self._set_values(range(len(arrays)), arrays)
        if self.outcome.done():
            error = self.outcome.exception()
            if error is not None:
                raise error

    def _set_values(self, indexes: Sequence[int], arrays: Sequence[NDArray[Any]]) -> None:
        """Store values, and queue the steps whose inputs are complete."""
        values, waits = self._values, self._waits
        ready = []
        for index, array in zip(indexes, arrays, strict=True):
            values[index] = array
            for step in self.route.feeds[index]:
                waits[step] -= 1
                if not waits[step]:
                    ready.append(step)
        for step in ready:
            if self.outcome.done():
                return
            inputs = [values[value] for value in self.route.manifest.steps[step].inputs]
            job = Job(self, step, inputs)  # type: ignore[arg-type]  # all of them are set
            self._jobs.add(job)
            try:
                self.route.queues[step].add(job)
            except Exception as error:
                self.fail(error)

    def job_done(self, job: Job, arrays: Sequence[NDArray[Any]]) -> None:
        """Take the outputs of a step."""
        self._jobs.discard(job)
        if self.outcome.done():
            return
        self._set_values(self.route.manifest.steps[job.step].outputs, arrays)
        self._num_left -= 1
        if not self._num_left and not self.outcome.done():
            outputs = [self._values[value] for value in self.route.manifest.output_values]
            self.outcome.set_result(outputs)  # type: ignore[arg-type]  # all of them are set

    def fail(self, error: Exception) -> None:
        """End the run with an error, wherever its steps are."""
        if not self.outcome.done():
            self.outcome.set_exception(error)
        self.cancel()

    def cancel(self) -> None:
        """Remove its jobs from the queues; results of jobs that run already are dropped."""
        jobs, self._jobs = self._jobs, set()
        for job in jobs:
            job.is_over = True
            self.route.queues[job.step].cancel(job)


class Job:
    """One step of a run.  Parts of it may run in several batches."""

    __slots__ = ("_num_left", "_parts", "_queued_at", "arrays", "count", "is_over", "run", "step")

    def __init__(self, run: MethodRun, step: int, arrays: list[NDArray[Any]]) -> None:
        self.run, self.step, self.arrays = run, step, arrays
        self.count = self._num_left = run.count
        self.is_over = False
        self._queued_at = time.monotonic()
        self._parts: list[tuple[int, Sequence[NDArray[Any]]]] = []

    def add_result(self, first: int, count: int, arrays: Sequence[NDArray[Any]], times: tuple[float, float]) -> None:
        """Take the outputs of ``count`` instances from ``first`` on; ``times``: when their batch began and ended."""
        if self.is_over:
            return
        self._num_left -= count
        began, ended = times
        if not self._num_left:
            self.is_over = True
            self.run.queue_s += began - self._queued_at
            self.run.compute_s += ended - began
            if not self._parts:
                self.run.job_done(self, arrays)
                return
        self._parts.append((first, arrays))
        if not self._num_left:
            self._parts.sort(key=lambda part: part[0])
            try:
                whole = [np.concatenate(rows) for rows in zip(*(arrays for _, arrays in self._parts), strict=True)]
            except ValueError:
                message = "its instances returned different shapes; send one instance per request"
                self.run.fail(RefusalError(400, message, code="invalid_input"))
                return
            self.run.job_done(self, whole)

    def note_batch(self, size: int, took_s: float) -> None:
        """Count a batch if the method's statistics count this step."""
        route = self.run.route
        if self.step == route.counted:
            route.note_batch(size, took_s)

    def fail(self, error: Exception) -> None:
        """End its request with an error."""
        self.run.fail(error)
