"""An answer on its way from a feed to its reader."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType

from penstock.engine.logprobs import TokenLogprobs
from penstock.errors import PenstockError
from penstock.llm.backend import Delta
from penstock.llm.engine_thread import StepEvent

__all__ = ["EventAnswer"]


def _nothing() -> None:
    """Nobody is to be told."""


class EventAnswer:
    """The Answer that whoever receives StepEvent fills with ``put``, in the event loop of its reader.

    ``on_abort`` is called once when the reader goes before the end.
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
        """Called when something came of it: its first news, its last, an error, or its reader's leaving."""
        self.take_now: Callable[[Delta], bool] | None = None
        """Offered what comes in the middle of an answer while its reader waits, who is then not woken for it; False
        leaves it to the reader.  What it raises, the reader gets."""
        self._on_abort: Callable[[], None] | None = on_abort
        self._unread: deque[Delta] = deque()
        self._error: BaseException | None = None
        self._ended = False
        self._reader: asyncio.Future[None] | None = None

    def put(self, news: StepEvent) -> None:
        """Take what came, its lists with it; nothing more may come after the last."""
        self.last = news
        settles, self.has_begun = news.is_last or not self.has_begun, True
        if news.opening is not None:
            self.num_prompt_tokens = news.opening.num_prompt_tokens
            self.num_cached_tokens = news.opening.num_cached_tokens
            self.seeds[0], self.prompt_logprobs = news.opening.seed, news.opening.prompt_logprobs
        elif news.seed is not None:
            self.seeds[news.index] = news.seed
        if news.timings is not None and news.index == 0:
            self.timings = news.timings
        if news.error is not None:
            self.fail(news.error)
            return
        if self.take_now is None or settles or not self._is_taken_now(news):
            self._append(news)
        if news.is_last:
            self._ended, self._on_abort, self.is_complete = True, None, True
        if self._unread or settles or self._error is not None:
            self._wake()
        if settles:
            self._settle()

    def fail(self, error: BaseException) -> None:
        """End with an error, once what came before it is read."""
        if self._ended:
            return
        self._error, self._ended, self._on_abort = error, True, None
        self._wake()
        self._settle()

    def _is_taken_now(self, news: StepEvent) -> bool:
        """Whether ``take_now`` took it: not when its reader is behind, nor the end of an answer."""
        reader, take_now = self._reader, self.take_now
        if take_now is None or reader is None or reader.done() or self._unread or news.finish_reason is not None:
            return False
        try:
            return take_now(Delta(news.index, news.text, news.token_ids, None, news.logprobs))
        except Exception as error:
            self._error = error
            return True

    def _append(self, news: StepEvent) -> None:
        for unread in self._unread:  # of a reader who is behind: as many as there are answers
            if unread.index == news.index:
                unread.text += news.text
                unread.token_ids += news.token_ids
                unread.finish_reason = news.finish_reason
                if unread.logprobs is not None and news.logprobs is not None:
                    unread.logprobs += news.logprobs
                return
        self._unread.append(Delta(news.index, news.text, news.token_ids, news.finish_reason, news.logprobs))

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come."""
        return self._ended

    def __aiter__(self) -> EventAnswer:
        return self

    async def __anext__(self) -> Delta:
        """What is new of one of the answers."""
        while not self._unread:
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if self._ended:
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
        if self._ended:  # it is let go of: what holds each other waits for the garbage collector, who stops all
            self.on_settled = _nothing
        on_settled()

    async def aclose(self) -> None:
        """End the request; nothing happens when it has ended."""
        self.close()

    def close(self) -> None:
        """The same, without a coroutine."""
        self._ended, self.take_now = True, None
        self._unread.clear()
        self._wake()
        if self._on_abort is not None:
            on_abort, self._on_abort = self._on_abort, None
            on_abort()
            self._settle()

    async def __aenter__(self) -> EventAnswer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def whole(self) -> StepEvent:
        """The last news, for an answer that comes as one; raises what it ended with."""
        async for _ in self:
            pass
        if self.last is None:
            raise PenstockError("the request ended without an answer")
        return self.last
