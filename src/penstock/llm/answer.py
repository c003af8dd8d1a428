"""An answer on its way from an engine thread to its reader."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping

from penstock.engine.logprobs import TokenLogprobs
from penstock.errors import PenstockError
from penstock.llm.backend import TokenDelta
from penstock.llm.engine_thread import StepEvent

__all__ = ["EventAnswer"]


def _nothing() -> None:
    """Do nothing: no callback is set."""


class EventAnswer:
    """An Answer that is filled with StepEvents by ``put``, in the event loop of its reader.

    ``on_abort`` is called once if the reader leaves before the end.
    """

    def __init__(self, on_abort: Callable[[], None], version: int = 1) -> None:
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.seeds: dict[int, int] = {}
        self.version = version
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self.timings: Mapping[str, float] = {}
        self.has_begun = False
        self.is_complete = False
        self.last: StepEvent | None = None
        self.on_settled: Callable[[], None] = _nothing
        """Called at the first event, at the last, at an error, and when the reader leaves."""
        self.take_now: Callable[[TokenDelta], bool] | None = None
        """Offered each TokenDelta in the middle of an answer while the reader waits.  If it returns True, the reader
        is not woken; if it raises, the reader gets the error.  Without it, 16 streams take 17 % more processor
        time of the gateway (``python benchmarks/serving_shortcuts.py MODEL.psm --shortcuts take_now --loads
        streams``)."""
        self._on_abort: Callable[[], None] | None = on_abort
        self._unread: deque[TokenDelta] = deque()
        self._error: BaseException | None = None
        self.is_over = False  # True: nothing more will come
        self._reader: asyncio.Future[None] | None = None

    def put(self, event: StepEvent) -> None:
        """Add a step event, whose lists the answer keeps.  No event may follow the last one."""
        self.last = event
        settles, self.has_begun = event.is_last or not self.has_begun, True
        if event.started is not None:
            self.num_prompt_tokens = event.started.num_prompt_tokens
            self.num_cached_tokens = event.started.num_cached_tokens
            self.seeds[0], self.prompt_logprobs = event.started.seed, event.started.prompt_logprobs
        elif event.seed is not None:
            self.seeds[event.index] = event.seed
        if event.timings is not None and event.index == 0:
            self.timings = event.timings
        if event.error is not None:
            self.fail(event.error)
            return
        if self.take_now is None or settles or not self._offer(event):
            self._append(event)
        if event.is_last:
            self.is_over, self._on_abort, self.is_complete = True, None, True
        if self._unread or settles or self._error is not None:
            self._wake()
        if settles:
            self._settle()

    def fail(self, error: BaseException) -> None:
        """End with an error, which the reader gets after everything that came before."""
        if self.is_over:
            return
        self._error, self.is_over, self._on_abort = error, True, None
        self._wake()
        self._settle()

    def _offer(self, event: StepEvent) -> bool:
        """Offer an event to ``take_now``.  Return True if it was taken.

        It is not offered while the reader is behind, nor at the end of an answer.
        """
        reader, take_now = self._reader, self.take_now
        if take_now is None or reader is None or reader.done() or self._unread or event.finish_reason is not None:
            return False
        try:
            return take_now(TokenDelta(event.index, event.text, event.token_ids, None, event.logprobs))
        except Exception as error:
            self._error = error
            return True

    def _append(self, event: StepEvent) -> None:
        for unread in self._unread:  # if the reader is behind: at most one Delta for each answer
            if unread.index == event.index:
                unread.text += event.text
                unread.token_ids += event.token_ids
                unread.finish_reason = event.finish_reason
                if unread.logprobs is not None and event.logprobs is not None:
                    unread.logprobs += event.logprobs
                return
        self._unread.append(TokenDelta(event.index, event.text, event.token_ids, event.finish_reason, event.logprobs))

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def __aiter__(self) -> EventAnswer:
        return self

    async def __anext__(self) -> TokenDelta:
        """Return the next TokenDelta of one of the answers."""
        while not self._unread:
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if self.is_over:
                raise StopAsyncIteration
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            except asyncio.CancelledError:
                self.close()
                raise
        return self._unread.popleft()

    def _settle(self) -> None:
        on_settled = self.on_settled
        if self.is_over:  # break the reference cycle: a collection by the garbage collector would stop all threads
            self.on_settled = _nothing
        on_settled()

    async def aclose(self) -> None:
        """End the request.  Does nothing if it has ended."""
        self.close()

    def close(self) -> None:
        """End the request without a coroutine."""
        self.is_over, self.take_now = True, None
        self._unread.clear()
        self._wake()
        if self._on_abort is not None:
            on_abort, self._on_abort = self._on_abort, None
            on_abort()
            self._settle()

    async def __aenter__(self) -> EventAnswer:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def whole(self) -> StepEvent:
        """Read to the end and return the last event, for an answer that comes at once.  Raises the request's error."""
        async for _ in self:
            pass
        if self.last is None:
            raise PenstockError("The request ended without an answer.")
        return self.last
