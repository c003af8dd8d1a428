"""The scheduler: it chooses the tokens of the next step.  No tensors, no numpy: plain lists and numbers.

Requests go in the order of ``arrival + priority * priority_s``: within a priority the earlier arrival first, and a
level of priority is worth ``priority_s`` seconds of waiting.  A more urgent request that arrives later than that goes
behind, so an endless stream of urgent ones starves none.  Within a priority clients have equal shares: a request goes
in front of those of a client that has more waiting (``FairQueue``).  A request's place in that order never changes.

Running requests keep running, decodes before prompts, so that a long prompt never stalls an answer.  A prompt is
computed in chunks within the step's token budget, and in a step that decodes within a smaller one.  Waiting requests
join when a place and pages are free.  When pages run out, the last running request in that order frees all of its pages
and waits to be computed again; the first always proceeds.  A waiting request takes places from requests that are less
urgent and behind it, never from its equals.

A prompt whose rows of logits are needed, for log-probabilities, takes the rows that the others leave, at least one.

With ``whole_prompts`` (a network whose attention is not causal) a prompt runs in one step or waits for the next, pages
are not shared, and nothing is decoded.

If the content of a prompt's pages is known, they are shared instead of computed, also while the prompt is being
computed.  While another request of the same step computes the very page that a prompt needs next, the prompt waits.
"""

from __future__ import annotations

import bisect
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from penstock.engine.fair_queue import FairQueue
from penstock.engine.options import PRIORITY_S
from penstock.engine.pages import PageKeys, PageLedger
from penstock.engine.request import Request, RequestStatus
from penstock.engine.stats import STEP_TOKENS
from penstock.errors import InternalError, InvalidArgumentError
from penstock.runtime.program import PAGE_TOKENS, pages_for
from penstock.text.grammar.matcher import MAX_AHEAD

__all__ = ["Chunk", "Scheduler"]

_STEP_NAMES: Final = (*map(str, STEP_TOKENS), "")
_MAX_SKIPPED = 4
"""Limit on the waiting requests that a step skips because it computes the pages that they need."""


@dataclass(slots=True)
class Chunk:
    """Tokens ``start`` to ``start + num_tokens`` of a request.

    ``samples``: the next token is sampled after them.  The logits of the last ``num_rows`` tokens are needed.
    """

    request: Request
    start: int
    num_tokens: int
    samples: bool
    num_rows: int


@dataclass(slots=True)
class _Step:
    """The step that is being scheduled.  ``pending`` are the names of the pages that it computes."""

    budget: int
    rows: int
    chunks: dict[int, Chunk]
    pending: set[bytes]
    short_of_pages: bool = False


