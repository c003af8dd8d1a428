"""A replica under a virtual clock: the engine's scheduler and pages, with costs in place of the program.

Time is in whole nanoseconds, so that many steps at once end exactly when they would end one by one.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from penstock.cluster.costs import StepCosts
from penstock.config import check_integer
from penstock.engine.options import MIXED_TOKENS, RequestOptions
from penstock.engine.page_journal import PageJournal
from penstock.engine.pages import PageLedger
from penstock.engine.params import ResolvedSampling
from penstock.engine.request import Request, Timings
from penstock.engine.scheduler import Chunk, Scheduler
from penstock.errors import InternalError
from penstock.runtime.program import PAGE_TOKENS, pages_for

if TYPE_CHECKING:
    from penstock.cluster.trace import SegmentKeys, TraceRequest

__all__ = ["NS", "Arrived", "Replica", "ReplicaLimits", "StepTable"]

NS: Final = 1_000_000_000
_SAMPLING: Final = ResolvedSampling()
_OPTIONS: Final = RequestOptions()
_PROMPTS: Final[dict[int, list[int]]] = {}
"""A prompt of zeros by length: only its length counts, and it is read-only."""
_MAX_PROMPTS: Final = 4096


@dataclass(frozen=True)
class ReplicaLimits:
    """The limits of a replica: KV pages, places of a step, tokens of a step, and prompt tokens beside decodes."""

    num_pages: int = 2048
    max_requests: int = 32
    max_tokens: int = 512
    max_mixed_tokens: int = MIXED_TOKENS

    def __post_init__(self) -> None:
        """Check every field."""
        for name in ("num_pages", "max_requests", "max_tokens", "max_mixed_tokens"):
            check_integer(name, getattr(self, name), 1, 1 << 24)


class StepTable:
    """The nanoseconds of steps by what they compute.

    ``context_ns``: of each token that a decode reads.
    """

    def __init__(self, costs: StepCosts, limits: ReplicaLimits) -> None:
        self.decode_ns = [0, *(max(1, round(costs.decode_s(n) * NS)) for n in range(1, limits.max_requests + 1))]
        self.context_ns = round(costs.decode_context_s * NS)
        self._prompt_ns = costs.prefill_step_s * NS
        self._request_ns = costs.request_s * NS
        self._token_ns = costs.prefill_token_s * NS
        self._prompt_context_ns = costs.prefill_context_s * NS

    def step_ns(
        self, num_decodes: int, decode_context: int, num_prompt_tokens: int, prompt_context: int, num_first: int
    ) -> int:
        """Return the time of a step: that of its decodes, of its prompt tokens, and of the requests that begin.

        ``decode_context``: the tokens before those of the decodes, in all.  ``prompt_context``: the same of the prompt
        tokens.  ``num_first``: the requests that get their first token.  A step without decodes reads the weights, too:
        it takes at least as long as one decode.
        """
        prompt_ns = num_prompt_tokens * self._token_ns + prompt_context * self._prompt_context_ns
        if num_decodes:
            prompt_ns += num_first * self._request_ns
            return self.decode_ns[num_decodes] + decode_context * self.context_ns + round(prompt_ns)
        prompt_ns += max(0, num_first - 1) * self._request_ns  # that of one request is in prefill_step_s
        return max(self.decode_ns[1], round(self._prompt_ns + prompt_ns))


@dataclass(eq=False, slots=True)
class Arrived:
    """A request that a replica got, and its times in nanoseconds.

    ``queued`` tokens wait in the router's books, and the pages of the ``expected`` keys.  ``first_ns``: of its first
    token, 0 before; ``target``: the place of the replica that goes on with it at the end of the step, or -1.
    """

    request: Request
    line: TraceRequest
    place: int
    arrival_ns: int
    queued: int
    expected: list[bytes]
    first_ns: int = 0
    target: int = -1


class Replica:
    """One replica.  ``end_ns`` is the end of its present steps, None while it is idle.

    ``journal`` reports its pages to the router, as that of a worker.  ``is_stepwise``: run decode steps one by one,
    also while the batch does not change.
    """

    def __init__(
        self, limits: ReplicaLimits, table: StepTable, keys: SegmentKeys, *, is_stepwise: bool = False
    ) -> None:
        self.scheduler = Scheduler(
            PageLedger(limits.num_pages, (0,)),
            limits.max_tokens,
            limits.max_requests,
            keys=keys,
            max_mixed_tokens=limits.max_mixed_tokens,
        )
        self.journal = PageJournal(keys)
        self.journal.watch(self.scheduler.ledger)
        self.journal.ask()
        self.end_ns: int | None = None
        self.busy_ns = 0
        self.num_prefilled = 0
        self.num_steps = 0
        self._table, self._is_stepwise = table, is_stepwise
        self._num_leaving = 0
        self._incoming: list[Request] = []
        self._copies: list[list[bytes]] = []
        self._open: dict[int, Arrived] = {}
        self._chunks: list[Chunk] = []
        # The present steps are ``_repeats``: the first takes ``_step_ns``, each further one ``_growth_ns`` longer.
        self._start_ns = self._step_ns = self._growth_ns = self._repeats = 0

    @property
    def num_open(self) -> int:
        """The number of requests that have not ended."""
        return len(self._open)

    def page_share(self, now_ns: int) -> float:
        """Return the share of its pages that requests hold at a time within the present steps."""
        pool = self.scheduler.ledger.pools[0]
        held = pool.num_pages - pool.num_free
        if self.end_ns is not None and self._repeats > 1:
            done = self._num_done(now_ns)
            held += sum(pages_for(chunk.start + done + 1) - pages_for(chunk.start + 1) for chunk in self._chunks)
        return held / pool.num_pages

    def submit(self, arrived: Arrived, now_ns: int) -> None:
        """Add a request; it joins when the step that runs has ended."""
        self._open[arrived.request.id] = arrived
        self._incoming.append(arrived.request)
        if self.end_ns is None:
            self._begin(now_ns)
        else:
            self._end_after_step(now_ns)

    def _end_after_step(self, now_ns: int) -> None:
        """Let the present steps end with the one that runs now."""
        if self._repeats > 1:
            done = self._num_done(now_ns)
            self._repeats = max(1, done + (self._start_ns + self._steps_ns(done) < now_ns))
            self.end_ns = self._start_ns + self._steps_ns(self._repeats)

    def holds(self, arrived: Arrived) -> bool:
        """Return True for a request that has not ended here."""
        return self._open.get(arrived.request.id) is arrived

    def release(self, arrived: Arrived, target: int, now_ns: int) -> None:
        """Let a request leave for another replica when the step that runs has ended."""
        arrived.target = target
        self._num_leaving += 1
        self._end_after_step(now_ns)

    def keep_from(self, target: int) -> None:
        """Let the requests go on here that were to leave for ``target``, which failed."""
        for arrived in self._open.values():
            if arrived.target == target:
                arrived.target = -1

    def store(self, keys: list[bytes], now_ns: int) -> None:
        """Keep copies of pages with these keys, if there is room for them when the step that runs has ended."""
        self._copies.append(keys)
        if self.end_ns is None:
            self._store_copies()
        else:
            self._end_after_step(now_ns)

    def _store_copies(self) -> None:
        ledger = self.scheduler.ledger
        for keys in self._copies:
            pages = ledger.open()
            ledger.adopt(pages, 0, keys[: ledger.count_shareable(pages, 0, keys)])
            if ledger.grow(pages, len(keys) * PAGE_TOKENS):
                ledger.name(pages, keys)
            ledger.close(pages)
        self._copies.clear()

    def stop(self, now_ns: int) -> list[Arrived]:
        """End the replica within its step; return the requests that are lost, in the order of their arrival here."""
        if self.end_ns is not None:
            self.busy_ns += now_ns - self._start_ns
            self.num_steps += self._num_done(now_ns)
        self.end_ns = None
        return [*self._open.values()]

    def _steps_ns(self, num_steps: int) -> int:
        """Return the time of the first ``num_steps`` of the present steps."""
        return num_steps * self._step_ns + num_steps * (num_steps - 1) // 2 * self._growth_ns

    def _num_done(self, now_ns: int) -> int:
        """Return how many of the present steps have ended."""
        if not self._growth_ns:
            return (now_ns - self._start_ns) // self._step_ns
        return bisect_right(range(1, self._repeats + 1), now_ns - self._start_ns, key=self._steps_ns)

    def finish_steps(self) -> tuple[list[Arrived], list[Arrived], list[Arrived]]:
        """End the present steps and begin the next ones.  Call it at ``end_ns``.

        Return the requests with their first token here, those that ended, and those that leave for another replica.
        """
        now_ns, repeats = self.end_ns, self._repeats
        if now_ns is None:
            raise InternalError("replica: no step is running")
        self.busy_ns += now_ns - self._start_ns
        self.num_steps += repeats
        first: list[Arrived] = []
        ended: list[Arrived] = []
        left: list[Arrived] = []
        for chunk in self._chunks:
            request = chunk.request
            if repeats > 1:
                self._repeat(chunk, repeats)
            elif chunk.num_tokens == 1 and (request.num_computed + 1) % PAGE_TOKENS:
                request.num_computed += 1  # no page is full
            else:
                self.scheduler.advance(chunk)
        for chunk in self._chunks:  # only now, as in the engine: an end frees pages that no step before it could take
            if not chunk.samples:
                continue
            request = chunk.request
            if len(request.output_ids) == request.num_resumed:
                arrived = self._open[request.id]
                arrived.first_ns = arrived.first_ns or now_ns
                first.append(arrived)
            request.output_ids.append(0)
            if len(request.output_ids) >= request.max_tokens:
                self.scheduler.remove(request)
                ended.append(self._open.pop(request.id))
        if self._num_leaving:
            self._num_leaving = 0
            left += [arrived for arrived in self._open.values() if arrived.target >= 0]
            for arrived in left:
                self.scheduler.remove(arrived.request)
                del self._open[arrived.request.id]
        self._begin(now_ns)
        return first, ended, left

    def _repeat(self, chunk: Chunk, repeats: int) -> None:
        """Compute ``repeats`` tokens of an answer, all but the last of which are appended."""
        request = chunk.request
        stop = chunk.start + repeats
        request.output_ids.extend([0] * (repeats - 1))
        if chunk.start % PAGE_TOKENS + repeats < PAGE_TOKENS:
            request.num_computed = stop
            return
        if request.pages is None or not self.scheduler.ledger.grow(request.pages, stop):
            raise InternalError(f"replica: request {request.id} has no pages for {repeats} tokens")
        self.scheduler.advance(Chunk(request, chunk.start, repeats, True, 1))

    def _begin(self, now_ns: int) -> None:
        """Schedule the next steps, if there is anything to do."""
        scheduler = self.scheduler
        if self._copies:
            self._store_copies()
        for request in self._incoming:
            scheduler.add(request)
        self._incoming.clear()
        self.end_ns = None
        if not scheduler.has_work:
            return
        chunks = self._chunks = scheduler.schedule()
        if not chunks:
            raise InternalError("replica: requests wait, but none can run")
        num_decodes = decode_context = num_prompt = prompt_context = num_first = 0
        for chunk in chunks:
            num_first += chunk.samples and len(chunk.request.output_ids) == chunk.request.num_resumed
            if chunk.num_tokens == 1:
                num_decodes += 1
                decode_context += chunk.start
            else:
                num_prompt += chunk.num_tokens
                prompt_context += chunk.num_tokens * (2 * chunk.start + chunk.num_tokens - 1) // 2
            if chunk.start < len(chunk.request.prompt_ids):
                self.num_prefilled += min(chunk.num_tokens, len(chunk.request.prompt_ids) - chunk.start)
        self._start_ns = now_ns
        self._step_ns = self._table.step_ns(num_decodes, decode_context, num_prompt, prompt_context, num_first)
        self._growth_ns = self._table.context_ns * num_decodes
        self._repeats = 1 if num_prompt or self._is_stepwise else self._num_equal_steps(chunks)
        self.end_ns = now_ns + self._steps_ns(self._repeats)

    def _num_equal_steps(self, chunks: list[Chunk]) -> int:
        """Return how many steps, this one included, have the same batch unless a request arrives."""
        scheduler = self.scheduler
        if scheduler.waiting or len(chunks) < len(scheduler.running):
            return 1
        steps = min(chunk.request.max_tokens - len(chunk.request.output_ids) for chunk in chunks)
        if steps <= 1 or any(chunk.start < len(chunk.request.prompt_ids) for chunk in chunks):
            return 1
        needed = sum(pages_for(chunk.start + steps) - pages_for(chunk.start + 1) for chunk in chunks)
        if needed > scheduler.ledger.pools[0].num_free:
            steps = min(steps, *(PAGE_TOKENS - chunk.start % PAGE_TOKENS for chunk in chunks))
        return max(1, steps)


def new_request(number: int, prompt_len: int, output_tokens: int, keys: list[bytes], arrival_s: float) -> Request:
    """Return a request of the engine for a prompt with these page keys."""
    prompt = _PROMPTS.get(prompt_len)
    if prompt is None:
        if len(_PROMPTS) >= _MAX_PROMPTS:
            _PROMPTS.clear()
        prompt = _PROMPTS[prompt_len] = [0] * prompt_len
    return Request(
        number,
        prompt,
        output_tokens,
        _SAMPLING,
        timings=Timings(submitted=arrival_s),
        options=_OPTIONS,
        page_keys=keys,
    )
