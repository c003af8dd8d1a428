"""Language models as steps of methods: prompts go to the service's own workers, which make their own batches."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Protocol

import numpy as np

from penstock.api_errors import RefusalError
from penstock.engine.options import RequestOptions
from penstock.engine.params import SamplingParams
from penstock.errors import InvalidArgumentError, InvalidFileError, PenstockError, QueueFullError, UnavailableError
from penstock.text.tokenizer_threads import call_tokenizer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from penstock.llm.backend import Backend
    from penstock.servables.api.plan import LanguagePlan
    from penstock.servables.process.open_version import Source
    from penstock.servables.schedule.flow import Job, Queue

    def _fits(queue: LanguageQueue) -> Queue:
        return queue


__all__ = ["LanguageModels", "LanguageQueue"]


class LanguageModels(Protocol):
    """Language models for servables."""

    async def open(self, plan: LanguagePlan, source: Source) -> LanguageQueue:
        """What runs a bundle of a version's folder, or one that is served beside."""


class LanguageQueue:
    """One language model.  ``find`` gives what answers now; ``end`` is called when the version goes.

    It works on ``max_open`` prompts at a time, of several requests by turns, so that one of a thousand neither fills
    the model's own queue nor holds up the others.
    """

    def __init__(
        self, name: str, plan: LanguagePlan, find: Callable[[], Backend], end: Callable[[], Awaitable[None]]
    ) -> None:
        self._name, self._find, self._end = name, find, end
        self._params = SamplingParams(**plan.sampling)
        self._max_open, self.max_waiting = plan.max_open, plan.max_waiting
        self._places = asyncio.Semaphore(plan.max_open)
        self._waiting: dict[Job, int] = {}  # prompts that have no place yet
        self._tasks: dict[Job, asyncio.Task[None]] = {}
        self._is_closed = False

    @property
    def is_ready(self) -> bool:
        """Whether the model answers."""
        try:
            return self._find().is_ready
        except PenstockError:
            return False

    @property
    def num_waiting(self) -> int:
        """Prompts that have no place yet."""
        return sum(self._waiting.values())

    def add(self, job: Job) -> None:
        """Begin its instances; QueueFullError, UnavailableError."""
        if self._is_closed:
            raise UnavailableError(f"{self._name} is being unloaded")
        waiting = self.num_waiting
        if waiting and waiting + job.count > self.max_waiting:
            told = f"{waiting} prompts wait for {self._name} and {job.count} more are above max_waiting"
            raise QueueFullError(f"{told}, {self.max_waiting}")
        self._waiting[job] = job.count
        task = self._tasks[job] = asyncio.ensure_future(self._run(job))
        task.add_done_callback(lambda _: self._forget(job))  # a task that is cancelled at once runs not even to an end

    def _forget(self, job: Job) -> None:
        del self._tasks[job], self._waiting[job]

    def cancel(self, job: Job) -> None:
        """End them."""
        task = self._tasks.get(job)
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    async def _run(self, job: Job) -> None:
        began = time.monotonic()
        found = np.empty(job.count, object)
        left = iter(range(job.count))

        async def some() -> None:
            for number in left:
                async with self._places:
                    self._waiting[job] -= 1
                    text = await self._answer(self._find(), job, number, job.arrays[0][number].decode())
                found[number] = text.encode()

        tasks = [asyncio.ensure_future(some()) for _ in range(min(job.count, self._max_open))]
        try:
            await asyncio.gather(*tasks)
        except Exception as error:
            job.fail(error)
            return
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        ended = time.monotonic()
        job.note_batch(job.count, ended - began)
        job.ran(0, job.count, [found], (began, ended))

    async def _answer(self, backend: Backend, job: Job, number: int, prompt: str) -> str:
        """The text that follows one prompt."""
        if backend.tokenizer is None:
            raise InvalidFileError(f"{self._name} has no tokenizer")
        ids: list[int] = await call_tokenizer(backend.tokenizer, len(prompt), backend.tokenizer.encode, prompt)
        options = RequestOptions(priority=job.run.priority)
        texts = []
        try:
            async with await backend.submit(ids, self._params, options, request_id=job.run.request_id) as answer:
                async for delta in answer:
                    texts.append(delta.text)
        except InvalidArgumentError as error:
            told = f"{self._name}, instance {job.run.first + number}: {error}"
            raise RefusalError(400, told, code="invalid_input") from None
        return "".join(texts)

    async def close(self) -> None:
        """End the model's workers if they are this version's own; what is open is refused."""
        self._is_closed = True
        open_ = [*self._tasks.items()]
        for job, task in open_:
            job.fail(UnavailableError(f"{self._name} is being unloaded"))
            task.cancel()
        await asyncio.gather(*(task for _, task in open_), return_exceptions=True)
        await self._end()
