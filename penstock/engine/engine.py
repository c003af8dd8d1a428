"""The engine: one loop that serves every front end.

A step is: schedule, run, sample, update.  Requests join and leave between steps.  Any thread may submit and
abort; whoever waits for a request drives the loop, one step at a time under a lock, and serves the others'
requests on the way.
"""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from operator import index
from types import FrameType
from typing import TYPE_CHECKING

from penstock.engine.batch import lay_out
from penstock.engine.pages import PageLedger
from penstock.engine.request import Request, ResolvedSampling, Status
from penstock.engine.sampler import sampling_arrays
from penstock.engine.scheduler import Chunk, Scheduler
from penstock.errors import InvalidArgumentError, PenstockError
from penstock.runtime.program import PAGE_TOKENS, Program

if TYPE_CHECKING:
    from penstock.engine.text import TextStream

__all__ = ["Engine", "interrupt_after"]


class Engine:
    """A program, its scheduler and its pages.

    ``max_chunk`` bounds the tokens of one request in one step (0: the step's budget, ``limits.max_tokens``).
    """

    def __init__(self, program: Program, *, max_chunk: int = 0) -> None:
        limits, info = program.limits, program.info
        self.program = program
        self.max_len = min(info.context_len, limits.context_len or info.context_len, limits.num_pages * PAGE_TOKENS)
        ledger = PageLedger(limits.num_pages, info.page_windows)
        max_requests = min(limits.max_requests, limits.max_rows or limits.max_requests)
        self.scheduler = Scheduler(ledger, limits.max_tokens, max_requests, max_chunk)
        self.num_steps = 0
        self._ids = count()
        self._lock = threading.RLock()
        self._incoming: deque[Request] = deque()
        self._aborts: deque[Request] = deque()
        self._stepping = False
        self._closed = False

    def submit(
        self,
        prompt_ids: Sequence[int],
        sampling: ResolvedSampling | None = None,
        *,
        stop_ids: frozenset[int] = frozenset(),
        text: TextStream | None = None,
    ) -> Request:
        """Queue a prompt, checked first; InvalidArgumentError says what is wrong with it."""
        self._check_open()
        ids = self.check_prompt(prompt_ids)
        sampling = sampling or ResolvedSampling()
        max_tokens = min(sampling.max_tokens, self.max_len - len(ids))
        request = Request(next(self._ids), ids, max_tokens, sampling, stop_ids, text)
        self._incoming.append(request)
        return request

    def check_prompt(self, prompt_ids: Sequence[int], answer_len: int = 1) -> list[int]:
        """The prompt as a list of ids; InvalidArgumentError when it is empty, too long or has an id out of range."""
        if isinstance(prompt_ids, (str, bytes)) or not hasattr(prompt_ids, "__len__"):
            raise InvalidArgumentError(f"prompt must be a list of token ids, not {type(prompt_ids).__name__}")
        if not len(prompt_ids):
            raise InvalidArgumentError("prompt is empty: it must have at least one token")
        if len(prompt_ids) + answer_len > self.max_len:
            beside = f", {answer_len} of them for the answer" if answer_len else ""
            raise InvalidArgumentError(
                f"prompt has {len(prompt_ids)} tokens, but the context holds {self.max_len}{beside}"
            )
        vocab_size = self.program.info.vocab_size
        ids = []
        for position, token in enumerate(prompt_ids):
            try:
                ids.append(index(token))
            except TypeError:
                raise InvalidArgumentError(
                    f"prompt: token ids must be whole numbers, found {token!r} at {position}"
                ) from None
            if isinstance(token, bool) or not 0 <= ids[-1] < vocab_size:
                raise InvalidArgumentError(f"prompt: token id {token} at {position} is not in 0 to {vocab_size - 1}")
        return ids

    def abort(self, request: Request) -> None:
        """End a request now, from any thread: its pages are free when this returns or the running step ends."""
        self._aborts.append(request)
        self._settle()

    def abort_all(self) -> None:
        """End every request that is not finished, from any thread."""
        for request in self._everyone():
            self._aborts.append(request)
        self._settle()

    def step(self) -> list[Request]:
        """One step: schedule, run, sample, update.  Returns the requests that got a token or ended."""
        try:
            with self._lock, interrupt_after():
                self._check_open()
                self._accept_calls()
                self._stepping = True
                try:
                    return self._step()
                finally:
                    self._stepping = False  # while the lock is held: the next step may be another thread's
        finally:
            self._settle()

    def _step(self) -> list[Request]:
        chunks = self.scheduler.schedule()
        if not chunks:
            return []
        sampled = [chunk.request for chunk in chunks if chunk.samples]
        self.num_steps += 1
        try:
            batch = lay_out(chunks)
            if sampled:
                tokens = self.program.step(batch, sampling_arrays(sampled))[0].tolist()
            else:
                self.program.run(batch)
                tokens = []
        except PenstockError as error:
            return self._fail(chunks, error)
        for chunk in chunks:
            self.scheduler.advance(chunk)
        for request, token in zip(sampled, tokens, strict=True):
            request.accept(token)
            if request.status is Status.FINISHED:
                self.scheduler.remove(request)
        return sampled

    def wait(self, request: Request, num_tokens: int) -> bool:
        """Drive the loop until the request has more than ``num_tokens`` answer tokens or has ended.

        True while it is not finished.  With several threads waiting, one steps at a time.
        """

        def nothing_new() -> bool:
            return request.status is not Status.FINISHED and len(request.output_ids) <= num_tokens

        while nothing_new():
            # The timeout: a lock is not fair, and another thread's step may bring what this one waits for.
            if not self._lock.acquire(timeout=0.02):
                continue
            try:
                if nothing_new():
                    self.step()
            finally:
                self._lock.release()
                self._settle()
        return request.status is not Status.FINISHED

    @contextmanager
    def between_steps(self) -> Iterator[Scheduler]:
        """The scheduler while no step runs, for work beside the loop."""
        with self._lock:
            self._check_open()
            with interrupt_after():
                self._accept_calls()
            yield self.scheduler

    def check_integrity(self) -> None:
        """InternalError unless scheduler and pages agree."""
        with self._lock:
            self.scheduler.check_integrity()

    def close(self) -> None:
        """End every request with "abort" and close the program.  Calling it again does nothing."""
        with self._lock:
            if self._closed:
                return
            self._accept_calls()
            for request in self._everyone():
                self._end(request, "abort")
            self._closed = True
            self.program.close()

    def _everyone(self) -> list[Request]:
        scheduler = self.scheduler
        return [*scheduler.running.copy(), *scheduler.waiting.copy(), *self._incoming.copy()]

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidArgumentError("the engine is closed")

    def _settle(self) -> None:
        """Carry out aborts now, unless a step runs: its thread does so when it ends."""
        while self._aborts and self._lock.acquire(blocking=False):
            try:
                if self._stepping:  # called by a signal handler in the middle of this thread's own step
                    return
                with interrupt_after():
                    self._accept_calls()
            finally:
                self._lock.release()

    def _accept_calls(self) -> None:
        while self._incoming:
            self.scheduler.add(self._incoming.popleft())
        while self._aborts:
            self._end(self._aborts.popleft(), "abort")

    def _end(self, request: Request, reason: str, error: PenstockError | None = None) -> None:
        if request.status is not Status.FINISHED:
            self.scheduler.remove(request)
            request.finish(reason, error)

    def _fail(self, chunks: Sequence[Chunk], error: PenstockError) -> list[Request]:
        """The step failed: its requests end with the error, the engine goes on."""
        for chunk in chunks:
            self._end(chunk.request, "error", error)
        return [chunk.request for chunk in chunks]


@contextmanager
def interrupt_after() -> Iterator[None]:
    """Hold Ctrl-C back until the block is done, so that it never leaves a step half updated."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:
        yield
        return
    interrupted: list[FrameType | None] = []
    signal.signal(signal.SIGINT, lambda _number, frame: interrupted.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if interrupted:
            raise KeyboardInterrupt
