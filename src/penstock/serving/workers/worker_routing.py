"""The choice of a worker for a request: the workers as replicas of a ``penstock.cluster.routing.ReplicaRouter``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from penstock.cluster.routing import MAX_KEYS, Figures, ReplicaChoice, ReplicaRouter, StepTimes
from penstock.runtime.program import PAGE_TOKENS

if TYPE_CHECKING:
    from penstock.engine.page_journal import PageReport
    from penstock.llm.answer import EventAnswer
    from penstock.serving.workers.worker_connection import WorkerConnection

__all__ = ["RoutedRequest", "WorkerRouting"]


class WorkerRouting:
    """Chooses workers for requests.  Their speed comes from the times of their answers.

    ``policy``: see ``ReplicaRouter``.  The workers of this machine share its cores and count as equally fast, so that
    noise does not decide between them.  A worker of another machine has its own figures.  Workers report which pages
    they have; a new ``WorkerRouting`` asks them for all.
    """

    def __init__(self, policy: str = "prefix") -> None:
        self.router = ReplicaRouter(policy)
        self._places: dict[WorkerConnection, int] = {}
        self._local_times = StepTimes()
        self._remote_times: dict[WorkerConnection, StepTimes] = {}
        self._followers: tuple[np.ndarray, np.ndarray] | None = None
        """The places of the workers that use this machine's prefill times, and of those that use its decode times.

        A worker of another machine is among them until it has measured its own.  None: compute them again."""

    def choose(
        self, connections: Sequence[WorkerConnection], num_tokens: int, keys: Sequence[bytes], session: str
    ) -> RoutedRequest:
        """Return the choice among ``connections``, at least one.  ``session``: see ``ReplicaRouter``."""
        for connection in [one for one in self._places if one.gone.is_set()]:
            self.router.remove(self._places.pop(connection))
            self._remote_times.pop(connection, None)
            self._followers = None
        for connection in connections:
            if connection not in self._places:
                self._add(connection)
        by_place = {self._places[connection]: connection for connection in connections}
        places = [*by_place]
        self.router.correct_all(places, [connection.num_open for connection in connections])
        route = self.router.route(num_tokens, keys, session, places)
        return RoutedRequest(self, by_place[route.place], route, num_tokens, keys, session)

    def _add(self, connection: WorkerConnection) -> None:
        plan = connection.plan
        num_pages, max_requests = (MAX_KEYS, 0) if plan is None else (plan.num_pages, plan.max_requests)
        if connection.is_remote:
            self._remote_times[connection] = StepTimes()
        figures = self._local_times.figures(Figures())
        self._places[connection] = self.router.add(figures, max_requests, num_pages or MAX_KEYS)
        self._followers = None
        connection.follow_pages(partial(self._report, connection))

    def _report(self, connection: WorkerConnection, report: PageReport) -> None:
        place = self._places.get(connection)
        if place is not None:
            self.router.report(place, report)

    def place_of(self, connection: WorkerConnection) -> int | None:
        """Return the place of a worker; None if it is no longer there."""
        return self._places.get(connection)

    def queued_s(self, connections: Sequence[WorkerConnection]) -> float:
        """Return the seconds of prefill that wait in these workers together."""
        places = [self._places[connection] for connection in connections if connection in self._places]
        return sum(self.router.queued_s(place) for place in places)

    def measure(self, connection: WorkerConnection, answer: EventAnswer) -> None:
        """Note the times of a complete answer."""
        own, timings = self._remote_times.get(connection), answer.timings
        times = self._local_times if own is None else own
        had_own = (times.has_prefill, times.has_decode)
        times.note_prefill(answer.num_prompt_tokens - answer.num_cached_tokens, timings.get("prefill_s", 0.0))
        times.note_decode(connection.num_open + 1, timings.get("per_token_s", 0.0))
        local = self._local_times.figures(Figures())
        if own is not None:
            self.router.measure(self._places[connection], own.figures(local))
            if had_own != (own.has_prefill, own.has_decode):
                self._followers = None
            return
        if self._followers is None:
            self._followers = self._find_followers()
        prefill, decode = self._followers
        self.router.measure_prefill(prefill, local)
        self.router.measure_decode(decode, local)

    def _find_followers(self) -> tuple[np.ndarray, np.ndarray]:
        own = [(place, self._remote_times.get(connection)) for connection, place in self._places.items()]
        prefill = [place for place, times in own if times is None or not times.has_prefill]
        decode = [place for place, times in own if times is None or not times.has_decode]
        return np.array(prefill, np.int64), np.array(decode, np.int64)


class RoutedRequest:
    """A request and the worker that was chosen for it, as the router counts it."""

    def __init__(
        self,
        routing: WorkerRouting,
        connection: WorkerConnection,
        route: ReplicaChoice,
        num_tokens: int,
        keys: Sequence[bytes],
        session: str,
    ) -> None:
        self.connection = connection
        self._routing, self._route, self._keys, self._session = routing, route, keys, session
        self._queued = max(0, num_tokens - route.num_known * PAGE_TOKENS)
        self._expected: Sequence[bytes] = ()
        self._is_open = False
        self.is_whole = True
        """False if another worker began the answers: the times say nothing about the worker's speed."""

    def begin(self) -> None:
        """Count the request: the worker was sent it."""
        self._is_open = True
        router = self._routing.router
        self._expected = router.begin(self._route.place, self._queued, self._keys, self._session)

    def note_first(self) -> None:
        """Note that its prompt is computed."""
        place = self._routing.place_of(self.connection)
        if place is not None and (self._queued or self._expected):
            self._routing.router.prefilled(place, self._queued, self._expected)
        self._queued, self._expected = 0, ()

    def end(self, answer: EventAnswer) -> None:
        """Note its end on this worker, complete or not.  Further calls do nothing."""
        if not self._is_open:
            return
        self._is_open = False
        self.note_first()
        place = self._routing.place_of(self.connection)
        if place is None:
            return
        num_tokens = 0
        if answer.is_complete and answer.timings:
            decode_s, token_s = (answer.timings.get(name, 0.0) for name in ("total_s", "per_token_s"))
            decode_s -= answer.timings.get("first_token_s", 0.0)
            num_tokens = 1 + round(decode_s / token_s) if token_s > 0 else 1
            if self.is_whole:
                self._routing.measure(self.connection, answer)
        self._routing.router.end(place, num_tokens)
