"""Changes of a service's models while it runs: one at a time of each model, none past the service's end."""

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
    """Loads, updates and unloads, each in a task of its own.  Errors are those of Models, and UnavailableError while
    another change of the same model is under way, during its first load, and once the service ends.
    """

    def __init__(self, models: Models) -> None:
        self._models = models
        self._tasks: set[asyncio.Task[Any]] = set()
        self._changing: set[str] = set()
        self._is_closed = False

    async def load(self, path: str, name: str = "") -> Backend:
        """``Models.load``; cancelling the caller gives it up and leaves nothing of it."""
        return await self._begin(lambda: self._models.load(path, name))

    async def update(self, name: str, path: str) -> Backend:
        """``Models.update``; cancelling the caller gives it up, unless requests go to the new weights already."""
        self._check(name)
        return await self._begin(lambda: self._models.update(name, path), name)

    async def unload(self, name: str) -> None:
        """``Models.unload``, which goes on when the caller is cancelled."""
        self._check(name)
        await self._begin(lambda: self._models.unload(name), name, goes_on=True)

    async def close(self) -> None:
        """Give up what is under way, and take no more."""
        self._is_closed = True
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _check(self, name: str) -> None:
        backend = self._models.get(name)
        if name in self._changing:
            raise UnavailableError(f"{name} is being changed already", 1.0)
        _ = backend.card  # not there during its first load

    async def _begin(
        self, work: Callable[[], Coroutine[Any, Any, _Result]], name: str = "", *, goes_on: bool = False
    ) -> _Result:
        if self._is_closed:
            raise UnavailableError("the service is about to end", 5.0)
        task = asyncio.ensure_future(work())
        self._tasks.add(task)
        if name:
            self._changing.add(name)
        task.add_done_callback(partial(self._note_done, name))
        try:
            return await (asyncio.shield(task) if goes_on else task)
        except asyncio.CancelledError:
            if self._is_closed:
                raise UnavailableError("the service is about to end", 5.0) from None
            raise

    def _note_done(self, name: str, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        self._changing.discard(name)
