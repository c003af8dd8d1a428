"""Language models as steps of methods: the workers of the service run the prompts and make their own batches."""

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
    from penstock.servables.api.manifest import LanguageManifest
    from penstock.servables.lifecycle.open_version import VersionSource
    from penstock.servables.schedule.method_run import Job, StepQueue

    def _fits(queue: LanguageQueue) -> StepQueue:
        return queue


__all__ = ["LanguageModels", "LanguageQueue"]


class LanguageModels(Protocol):
    """The provider of language models for servables."""

    async def open(self, manifest: LanguageManifest, source: VersionSource) -> LanguageQueue:
        """Open a model in a version's folder, or a model that the service serves.  Raises the error of the load."""


class LanguageQueue:
    """The queue of one language model.

    At most ``max_open`` prompts run at the same time, alternating between requests.  A request with a thousand prompts
    therefore neither fills the model's own queue nor blocks other requests.

    ``name``: the model in messages.  ``find`` returns the current backend; ``end`` is called when the version is
    stopped.
    """

    def __init__(
        self, name: str, manifest: LanguageManifest, find: Callable[[], Backend], end: Callable[[], Awaitable[None]]
    ) -> None:
        self._name, self._find, self._end = name, find, end
        self._params = SamplingParams(**manifest.sampling)
        self._max_open, self.max_waiting = manifest.max_open, manifest.max_waiting
        self._slots = asyncio.Semaphore(manifest.max_open)
        self._waiting: dict[Job, int] = {}  # prompts that have no slot yet
        self._tasks: dict[Job, asyncio.Task[None]] = {}
        self._is_closed = False

    @property
    def is_ready(self) -> bool:
        """Return True if the model is ready."""
        try:
            return self._find().is_ready
        except PenstockError:
            return False

    @property
    def num_waiting(self) -> int:
        """The number of prompts that wait for a slot."""
        return sum(self._waiting.values())

    def add(self, job: Job) -> None:
        """Start a job.  Raises QueueFullError and UnavailableError."""
        if self._is_closed:
            raise UnavailableError(f"{self._name} is being unloaded")
        waiting = self.num_waiting
        if waiting and waiting + job.count > self.max_waiting:
            raise QueueFullError(
                f"the queue is full: {waiting} prompts wait for {self._name} and {job.count} more "
                f"would exceed max_waiting ({self.max_waiting})"
            )
        self._waiting[job] = job.count
        task = self._tasks[job] = asyncio.ensure_future(self._run(job))
        task.add_done_callback(lambda _: self._forget(job))  # runs even if the task is cancelled first

    def _forget(self, job: Job) -> None:
        del self._tasks[job], self._waiting[job]

    def cancel(self, job: Job) -> None:
        """Cancel a job."""
        task = self._tasks.get(job)
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    async def _run(self, job: Job) -> None:
        began = time.monotonic()
        texts = np.empty(job.count, object)
        remaining = iter(range(job.count))

        async def run_remaining() -> None:
            for number in remaining:
                async with self._slots:
                    self._waiting[job] -= 1
                    text = await self._generate(self._find(), job, number, job.arrays[0][number].decode())
                texts[number] = text.encode()

        tasks = [asyncio.ensure_future(run_remaining()) for _ in range(min(job.count, self._max_open))]
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
        job.add_result(0, job.count, [texts], (began, ended))

    async def _generate(self, backend: Backend, job: Job, number: int, prompt: str) -> str:
        """Return the text that the model generates for one prompt."""
        if backend.tokenizer is None:
            raise InvalidFileError(f"{self._name} has no tokenizer")
        ids: list[int] = await call_tokenizer(backend.tokenizer, len(prompt), backend.tokenizer.encode, prompt)
        options = RequestOptions(priority=job.run.priority)
        texts = []
        try:
            async with await backend.submit(ids, self._params, options, request_id=job.run.request_id) as stream:
                async for delta in stream:
                    texts.append(delta.text)
        except InvalidArgumentError as error:
            message = f"{self._name}, instance {job.run.first + number}: {error}"
            raise RefusalError(400, message, code="invalid_input") from None
        return "".join(texts)

    async def close(self) -> None:
        """Refuse open jobs, and stop the workers of the model if they belong to this version."""
        self._is_closed = True
        jobs = [*self._tasks.items()]
        for job, task in jobs:
            job.fail(UnavailableError(f"{self._name} is being unloaded"))
            task.cancel()
        await asyncio.gather(*(task for _, task in jobs), return_exceptions=True)
        await self._end()
