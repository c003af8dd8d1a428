"""The engine: one loop that serves every front end.

A step is: schedule, run, sample, update.  Requests join and leave between steps.  Any thread may submit and
abort; whoever waits for a request drives the loop, one step at a time under a lock, and serves the others'
requests on the way.  Whatever goes wrong in a step ends that step's requests with the error, never the engine.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING

from penstock.core.forked import check_process, is_forked
from penstock.engine.batch import BatchLayout
from penstock.engine.capabilities import check_sampling
from penstock.engine.deadlines import Deadlines
from penstock.engine.fair_queue import heaviest
from penstock.engine.interrupt import interrupt_after
from penstock.engine.options import EngineOptions, RequestOptions, check_options
from penstock.engine.pages import PageLedger
from penstock.engine.params import ResolvedSampling, check_num_top
from penstock.engine.pooling import Pooling
from penstock.engine.prefix import PageKeys
from penstock.engine.prompts import check_token_ids
from penstock.engine.request import Request, Status, to_penstock_error
from penstock.engine.sampler import SamplingRows, accept_row, row_arrays
from penstock.engine.scheduler import Chunk, Scheduler
from penstock.engine.stats import EngineStats
from penstock.errors import (
    DeadlineError,
    InternalError,
    InvalidArgumentError,
    PenstockError,
    QueueFullError,
    UnsupportedError,
)
from penstock.runtime.program import PAGE_TOKENS, Program, pages_for

if TYPE_CHECKING:
    from penstock.core.native import Sampled
    from penstock.engine.prompt_logits import PromptRows
    from penstock.text.text_stream import TextStream

__all__ = ["Engine"]


class Engine:
    """A program, its scheduler and its pages.

    ``observer``, when set, is called with the requests that got a token or ended, after each step and after an abort
    between steps, in the thread that did it, while no other can step.  It must return soon and raise nothing.
    """

    def __init__(self, program: Program, options: EngineOptions | None = None) -> None:
        limits, info = program.limits, program.info
        self.program = program
        self.options = options or EngineOptions()
        self.max_len = min(info.context_len, limits.context_len or info.context_len, limits.num_pages * PAGE_TOKENS)
        if info.bidirectional:  # a prompt runs in one step
            self.max_len = min(self.max_len, limits.max_tokens, self.options.max_chunk or limits.max_tokens)
        self.scheduler = self._new_scheduler()
        self._rows = SamplingRows(info.vocab_size)
        self.layout = BatchLayout(len(info.page_windows), limits.max_requests, pages_for(self.max_len))
        self.num_steps = self.num_output_tokens = 0
        self.observer: Callable[[Sequence[Request]], None] | None = None
        self._num_finished: Counter[str] = Counter()
        self._ids = count()
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._door = threading.RLock()  # who holds it may come in
        self._num_submitted = self._num_ended = 0
        self._incoming: deque[Request] = deque()
        self._aborts: deque[Request | int] = deque()  # a number: every request below it
        self._displaced: dict[int, Request] = {}  # they end in favour of another client's, unless they have begun
        self._ended: list[Request] = []  # not told to anybody yet
        self._deadlines = Deadlines()
        self._busy = False
        self._closed = False

    def _new_scheduler(self) -> Scheduler:
        limits, options = self.program.limits, self.options
        scheduler = Scheduler(
            PageLedger(limits.num_pages, self.program.info.page_windows),
            limits.max_tokens,
            limits.max_requests,
            options.max_chunk,
            PageKeys() if options.prefix_cache else None,
            max_rows=limits.max_rows,
            max_mixed_tokens=options.max_mixed_tokens,
            priority_s=options.priority_s,
        )
        scheduler.whole_prompts = self.program.info.bidirectional
        return scheduler

    def submit(
        self,
        prompt_ids: Sequence[int],
        sampling: ResolvedSampling | None = None,
        *,
        stop_ids: frozenset[int] = frozenset(),
        text: TextStream | None = None,
        options: RequestOptions | None = None,
        pooling: Pooling | None = None,
        prompt_rows: PromptRows | None = None,
        family: int = 0,
    ) -> Request:
        """Queue a prompt, checked first; InvalidArgumentError says what is wrong with it.  With ``pooling`` it is not
        continued, but its hidden rows are taken; UnsupportedError when the program has none.

        ``prompt_rows`` takes what is wanted of each of its positions; with ``max_tokens`` 0 that is all, and the prompt
        may fill the context.  Requests of one ``family`` (not 0) share its pages, without the prefix cache too.
        QueueFullError when as many requests wait as may.
        """
        self.check_process()
        self._check_open()
        options, sampling = check_options(options), check_sampling(sampling, self.program.info)
        if prompt_rows is not None:
            check_num_top(max(0, prompt_rows.num_logprobs), self.program.info.vocab_size)
        if pooling is not None and not self.program.info.hidden_size:
            raise UnsupportedError("embed: the network does not pick the rows of its head from rows of all tokens")
        num_new = 0 if pooling is not None else sampling.max_tokens
        ids = self.fit_prompt(prompt_ids, num_new, options)
        if self.scheduler.whole_prompts and prompt_rows is not None and len(ids) > self.program.limits.max_rows:
            raise InvalidArgumentError(
                f"prompt has {len(ids)} tokens, but a step has {self.program.limits.max_rows} rows of logits "
                "(max_rows), and this network runs a prompt in one step, because its attention is not causal",
                param="prompt",
            )
        max_tokens = min(sampling.max_tokens, self.max_len - len(ids))
        request = Request(next(self._ids), ids, max_tokens, sampling, stop_ids, text, options=options, pooling=pooling)
        request.prompt_rows, request.family = prompt_rows, family
        with self._door:  # two at once would both find the last place
            if not self.has_room and not self._displace(options):
                full = f"The request queue is full ({self._num_waiting} waiting). Retry later."
                raise QueueFullError(full)
            self._num_submitted += 1
            self._incoming.append(request)
        if self._displaced:
            self._settle()
        if self._closed:  # by another thread, which may have looked before
            with self._alone():
                self._accept_calls()
                self._end(request, "abort")
        return request

    def fit_prompt(self, prompt_ids: Sequence[int], max_tokens: int, options: RequestOptions) -> list[int]:
        """The prompt as it runs when up to ``max_tokens`` follow: checked, and cut to its end when the options say so
        and it is too long.  InvalidArgumentError as ``check_prompt`` has it.
        """
        answer_len = min(1, max_tokens)
        if options.truncate_prompt and hasattr(prompt_ids, "__len__") and len(prompt_ids) + answer_len > self.max_len:
            prompt_ids = prompt_ids[-max(1, self.max_len - min(max_tokens, self.max_len // 2)) :]
        return self.check_prompt(prompt_ids, answer_len)

    @property
    def _num_waiting(self) -> int:
        """Open requests beyond the places of a step.  Counted by who came and who ended: lists change meanwhile."""
        return self._num_submitted - self._num_ended - self.scheduler.max_requests

    @property
    def has_room(self) -> bool:
        """Whether one more request may wait."""
        return self.options.max_waiting == 0 or self._num_waiting < self.options.max_waiting

    def has_room_for(self, client: str, priority: int | None = None) -> bool:
        """Return True if one more request of a client may wait, also in place of another client's last request.

        Without ``priority`` the request counts as the most urgent.
        """
        return self.has_room or self._giving_way(self._displaceable(), client, priority) is not None

    def _displaceable(self) -> list[Request]:
        """Requests that wait for their first place in a step, from any thread."""
        waiting = (*self.scheduler.waiting.copy(), *self._incoming.copy())
        return [r for r in waiting if not r.timings.scheduled and r.id not in self._displaced]

    @staticmethod
    def _giving_way(waiting: Iterable[Request], client: str, priority: int | None) -> str | None:
        return heaviest(((r.options.client, r.options.priority) for r in waiting), client, priority)

    def _displace(self, options: RequestOptions) -> bool:
        """End the least urgent, last waiting request of the client that has most, in favour of a new request.

        Returns False if the new request's client has about as many, or if the others' requests are more urgent.
        """
        waiting = self._displaceable()
        name = self._giving_way(waiting, options.client, options.priority)
        if name is None:
            return False
        last = max((r for r in waiting if r.options.client == name), key=lambda r: (r.options.priority, r.id))
        self._displaced[last.id] = last
        return True

    def make_room(self) -> None:
        """Drive the loop until one more request may wait."""
        while not self.has_room:
            self.step()

    def check_prompt(self, prompt_ids: Sequence[int], answer_len: int = 1) -> list[int]:
        """The prompt as a list of ids; InvalidArgumentError when it is empty, too long or has an id out of range."""
        if self.scheduler.whole_prompts and hasattr(prompt_ids, "__len__"):
            num_tokens = len(prompt_ids) + answer_len
            limits, longest = self.program.limits, self.program.info.context_len
            if self.max_len < num_tokens <= min(longest, limits.context_len or longest):
                raise InvalidArgumentError(
                    f"prompt has {len(prompt_ids)} tokens, but this network runs a prompt in one step, because its "
                    f"attention is not causal, and a step holds {self.max_len} with the answer's (max_tokens of its "
                    "limits, max_chunk)",
                    param="prompt",
                )
        return check_token_ids(prompt_ids, self.program.info.vocab_size, self.max_len, answer_len)

    def abort(self, request: Request) -> None:
        """End a request now, from any thread: its pages are free when this returns or the running step ends."""
        if is_forked(self._pid):
            return  # a copy of the parent's request, which goes on there
        self._aborts.append(request)
        self._settle()

    def await_abort(self, request: Request) -> None:
        """Return when a request that was aborted has ended, at the end of the running step; at once within a step."""
        self.check_process()
        while not self._lock.acquire(timeout=0.001):  # it is not fair: the step's own thread may carry it out
            if request.status is Status.FINISHED:
                return
        try:  # with the lock held: no other step comes in between
            self._settle()
        finally:
            self._lock.release()

    def abort_all(self) -> None:
        """End every request that was submitted before, from any thread."""
        self.check_process()
        self._aborts.append(next(self._ids))  # who they are is seen under the lock: they move from list to list
        self._settle()

    def fail_all(self, error: Exception) -> None:
        """End every request with what came out of a step itself; the engine goes on with all pages free."""
        with self._alone():
            self._start_over(error)
            while self._incoming:
                self._end(self._incoming.popleft(), "error", to_penstock_error("the step", error))
            self._tell([])

    def step(self) -> list[Request]:
        """One step: schedule, run, sample, update.  Returns the requests that got a token or ended."""
        with self._alone():
            self._check_open()
            self._accept_calls()
            self._expire()
            return self._tell(self._step())

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Work on the requests while nobody else does, and carry out the aborts that came meanwhile.

        They come from other threads, and from this one in the middle of the work: the garbage collector drops a stream,
        a signal's handler aborts.  Anything else in the middle of it is refused.
        """
        self.check_process()
        try:
            with self._lock, interrupt_after():
                if self._busy:
                    raise InternalError("the engine was called again in the middle of its own step, in the same thread")
                self._busy = True
                try:
                    yield
                finally:
                    self._busy = False  # while the lock is held: what comes next may be another thread's
        finally:
            self._settle()

    def _tell(self, news: list[Request]) -> list[Request]:
        """Add what has ended besides, and let the observer know."""
        news += self._ended
        self._ended.clear()
        if self.observer is not None and news:
            self.observer(news)
        return news

    def _step(self) -> list[Request]:
        try:
            chunks = self.scheduler.schedule()
        except Exception as error:  # its books may be wrong: nobody's pages can be trusted
            self._start_over(error)
            return []
        if not chunks:
            return []
        sampled = [chunk.request for chunk in chunks if chunk.samples]
        self.num_steps += 1
        try:
            batch = self.layout.lay_out(chunks)
            if len(batch.output_rows):
                rows = self.program.step(batch, row_arrays(self._rows.of(sampled), chunks))
            else:
                self.program.run(batch)
            pooled = self._pool(chunks) if len(sampled) < len(chunks) else []
            for chunk in chunks:
                self.scheduler.advance(chunk)
        except Exception as error:
            for chunk in chunks:
                self._end(chunk.request, "error", to_penstock_error("the step", error))
            return []
        row = 0
        for chunk in chunks:
            row += chunk.num_rows
            if chunk.num_rows:
                self._accept(chunk, rows, range(row - chunk.num_rows, row))
        for request, damage in pooled:
            self._end(request, "error" if damage else "stop", damage)
        return sampled

    def _pool(self, chunks: Sequence[Chunk]) -> list[tuple[Request, InternalError | None]]:
        """Hand the step's hidden rows to the requests with a pooling.

        Returns the requests whose prompt is complete, each with the error in its rows or None.
        """
        if all(chunk.request.pooling is None for chunk in chunks):
            return []
        hidden, start = self.program.hidden(), 0
        ended: list[tuple[Request, InternalError | None]] = []
        for chunk in chunks:
            stop, pooling = start + chunk.num_tokens, chunk.request.pooling
            if pooling is not None:
                pooling.take(hidden[start:stop], chunk.start)
                if chunk.start + chunk.num_tokens == chunk.request.num_tokens:
                    ended.append((chunk.request, pooling.error()))
            start = stop
        return ended

    def _accept(self, chunk: Chunk, rows: Sampled, own: range) -> None:
        """Give a request its own rows: of its prompt, and that of the next token."""
        request = chunk.request
        try:
            if request.prompt_rows is not None:
                request.prompt_rows.take(len(request.prompt_ids), self.program, rows, own)
            if not chunk.samples:
                return
            if request.max_tokens == 0:
                request.finish("length")
            else:
                accept_row(request, rows, own[-1])
                self.num_output_tokens += 1
        except Exception as error:
            self._end(request, "error", to_penstock_error("the step", error))
            return
        if request.status is Status.FINISHED:
            self.scheduler.remove(request)
            self._count_end(request)

    def _start_over(self, error: Exception) -> None:
        """Every request ends with the error; the engine goes on with all pages free."""
        everyone = [*self.scheduler.running, *self.scheduler.waiting]
        self.scheduler = self._new_scheduler()
        for request in everyone:
            request.pages, request.slot = None, -1
            self._end(request, "error", to_penstock_error("the step", error))

    def _expire(self) -> None:
        """End the requests whose time is over."""
        if self._deadlines:
            for request, error in self._deadlines.take_over(time.perf_counter()):
                self._end(request, "error", error)

    def wait(self, request: Request, num_tokens: int) -> bool:
        """Drive the loop until the request has more than ``num_tokens`` answer tokens or has ended.

        True while it is not finished.  With several threads waiting, one steps at a time.
        """

        def nothing_new() -> bool:
            return request.status is not Status.FINISHED and len(request.output_ids) <= num_tokens

        self.check_process()
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

    @property
    def has_work(self) -> bool:
        """Whether a step would have anything to do, from any thread."""
        return bool(self._incoming or self._aborts or self._displaced or self.scheduler.has_work)

    @property
    def is_closed(self) -> bool:
        """Whether it takes no more requests."""
        return self._closed

    def figures(self) -> EngineStats:
        """Counters of this moment, from any thread."""
        scheduler = self.scheduler
        pools = scheduler.ledger.pools
        fullest = min(pools, key=lambda pool: pool.num_free, default=None)  # a model without attention has none
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting) + len(self._incoming),
            num_pages=fullest.num_pages if fullest else 0,
            num_held_pages=fullest.num_pages - fullest.num_free if fullest else 0,
            num_named_pages=max((pool.num_named for pool in pools), default=0),
            num_steps=self.num_steps,
            num_preemptions=scheduler.num_preemptions,
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_cached_tokens=scheduler.num_cached_tokens,
            num_output_tokens=self.num_output_tokens,
            num_finished=dict(self._num_finished),
            num_step_tokens=scheduler.num_step_tokens,
            num_steps_by=dict(scheduler.num_steps_by),
        )

    def forget_prefixes(self) -> None:
        """Drop what the prefix cache knows; requests keep what they hold."""
        with self._alone():
            self.scheduler.ledger.forget()

    def check_integrity(self) -> None:
        """InternalError unless scheduler and pages agree."""
        with self._alone():
            self.scheduler.check_integrity()

    def close(self) -> None:
        """End every request with "abort" and close the program.  Does nothing the second time or in a forked child."""
        if is_forked(self._pid):
            return  # the parent's threads and memory are the parent's to end
        with self._alone():
            if self._closed:
                return
            self._closed = True  # first: a submit that does not see it is seen here
            self._accept_calls()
            for request in self._everyone():
                self._end(request, "abort")
            self._tell([])
            self.program.close()

    def _everyone(self) -> list[Request]:
        return [*self.scheduler.running.copy(), *self.scheduler.waiting.copy(), *self._incoming.copy()]

    def check_process(self) -> None:
        """InvalidArgumentError in a forked child, before it waits for a lock that a thread of the parent held."""
        check_process(self._pid, "LLM")

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidArgumentError("the engine is closed")

    def _settle(self) -> None:
        """Carry out aborts now, unless a step runs: its thread does so when it ends."""
        while (self._aborts or self._displaced) and self._lock.acquire(blocking=False):
            try:
                if self._busy:
                    return
                self._busy = True
                try:
                    with interrupt_after():
                        self._accept_calls()
                        self._tell([])
                finally:
                    self._busy = False
            finally:
                self._lock.release()

    def _accept_calls(self) -> None:
        while self._incoming:
            request = self._incoming.popleft()
            if request.status is Status.FINISHED:  # aborted before it was seen here
                continue
            try:
                self.scheduler.add(request)
            except Exception:
                self._incoming.appendleft(request)  # whoever ends all requests must find it
                raise
            self._deadlines.add(request)
        while self._aborts:
            one = self._aborts.popleft()
            for request in [r for r in self._everyone() if r.id < one] if isinstance(one, int) else [one]:
                self._end(request, "abort")
        while self._displaced:
            _, request = self._displaced.popitem()
            if not request.timings.scheduled:
                full = (
                    f"The request queue is full ({self.options.max_waiting} waiting), and this client has most of the "
                    "waiting requests. Retry later."
                )
                self._end(request, "error", QueueFullError(full))
        self._deadlines.forget_ended(self._num_submitted - self._num_ended)

    def _end(self, request: Request, reason: str, error: PenstockError | None = None) -> None:
        if request.status is not Status.FINISHED:
            if error is not None and not isinstance(error, DeadlineError) and request.pages is not None:
                self.scheduler.ledger.unname(request.pages)  # keys and values may be why
            self.scheduler.remove(request)
            request.finish(reason, error)
            self._count_end(request)
            self._ended.append(request)

    def _count_end(self, request: Request) -> None:
        self._num_ended += 1
        self._num_finished["error" if request.error is not None else request.finish_reason or "error"] += 1
