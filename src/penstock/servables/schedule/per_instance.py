"""Requests whose instances fail one by one (the parameter ``per_instance_errors``): each instance a run of its own."""

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
    from penstock.servables.schedule.flow import Route, Run

__all__ = ["Found", "is_of_instances", "room", "run_each"]

_CODES: Final = frozenset({"invalid_input", "stage_failed", "stage_died", "stage_hung"})
_WINDOW: Final = 256
"""Instances that are on their way at once, where so many may wait."""
_MIN_PAUSE_S: Final = 0.005
_MAX_PAUSE_S: Final = 0.2


def is_of_instances(error: RefusalError) -> bool:
    """Whether it is about what was given, so that other instances may do better; not about queues, time or versions."""
    return error.code in _CODES


@dataclass
class Found:
    """What came of a request: its outputs, [count, ...] each, and the errors of its instances."""

    outputs: list[NDArray[Any]]
    queue_s: float
    compute_s: float
    errors: dict[int, RefusalError] = field(default_factory=dict)

    @classmethod
    def of(cls, run: Run) -> Found:
        """Of one whose outcome is there."""
        return cls(run.outcome.result(), run.queue_s, run.compute_s)

    def errors_text(self) -> str:
        """A JSON list, by instance: ``instance``, ``status``, ``code`` and ``message`` of each that failed."""
        return json.dumps(
            [
                {"instance": index, "status": one.status, "code": one.code, "message": str(one)[:MAX_MESSAGE_CHARS]}
                for index, one in sorted(self.errors.items())
            ]
        )


async def run_each(
    run: Callable[[int], Awaitable[Run]], count: int, route: Route, known: Mapping[int, RefusalError]
) -> Found:
    """Run each of ``count`` instances by its number, some side by side; raises what is not about an instance.

    ``known``: errors of instances that need not run.

    Rows of instances that failed are zeros, or empty bytes; RefusalError when the others' differ in shape.
    """
    rows: list[list[NDArray[Any]] | None] = [None] * count
    errors = dict(known)
    times = [0.0, 0.0]
    left = (index for index in range(count) if index not in known)

    async def some() -> None:
        for index in left:
            try:
                one = await run(index)
            except RefusalError as error:
                if not is_of_instances(error):
                    raise
                errors[index] = error
            else:
                rows[index] = one.outcome.result()
                times[:] = max(times[0], one.queue_s), max(times[1], one.compute_s)

    num_tasks = min(count, _WINDOW, *(queue.max_waiting for queue in route.queues))
    tasks = [asyncio.ensure_future(some()) for _ in range(num_tasks)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    outputs = [
        _together(spec, [None if row is None else row[n] for row in rows])
        for n, spec in enumerate(route.plan.outputs.values())
    ]
    return Found(outputs, times[0], times[1], errors)


async def room(route: Route, left_s: float) -> None:
    """Until an instance that a full queue refused may try again, or for ``left_s``: others of its request have run, so
    that it waits rather than spoil them.  It is not told when there is room: it looks, and less often with time.
    """
    over = time.monotonic() + left_s
    pause_s = _MIN_PAUSE_S
    while (left_s := over - time.monotonic()) > 0:
        await asyncio.sleep(min(pause_s, left_s))
        if route.has_room:
            return
        pause_s = min(_MAX_PAUSE_S, 2 * pause_s)


def _together(spec: Spec, rows: Sequence[NDArray[Any] | None]) -> NDArray[Any]:
    """Arrays of one row each as one; a row that is missing is as empty as its kind can be."""
    shapes = {row.shape[1:] for row in rows if row is not None}
    if len(shapes) > 1:
        raise RefusalError(400, "its instances gave different shapes: send them one by one", code="invalid_input")
    shape = shapes.pop() if shapes else tuple(max(size, 0) for size in spec.shape)
    empty = np.zeros((1, *shape), spec.dtype)
    if spec.is_bytes:
        empty.fill(b"")
    return np.concatenate([empty if row is None else row for row in rows])
