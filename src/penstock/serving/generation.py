"""Submit the prompts of a request to the engine, read their answers as they grow, and count them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import QueueFullError, UnavailableError

if TYPE_CHECKING:
    from penstock.llm.backend import Answer, TokenDelta
    from penstock.serving.call import Call
    from penstock.serving.translation import EngineRequest

__all__ = ["Generation", "Take", "TakeNow", "usage"]

Take = Callable[[int, "Answer", "TokenDelta"], Awaitable[None]]
"""Handles a delta; its arguments are the index of the prompt, the prompt's answer and the delta."""
TakeNow = Callable[[int, "Answer", "TokenDelta"], bool]
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
    """Runs the prompts of one request.  ``num_*`` are sums over the prompts."""

    def __init__(self, call: Call, request: EngineRequest) -> None:
        self._call, self._request = call, request
        self._taking = asyncio.Lock()
        self._start = time.monotonic()
        self._metrics = call.metrics.of_model(request.backend.name)
        self.num_prompt_tokens = self.num_output_tokens = self.num_cached_tokens = 0

    async def run(self, take: Take, take_now: TakeNow | None = None) -> None:
        """Answer all prompts; pass each delta to ``take``, one at a time.  The first error cancels the other prompts.

        A delta goes to ``take_now`` instead if that need not wait, which saves waking a task.
        """
        try:
            if len(self._request.prompts) == 1:
                await self._answer(0, take, take_now)
            else:
                await self._answer_all(take, take_now)
        except BaseException as error:
            self._metrics.finished["abort" if isinstance(error, asyncio.CancelledError) else "error"] += 1
            raise
        finally:
            facts = self._call.facts
            facts["prompt_tokens"], facts["completion_tokens"] = self.num_prompt_tokens, self.num_output_tokens

    async def _answer_all(self, take: Take, take_now: TakeNow | None) -> None:
        num_prompts = len(self._request.prompts)
        todo = iter(range(num_prompts))

        async def work() -> None:
            for index in todo:
                await self._answer(index, take, take_now, is_first=index == 0)

        tasks = [asyncio.create_task(work()) for _ in range(min(MAX_AT_ONCE, num_prompts))]
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
                request, request_id = self._request, self._call.request_id
                options = request.options if is_first else request.options.since(self._start)
                own = {} if request.beams is None else {"beams": request.beams}
                return await request.backend.submit(ids, request.params, options, request_id=request_id, **own)
            except QueueFullError:
                if is_first:
                    raise
                await asyncio.sleep(_RETRY_S)

    async def _answer(self, index: int, take: Take, take_now: TakeNow | None, is_first: bool = True) -> None:
        metrics, params, ids = self._metrics, self._request.params, self._request.prompts[index]
        last: dict[int, float] = {}
        counts: dict[int, int] = {}
        sent = time.perf_counter()

        def note(delta: TokenDelta) -> None:
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

                def offer(delta: TokenDelta) -> bool:
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
            metrics.record_prompt(num_prompt, num_output, time.perf_counter() - self._call.arrived, answer.timings)
        if self._call.trace is not None:
            self._call.trace.note(sent, answer.timings, params.n)
        metrics.note_request(params.n, params.max_tokens, max(counts.values(), default=0))
        self.num_prompt_tokens += num_prompt
        self.num_output_tokens += num_output
        self.num_cached_tokens += answer.num_cached_tokens
