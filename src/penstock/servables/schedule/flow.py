"""A request on its way through a method: which steps can begin, and what has come of those that ran."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from penstock.api_errors import RefusalError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.servables.api.plan import MethodPlan
    from penstock.tensors import MethodStatistics

__all__ = ["Job", "Queue", "Route", "Run"]


class Queue(Protocol):
    """Where a unit's work waits and from where it comes back: ``num_waiting`` instances, ``max_waiting`` at most."""

    @property
    def max_waiting(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    def add(self, job: Job) -> None:
        """Take a job; QueueFullError, UnavailableError."""

    def cancel(self, job: Job) -> None:
        """Nobody waits for it any more."""


class Route:
    """A method's steps, prepared: which queue runs each, what feeds which.

    ``counted``: the step whose batches are the method's executions, the last one with a model, or the last.
    """

    __slots__ = ("counted", "feeds", "num_open", "plan", "queues", "statistics", "waits")

    def __init__(self, plan: MethodPlan, queues: Sequence[Queue], statistics: MethodStatistics, counted: int) -> None:
        self.plan, self.statistics, self.counted = plan, statistics, counted
        self.num_open = 0
        self.queues = [queues[step.unit] for step in plan.steps]
        self.waits = [len(set(step.inputs)) for step in plan.steps]
        self.feeds: list[list[int]] = [[] for _ in range(plan.num_values)]
        for index, step in enumerate(plan.steps):
            for value in set(step.inputs):
                self.feeds[value].append(index)

    @property
    def has_room(self) -> bool:
        """Whether each of its queues would take an instance."""
        return all(one.num_waiting < one.max_waiting for one in self.queues)

    def note_batch(self, size: int, took_s: float) -> None:
        """Count a batch."""
        found = self.statistics
        found.num_executions += 1
        number, ns = found.batch_sizes.get(size, (0, 0))
        found.batch_sizes[size] = (number + 1, ns + int(took_s * 1e9))


class Run:
    """One request, or some of its instances from ``first`` on, which errors are told by.

    ``outcome`` is set to the outputs' arrays, or to what it failed with.
    """

    __slots__ = (
        "_jobs", "_left", "_values", "_waits", "compute_s", "count", "first", "outcome", "priority", "queue_s",
        "request_id", "route",
    )  # fmt: skip

    def __init__(self, route: Route, count: int, priority: int, request_id: str, first: int = 0) -> None:
        self.route, self.count, self.priority, self.request_id, self.first = route, count, priority, request_id, first
        self.outcome: asyncio.Future[list[NDArray[Any]]] = asyncio.get_running_loop().create_future()
        self.queue_s = self.compute_s = 0.0
        self._values: list[NDArray[Any] | None] = [None] * route.plan.num_values
        self._waits = [*route.waits]
        self._left = len(route.waits)
        self._jobs: set[Job] = set()

    def start(self, arrays: Sequence[NDArray[Any]]) -> None:
        """Begin with the inputs, [count, ...] each; raises what the first step refuses."""
        self._put(range(len(arrays)), arrays)
        if self.outcome.done():  # who is refused at once hears it at once
            error = self.outcome.exception()
            if error is not None:
                raise error

    def _put(self, indexes: Sequence[int], arrays: Sequence[NDArray[Any]]) -> None:
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
            given = [values[one] for one in self.route.plan.steps[step].inputs]
            job = Job(self, step, given)  # type: ignore[arg-type]  # each was put
            self._jobs.add(job)
            try:
                self.route.queues[step].add(job)
            except Exception as error:
                self.fail(error)

    def done(self, job: Job, arrays: Sequence[NDArray[Any]]) -> None:
        """A step has ended."""
        self._jobs.discard(job)
        if self.outcome.done():
            return
        self._put(self.route.plan.steps[job.step].outputs, arrays)
        self._left -= 1
        if not self._left and not self.outcome.done():
            self.outcome.set_result([self._values[one] for one in self.route.plan.output_values])  # type: ignore[misc]

    def fail(self, error: Exception) -> None:
        """End it, wherever its steps are."""
        if not self.outcome.done():
            self.outcome.set_exception(error)
        self.cancel()

    def cancel(self) -> None:
        """Nobody waits for it any more: what is queued goes, what comes of the rest is dropped."""
        jobs, self._jobs = self._jobs, set()
        for job in jobs:
            job.is_over = True
            self.route.queues[job.step].cancel(job)


class Job:
    """A request's passage through one step.  Parts of it may run in several batches."""

    __slots__ = ("_left", "_parts", "_since", "arrays", "count", "is_over", "run", "step")

    def __init__(self, run: Run, step: int, arrays: list[NDArray[Any]]) -> None:
        self.run, self.step, self.arrays = run, step, arrays
        self.count = self._left = run.count
        self.is_over = False
        self._since = time.monotonic()
        self._parts: list[tuple[int, Sequence[NDArray[Any]]]] = []

    def ran(self, first: int, count: int, arrays: Sequence[NDArray[Any]], times: tuple[float, float]) -> None:
        """Instances from ``first`` on have gone through: their outputs, and when their batch began and ended."""
        if self.is_over:
            return
        self._left -= count
        began, ended = times
        if not self._left:
            self.is_over = True
            self.run.queue_s += began - self._since
            self.run.compute_s += ended - began
            if not self._parts:
                self.run.done(self, arrays)
                return
        self._parts.append((first, arrays))
        if not self._left:
            self._parts.sort(key=lambda part: part[0])
            try:
                whole = [np.concatenate(ones) for ones in zip(*(arrays for _, arrays in self._parts), strict=True)]
            except ValueError:
                told = "its instances gave different shapes: send them one by one"
                self.run.fail(RefusalError(400, told, code="invalid_input"))
                return
            self.run.done(self, whole)

    def note_batch(self, size: int, took_s: float) -> None:
        """Count a batch that ran, if this is the step that the method counts."""
        route = self.run.route
        if self.step == route.counted:
            route.note_batch(size, took_s)

    def fail(self, error: Exception) -> None:
        """End the request that it belongs to."""
        self.run.fail(error)
