"""The order of waiting requests: by priority and arrival, and fair between clients within a level of priority.

Start-time fair queueing (P. Goyal, H. Vin, H. Cheng, 1996).  Within a level each request has a virtual start: the
virtual finish of its client's request before it, or the level's virtual time if that is later.  Its virtual finish is
its tokens later.  The virtual time is the greatest virtual start of the requests that have begun to run.  A request
goes in front of those of its level that have a later virtual start, so that a client with few requests does not wait
behind all the requests of a client with many.  The requests of one client keep their order.

A place in the order is given once, on arrival, and never changes.  With one client it is the order of
``arrival + priority * priority_s``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from penstock.errors import QueueFullError

if TYPE_CHECKING:
    from penstock.engine.request import Request

__all__ = ["FairQueue", "displaced_error", "heaviest"]

_MAX_IDLE_CLIENTS: Final = 1024
"""Clients without a waiting request that a level remembers."""
_BEGUN: Final = -1.0
"""The virtual start of a request that has begun: nothing is placed in front of it."""


@dataclass(slots=True)
class _Client:
    """A client within a level.

    ``arrived`` and ``started`` are the virtual finishes of its last request that arrived, and of its last that began to
    run.
    """

    arrived: float = 0.0
    started: float = 0.0
    num_waiting: int = 0


@dataclass(slots=True)
class _Level:
    """A level of priority that has waiting requests; ``latest`` is the greatest virtual start that it has given."""

    now: float = 0.0
    latest: float = 0.0
    num_waiting: int = 0
    clients: dict[str, _Client] = field(default_factory=dict)


def heaviest(waiting: Iterable[tuple[str, int]], client: str, priority: int | None = None) -> str | None:
    """Return the client whose last request gives up its place in a full queue to ``client``, or None.

    ``waiting`` has the client and the priority of each waiting request.  The client with the most of them gives way, if
    it has more than ``client`` will have.  A request that is more urgent than ``priority`` keeps its place.  None
    stands for a request whose priority is unknown and may be the most urgent.
    """
    counts: Counter[str] = Counter()
    others = set()
    for name, its_priority in waiting:
        counts[name] += 1
        if priority is None or its_priority >= priority:
            others.add(name)
    most = max(others, key=lambda name: counts[name], default=client)
    return most if counts[most] > counts[client] + 1 else None


class FairQueue:
    """Gives requests their place in the order.

    ``priority_s``: seconds of waiting that a level of priority is worth.
    """

    def __init__(self, priority_s: float) -> None:
        self._priority_s = priority_s
        self._levels: dict[int, _Level] = {}

    @property
    def num_clients(self) -> int:
        """The number of clients that are remembered, counted once for each level."""
        return sum(len(level.clients) for level in self._levels.values())

    def place(self, request: Request, waiting: Iterable[Request]) -> None:
        """Set ``order`` of a request that arrives.  ``waiting`` are the other waiting requests in order."""
        priority = request.options.priority
        level = self._levels.setdefault(priority, _Level())
        client = level.clients.setdefault(request.options.client, _Client())
        start = max(level.now, client.arrived)
        client.arrived = start + _cost(request)
        client.num_waiting += 1
        level.num_waiting += 1
        request.virtual_start = start
        request.order = (request.timings.submitted + priority * self._priority_s, math.inf, request.id)
        if start < level.latest:
            same = (other for other in waiting if other.options.priority == priority)
            behind = next((other for other in same if other.virtual_start > start), None)
            if behind is not None and behind.order < request.order:
                request.order = (behind.order[0], start, request.id)
        level.latest = max(level.latest, start)
        if len(level.clients) > level.num_waiting + _MAX_IDLE_CLIENTS:
            level.clients = {name: client for name, client in level.clients.items() if client.num_waiting}

    def begin(self, request: Request) -> None:
        """Note that a waiting request runs.  A request that ran before changes nothing."""
        if request.virtual_start == _BEGUN:
            return
        level = self._levels[request.options.priority]
        client = level.clients[request.options.client]
        level.now = max(level.now, request.virtual_start)
        client.started = max(client.started, request.virtual_start + _cost(request))
        self._leave(request)

    def remove(self, request: Request) -> None:
        """Note that a request ended while it waited.  If its client has no other waiting request, it is not charged."""
        if request.virtual_start != _BEGUN:
            self._leave(request)

    def _leave(self, request: Request) -> None:
        request.virtual_start = _BEGUN
        priority, name = request.options.priority, request.options.client
        level = self._levels[priority]
        client = level.clients[name]
        client.num_waiting -= 1
        level.num_waiting -= 1
        if not client.num_waiting:
            client.arrived = client.started
            if client.started <= level.now:
                del level.clients[name]
        if not level.num_waiting:
            del self._levels[priority]


def _cost(request: Request) -> int:
    """Return the tokens that a request may compute: of its prompt, and of the longest answer that it asks for."""
    return len(request.prompt_ids) + (request.max_tokens if request.samples else 0)


def displaced_error(max_waiting: int) -> QueueFullError:
    """Return the error for a request whose place in a full queue another client's request takes."""
    return QueueFullError(
        f"The request queue is full ({max_waiting} waiting), and this client has most of the waiting requests. Retry "
        "later."
    )
