"""Times the steps of a worker process where its tokens arrive: in the primary, as a service has them.

The engine's loop in a process of its own is faster: in a worker the thread that sends the tokens, and the one that
reads requests, take turns with it.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.bench.step_costs import middle
from penstock.engine.options import EngineOptions
from penstock.engine.params import SamplingParams
from penstock.errors import InternalError
from penstock.runtime.program import MAX_REQUESTS
from penstock.serving.workers.primary import Primary
from penstock.serving.workers.remote_model import RemoteBackend
from penstock.serving.workers.worker_config import MAX_WAITING, WorkerModelOptions

if TYPE_CHECKING:
    from types import TracebackType

    from penstock.bench.measure import Bench
    from penstock.llm.answer import EventAnswer

__all__ = ["WorkerSteps", "step_s"]

_RUN_STEPS: Final = 8
"""Steps are timed in runs: the primary may get the tokens of two steps at once."""
_SHORT_PROMPT: Final = 16
_MAX_ADDED: Final = 8
_REST_S: Final = 0.005
"""Pause after a request, in which the engine comes to rest."""


class WorkerSteps:
    """A worker of the model of ``settings``, and its primary in this process; see ``penstock.bench.step_costs.Steps``.

    Use it as a context manager.  Entering raises the errors of loading.
    """

    def __init__(self, settings: Bench) -> None:
        num_requests = max(*settings.batches, min(middle(settings.batches) + 1, MAX_REQUESTS))
        limits = settings.limits(num_requests)
        self._model, self._context_len = str(settings.model), limits.context_len
        options = WorkerModelOptions(
            scheme=settings.scheme,
            threads=settings.threads,
            weights=settings.weights,
            limits=limits,
            # Answers begin together, as the number of pages assumes.
            engine=EngineOptions(max_mixed_tokens=0, max_waiting=MAX_WAITING),
            verify=settings.verify,
            network=settings.network,
            tensor_parallel_size=settings.tensor_parallel_size,
        )
        self._random = np.random.default_rng()
        self._primary = Primary()
        self._backend = RemoteBackend("bench", self._primary, options)
        self._runner = asyncio.Runner()

    def __enter__(self) -> WorkerSteps:
        """Start the worker."""
        try:
            self._runner.run(self._open())
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the worker."""
        with self._runner:
            self._runner.run(self._close())

    async def _open(self) -> None:
        await self._primary.open()
        await self._backend.load(self._model)

    async def _close(self) -> None:
        await self._backend.stop()
        await self._primary.close()

    def prefill(self, prompt_tokens: int) -> float:
        """Return the seconds from a prompt to its first token."""
        return self._runner.run(self._prefill(prompt_tokens))

    def decode(self, batch: int, prompt_tokens: int, num_steps: int) -> tuple[float, float]:
        """Return the seconds of a step of ``batch`` answers, and the mean tokens before those of its requests."""
        return self._runner.run(self._decode(batch, prompt_tokens, num_steps))

    def added_request(self, batch: int, prompt_tokens: int) -> float:
        """Return the seconds by which a request of one token delays ``batch`` answers that run; the median."""
        return self._runner.run(self._added_request(batch, prompt_tokens))

    async def _submit(self, prompt_tokens: int, max_tokens: int) -> EventAnswer:
        card = self._backend.card
        prompt = self._random.integers(0, card.vocab_size, prompt_tokens).tolist()
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        return await self._backend.submit(prompt, params)

    async def _prefill(self, prompt_tokens: int) -> float:
        await asyncio.sleep(_REST_S)
        begin = time.perf_counter()
        async with await self._submit(prompt_tokens, 1) as answer:
            await anext(answer)
            return time.perf_counter() - begin

    @asynccontextmanager
    async def _answers(self, batch: int, prompt_tokens: int) -> AsyncIterator[list[_StepReader]]:
        """Yield the readers of ``batch`` endless answers that have begun; end them at exit."""
        await asyncio.sleep(_REST_S)
        max_tokens = self._context_len - prompt_tokens
        answers = await asyncio.gather(*(self._submit(prompt_tokens, max_tokens) for _ in range(batch)))
        readers = [_StepReader(answer) for answer in answers]
        tasks = [asyncio.ensure_future(reader.read()) for reader in readers]
        try:
            for reader in readers:
                await reader.reach(1)
            yield readers
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _decode(self, batch: int, prompt_tokens: int, num_steps: int) -> tuple[float, float]:
        async with self._answers(batch, prompt_tokens) as readers:
            context = sum(prompt_tokens + len(reader.times) - 1 for reader in readers)
            first, num_begun = readers[0], len(readers[0].times)
            await first.reach(num_begun + num_steps)
        times = first.times[num_begun - 1 : num_begun + num_steps]
        return step_s(times), context + batch * (num_steps - 1) / 2

    async def _added_request(self, batch: int, prompt_tokens: int) -> float:
        batch = min(batch, MAX_REQUESTS - 1)
        most = self._context_len - _SHORT_PROMPT - 4 * _RUN_STEPS  # an answer with more tokens would end soon
        added: list[float] = []
        async with self._answers(batch, _SHORT_PROMPT) as readers:
            first = readers[0]
            while len(added) < _MAX_ADDED and len(first.times) < most:
                plain_s = await first.pass_steps(_RUN_STEPS)
                start, begin = len(first.times), first.times[-1]
                async with await self._submit(prompt_tokens, 1) as answer:
                    await answer.whole()
                await first.reach(len(first.times) + 2)  # it may wait for the pause after a first token
                if first.is_over:
                    break
                added.append(first.times[-1] - begin - plain_s * (len(first.times) - start))
        return statistics.median(added) if added else 0.0


class _StepReader:
    """Reads an answer and notes when each token came."""

    def __init__(self, answer: EventAnswer) -> None:
        self.times: list[float] = []
        self._answer = answer
        self._has_new = asyncio.Event()
        self._error: BaseException | None = None
        self.is_over = False

    async def read(self) -> None:
        """Read until the end, which ``reach`` is told."""
        try:
            async with self._answer as answer:
                async for delta in answer:
                    self.times += [time.perf_counter()] * len(delta.token_ids)
                    self._has_new.set()
        except Exception as error:
            self._error = error
        finally:
            self.is_over = True
            self._has_new.set()

    async def reach(self, num_tokens: int) -> None:
        """Wait until there are so many tokens, or the answer has ended with some; raises its error."""
        while len(self.times) < num_tokens and not self.is_over:
            self._has_new.clear()
            await self._has_new.wait()
        if self._error is not None:
            raise self._error
        if not self.times:
            raise InternalError("bench: an answer ended without a token")

    async def pass_steps(self, num_steps: int) -> float:
        """Wait for so many more tokens and return the seconds of each."""
        start = len(self.times)
        await self.reach(start + num_steps)
        return step_s(self.times[start - 1 :])


def step_s(times: list[float]) -> float:
    """Return the seconds between tokens that came at ``times``: the median of the means of short runs."""
    num_steps = len(times) - 1
    if num_steps < 1:
        raise InternalError("bench: an answer ended during the measurement")
    run = min(_RUN_STEPS, num_steps)
    starts = range(0, num_steps - run + 1, run)
    return statistics.median((times[at + run] - times[at]) / run for at in starts)
