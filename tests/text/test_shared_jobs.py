"""Equal calls that are made at the same time run once; nobody waits for a call that nobody wants."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError

import pytest

from penstock.errors import InvalidArgumentError
from penstock.text.grammar.shared_jobs import NUM_THREADS, SharedJobs


class Gate:
    """A function whose calls wait until they are let through."""

    def __init__(self) -> None:
        self.calls: list[object] = []
        self.begun, self.open = threading.Semaphore(0), threading.Event()

    def __call__(self, key: object) -> object:
        self.calls.append(key)
        if str(key).startswith("slow"):
            self.begun.release()
            assert self.open.wait(300)
        if key == "wrong":
            raise InvalidArgumentError("wrong", param="x")
        return object()


@pytest.fixture
def gate():
    made = Gate()
    yield made
    made.open.set()


def test_equal_calls_share_one(gate):
    jobs = SharedJobs(gate, "test")
    first = jobs.begin("slow")
    others = [jobs.begin("slow") for _ in range(4)]
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(jobs.call("slow")))
    thread.start()
    assert others[0].cancel()  # one of them leaves
    gate.open.set()
    thread.join(300)
    assert [first.result(60), *(other.result(60) for other in others[1:])] == found * 4
    assert gate.calls == ["slow"]
    assert jobs.call("slow") is not found[0]  # results are not kept


def test_an_error_reaches_everybody(gate):
    jobs = SharedJobs(gate, "test")
    for _ in range(2):
        with pytest.raises(InvalidArgumentError):
            jobs.call("wrong")
    with pytest.raises(InvalidArgumentError):
        jobs.begin("wrong").result(60)


def test_slow_calls_delay_neither_callers_nor_what_nobody_wants(gate):
    jobs = SharedJobs(gate, "test")
    slow = [jobs.begin(f"slow {index}") for index in range(NUM_THREADS)]
    for _ in slow:
        assert gate.begun.acquire(timeout=300)
    queued = jobs.begin("a"), jobs.begin("b")
    assert jobs.call("a") is queued[0].result(60)  # in this thread, although both others are busy
    assert queued[1].cancel()
    gate.open.set()
    for one in slow:
        one.result(60)
    last = jobs.begin("c")
    last.result(60)
    assert "b" not in gate.calls
    assert gate.calls.count("a") == 1


def test_closing_cancels_what_has_not_begun(gate):
    jobs = SharedJobs(gate, "test")
    slow = [jobs.begin(f"slow {index}") for index in range(NUM_THREADS)]
    for _ in slow:
        assert gate.begun.acquire(timeout=300)
    queued = jobs.begin("a")
    jobs.close()
    with pytest.raises(CancelledError):
        queued.result(60)
    with pytest.raises(InvalidArgumentError):
        jobs.begin("a")
    gate.open.set()
    assert all(one.result(60) for one in slow)
