"""Requests with ``per_instance_errors``: if the request fails, each of its instances runs separately."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.api_errors import MAX_MESSAGE_CHARS, RefusalError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.servables.api.specs import Spec
    from penstock.servables.schedule.method_run import MethodGraph, MethodRun

__all__ = ["MethodResult", "is_instance_error", "run_each_instance", "wait_for_room"]

_CODES: Final = frozenset({"invalid_input", "stage_failed", "stage_died", "stage_hung"})
_MAX_RUNNING: Final = 256
"""The maximum number of instances of a request that run at the same time; ``max_waiting`` may lower it."""
_MIN_PAUSE_S: Final = 0.005
_MAX_PAUSE_S: Final = 0.2


def is_instance_error(error: RefusalError) -> bool:
    """Return True if the input of an instance may have caused the error, rather than queues, deadlines or versions."""
    return error.code in _CODES


@dataclass
class MethodResult:
    """The result of a request: output arrays [count, ...], seconds of waiting and computing, and errors by instance."""

    outputs: list[NDArray[Any]]
    queue_s: float
    compute_s: float
    errors: dict[int, RefusalError] = field(default_factory=dict)

    @classmethod
    def of(cls, run: MethodRun) -> MethodResult:
        """Return the result of a finished run; raise its error."""
        return cls(run.outcome.result(), run.queue_s, run.compute_s)

    def errors_json(self) -> str:
        """Return a JSON list with ``instance``, ``status``, ``code`` and ``message`` of each failed instance."""
        return json.dumps(
            [
                {
                    "instance": index,
                    "status": error.status,
                    "code": error.code,
                    "message": str(error)[:MAX_MESSAGE_CHARS],
                }
                for index, error in sorted(self.errors.items())
            ]
        )


async def run_each_instance(
    run: Callable[[int], Awaitable[MethodRun]], count: int, route: MethodGraph, known_errors: Mapping[int, RefusalError]
) -> MethodResult:
    """Run ``count`` instances separately and concurrently; ``run`` is called with the number of each.

    ``known_errors``: errors of instances that need not run.  The rows of failed instances are zeros, or empty bytes.
    Raises errors that no instance caused, and RefusalError if the rows of instances differ in shape.
    """
    rows: list[list[NDArray[Any]] | None] = [None] * count
    errors = dict(known_errors)
    times = [0.0, 0.0]
    remaining = (index for index in range(count) if index not in known_errors)

    async def run_remaining() -> None:
        for index in remaining:
            try:
                instance_run = await run(index)
            except RefusalError as error:
                if not is_instance_error(error):
                    raise
                errors[index] = error
            else:
                rows[index] = instance_run.outcome.result()
                times[:] = max(times[0], instance_run.queue_s), max(times[1], instance_run.compute_s)

    num_tasks = min(count, _MAX_RUNNING, *(queue.max_waiting for queue in route.queues))
    tasks = [asyncio.ensure_future(run_remaining()) for _ in range(num_tasks)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    outputs = [
        _concatenate(spec, [None if row is None else row[n] for row in rows])
        for n, spec in enumerate(route.manifest.outputs.values())
    ]
    return MethodResult(outputs, times[0], times[1], errors)


async def wait_for_room(route: MethodGraph, left_s: float) -> None:
    """Wait until the queues may accept an instance that was refused, or for ``left_s`` seconds.

    Other instances of its request have run already, so the instance waits instead of failing the request.  This polls
    the queues with growing pauses.
    """
    end = time.monotonic() + left_s
    pause_s = _MIN_PAUSE_S
    while (left_s := end - time.monotonic()) > 0:
        await asyncio.sleep(min(pause_s, left_s))
        if route.has_room:
            return
        pause_s = min(_MAX_PAUSE_S, 2 * pause_s)


def _concatenate(spec: Spec, rows: Sequence[NDArray[Any] | None]) -> NDArray[Any]:
    """Concatenate arrays of one row each; missing rows are zeros, or empty bytes."""
    shapes = {row.shape[1:] for row in rows if row is not None}
    if len(shapes) > 1:
        message = "its instances returned different shapes; send one instance per request"
        raise RefusalError(400, message, code="invalid_input")
    shape = shapes.pop() if shapes else tuple(max(size, 0) for size in spec.shape)
    empty = np.zeros((1, *shape), spec.dtype)
    if spec.is_bytes:
        empty.fill(b"")
    return np.concatenate([empty if row is None else row for row in rows])
