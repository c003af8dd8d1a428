"""The choice among many workers: the same as if all were measured anew after each answer, with the work for one."""

from __future__ import annotations

import asyncio
import random
from asyncio import Event
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from penstock.cluster.routing import Figures, ReplicaRouter
from penstock.serving import translation
from penstock.serving.openai.bodies import ChatCompletionRequest
from penstock.serving.openai.messages import Message
from penstock.serving.workers.failover import Failover
from penstock.serving.workers.worker_routing import RoutedRequest, WorkerRouting


class PlainRouting(WorkerRouting):
    """Measures each worker anew after each answer."""

    def choose(self, connections, num_tokens, keys, session) -> RoutedRequest:
        for connection in connections:
            if connection in self._places:
                self.router.correct(self._places[connection], connection.num_open)
        return super().choose(connections, num_tokens, keys, session)

    def measure(self, connection, answer) -> None:
        super().measure(connection, answer)
        local = self._local_times.figures(Figures())
        for other, place in self._places.items():
            own = self._remote_times.get(other)
            self.router.measure(place, local if own is None else own.figures(local))


class Worker(SimpleNamespace):
    """A worker that reports no pages."""

    __hash__ = object.__hash__

    def follow_pages(self, on_pages: Callable[[object], None]) -> None:
        """Report nothing."""


def workers_of(num: int, num_remote: int) -> list[Worker]:
    plan = SimpleNamespace(num_pages=50, max_requests=4)
    return [Worker(is_remote=number < num_remote, plan=plan, num_open=0, gone=Event()) for number in range(num)]


def answer_of(draw: random.Random, num_tokens: int) -> SimpleNamespace:
    """An answer with times that vary; short prompts and answers of one token have not all of them."""
    timings = {"total_s": draw.uniform(1, 2), "first_token_s": 0.5}
    if draw.random() < 0.7:
        timings |= {"prefill_s": draw.uniform(0.01, 0.5), "per_token_s": draw.uniform(0.005, 0.05)}
    return SimpleNamespace(is_complete=True, timings=timings, num_prompt_tokens=num_tokens, num_cached_tokens=0)


def choices(routing: WorkerRouting, num_requests: int) -> tuple[list[int], list[float]]:
    """The workers of random requests, and the costs that the router knows at the end."""
    draw, workers = random.Random(7), workers_of(12, num_remote=6)
    places: list[int] = []
    open_requests: list[tuple[RoutedRequest, Worker, int]] = []
    for number in range(num_requests):
        if number == num_requests // 2:
            workers[1].gone.set()
            workers[8].gone.set()
            workers = [one for one in workers if not one.gone.is_set()] + workers_of(2, num_remote=1)
        num_tokens = draw.choice([10, 100, 900])
        keys = [f"{draw.randrange(6)} {page}".encode() for page in range(num_tokens // 32)]
        routed = routing.choose(workers, num_tokens, keys, f"client {draw.randrange(5)}")
        worker = routed.connection
        worker.num_open += 1
        routed.begin()
        places.append(routing.place_of(worker))
        open_requests.append((routed, worker, num_tokens))
        while len(open_requests) > draw.randrange(40):
            ended, worker, num_tokens = open_requests.pop(draw.randrange(len(open_requests)))
            worker.num_open -= 1
            ended.end(answer_of(draw, num_tokens))
    return places, routing.router._token_s.tolist() + routing.router._prefill_s.tolist()


def test_choices_are_those_of_the_plain_form() -> None:
    found = choices(WorkerRouting(), 2000)
    assert found == choices(PlainRouting(), 2000)
    assert len(set(found[0])) == 12


@pytest.mark.parametrize("num_remote", [250, 0])
def test_an_answer_measures_only_its_worker(num_remote: int, monkeypatch) -> None:
    routing, draw = WorkerRouting(), random.Random(3)
    workers = workers_of(250, num_remote)
    num_set = []
    monkeypatch.setattr(ReplicaRouter, "_set_open", lambda self, place, num_open: num_set.append(place))
    routed = routing.choose(workers, 100, [], "")
    num_set.clear()
    routed = routing.choose(workers, 100, [], "")
    routed.begin()
    routed.end(answer_of(draw, 100))
    assert len(num_set) <= 3, "begin, end and the worker that answered"


def session_of(client: str, **fields: str) -> str:
    """The session of a chat request with these fields."""
    body = ChatCompletionRequest(messages=[Message(role="user", content="a")], **fields)
    call = SimpleNamespace(client=client, arrival=0.0, headers={})
    options = translation.options_of(call, body)
    routed: list[str] = []
    routes = SimpleNamespace(choose=lambda num_tokens, keys, session, state_id, only: routed.append(session))

    async def choose() -> None:
        Failover(routes, [1, 2], options, lambda options: None)._choose()

    asyncio.run(choose())
    return routed[0]


def test_the_session_is_by_cache_key_then_user_then_client(monkeypatch) -> None:
    monkeypatch.setattr(translation, "deadline_s", lambda call, timeout_s: None)
    assert session_of("key-a") == "key-a"
    by_user = session_of("key-a", user="ann")
    by_key = session_of("key-a", user="ann", prompt_cache_key="k" * 512)
    assert by_key == session_of("key-a", user="bob", prompt_cache_key="k" * 512)
    others = [session_of("key-b", user="ann"), session_of("key-a", user="bob")]
    assert len({"key-a", by_user, by_key, *others}) == 5
    assert max(map(len, [by_user, by_key])) <= 64


def test_a_session_decides_between_equal_workers() -> None:
    """Ten requests of two sessions, in turn: each session keeps the worker of its first one."""
    routing, workers = WorkerRouting(), workers_of(4, num_remote=4)
    chosen = []
    for number in range(10):
        routed = routing.choose(workers, 10, [], f"session {number % 2}")
        routed.begin()
        routed.end(answer_of(random.Random(1), 10))
        chosen.append(workers.index(routed.connection))
    assert chosen == [0, 1] * 5