class Scheduler:
    """The queue of waiting requests, the running ones, and their pages.

    ``max_tokens``: token budget of a step.  ``max_requests``: maximum number of running requests.  ``max_rows``:
    maximum number of rows of logits (0: ``max_requests``).  ``max_chunk``: maximum number of tokens of one request in
    one step (0: ``max_tokens``).  ``keys`` names pages so that requests share them; with None only the answers to one
    prompt share.
    ``max_mixed_tokens``: maximum number of prompt tokens in a step that also decodes (0: what those leave of the
    budget).
    ``priority_s``: seconds of waiting that a level of priority is worth.  Set ``whole_prompts`` and ``num_stages``
    before the first request.

    With ``num_stages`` above 1, that many steps are in flight: chunks advance when they are launched, a request whose
    token is being sampled takes part in no other step, and each step decodes its share of the requests.
    """

    def __init__(
        self,
        ledger: PageLedger,
        max_tokens: int,
        max_requests: int,
        max_chunk: int = 0,
        keys: PageKeys | None = None,
        *,
        max_rows: int = 0,
        max_mixed_tokens: int = 0,
        priority_s: float = PRIORITY_S,
    ) -> None:
        if max_requests < 1:
            raise InvalidArgumentError(f"max_requests: expected at least 1, got {max_requests}", param="max_requests")
        for name, value in (("max_tokens", max_tokens), ("max_rows", max_rows or max_requests)):
            if value < max_requests:  # else the last running request would never have a turn
                raise InvalidArgumentError(
                    f"{name}: expected at least max_requests ({max_requests}), got {value}", param=name
                )
        self.ledger = ledger
        self.max_tokens = max_tokens
        self.max_requests = max_requests
        self.max_chunk = max_chunk or max_tokens
        self.max_rows = max_rows or max_requests
        self.max_mixed_tokens = max_mixed_tokens or max_tokens
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_step_tokens = 0
        self.num_steps_by: Counter[str] = Counter()
        self._keys = keys or PageKeys()
        self._all_share = keys is not None
        self._order = FairQueue(priority_s)
        self.whole_prompts = False
        self.num_stages = 1
        self._free_slots = list(range(max_requests - 1, -1, -1))

    @property
    def has_work(self) -> bool:
        """True if any request has not ended."""
        return bool(self.waiting or self.running)

    @property
    def num_clients(self) -> int:
        """The number of clients that the order of waiting requests remembers, counted once for each priority."""
        return self._order.num_clients

    def figures(self) -> dict[str, Any]:
        """Return the fields of EngineStats that the scheduler knows."""
        pools = self.ledger.pools
        fullest = min(pools, key=lambda pool: pool.num_free, default=None)  # a model without attention has none
        return {
            "num_running": len(self.running),
            "num_pages": fullest.num_pages if fullest else 0,
            "num_held_pages": fullest.num_pages - fullest.num_free if fullest else 0,
            "num_named_pages": max((pool.num_named for pool in pools), default=0),
            "num_preemptions": self.num_preemptions,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_cached_tokens": self.num_cached_tokens,
            "num_step_tokens": self.num_step_tokens,
            "num_steps_by": dict(self.num_steps_by),
        }

    def add(self, request: Request) -> None:
        """Add a request to the queue."""
        request.status = RequestStatus.WAITING
        self._order.place(request, self.waiting)
        bisect.insort(self.waiting, request, key=_order)

    def remove(self, request: Request) -> bool:
        """Remove a request that waits or runs, and free its pages.  Return False for an unknown one."""
        runs = _take_out(self.running, request)
        waits = not runs and _take_out(self.waiting, request)
        if waits:
            self._order.remove(request)
        self._release(request)
        return runs or waits

    def schedule(self) -> list[Chunk]:
        """Return the chunks of the next step; an empty list if no request waits or runs.

        If all running requests only wait for others of their groups, the last ones make room for these.
        """
        chunks = self._schedule()
        while not chunks and self.running and self.running[-1].is_parked:
            self.preempt(self.running[-1])
            chunks = self._schedule()
        return chunks

    def _schedule(self) -> list[Chunk]:
        step = _Step(self.max_tokens, self.max_rows, {}, set())
        decodes: list[Request] = []
        prompts: list[Request] = []
        for request in self.running:
            num_left = request.num_tokens - request.num_computed
            if num_left:  # else its token is being sampled
                is_decode = num_left == 1 and (request.num_computed > 0 or not self.whole_prompts)
                (decodes if is_decode else prompts).append(request)
        for request in decodes[: -(-len(self.running) // self.num_stages)]:
            if request.status is not RequestStatus.RUNNING or not step.budget:
                continue
            # A page that is not full has room: 31 of 32 decodes need no look at the tables.
            if request.num_computed % PAGE_TOKENS or self._make_room(step, request, 1):
                samples = request.samples
                step.chunks[request.id] = Chunk(request, request.num_computed, 1, samples, int(samples))
                step.budget -= 1
                step.rows -= samples
        for request in [prompt for prompt in prompts if _goes_on(prompt) and not self.whole_prompts]:
            prompts.remove(request)
            if request.status is RequestStatus.RUNNING and step.budget:
                self._continue(step, request)
        if step.chunks:
            step.budget = min(step.budget, self.max_mixed_tokens)
        for request in prompts:
            self._admit(step, before=request)
            if request.status is RequestStatus.RUNNING and step.budget:
                self._continue(step, request)
        self._admit(step)
        chunks = [*step.chunks.values()]
        if chunks:
            self._count(sum(chunk.num_tokens for chunk in chunks))
        return chunks

    def _count(self, num_tokens: int) -> None:
        """Count a step of so many tokens."""
        self.num_step_tokens += num_tokens
        self.num_steps_by[_STEP_NAMES[bisect.bisect_left(STEP_TOKENS, num_tokens)]] += 1

    def advance(self, chunk: Chunk) -> None:
        """Note that a chunk ran: its keys and values are in pages.  Call this before the sampled token is appended."""
        request, pages = chunk.request, chunk.request.pages
        request.num_computed = computed = chunk.start + chunk.num_tokens
        if pages is None:
            return
        shares = (self._all_share or request.family) and not self.whole_prompts
        if shares and computed // PAGE_TOKENS > pages.num_named:
            num_full = computed // PAGE_TOKENS
            self._extend_keys(request, num_full)
            self.ledger.name(pages, request.page_keys[:num_full])
        self.ledger.slide(pages, computed)

    def preempt(self, request: Request) -> None:
        """Free a running request's pages.  It waits in front of later ones and is computed again."""
        if not _take_out(self.running, request):
            return
        self._release(request)
        request.num_computed = 0
        request.num_preemptions += 1
        request.status = RequestStatus.WAITING
        self.num_preemptions += 1
        bisect.insort(self.waiting, request, key=_order)

    def check_integrity(self) -> None:
        """Raise InternalError unless every page is accounted for and every request is where its status says."""
        self.ledger.check_integrity(r.pages for r in self.running if r.pages is not None)
        for request in self.running:
            if request.status is not RequestStatus.RUNNING or request.pages is None:
                raise InternalError(f"scheduler: request {request.id} runs with status {request.status.value}")
            if not 0 <= request.num_computed < request.num_tokens + (self.num_stages > 1 or request.is_parked):
                raise InternalError(
                    f"scheduler: request {request.id} has {request.num_computed} of {request.num_tokens} computed"
                )
            if any(len(table) != pages_for(request.num_computed) for table in request.pages.tables):
                raise InternalError(f"scheduler: request {request.id} has more or fewer pages than computed tokens")
        for request in self.waiting:
            if request.status is not RequestStatus.WAITING or request.pages is not None or request.num_computed != 0:
                raise InternalError(f"scheduler: request {request.id} waits but holds pages")
        ids = [r.id for r in self.running] + [r.id for r in self.waiting]
        if len(set(ids)) != len(ids) or len(self.running) > self.max_requests:
            raise InternalError("scheduler: a request is listed twice, or too many requests run")
        for listed in (self.running, self.waiting):
            if [_order(r) for r in listed] != sorted(_order(r) for r in listed):
                raise InternalError("scheduler: requests are not in order of priority and arrival")
        slots = sorted([*self._free_slots, *(r.slot for r in self.running)])
        if slots != list(range(self.max_requests)):
            raise InternalError(f"scheduler: free and used slots are {slots}")

    def keys_of(self, token_ids: Sequence[int], salt: str) -> list[bytes]:
        """Return the keys of the full pages of a text; none if requests do not share pages."""
        keys: list[bytes] = []
        if self._all_share and not self.whole_prompts:
            self._keys.extend(keys, salt, token_ids)
        return keys

    def _release(self, request: Request) -> None:
        if request.pages is not None:
            self.ledger.close(request.pages)
            request.pages = None
        if request.slot >= 0:
            self._free_slots.append(request.slot)
            request.slot = -1

    def _make_room(self, step: _Step, request: Request, num_tokens: int) -> bool:
        """Get pages for ``num_tokens`` more tokens of a running request, if need be by preempting the last ones.

        Returns False if the request was the last one itself: it waits again.
        """
        if request.pages is None:
            raise InternalError(f"scheduler: request {request.id} runs without page tables")
        while not self.ledger.grow(request.pages, request.num_computed + num_tokens):
            step.short_of_pages = True
            victim = self.running[-1]
            self._drop(step, victim)
            if victim is request:
                return False
        return True

    def _drop(self, step: _Step, victim: Request) -> None:
        """Preempt a request that may already have a chunk in this step."""
        chunk = step.chunks.pop(victim.id, None)
        if chunk:
            step.budget += chunk.num_tokens
            step.rows += chunk.num_rows
            step.pending.difference_update(victim.page_keys)
        self.preempt(victim)

    def _continue(self, step: _Step, request: Request) -> None:
        """Schedule the next chunk of a running request's prompt, or of what it computes again.

        There is none while it waits for another request's pages.
        """
        if self._shares_or_waits(step, request):
            return
        start = request.num_computed
        first_row = max(start, request.first_wanted)
        # Each other request may need a row.  Whole prompts take turns, or the first might never have its rows.
        others = 0 if self.whole_prompts else len(self.running) - len(step.chunks) - 1
        max_tokens = max(0, first_row + step.rows - others - start)
        num_tokens = min(request.num_tokens - start, step.budget, self.max_chunk, max_tokens)
        if self.whole_prompts and num_tokens < request.num_tokens - start:
            return
        if not num_tokens or not self._make_room(step, request, num_tokens):
            return
        stop = start + num_tokens
        samples = request.samples and stop == request.num_tokens
        num_rows = max(0, stop - first_row)
        step.chunks[request.id] = Chunk(request, start, num_tokens, samples, num_rows)
        step.budget -= num_tokens
        step.rows -= num_rows
        # The last of these pages may be full only after a later step.
        step.pending.update(request.page_keys[start // PAGE_TOKENS : pages_for(stop)])

    def _shares_or_waits(self, step: _Step, request: Request) -> bool:
        """Share the known pages of the next tokens.  Return True if the step already computes the page after them."""
        pages = request.pages
        if pages is None or not request.may_share or not (self._all_share or request.family) or self.whole_prompts:
            return False
        self._extend_keys(request, (request.num_tokens - 1) // PAGE_TOKENS)
        max_pages = min(request.first_wanted, request.num_tokens - 1) // PAGE_TOKENS  # what follows is needed itself
        own = request.num_computed // PAGE_TOKENS
        num_known = self.ledger.count_shareable(pages, own, request.page_keys[:max_pages])
        if num_known > own:
            self.ledger.adopt(pages, own, request.page_keys[:num_known])
            gained = num_known * PAGE_TOKENS - request.num_computed
            request.num_computed = num_known * PAGE_TOKENS
            if request.num_preemptions == 0 and not request.num_sampled:
                request.num_cached += gained
                self.num_cached_tokens += gained
        next_page = request.num_computed // PAGE_TOKENS
        return next_page < max_pages and request.page_keys[next_page] in step.pending

    def _extend_keys(self, request: Request, num_pages: int) -> None:
        have = len(request.page_keys)
        if have < num_pages:
            tokens = request.tokens(have * PAGE_TOKENS, num_pages * PAGE_TOKENS)
            salt = request.options.cache_salt if self._all_share else str(request.family)
            self._keys.extend(request.page_keys, salt, tokens)

    def _admit(self, step: _Step, before: Request | None = None) -> None:
        """Let waiting requests join; with ``before`` only those in front of that request."""
        index = num_parked = 0
        while index < min(len(self.waiting), _MAX_SKIPPED + num_parked) and step.budget > 0:
            request = self.waiting[index]
            if request.is_parked:
                index, num_parked = index + 1, num_parked + 1
                continue
            if before is not None and request.order >= before.order:
                return
            if step.short_of_pages or not self._join(step, request):
                return
            if request.id not in step.chunks and request.status is RequestStatus.WAITING:
                index += 1  # this step computes what it needs

    def _join(self, step: _Step, request: Request) -> bool:
        """Let a waiting request run if there is a place and pages; return False if not.

        A request that needs what the step already computes goes on waiting: the result is True, but it has no chunk.
        """
        while len(self.running) >= self.max_requests:
            if not self._displace(step, request):
                return False
        request.pages = self.ledger.open(self._rotation(request))
        if self._shares_or_waits(step, request):
            self._undo(request)
            return True
        while not self._has_room(step, request):
            if not self._displace(step, request):
                self._undo(request)
                return False
        self.waiting.remove(request)
        self._order.begin(request)
        request.status = RequestStatus.RUNNING
        request.slot = self._free_slots.pop()
        if not request.timings.scheduled:
            request.timings.scheduled = time.perf_counter()
            self.num_prompt_tokens += len(request.prompt_ids)
        bisect.insort(self.running, request, key=_order)
        self._continue(step, request)
        return True

    def _displace(self, step: _Step, request: Request) -> bool:
        """Preempt the last running request that is behind a waiting one and less urgent.

        Otherwise preempt the last one that only waits for a request of its group that has no place.  Return False if
        there is none.
        """
        for other in reversed(self.running):
            if other.order < request.order:
                break
            if other.options.priority > request.options.priority:
                self._drop(step, other)
                return True
        for other in reversed(self.running):
            if other.is_parked and any(
                one.status is RequestStatus.WAITING and not one.is_parked for one in other.group
            ):
                self._drop(step, other)
                return True
        return False

    def _undo(self, request: Request) -> None:
        """Release what a waiting request got while it tried to join."""
        self._release(request)
        if request.num_preemptions == 0:
            self.num_cached_tokens -= request.num_cached
            request.num_cached = 0
        request.num_computed = 0

    def _rotation(self, request: Request) -> int:
        """Return the rank of a request's first partition: equal for prompts that can share pages, else in turn."""
        if self.ledger.num_ranks == 1:
            return 0
        if request.may_share and (self._all_share or request.family) and request.num_tokens >= PAGE_TOKENS:
            self._extend_keys(request, 1)
            return int.from_bytes(request.page_keys[0][:4], "little")
        return request.id

    def _has_room(self, step: _Step, request: Request) -> bool:
        """Return True if all known tokens fit now, with one page of growth for each running request.

        If only the first chunk counted, the request would be preempted before its prompt is complete.
        """
        if not self.running or request.pages is None:
            return True
        num_tokens = min(request.num_tokens - request.num_computed, step.budget, self.max_chunk)
        for window, pool, table in zip(self.ledger.windows, self.ledger.pools, request.pages.tables, strict=True):
            stop = pages_for(request.num_tokens)
            if window > 0:  # it holds at most the window and a chunk
                stop = min(stop, len(table) + pages_for(window + num_tokens + PAGE_TOKENS))
            if pool.missing(len(table), stop, request.pages.rotation, spare=len(self.running)) > 0:
                return False
        return True


def _goes_on(request: Request) -> bool:
    """Return True for an answer with forced tokens, which is as urgent as one that goes on by one token."""
    computed = request.num_computed
    return len(request.prompt_ids) <= computed and 0 < request.num_tokens - 1 - computed <= MAX_AHEAD


def _order(request: Request) -> tuple[float, float, int]:
    return request.order


def _take_out(listed: list[Request], request: Request) -> bool:
    """Remove a request from an ordered list.  Return False if it is not there."""
    index = bisect.bisect_left(listed, request.order, key=_order)
    if index < len(listed) and listed[index] is request:
        del listed[index]
        return True
    return False
