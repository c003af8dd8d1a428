"""Which tokens run in the next step.  No tensors, no numpy: plain lists and numbers.

First come, first served: requests that run keep running, decodes before prompts, so that a long prompt never
stalls an answer; a prompt is computed in chunks within the step's token budget; waiting requests join when a
place and pages are free.  When pages run out, the youngest running request gives up all of its own and waits
at the front to be computed again; the oldest always proceeds, so nobody starves.
"""

from __future__ import annotations

import bisect
import time
from collections import deque
from dataclasses import dataclass

from penstock.engine.pages import PageLedger
from penstock.engine.request import Request, Status
from penstock.errors import InternalError, InvalidArgumentError
from penstock.runtime.program import PAGE_TOKENS, pages_for

__all__ = ["Chunk", "Scheduler"]


@dataclass(frozen=True)
class Chunk:
    """Tokens ``start`` to ``start + num_tokens`` of a request; ``samples`` when the next token follows from them."""

    request: Request
    start: int
    num_tokens: int
    samples: bool


class Scheduler:
    """The queue of waiting requests, the running ones, and their pages.

    ``max_tokens`` is the token budget of a step, ``max_requests`` bounds the running ones, and ``max_chunk``
    bounds the tokens of one request in one step.
    """

    def __init__(self, ledger: PageLedger, max_tokens: int, max_requests: int, max_chunk: int = 0) -> None:
        if max_tokens < 1 or max_requests < 1:
            raise InvalidArgumentError(
                f"max_tokens and max_requests must be at least 1, not {max_tokens} and {max_requests}"
            )
        self.ledger = ledger
        self.max_tokens = max_tokens
        self.max_requests = max_requests
        self.max_chunk = max_chunk or max_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        """Whether any request is not finished."""
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Let a request wait for its turn."""
        request.status = Status.WAITING
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands, and free its pages.  One that is not here is left alone."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        if request.pages is not None:
            self.ledger.close(request.pages)
            request.pages = None

    def schedule(self) -> list[Chunk]:
        """The chunks of the next step; empty when nothing waits or runs."""
        chunks: dict[int, Chunk] = {}
        budget = self.max_tokens
        preempted = False
        decodes: list[Request] = []
        prompts: list[Request] = []
        for request in self.running:
            (decodes if request.num_tokens - request.num_computed == 1 else prompts).append(request)
        for request in decodes + prompts:
            if request.status is not Status.RUNNING or budget == 0:
                continue
            num_tokens = self._chunk_len(request, budget)
            while not self._grow(request, request.num_computed + num_tokens):
                victim = self.running[-1]
                preempted = True
                dropped = chunks.pop(victim.id, None)
                budget += dropped.num_tokens if dropped else 0
                self._preempt(victim)
                if victim is request:
                    break
            else:
                chunks[request.id] = self._chunk(request, num_tokens)
                budget -= num_tokens
        if not preempted:
            self._admit(chunks, budget)
        return list(chunks.values())

    def advance(self, chunk: Chunk) -> None:
        """A chunk ran: its keys and values are in pages.  Call before the sampled token is appended."""
        request = chunk.request
        request.num_computed = chunk.start + chunk.num_tokens
        if request.pages is not None:
            self.ledger.slide(request.pages, request.num_computed)

    def preempt(self, request: Request) -> None:
        """Drop a running request's pages; it waits at the front and is computed again."""
        if request in self.running:
            self._preempt(request)

    def check_integrity(self) -> None:
        """InternalError unless every page is accounted for and every request stands where its status says."""
        self.ledger.check_integrity(r.pages for r in self.running if r.pages is not None)
        for request in self.running:
            if request.status is not Status.RUNNING or request.pages is None:
                raise InternalError(f"scheduler: request {request.id} runs with status {request.status.value}")
            if not 0 <= request.num_computed < request.num_tokens:
                raise InternalError(
                    f"scheduler: request {request.id} has {request.num_computed} of {request.num_tokens} computed"
                )
        for request in self.waiting:
            if request.status is not Status.WAITING or request.pages is not None or request.num_computed != 0:
                raise InternalError(f"scheduler: request {request.id} waits but holds pages")
        everyone = [r.id for r in self.running] + [r.id for r in self.waiting]
        if len(set(everyone)) != len(everyone) or len(self.running) > self.max_requests:
            raise InternalError("scheduler: a request is listed twice, or too many run")
        if [r.id for r in self.running] != sorted(r.id for r in self.running):
            raise InternalError("scheduler: running requests are not in order of arrival")

    def _chunk_len(self, request: Request, budget: int) -> int:
        return min(request.num_tokens - request.num_computed, budget, self.max_chunk)

    @staticmethod
    def _chunk(request: Request, num_tokens: int) -> Chunk:
        samples = request.num_computed + num_tokens == request.num_tokens
        return Chunk(request, request.num_computed, num_tokens, samples)

    def _grow(self, request: Request, num_tokens: int) -> bool:
        if request.pages is None:
            raise InternalError(f"scheduler: request {request.id} runs without page tables")
        return self.ledger.grow(request.pages, num_tokens)

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        if request.pages is not None:
            self.ledger.close(request.pages)
        request.pages = None
        request.num_computed = 0
        request.num_preemptions += 1
        request.status = Status.WAITING
        self.num_preemptions += 1
        # In front of everyone younger, behind older ones that were preempted before it.
        bisect.insort(self.waiting, request, key=lambda r: r.id)

    def _admit(self, chunks: dict[int, Chunk], budget: int) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.max_requests:
            request = self.waiting[0]
            pages = self.ledger.open()
            num_tokens = self._chunk_len(request, budget)
            if not self._has_room(request, num_tokens) or not self.ledger.grow(pages, num_tokens):
                break
            self.waiting.popleft()
            request.pages = pages
            request.status = Status.RUNNING
            if not request.timings.scheduled:
                request.timings.scheduled = time.perf_counter()
            bisect.insort(self.running, request, key=lambda r: r.id)
            chunks[request.id] = self._chunk(request, num_tokens)
            budget -= num_tokens

    def _has_room(self, request: Request, num_tokens: int) -> bool:
        """Whether all known tokens fit now, beside one page of growth for each running request.

        Admitting on the first chunk alone would only have the request preempted again before its prompt is
        through.  A windowed group keeps the window and a chunk, never more.
        """
        for window, pool in zip(self.ledger.windows, self.ledger.pools, strict=True):
            held = request.num_tokens if window <= 0 else min(request.num_tokens, window + num_tokens + PAGE_TOKENS)
            needed = pages_for(held) + len(self.running)
            if self.running and needed > pool.num_free:
                return False
        return True
