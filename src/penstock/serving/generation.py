"""Submit the prompts of a request to the engine, read their answers as they grow, and count them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from penstock.api_errors import RefusalError
from penstock.errors import QueueFullError, UnavailableError

if TYPE_CHECKING:
    from penstock.engine.options import RequestOptions
    from penstock.engine.params import SamplingParams
    from penstock.llm.backend import Answer, Backend, Delta
    from penstock.serving.call import Call
    from penstock.serving.openai.bodies import ChatCompletionRequest, CompletionRequest

__all__ = ["Generation", "Take", "TakeNow", "check_stream_options", "includes_usage", "refuse_together", "usage"]

Take = Callable[[int, "Answer", "Delta"], Awaitable[None]]
"""Handles a delta; its arguments are the index of the prompt, the prompt's answer and the delta."""
TakeNow = Callable[[int, "Answer", "Delta"], bool]
"""Like Take, but without waiting: it returns False, and does nothing, if it would have to wait."""

MAX_AT_ONCE: Final = 32
"""The most prompts of one HTTP request that are open at a time; the others wait here, not in the engine's queue."""
_RETRY_S: Final = 0.05


def usage(num_prompt: int, num_output: int, num_cached: int) -> dict[str, Any]:
    """Return token counts in OpenAI's format."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


class Generation:
    """Runs the prompts of one HTTP request.  ``num_*`` are sums over the prompts."""

    def __init__(self, call: Call, backend: Backend, params: SamplingParams, options: RequestOptions) -> None:
        self._call, self._backend, self._params, self._options = call, backend, params, options
        self._taking = asyncio.Lock()
        self._metrics = call.metrics.of_model(backend.name)
        self.num_prompt_tokens = self.num_output_tokens = self.num_cached_tokens = 0

    async def run(self, prompts: Sequence[Sequence[int]], take: Take, take_now: TakeNow | None = None) -> None:
        """Answer all prompts; pass each delta to ``take``, one at a time.  The first error cancels the other prompts.

        A delta goes to ``take_now`` instead if that need not wait, which saves waking a task.
        """
        try:
            if len(prompts) == 1:
                await self._answer(0, prompts[0], take, take_now)
            else:
                await self._answer_all(prompts, take, take_now)
        except BaseException as error:
            self._metrics.finished["abort" if isinstance(error, asyncio.CancelledError) else "error"] += 1
            raise
        finally:
            facts = self._call.facts
            facts["prompt_tokens"], facts["completion_tokens"] = self.num_prompt_tokens, self.num_output_tokens

    async def _answer_all(self, prompts: Sequence[Sequence[int]], take: Take, take_now: TakeNow | None) -> None:
        todo = iter(range(len(prompts)))

        async def work() -> None:
            for index in todo:
                await self._answer(index, prompts[index], take, take_now, is_first=index == 0)

        tasks = [asyncio.create_task(work()) for _ in range(min(MAX_AT_ONCE, len(prompts)))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _begin(self, ids: Sequence[int], is_first: bool) -> Answer:
        """Submit a prompt.  A full queue refuses only the first prompt of a request; the others wait for room."""
        while True:
            try:
                call = self._call
                return await self._backend.submit(ids, self._params, self._options, request_id=call.request_id)
            except QueueFullError:
                if is_first:
                    raise
                await asyncio.sleep(_RETRY_S)

    async def _answer(
        self, index: int, ids: Sequence[int], take: Take, take_now: TakeNow | None, is_first: bool = True
    ) -> None:
        metrics, params = self._metrics, self._params
        last: dict[int, float] = {}
        counts: dict[int, int] = {}
        sent = time.perf_counter()

        def note(delta: Delta) -> None:
            now, count = time.perf_counter(), len(delta.token_ids)
            before = last.get(delta.index)
            if before is not None:
                if count:
                    metrics.between(now - before, count)
            elif count and not last:
                metrics.first_token(now - self._call.arrived)
            last[delta.index] = now
            counts[delta.index] = counts.get(delta.index, 0) + count

        async with await self._begin(ids, is_first) as answer:
            if take_now is not None:

                def offer(delta: Delta) -> bool:
                    if self._taking.locked() or not take_now(index, answer, delta):
                        return False
                    note(delta)
                    return True

                answer.take_now = offer
            async for delta in answer:
                note(delta)
                if delta.finish_reason is not None:
                    if delta.finish_reason == "abort":
                        raise UnavailableError("The model was closed before the answer was complete.")
                    metrics.finished[delta.finish_reason] += 1
                async with self._taking:
                    await take(index, answer, delta)
            num_prompt, num_output = answer.num_prompt_tokens or len(ids), sum(counts.values())
            metrics.ended(num_prompt, num_output, time.perf_counter() - self._call.arrived, answer.timings)
        if self._call.trace is not None:
            self._call.trace.note(sent, answer.timings, params.n)
        metrics.asked(params.n, params.max_tokens, max(counts.values(), default=0))
        self.num_prompt_tokens += num_prompt
        self.num_output_tokens += num_output
        self.num_cached_tokens += answer.num_cached_tokens


def refuse_together(is_wrong: bool, message: str, param: str) -> None:
    """Raise a 400 error if a combination of fields is wrong."""
    if is_wrong:
        raise RefusalError(400, message, param=param, code="invalid_value")


def check_stream_options(body: CompletionRequest | ChatCompletionRequest) -> None:
    """Raise a 400 error if a body has options of a stream and asks for none."""
    is_wrong = body.stream_options is not None and not body.stream
    refuse_together(is_wrong, "stream_options requires stream", "stream_options")


def includes_usage(body: CompletionRequest | ChatCompletionRequest) -> bool:
    """Return True if the stream that a body asks for ends with the token counts."""
    return body.stream_options is not None and bool(body.stream_options.include_usage)
