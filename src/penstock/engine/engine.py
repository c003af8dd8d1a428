"""The engine: one loop that serves every front end.

A step is: schedule, run, sample, update.  Requests join and leave between steps.  Any thread may submit and abort.  A
thread that waits for a request drives the loop, one step at a time under a lock, and thereby also serves the requests
of other threads.  An error in a step ends the requests of that step, never the engine.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, cast

from penstock.checkpoint.pooling.head import PoolingHead
from penstock.core.forked import check_process, is_forked
from penstock.engine.batch import BatchLayout, Step, take_hidden
from penstock.engine.capabilities import check_halves, check_sampling
from penstock.engine.deadlines import Deadlines
from penstock.engine.decoding.hook import apply_hooks
from penstock.engine.fair_queue import displaced_error, heaviest
from penstock.engine.interrupt import end_stuck_step, interrupt_after
from penstock.engine.options import EngineOptions, RequestOptions, check_options
from penstock.engine.page_journal import PageJournal
from penstock.engine.pages import PageLedger
from penstock.engine.params import ResolvedSampling, check_num_top
from penstock.engine.pooling import Pooling, check_heads
from penstock.engine.prompts import begin_decoder, check_token_ids, longer_than_a_step, more_rows_than_a_step, own_start
from penstock.engine.request import BegunAnswer, Request, RequestStatus, to_penstock_error
from penstock.engine.sampler import SamplingRows, accept_row, lacks_mask, mask_errors, masks_to_make, row_arrays
from penstock.engine.scheduler import Chunk, Scheduler
from penstock.engine.stats import EngineStats
from penstock.errors import (
    DeadlineError,
    InternalError,
    InvalidArgumentError,
    PenstockError,
    QueueFullError,
)
from penstock.runtime.program import PAGE_TOKENS, Program, pages_for
from penstock.text.grammar.matcher import MaskThread

if TYPE_CHECKING:
    from penstock.core.native import Sampled, Sampling, StepBatch
    from penstock.engine.prompt_logits import PromptRows
    from penstock.runtime.program import PipelinedProgram
    from penstock.text.text_stream import TextStream

__all__ = ["Engine"]

MIN_CHUNK = 128
"""The chunks of a prompt that several stages compute at once have at least this many tokens."""


class Engine:
    """A program with its scheduler and its pages.

    ``observer``, if set, is called after each step, and after an abort between steps, with the requests that got a
    token or ended.  It runs in the thread that made the step, and must return soon and not raise.  ``journal`` reports
    which pages can be shared.  ``pooling_head`` is that of the model's files.  Without ``has_language_head`` only
    prompts with a pooling are accepted.  ``prompt_masks`` are tokens of which a prompt has only its last one.
    """

    def __init__(self, program: Program, options: EngineOptions | None = None) -> None:
        limits, info = program.limits, program.info
        self.program = program
        self.options = options or EngineOptions()
        self.max_len = min(info.context_len, limits.context_len or info.context_len, limits.num_pages * PAGE_TOKENS)
        if info.whole_prompts:  # prompts of this model cannot be divided into chunks
            self.max_len = min(self.max_len, limits.max_tokens, self.options.max_chunk or limits.max_tokens)
        self.journal = PageJournal()
        self.scheduler = self._new_scheduler()
        # Of each step in flight
        stages, max_pages = range(info.num_stages), pages_for(self.max_len)
        self._rows = [SamplingRows(info.vocab_size) for _ in stages]
        self.layouts = [BatchLayout(len(info.page_windows), limits.max_requests, max_pages) for _ in stages]
        self._in_flight: deque[Step] = deque()
        self._masks = MaskThread()
        self.num_steps = self.num_output_tokens = 0
        self.pooling_head: PoolingHead | None = None
        self.has_language_head, self.prompt_masks = True, dict[int, str]()
        self.observer: Callable[[Sequence[Request]], None] | None = None
        self._num_finished: Counter[str] = Counter()
        self._ids, self._pid = count(), os.getpid()
        self._lock, self._submit_lock = threading.RLock(), threading.RLock()
        self.search_lock = threading.Lock()  # two beam searches must not share the last places of the queue
        self._num_submitted = self._num_ended = 0
        self._incoming: deque[Request] = deque()
        self._aborts: deque[Request | int] = deque()  # a number stands for every request with a lower id
        self._displaced: dict[int, Request] = {}  # end in favour of another client's request unless they have begun
        self._ended: list[Request] = []  # not reported to the observer
        self._deadlines = Deadlines()
        self._busy = False
        self.is_closed = False  # True: no more requests are accepted

    def _new_scheduler(self) -> Scheduler:
        limits, options, info = self.program.limits, self.options, self.program.info
        num_stages = info.num_stages
        max_chunk = options.max_chunk
        if num_stages > 1 and not max_chunk:
            max_chunk = max(MIN_CHUNK, limits.max_tokens // (2 * num_stages))
        scheduler = Scheduler(
            PageLedger(limits.num_pages, info.page_windows, info.context_ranks, info.group_pages),
            limits.max_tokens,
            limits.max_requests,
            0 if info.whole_prompts else max_chunk,
            self.journal.keys if options.prefix_cache else None,
            max_rows=limits.max_rows,
            max_mixed_tokens=options.max_mixed_tokens,
            priority_s=options.priority_s,
        )
        scheduler.whole_prompts, scheduler.num_stages = info.whole_prompts, num_stages
        if options.prefix_cache:
            self.journal.watch(scheduler.ledger)
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
        """Check a prompt and queue a request for it.

        ``text`` collects the text of the answer.  With ``pooling`` the prompt is not continued, and its hidden rows are
        collected.  ``prompt_rows`` collects a row for each position of the prompt; with ``max_tokens`` 0 nothing else
        happens, and the prompt may fill the context.  Requests of one ``family`` (not 0) share the pages of their
        prompt even without the prefix cache.

        Raises InvalidArgumentError if the prompt or a parameter is wrong, UnsupportedError if the program has no hidden
        rows or cannot sample in this way, and QueueFullError if the queue is full.
        """
        self._check_open()
        options, sampling = check_options(options), check_sampling(sampling, self.program.info)
        if prompt_rows is not None:
            check_num_top(max(0, prompt_rows.num_logprobs), self.program.info.vocab_size)
        check_heads(pooling, self.program.info.hidden_size, self.has_language_head)
        check_halves(pooling, prompt_rows, self.program.info)
        num_new = 0 if pooling is not None else sampling.max_tokens
        ids = self.fit_prompt(prompt_ids, num_new, options)
        if self.scheduler.whole_prompts and prompt_rows is not None and len(ids) > self.program.limits.max_rows:
            raise more_rows_than_a_step(len(ids), self.program.limits.max_rows)
        max_tokens = min(sampling.max_tokens, self.max_len - len(ids))
        request = Request(next(self._ids), ids, max_tokens, sampling, stop_ids, text, options=options, pooling=pooling)
        request.prompt_rows, request.family = prompt_rows, family
        return self._queue(request)

    def resume(
        self,
        prompt_ids: Sequence[int],
        begun: BegunAnswer,
        sampling: ResolvedSampling,
        *,
        stop_ids: frozenset[int] = frozenset(),
        text: TextStream | None = None,
        options: RequestOptions | None = None,
        family: int = 0,
    ) -> Request:
        """Queue a request that another engine began, as ``submit`` does; ``text`` has the begun tokens already.

        They are computed again, as after a preemption, and the next token is the one that the other engine would have
        sampled.  Raises InvalidArgumentError also if no token may follow.
        """
        self._check_open()
        options, sampling = check_options(options), check_sampling(sampling, self.program.info)
        ids = self.fit_prompt(prompt_ids, sampling.max_tokens, options)
        max_tokens = min(sampling.max_tokens, self.max_len - len(ids))
        output_ids = check_token_ids(begun.token_ids, self.program.info.vocab_size, max_tokens, 1)
        request = Request(next(self._ids), ids, max_tokens, sampling, stop_ids, text, options=options, family=family)
        request.resume(output_ids)
        return self._queue(request)

    def _queue(self, request: Request) -> Request:
        """Let a checked request wait for a place in a step; QueueFullError."""
        with self._submit_lock:  # two threads could both take the last place in the queue
            if not self.has_room and not self._displace(request.options):
                raise QueueFullError(f"The request queue is full ({self.num_waiting} waiting). Retry later.")
            self._num_submitted += 1
            request.enter(own_start(request.prompt_ids, self.program.info.prefix_token, self.prompt_masks))
            self._incoming.append(request)
        if self._displaced:
            self._settle()
        if self.is_closed:  # closed by another thread, which may have looked for open requests before
            with self.exclusive():
                self._accept_calls()
                self._end(request, "abort")
        return request

    def fit_prompt(self, prompt_ids: Sequence[int], max_tokens: int, options: RequestOptions) -> list[int]:
        """Return the prompt as it runs when up to ``max_tokens`` tokens follow.

        The prompt is checked as by ``check_prompt``.  If it is too long and the options allow it, only its end is kept.
        """
        answer_len, prompt_ids = min(1, max_tokens), begin_decoder(prompt_ids, self.program.info.prefix_token)
        if options.truncate_prompt and hasattr(prompt_ids, "__len__") and len(prompt_ids) + answer_len > self.max_len:
            prompt_ids = prompt_ids[-max(1, self.max_len - min(max_tokens, self.max_len // 2)) :]
        return self.check_prompt(prompt_ids, answer_len)

    @property
    def num_waiting(self) -> int:
        """Open requests beyond the places of a step, from counters, because the lists change meanwhile."""
        return self._num_submitted - self._num_ended - self.scheduler.max_requests

    @property
    def has_room(self) -> bool:
        """True if one more request may wait."""
        return self.options.max_waiting == 0 or self.num_waiting < self.options.max_waiting

    def has_room_for(self, client: str, priority: int | None = None) -> bool:
        """Return True if one more request of a client may wait, possibly in place of another client's last request.

        Without ``priority`` the request counts as the most urgent.
        """
        return self.has_room or self._giving_way(self._displaceable(), client, priority) is not None

    def _displaceable(self) -> list[Request]:
        """Return the requests that wait for their first place in a step.  Any thread may call this."""
        waiting = (*self.scheduler.waiting.copy(), *self._incoming.copy())
        return [r for r in waiting if not (r.timings.scheduled or r.num_resumed or r.id in self._displaced)]

    @staticmethod
    def _giving_way(waiting: Iterable[Request], client: str, priority: int | None) -> str | None:
        return heaviest(((r.options.client, r.options.priority) for r in waiting), client, priority)

    def _displace(self, options: RequestOptions) -> bool:
        """End a waiting request in favour of a new one: the least urgent, last one of the client with the most.

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
        """Return the prompt as a list of ids.

        Raises InvalidArgumentError if it is empty, too long, or has an id outside of the vocabulary.
        """
        prompt_ids = begin_decoder(prompt_ids, self.program.info.prefix_token, self.prompt_masks)
        if self.scheduler.whole_prompts and hasattr(prompt_ids, "__len__"):
            limits, longest = self.program.limits, self.program.info.context_len
            if self.max_len < len(prompt_ids) + answer_len <= min(longest, limits.context_len or longest):
                raise longer_than_a_step(len(prompt_ids), self.max_len)
        return check_token_ids(prompt_ids, self.program.info.vocab_size, self.max_len, answer_len)

    def abort(self, request: Request) -> None:
        """End a request, from any thread.  Its pages are free when this returns, or when the running step ends."""
        if is_forked(self._pid):
            return  # a copy of the parent's request, which goes on in the parent
        self._aborts.append(request)
        self._settle()

    def await_abort(self, request: Request) -> None:
        """Wait until an aborted request has ended, at the end of the running step.  Within a step, return at once."""
        self.check_process()
        # With a timeout, because the lock is not fair, and the thread of the step may carry out the abort.
        while not self._lock.acquire(timeout=0.001):
            if request.status is RequestStatus.FINISHED:
                return
        try:  # with the lock held, no other step can start
            self._settle()
        finally:
            self._lock.release()

    def abort_all(self) -> None:
        """End every request that was submitted before this call, from any thread."""
        self.check_process()
        self._aborts.append(next(self._ids))  # found under the lock, because requests move from list to list
        self._settle()

    def fail_all(self, error: Exception) -> None:
        """End every request with an error that a step raised.  The engine goes on with all pages free."""
        with self.exclusive():
            self._start_over(error)
            while self._incoming:
                self._end(self._incoming.popleft(), "error", to_penstock_error("The step", error))
            self._notify([])

    def step(self) -> list[Request]:
        """Run one step: schedule, run, sample, update.  Returns the requests that got a token or ended."""
        with self.exclusive():
            self._check_open()
            self._accept_calls()
            self._expire()
            return self._notify(self._step())

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Work on the requests while no other thread does, and carry out the aborts that arrive meanwhile.

        Aborts come from other threads, and from this one in the middle of the work: the garbage collector drops a
        stream, or a signal handler aborts.  Any other call in the middle of the work is refused.
        """
        self.check_process()
        try:
            with self._lock, interrupt_after():
                if self._busy:
                    raise InternalError("The engine was called in the middle of its own step, by the same thread.")
                self._busy = True
                try:
                    yield
                finally:
                    self._busy = False  # while the lock is held, because another thread may step next
        finally:
            self._settle()

    def _notify(self, changed: list[Request]) -> list[Request]:
        """Add the requests that ended otherwise, and call the observer."""
        changed += self._ended
        self._ended.clear()
        if self.observer is not None and changed:
            self.observer(changed)
        return changed

    def _step(self) -> list[Request]:
        if self.program.info.num_stages == 1:
            step = self._schedule()
            return [] if step is None else self._finish(step, lambda: self._run(step))
        while len(self._in_flight) < self.program.info.num_stages and self._launch():
            pass
        if not self._in_flight:
            return []
        return self._finish(self._in_flight.popleft(), cast("PipelinedProgram", self.program).collect)

    def _schedule(self) -> Step | None:
        """Return the next step; None if there is nothing to do."""
        try:
            chunks = self.scheduler.schedule()
        except Exception as error:  # its lists may be wrong, so no request's pages can be trusted
            self._start_over(error)
            return None
        if not chunks:
            return None
        self.num_steps += 1
        pages = [chunk.request.pages for chunk in chunks]
        return Step(chunks, pages, [chunk.request for chunk in chunks if chunk.samples])

    def _lay_out(self, step: Step) -> StepBatch:
        """Return the arrays of a step; they are valid until as many others as there are stages were laid out."""
        return self.layouts[self.num_steps % len(self.layouts)].lay_out(step.chunks)

    def _sampling(self, step: Step) -> Sampling | None:
        """Return the parameters of the step's rows, as long valid.  Ends the requests whose grammar failed."""
        if not any(chunk.num_rows for chunk in step.chunks):
            return None
        for request, error in (*mask_errors(step.sampled), *apply_hooks(self.program, step.chunks)):
            self._end(request, "error", error)
        return row_arrays(self._rows[self.num_steps % len(self._rows)].of(step.sampled), step.chunks)

    def _run(self, step: Step) -> Sampled | None:
        batch, rows = self._lay_out(step), None
        apart = [r for r in step.sampled if r.sampling.hook is not None or lacks_mask(r)]
        if apart:  # rows are computed before they are sampled
            with self._masks.making(masks_to_make(apart, not self.scheduler.whole_prompts)):
                self.program.run(batch)
            sampling = self._sampling(step)
            rows = None if sampling is None else self.program.sample(sampling)
        elif (sampling := self._sampling(step)) is None:
            self.program.run(batch)
        else:
            rows = self.program.step(batch, sampling)
        for chunk in step.chunks:
            self.scheduler.advance(chunk)
        return rows

    def _launch(self) -> bool:
        """Start a step of a pipeline; return False if there is none to start.

        Its chunks count as computed from now on, because each stage computes the steps in their order.
        """
        step = self._schedule()
        if step is None:
            return False
        try:
            cast("PipelinedProgram", self.program).launch(self._lay_out(step), self._sampling(step))
        except Exception as error:
            self._fail(step, error)
            return False
        self._in_flight.append(step)  # whatever comes, it has to be collected
        try:
            for chunk in step.chunks:
                self.scheduler.advance(chunk)
        except Exception as error:
            self._fail(step, error)
        return True

    def _fail(self, step: Step, error: Exception) -> None:
        """End the requests of a step with its error."""
        for place, chunk in enumerate(step.chunks):
            if step.is_current(place):
                self._end(chunk.request, "error", to_penstock_error("The step", error))

    def _finish(self, step: Step, rows_of: Callable[[], Sampled | None]) -> list[Request]:
        """Hand the rows of a step to its requests.  Returns the requests that sampled a token."""
        chunks = step.chunks
        try:
            rows = rows_of()
            pooled = take_hidden(self.program, chunks) if len(step.sampled) < len(chunks) else []
        except Exception as error:
            self._fail(step, error)
            return []
        sampled, row = step.sampled, 0
        for place, chunk in enumerate(chunks):
            row += chunk.num_rows
            if not step.is_current(place):
                sampled = [request for request in sampled if request is not chunk.request]
            elif chunk.num_rows and rows is not None:
                self._accept(chunk, rows, range(row - chunk.num_rows, row))
        for request, damage in pooled:
            self._end(request, "error" if damage else "stop", damage)
        return sampled

    def _accept(self, chunk: Chunk, rows: Sampled, own: range) -> None:
        """Hand a request the rows of its prompt and the row of its next token."""
        request = chunk.request
        damage: PenstockError | None = None
        try:
            if request.prompt_rows is not None:
                request.prompt_rows.take(len(request.prompt_ids), self.program, rows, own)
            if not chunk.samples:
                return
            if request.max_tokens == 0:
                request.finish("length")
            else:
                self.num_output_tokens += accept_row(request, rows, own[-1])
        except Exception as error:  # perhaps after the last token, when some of the group have ended
            damage = to_penstock_error("The step", error)
        if damage is not None or request.status is RequestStatus.FINISHED:
            for ended in request.group or (request,):
                self._end(ended, "error", damage)

    def _start_over(self, error: Exception) -> None:
        """End every request with the error, and start again with all pages free."""
        everyone = [*self.scheduler.running, *self.scheduler.waiting]
        self.scheduler = self._new_scheduler()
        for request in everyone:
            request.pages, request.slot = None, -1
            self._end(request, "error", to_penstock_error("The step", error))

    def _expire(self) -> None:
        """End the requests whose deadline has passed."""
        if self._deadlines:
            for request, error in self._deadlines.take_expired(time.perf_counter()):
                self._end(request, "error", error)

    def wait(self, request: Request, num_tokens: int) -> bool:
        """Drive the loop until the request has more than ``num_tokens`` answer tokens, or has ended.

        Returns True if it has not ended.  If several threads wait, one steps at a time.
        """

        def is_unchanged() -> bool:
            return request.status is not RequestStatus.FINISHED and len(request.output_ids) <= num_tokens

        self.check_process()
        while is_unchanged():
            # With a timeout, because another thread's step may bring what this thread waits for.
            if not self._lock.acquire(timeout=0.02):
                continue
            try:
                if is_unchanged():
                    self.step()
            finally:
                self._lock.release()
                self._settle()
        return request.status is not RequestStatus.FINISHED

    @property
    def has_work(self) -> bool:
        """True if a step would have something to do.  Any thread may read this."""
        queued = self._incoming or self._aborts or self._displaced or self._in_flight
        return bool(queued or self.scheduler.has_work)

    def figures(self) -> EngineStats:
        """Return the counters of this moment.  Any thread may call this."""
        return EngineStats(
            **self.scheduler.figures(),
            num_waiting=len(self.scheduler.waiting) + len(self._incoming),
            num_steps=self.num_steps,
            num_output_tokens=self.num_output_tokens,
            num_finished=dict(self._num_finished),
        )

    def forget_prefixes(self) -> None:
        """Empty the prefix cache.  Requests keep the pages that they hold."""
        with self.exclusive():
            self.scheduler.ledger.forget()

    def check_integrity(self) -> None:
        """Raise InternalError unless scheduler and pages agree."""
        with self.exclusive():
            self.scheduler.check_integrity()

    def close(self) -> None:
        """End every request with "abort" and close the program.

        A second call, or one in a forked child, does nothing.  A step of several ranks that another thread has been
        in for a second is ended: its requests fail.
        """
        if is_forked(self._pid):
            return  # the parent owns the threads and the memory
        end_stuck_step(self._lock, lambda: self.num_steps, self.program.end_exchanges)
        with self.exclusive():
            if self.is_closed:
                return
            self.is_closed = True  # first, so that a submit that does not see it is seen here
            self._accept_calls()
            for request in self._everyone():
                self._end(request, "abort")
            self._notify([])
            self._masks.close()
            self.program.close()

    def _everyone(self) -> list[Request]:
        return [*self.scheduler.running.copy(), *self.scheduler.waiting.copy(), *self._incoming.copy()]

    def check_process(self) -> None:
        """Raise InvalidArgumentError in a forked child, where a thread of the parent may hold a lock for ever."""
        check_process(self._pid, "LLM")

    def _check_open(self) -> None:
        self.check_process()
        if self.is_closed:
            raise InvalidArgumentError("The engine is closed.", code="closed")

    def _settle(self) -> None:
        """Carry out aborts now, unless a step is running: its thread does so when it ends."""
        while (self._aborts or self._displaced) and self._lock.acquire(blocking=False):
            try:
                if self._busy:
                    return
                self._busy = True
                try:
                    with interrupt_after():
                        self._accept_calls()
                        self._notify([])
                finally:
                    self._busy = False
            finally:
                self._lock.release()

    def _accept_calls(self) -> None:
        while self._incoming:
            request = self._incoming.popleft()
            if request.status is RequestStatus.FINISHED:  # aborted before this
                continue
            try:
                self.scheduler.add(request)
            except Exception:
                self._incoming.appendleft(request)  # fail_all must find it
                raise
            self._deadlines.add(request)
        while self._aborts:
            entry = self._aborts.popleft()
            aborted = [r for r in self._everyone() if r.id < entry] if isinstance(entry, int) else [entry]
            for request in aborted:
                self._end(request, "abort")
        while self._displaced:
            _, request = self._displaced.popitem()
            if not request.timings.scheduled:
                self._end(request, "error", displaced_error(self.options.max_waiting))
        self._deadlines.forget_ended(self._num_submitted - self._num_ended)

    def _end(self, request: Request, reason: str, error: PenstockError | None = None) -> None:
        if request.status is not RequestStatus.FINISHED:
            if error is not None and not isinstance(error, DeadlineError) and request.pages is not None:
                self.scheduler.ledger.unname(request.pages)  # its keys and values may be the reason
            self.scheduler.remove(request)
            request.finish(reason, error)
            self._count_end(request)
            self._ended.append(request)
            for other in request.group:
                self._end(other, reason, error)
        elif self.scheduler.remove(request):  # its last token ended it
            request.error = request.error or error
            self._count_end(request)

    def _count_end(self, request: Request) -> None:
        self._num_ended += 1
        self._num_finished["error" if request.error is not None else request.finish_reason or "error"] += 1
