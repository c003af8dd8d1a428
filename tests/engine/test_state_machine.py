"""Thousands of random moves: add, step, abort, preempt, finish, fail, forget.  After each one every page is accounted
for, and every token that a chunk sees through its page tables is the one of its own history; in the end all is free.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.engine.options import RequestOptions
from penstock.engine.pages import PageKeys, PageLedger
from penstock.engine.request import Request, RequestStatus
from penstock.engine.scheduler import Scheduler
from penstock.runtime.program import PARTITION_PAGES, pages_by_group, pages_for, whole_partitions
from tests.support.properties import CHECKS

PAGE = 32
History = tuple[int, int]  # position, hash of all tokens up to it


class EngineMoves(RuleBasedStateMachine):
    """Stands in for the engine, over pages that remember what was written into them."""

    @initialize(
        num_pages=st.sampled_from([2, 8, 14, 30]),
        windows=st.sampled_from([(0,), (40,), (0, 33), (64, 0, 32), (2, 0)]),
        max_tokens=st.sampled_from([16, 40, 200]),
        max_requests=st.integers(1, 6),
        cached=st.sampled_from([True, True, True, False]),
        num_ranks=st.sampled_from([1, 1, 2, 3]),
        tight=st.booleans(),
    )
    def begin(self, num_pages, windows, max_tokens, max_requests, cached, num_ranks, tight):
        """With ``tight`` pools, a group with a window has only the pages that one request may need."""
        num_pages = whole_partitions(num_pages, num_ranks)
        group_pages = pages_by_group(windows, num_pages, max_requests, max_tokens, num_ranks)
        if tight and num_ranks == 1:
            least = [pages_for(window - 2) + 2 + pages_for(max_tokens) for window in windows]
            group_pages = [min(num_pages, n) if w else num_pages for w, n in zip(windows, least, strict=True)]
        self.ledger = PageLedger(num_pages, windows, num_ranks, group_pages)
        self.scheduler = Scheduler(self.ledger, max_tokens, max_requests, 0, PageKeys(b"secret") if cached else None)
        self.cached = cached
        self.content: list[dict[int, dict[int, History]]] = [{} for _ in windows]
        self.live: list[Request] = []
        self.num_added = self.num_hits = 0

    @rule(
        family=st.integers(0, 1),
        prompt_len=st.sampled_from([1, 31, 32, 33, 64, 90, 128, 129, 200, 290, 530]),
        own_tail=st.sampled_from([0, 0, 1, 5, 40]),
        max_tokens=st.integers(1, 50),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        salt=st.sampled_from(["", "", "other"]),
    )
    def add(self, family, prompt_len, own_tail, max_tokens, priority, salt):
        capacity = self.ledger.num_pages * PAGE
        prompt_len = min(prompt_len, capacity - 1)
        prompt = list(range(prompt_len))
        prompt[0] += family  # a token in front makes all later pages different
        if own_tail < prompt_len:
            prompt[prompt_len - own_tail :] = [10_000 + self.num_added] * own_tail
        request = Request(
            self.num_added,
            prompt,
            min(max_tokens, capacity - prompt_len),
            options=RequestOptions(priority=priority, cache_salt=salt),
        )
        self.num_added += 1
        self.live.append(request)
        self.scheduler.add(request)

    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            self.one_step()

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 50))
    def abort(self, which):
        self.end(self.live[which % len(self.live)], "abort")

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 50))
    def finish(self, which):
        running = self.scheduler.running
        if running:
            self.end(running[which % len(running)], "stop")

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 50))
    def preempt(self, which):
        self.scheduler.preempt(self.live[which % len(self.live)])

    @rule(luck=st.integers(0, 5))
    def fail(self, luck):
        """The program fails a step: its requests end, and their pages contain garbage."""
        if luck:
            return
        for chunk in self.scheduler.schedule():
            for group, table in enumerate(chunk.request.pages.tables):
                for position in range(chunk.start, chunk.start + chunk.num_tokens):
                    self.content[group].setdefault(table[position // PAGE], {})[position % PAGE] = (-1, -1)
            self.end(chunk.request, "error")

    @rule(luck=st.integers(0, 5))
    def forget(self, luck):
        if not luck:
            self.ledger.forget()

    @invariant()
    def everything_is_accounted_for(self):
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()
            for request in self.scheduler.running:
                for table in request.pages.tables:
                    for index, page in enumerate(table):
                        rank = (request.pages.rotation + index // PARTITION_PAGES) % self.ledger.num_ranks
                        assert page < 0 or page % self.ledger.num_ranks == rank, "a page is on another rank"

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        for _ in range(100_000):
            if not self.scheduler.has_work:
                break
            assert self.one_step() > 0, "work is left but nothing was scheduled"
        assert not self.live
        for pool in self.ledger.pools:
            assert pool.num_free == pool.num_pages
        assert self.cached or self.num_hits == 0

    def one_step(self) -> int:
        chunks = self.scheduler.schedule()
        assert sum(chunk.num_tokens for chunk in chunks) <= self.scheduler.max_tokens
        for chunk in chunks:
            self.read(chunk, chunk.start)  # what it sees is written before the step, in any order within it
        for chunk in chunks:
            self.write(chunk)
        for chunk in chunks:
            self.read(chunk, chunk.start + chunk.num_tokens)
        for chunk in chunks:
            self.scheduler.advance(chunk)
            if chunk.samples:
                chunk.request.accept(chunk.request.id % 2)
                if chunk.request.status is RequestStatus.FINISHED:
                    self.scheduler.remove(chunk.request)
                    self.retire(chunk.request)
        self.scheduler.check_integrity()
        return len(chunks)

    @staticmethod
    def histories(request: Request, stop: int) -> list[History]:
        salted, found = hash(request.options.cache_salt), []
        for position, token in enumerate(request.tokens(0, stop)):
            salted = hash((salted, token))
            found.append((position, salted))
        return found

    def write(self, chunk) -> None:
        stop = chunk.start + chunk.num_tokens
        history = self.histories(chunk.request, stop)
        for group, table in enumerate(chunk.request.pages.tables):
            for position in range(chunk.start, stop):
                page = table[position // PAGE]
                assert page >= 0, "a token's own page was given up"
                self.content[group].setdefault(page, {})[position % PAGE] = history[position]

    def read(self, chunk, stop: int) -> None:
        """Return what the tokens of the chunk see before ``stop``; the first token sees furthest back."""
        history = self.histories(chunk.request, stop)
        for group, (window, table) in enumerate(zip(self.ledger.windows, chunk.request.pages.tables, strict=True)):
            for position in range(max(0, chunk.start - window + 1) if window else 0, stop):
                found = self.content[group][table[position // PAGE]][position % PAGE]
                assert found == history[position], f"position {position} of group {group} is another's"

    def end(self, request: Request, reason: str) -> None:
        self.scheduler.remove(request)
        request.finish(reason)
        self.retire(request)

    def retire(self, request: Request) -> None:
        self.num_hits += request.num_cached
        self.live.remove(request)
        assert request.pages is None
        assert request.slot == -1


TestEngineMoves = EngineMoves.TestCase
TestEngineMoves.settings = settings(CHECKS, max_examples=30, stateful_step_count=100)


@pytest.mark.long
class TestManyEngineMoves(EngineMoves.TestCase):
    settings = settings(CHECKS, max_examples=300, stateful_step_count=100)
