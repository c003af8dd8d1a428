"""Changes of a running service's models: one at a time per model, and none once the service stops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.errors import UnavailableError

if TYPE_CHECKING:
    from penstock.llm.backend import Backend, Models

__all__ = ["Changes"]

_Result = TypeVar("_Result")


class Changes:
    """Loads, updates and unloads models and drains workers, each in a task of its own.

    Raises the errors of Models, and UnavailableError if the model is being changed or loaded for the first time, or if
    the service is stopping.
    """

    def __init__(self, models: Models) -> None:
        self._models = models
        self._tasks: set[asyncio.Task[Any]] = set()
        self._changing: set[str] = set()
        self._is_closed = False

    async def load(self, path: str, name: str = "") -> Backend:
        """Call ``Models.load``; cancelling the caller cancels the load and undoes it."""
        return await self._begin(lambda: self._models.load(path, name))

    async def update(self, name: str, path: str) -> Backend:
        """Call ``Models.update``; cancelling the caller cancels it, unless requests already use the new weights."""
        self._check(name)
        return await self._begin(lambda: self._models.update(name, path), name)

    async def unload(self, name: str) -> None:
        """Call ``Models.unload``, which continues if the caller is cancelled."""
        self._check(name)
        await self._begin(lambda: self._models.unload(name), name, goes_on=True)

    async def drain_worker(self, name: str, worker: str, *, replaces: bool) -> Backend:
        """Call ``Models.drain_worker``, which continues if the caller is cancelled."""
        self._check(name)
        work = partial(self._models.drain_worker, name, worker, replaces=replaces)
        return await self._begin(work, name, goes_on=True)

    async def close(self) -> None:
        """Cancel running changes and refuse further ones."""
        self._is_closed = True
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _check(self, name: str) -> None:
        backend = self._models.get(name)
        if name in self._changing:
            raise UnavailableError(f"{name} is already being changed. Retry later.", 1.0)
        _ = backend.card  # raises UnavailableError during the first load

    async def _begin(
        self, work: Callable[[], Coroutine[Any, Any, _Result]], name: str = "", *, goes_on: bool = False
    ) -> _Result:
        if self._is_closed:
            raise UnavailableError("The service is stopping.", 5.0)
        task = asyncio.ensure_future(work())
        self._tasks.add(task)
        if name:
            self._changing.add(name)
        task.add_done_callback(partial(self._note_done, name))
        try:
            return await (asyncio.shield(task) if goes_on else task)
        except asyncio.CancelledError:
            if self._is_closed:
                raise UnavailableError("The service is stopping.", 5.0) from None
            raise

    def _note_done(self, name: str, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        self._changing.discard(name)
