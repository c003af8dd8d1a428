"""The order of requests of several clients: fair within a priority, and unchanged for one client."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.fair_queue import FairQueue
from penstock.engine.options import PRIORITY_S, EngineOptions, RequestOptions
from penstock.engine.pages import PageLedger
from penstock.engine.params import ResolvedSampling
from penstock.engine.request import Request, RequestStatus, Timings
from penstock.engine.scheduler import Scheduler
from penstock.errors import InvalidArgumentError, QueueFullError
from tests.support.errors import raises
from tests.support.properties import CHECKS


class Queue:
    """A scheduler with ``places`` running requests, where requests arrive a millisecond apart."""

    def __init__(self, places: int = 1) -> None:
        self.scheduler = Scheduler(PageLedger(64, (0,)), 64, places)
        self.requests: list[Request] = []
        self.begun: list[str] = []
        self._ids = itertools.count()

    def add(self, client: str, prompt_len: int = 4, priority: int = 0, after_s: float = 0.0) -> Request:
        number = next(self._ids)
        request = Request(
            number,
            [1] * prompt_len,
            1,
            timings=Timings(submitted=number / 1000 + after_s),
            options=RequestOptions(client=client, priority=priority),
        )
        self.requests.append(request)
        self.scheduler.add(request)
        return request

    def step(self) -> None:
        """Run what is scheduled.  A request ends with its first token."""
        for chunk in self.scheduler.schedule():
            self.scheduler.advance(chunk)
            if chunk.samples:
                self.begun.append(chunk.request.options.client)
                chunk.request.accept(7)
                self.scheduler.remove(chunk.request)
        self.scheduler.check_integrity()

    def drain(self) -> list[str]:
        while self.scheduler.has_work:
            self.step()
        return self.begun


def test_a_first_request_does_not_wait_for_400_of_another() -> None:
    queue = Queue()
    for _ in range(400):
        queue.add("busy")
    for _ in range(5):
        queue.step()
    queue.add("new")
    begun = queue.drain()
    assert begun.index("new") == 5, "it goes in front of the 395 that wait"


def test_clients_take_turns() -> None:
    queue = Queue()
    for _ in range(6):
        queue.add("a")
    queue.step()
    for client in "bbbccc":
        queue.add(client)
    assert "".join(queue.drain()) == "abcabcabcaaa"


def test_shares_are_counted_in_tokens() -> None:
    queue = Queue()
    for _ in range(8):
        queue.add("short", 3)
    queue.step()
    for _ in range(3):
        queue.add("long", 15)
    begun = queue.drain()
    assert begun[:2] == ["short", "long"]
    assert begun[2:].index("long") == 4, "four short ones are worth a long one"


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(-1, 1), st.integers(0, 30), st.booleans()), max_size=40))
@settings(CHECKS, max_examples=200)
def test_one_client_has_the_order_of_arrival_and_priority(moves: list[tuple[int, int, int, bool]]) -> None:
    queue = Queue(places=2)
    for prompt_len, priority, after_s, steps in moves:
        queue.add("only", prompt_len, priority, after_s)
        if steps:
            queue.step()
        for listed in (queue.scheduler.waiting, queue.scheduler.running):
            due = [(r.timings.submitted + r.options.priority * PRIORITY_S, r.id) for r in listed]
            assert due == sorted(due)
    queue.drain()


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.sampled_from("abcdef"), st.integers(1, 50), st.integers(0, 1)),
            st.tuples(st.sampled_from(["step", "abort", "preempt"]), st.just(""), st.integers(0, 50), st.just(0)),
        ),
        max_size=80,
    )
)
@settings(CHECKS, max_examples=200)
def test_random_moves_keep_client_order_and_leave_no_state(moves: list[tuple[str, str, int, int]]) -> None:
    queue = Queue(places=2)
    for move, client, number, priority in moves:
        if move == "add":
            queue.add(client, number, priority)
        elif move == "step":
            queue.step()
        elif queue.requests:
            request = queue.requests[number % len(queue.requests)]
            if move == "preempt":
                queue.scheduler.preempt(request)
            elif request.status is not RequestStatus.FINISHED:
                queue.scheduler.remove(request)
                request.finish("abort")
        ranks: dict[tuple[str, int], int] = {}
        for request in queue.scheduler.waiting:
            of_client = (request.options.client, request.options.priority)
            assert ranks.get(of_client, -1) < request.id, "a client's own requests changed places"
            ranks[of_client] = request.id
    queue.drain()
    assert queue.scheduler.num_clients == 0


def test_priority_goes_before_fairness() -> None:
    queue = Queue()
    for _ in range(3):
        queue.add("busy")
    queue.add("late", priority=1)
    queue.add("urgent", priority=-1)
    assert queue.drain() == ["urgent", "busy", "busy", "busy", "late"]


def test_a_client_is_not_charged_for_requests_that_it_gave_up() -> None:
    queue = Queue()
    queue.add("running")
    gone = [queue.add("impatient") for _ in range(50)]
    others = [queue.add("patient") for _ in range(4)]
    for request in gone:
        queue.scheduler.remove(request)
        request.finish("abort")
    queue.add("impatient")
    assert others
    assert queue.drain().index("impatient") <= 2


def test_clients_that_left_are_forgotten() -> None:
    order = FairQueue(PRIORITY_S)
    kept = Request(0, [1] * 1_000_000, 1, options=RequestOptions(client="kept"))
    order.place(kept, [])
    for number in range(1, 5000):
        request = Request(number, [1] * 100, 1, options=RequestOptions(client=str(number)))
        order.place(request, [kept])
        order.begin(request)
    assert order.num_clients <= 1026


@pytest.mark.parametrize("client", [None, 7, b"key", "x" * 65])
def test_a_client_is_a_short_string(client: object) -> None:
    with raises(InvalidArgumentError, param="client", match="most 64"):
        RequestOptions(client=client)


def test_a_full_queue_makes_room_for_a_client_with_fewer(make_llm) -> None:
    engine = make_llm(max_requests=1, options=EngineOptions(max_waiting=4)).engine

    def submit(client: str) -> Request:
        return engine.submit([5, 6], ResolvedSampling(max_tokens=2), options=RequestOptions(client=client))

    busy = [submit("busy") for _ in range(5)]
    with pytest.raises(QueueFullError):
        submit("busy")
    assert not engine.has_room_for("busy")
    assert engine.has_room_for("new")
    new = submit("new")
    assert isinstance(busy[-1].error, QueueFullError)
    assert "this client has most of the waiting requests" in str(busy[-1].error)
    engine.step()
    second = submit("new")
    assert isinstance(busy[-2].error, QueueFullError)
    with pytest.raises(QueueFullError):
        submit("new")  # both have two waiting
    while engine.has_work:
        engine.step()
    assert [r.finish_reason for r in (*busy[:3], new, second)] == ["length"] * 5


def test_a_full_queue_keeps_requests_that_are_more_urgent(make_llm) -> None:
    engine = make_llm(max_requests=1, options=EngineOptions(max_waiting=4)).engine

    def submit(client: str, priority: int) -> Request:
        options = RequestOptions(client=client, priority=priority)
        return engine.submit([5, 6], ResolvedSampling(max_tokens=2), options=options)

    urgent = [submit("busy", -1) for _ in range(4)]
    late = submit("busy", 1)
    assert engine.has_room_for("new", 1)
    assert engine.has_room_for("new")
    normal = submit("new", 0)
    assert isinstance(late.error, QueueFullError)
    assert not engine.has_room_for("other", 0)
    with pytest.raises(QueueFullError):
        submit("other", 0)
    first = submit("other", -1)
    assert isinstance(urgent[-1].error, QueueFullError)
    while engine.has_work:
        engine.step()
    assert [r.finish_reason for r in (*urgent[:3], normal, first)] == ["length"] * 5


def test_a_request_that_has_begun_keeps_its_place(make_llm) -> None:
    engine = make_llm(max_requests=2, options=EngineOptions(max_waiting=1)).engine
    begun = [engine.submit([5], ResolvedSampling(max_tokens=9), options=RequestOptions(client="a")) for _ in range(2)]
    engine.step()
    engine.submit([5], ResolvedSampling(max_tokens=1), options=RequestOptions(client="a"))
    with pytest.raises(QueueFullError):
        engine.submit([5], ResolvedSampling(max_tokens=1), options=RequestOptions(client="b"))
    while engine.has_work:
        engine.step()
    assert all(r.finish_reason == "length" for r in begun)
