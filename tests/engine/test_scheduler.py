"""Scheduler and pages: every page is accounted for after any sequence of events."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.options import RequestOptions
from penstock.engine.pages import FREED, PageLedger, PagePool
from penstock.engine.request import Request, RequestStatus
from penstock.engine.scheduler import Scheduler
from penstock.errors import InternalError, InvalidArgumentError
from tests.support.errors import raises
from tests.support.properties import CHECKS

MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 150), st.integers(1, 60)),
        st.tuples(st.just("step"), st.integers(1, 4), st.just(0)),
        st.tuples(st.just("abort"), st.integers(0, 20), st.just(0)),
        st.tuples(st.just("preempt"), st.integers(0, 20), st.just(0)),
        st.tuples(st.just("finish"), st.integers(0, 20), st.just(0)),
    ),
    max_size=60,
)


class Driver:
    """Stands in for the engine, without a program."""

    def __init__(
        self, num_pages: int, windows: tuple[int, ...], max_tokens: int, max_requests: int, max_mixed_tokens: int = 0
    ) -> None:
        self.ledger = PageLedger(num_pages, windows)
        self.scheduler = Scheduler(self.ledger, max_tokens, max_requests, max_mixed_tokens=max_mixed_tokens)
        self.requests: list[Request] = []

    def add(self, prompt_len: int, max_tokens: int) -> None:
        capacity = self.ledger.num_pages * 32
        prompt_len = min(prompt_len, capacity - 1)
        request = Request(len(self.requests), [1] * prompt_len, min(max_tokens, capacity - prompt_len))
        self.requests.append(request)
        self.scheduler.add(request)

    def step(self) -> int:
        chunks = self.scheduler.schedule()
        assert sum(chunk.num_tokens for chunk in chunks) <= self.scheduler.max_tokens
        assert len({chunk.request.id for chunk in chunks}) == len(chunks) <= self.scheduler.max_requests
        for chunk in chunks:
            assert chunk.request.status is RequestStatus.RUNNING
            assert chunk.start == chunk.request.num_computed
            for table in chunk.request.pages.tables:
                assert len(table) * 32 >= chunk.start + chunk.num_tokens
            self.scheduler.advance(chunk)
            if chunk.samples:
                chunk.request.accept(7)
                if chunk.request.status is RequestStatus.FINISHED:
                    self.scheduler.remove(chunk.request)
        self.scheduler.check_integrity()
        return len(chunks)

    def end(self, request: Request, reason: str) -> None:
        if request.status is not RequestStatus.FINISHED:
            self.scheduler.remove(request)
            request.finish(reason)

    def drain(self) -> None:
        for _ in range(100_000):
            if not self.scheduler.has_work:
                break
            assert self.step() > 0, "work is left but nothing was scheduled"
        assert not self.scheduler.has_work
        for pool in self.ledger.pools:
            assert pool.num_free == pool.num_pages


@given(
    moves=MOVES,
    num_pages=st.integers(1, 12),
    windows=st.sampled_from([(0,), (40,), (0, 33), (64, 0, 32)]),
    max_tokens=st.sampled_from([5, 7, 32, 200]),
    max_requests=st.integers(1, 5),
)
@settings(CHECKS, max_examples=150)
def test_any_sequence_of_moves_ends_with_every_page_free(moves, num_pages, windows, max_tokens, max_requests):
    driver = Driver(num_pages, windows, max_tokens, max_requests)
    for move, a, b in moves:
        if move == "add":
            driver.add(a, b)
        elif move == "step":
            for _ in range(a):
                driver.step()
        elif driver.requests:
            request = driver.requests[a % len(driver.requests)]
            if move == "preempt":
                driver.scheduler.preempt(request)
            else:
                driver.end(request, "abort" if move == "abort" else "stop")
        driver.scheduler.check_integrity()
    driver.drain()
    for request in driver.requests:
        assert request.status is RequestStatus.FINISHED
        if request.finish_reason == "length":
            assert len(request.output_ids) == request.max_tokens


def test_the_oldest_request_always_proceeds_when_pages_run_out():
    driver = Driver(num_pages=4, windows=(0,), max_tokens=64, max_requests=4)
    for _ in range(4):
        driver.add(20, 60)
    finished: list[int] = []
    while driver.scheduler.has_work:
        driver.step()
        finished += [r.id for r in driver.requests if r.status is RequestStatus.FINISHED and r.id not in finished]
    assert finished == [0, 1, 2, 3]
    assert driver.scheduler.num_preemptions > 0
    assert driver.requests[0].num_preemptions == 0


def test_a_request_waits_until_running_ones_can_grow():
    driver = Driver(num_pages=8, windows=(0,), max_tokens=64, max_requests=4)
    driver.add(100, 25)  # four pages
    driver.step()
    driver.step()
    driver.add(100, 25)
    driver.add(120, 8)  # four pages as well, but the first request may need one
    for _ in range(3):
        driver.step()
    assert [r.status for r in driver.requests] == [RequestStatus.RUNNING, RequestStatus.WAITING, RequestStatus.WAITING]
    driver.drain()
    assert driver.scheduler.num_preemptions == 0


def test_a_long_prompt_never_stalls_an_answer():
    driver = Driver(num_pages=64, windows=(0,), max_tokens=16, max_requests=4)
    driver.add(4, 50)
    driver.step()
    driver.add(500, 4)
    for made in range(2, 20):
        driver.step()
        assert len(driver.requests[0].output_ids) == made
    assert 0 < driver.requests[1].num_computed < 500


def test_a_step_that_decodes_takes_fewer_tokens_of_prompts():
    driver = Driver(num_pages=100, windows=(0,), max_tokens=64, max_requests=4, max_mixed_tokens=10)
    driver.add(50, 3)
    driver.add(40, 2)
    taken = []
    for _ in range(6):
        chunks = driver.scheduler.schedule()
        taken.append([chunk.num_tokens for chunk in chunks])
        for chunk in chunks:
            driver.scheduler.advance(chunk)
            if chunk.samples:
                chunk.request.accept(7)
                if chunk.request.status is RequestStatus.FINISHED:
                    driver.scheduler.remove(chunk.request)
    # Without a decode the whole budget, then ten tokens with a decode, and the rest once that has ended.
    assert taken == [[50, 14], [1, 10], [1, 10], [6], [1], []]


def test_requests_that_wait_are_served_in_order_of_arrival():
    driver = Driver(num_pages=64, windows=(0,), max_tokens=512, max_requests=1)
    for length in (50, 3, 20):
        driver.add(length, 2)
    order = []
    while driver.scheduler.has_work:
        chunks = driver.scheduler.schedule()
        order += [chunk.request.id for chunk in chunks]
        for chunk in chunks:
            driver.scheduler.advance(chunk)
            chunk.request.accept(1)
            if chunk.request.status is RequestStatus.FINISHED:
                driver.scheduler.remove(chunk.request)
    assert order == [0, 0, 1, 1, 2, 2]


def served(driver: Driver, arrivals: dict[int, list[tuple[int, int]]], num_seconds: int) -> list[int]:
    """The order in which requests end; a second of a virtual clock is a step.  ``arrivals``: by second, pairs of a
    priority and an answer's length.
    """
    ended: list[int] = []
    for second in range(num_seconds):
        for priority, max_tokens in arrivals.get(second, []):
            request = Request(len(driver.requests), [1] * 4, max_tokens, options=RequestOptions(priority=priority))
            request.timings.submitted = float(second)
            driver.requests.append(request)
            driver.scheduler.add(request)
        driver.step()
        ended += [r.id for r in driver.requests if r.status is RequestStatus.FINISHED and r.id not in ended]
    return ended


def test_urgent_requests_do_not_starve_the_others():
    driver = Driver(num_pages=16, windows=(0,), max_tokens=64, max_requests=2)  # a level is worth 10 s
    arrivals = {second: [(0, 4)] for second in range(200)}  # twice as many as can be served
    arrivals[0] = [(2, 8), (0, 4), (0, 4)]
    ended = served(driver, arrivals, 200)
    assert driver.requests[0].num_preemptions == 0  # no other request takes its place
    before = ended.index(0)
    assert 21 <= before <= 23  # those of the first 20 s and those that run at that time
    urgent = [i for i in ended if i]
    assert urgent == sorted(urgent)


def test_forced_tokens_run_before_prompts():
    """An answer does not wait for more urgent prompts because its grammar forces several tokens."""
    driver = Driver(num_pages=64, windows=(0,), max_tokens=40, max_requests=2, max_mixed_tokens=8)
    driver.add(4, 100)
    driver.step()
    answer = driver.requests[0]
    for token in range(20):
        answer.accept(token)
    urgent = Request(1, [1] * 500, 4, options=RequestOptions(priority=-1))
    driver.requests.append(urgent)
    driver.scheduler.add(urgent)
    chunks = {chunk.request.id: chunk.num_tokens for chunk in driver.scheduler.schedule()}
    assert chunks == {0: 21, 1: 8}


def test_a_preempted_request_runs_again_after_waiting():
    driver = Driver(num_pages=16, windows=(0,), max_tokens=64, max_requests=1)
    arrivals = {0: [(1, 12)]} | {second: [(0, 3)] for second in range(3, 100, 2)}
    ended = served(driver, arrivals, 60)
    assert driver.requests[0].num_preemptions == 1
    late = [r.id for r in driver.requests if r.timings.submitted > 10]
    assert all(ended.index(0) < ended.index(i) for i in late if i in ended)


def test_long_waiting_requests_are_not_preempted():
    driver = Driver(num_pages=16, windows=(0,), max_tokens=64, max_requests=2)
    ended = served(driver, {0: [(1, 30), (1, 40)], 11: [(0, 3)], 9: [(0, 3)]}, 60)
    assert [r.num_preemptions for r in driver.requests] == [0, 1, 0, 0]  # by the one of second 9, which goes first
    assert ended == [2, 0, 3, 1]


def test_limits_that_would_starve_the_last_are_refused_by_name():
    ledger = PageLedger(4, (0,))
    with raises(InvalidArgumentError, param="max_tokens", match=r"max_requests \(5\)"):
        Scheduler(ledger, 4, 5)
    with raises(InvalidArgumentError, param="max_rows", match=r"max_requests \(5\)"):
        Scheduler(ledger, 8, 5, max_rows=3)
    with raises(InvalidArgumentError, param="max_requests"):
        Scheduler(ledger, 8, 0)


def test_a_windowed_group_gives_up_pages_that_a_full_one_keeps():
    driver = Driver(num_pages=32, windows=(0, 40), max_tokens=64, max_requests=1)
    driver.add(200, 400)
    for _ in range(300):
        driver.step()
    full, windowed = driver.requests[0].pages.tables
    assert FREED not in full
    position = driver.requests[0].num_computed
    kept = [index for index, page in enumerate(windowed) if page != FREED]
    assert kept[0] == (position - 40 + 1) // 32
    assert len(kept) <= 3


def test_a_shared_page_is_freed_by_its_last_holder():
    pool = PagePool(2)
    page = pool.take()
    pool.share(page)
    pool.give_back(page)
    assert pool.num_free == 1
    pool.check_integrity([page])
    pool.give_back(page)
    assert pool.num_free == 2
    pool.check_integrity([])


def test_planted_mistakes_are_found():
    pool = PagePool(2)
    page = pool.take()
    with pytest.raises(InternalError, match="tables hold"):
        pool.check_integrity([])
    pool.give_back(page)
    with pytest.raises(InternalError, match="no request holds"):
        pool.give_back(page)
    with pytest.raises(InternalError, match="no request holds"):
        pool.share(page)
    pool.take(), pool.take()
    with pytest.raises(InternalError, match="no free page"):
        pool.take()
    driver = Driver(num_pages=4, windows=(0,), max_tokens=64, max_requests=2)
    driver.add(40, 9)
    driver.step()
    driver.requests[0].pages.tables[0].pop()
    with pytest.raises(InternalError):
        driver.scheduler.check_integrity()
