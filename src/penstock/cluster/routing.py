"""Chooses the replica of a request: by its cost in seconds, by open requests, or in turn.

The cost of a request on a replica is the time until its answer is complete there::

    (queued prefill tokens + prompt tokens - known tokens + displaced tokens) * seconds per prefill token
    + tokens of an answer * (seconds of a decode step + open requests * seconds per row of a step)
    + the wait for a place, if all places of a step are taken

Displaced tokens are those that are not known and for which the replica has no blank pages: each page that it computes
takes the place of another that somebody computes again.  Without them a busy cluster copies its prefixes to replicas
that have no room for them, until no cache holds what it needs.

There is no threshold to tune: a replica that knows the prompt's beginning is chosen until its queue costs more than the
prefill that it saves.  The form is that of the router of NVIDIA Dynamo (its KV router adds prefill work to do and
decode blocks), in seconds.  Costs that round to the same multiple of ``TIE_S`` are equal: the replica that knows most
goes first, then that of the session, then the one with the fewest requests so far, then the one that was added first.

A replica reports the keys of the pages that it gains and drops (``PageJournal``), and how many blank ones it has.  The
router adds what is on its way: the keys of the prompts that were sent there and are not computed yet.  What a replica
knows that has not reported is estimated from what it was sent: the newest page keys, at most as many as it has pages.
Keys begin with the cache salt of their request, so tenants with different salts match nothing of each other.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.config import check_choice, check_integer, check_number
from penstock.errors import InternalError
from penstock.runtime.program import PAGE_TOKENS
from penstock.validation import set_fields

if TYPE_CHECKING:
    from penstock.engine.page_journal import PageReport

__all__ = ["POLICIES", "ROUTED_PAGES", "TIE_S", "Figures", "ReplicaChoice", "ReplicaRouter", "StepTimes"]

POLICIES: Final = ("prefix", "least-loaded", "round-robin")
TIE_S: Final = 0.001
MAX_KEYS: Final = 16_384
"""Limit on the page keys that the router remembers of one replica: 524,288 tokens."""
ROUTED_PAGES: Final = 256
"""Number of leading pages of a prompt that routing looks at: 8192 tokens."""
MAX_SESSIONS: Final = 65_536
"""Limit on the sessions that the router remembers; the least recently used is forgotten."""
_DECAY: Final = 0.98
"""The weight of an observation after one more: about the last 50 count."""
_MIN_TOKENS: Final = 32
"""A prompt with fewer computed tokens says little about the time per token."""


@dataclass(frozen=True)
class Figures:
    """The speed of a replica, in seconds.

    ``prefill_token_s``: per token of a prompt.  ``decode_step_s``: of a decode step, whatever its batch.
    ``decode_row_s``: per request in the batch of a step.  A step of b requests takes ``decode_step_s + b *
    decode_row_s``.
    """

    prefill_token_s: float = 0.0003
    decode_step_s: float = 0.0105
    decode_row_s: float = 0.0005

    def __post_init__(self) -> None:
        """Check every field."""
        for name in ("prefill_token_s", "decode_step_s", "decode_row_s"):
            set_fields(self, **{name: check_number(name, getattr(self, name), 1e6, may_be_zero=True)})


@dataclass(frozen=True)
class ReplicaChoice:
    """The choice for a request: the place of the replica, and how many leading pages it knows."""

    place: int
    num_known: int


class StepTimes:
    """The speed of a replica, from the times of requests that it has answered.

    Totals in which later requests weigh more give the time per prefill token.  The time of a decode step is a line over
    the number of open requests, by least squares; until the number has varied, one row of 16 belongs to the request.
    """

    def __init__(self) -> None:
        self._prefill_s = self._prefill_tokens = 0.0
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def note_prefill(self, num_tokens: int, seconds: float) -> None:
        """Note that ``num_tokens`` computed tokens of a prompt took so long.  Short prompts are ignored."""
        if num_tokens >= _MIN_TOKENS and seconds > 0:
            self._prefill_s = self._prefill_s * _DECAY + seconds
            self._prefill_tokens = self._prefill_tokens * _DECAY + num_tokens

    def note_decode(self, num_open: int, seconds: float) -> None:
        """Note the seconds per token of an answer that ended with ``num_open`` requests open, its own included."""
        if seconds > 0:
            values = (1.0, num_open, seconds, num_open * num_open, num_open * seconds)
            sums = (self._n, self._x, self._y, self._xx, self._xy)
            kept = [total * _DECAY + value for total, value in zip(sums, values, strict=True)]
            self._n, self._x, self._y, self._xx, self._xy = kept

    @property
    def has_prefill(self) -> bool:
        """True if a prefill was measured."""
        return bool(self._prefill_tokens)

    @property
    def has_decode(self) -> bool:
        """True if an answer was measured."""
        return bool(self._n)

    def figures(self, default: Figures) -> Figures:
        """Return the measured figures; those of ``default`` where nothing was measured."""
        prefill_s = self._prefill_s / self._prefill_tokens if self._prefill_tokens else default.prefill_token_s
        if not self._n:
            return Figures(prefill_s, default.decode_step_s, default.decode_row_s)
        mean_open, mean_s = self._x / self._n, self._y / self._n
        variance = self._xx / self._n - mean_open * mean_open
        row_s = (self._xy / self._n - mean_open * mean_s) / variance if variance > 0.5 else mean_s / (mean_open + 15)
        row_s = min(max(row_s, 0.0), mean_s / mean_open)
        return Figures(prefill_s, max(0.0, mean_s - row_s * mean_open), row_s)  # rounding may pass below 0


class _Replica:
    """The state of a replica as the router knows it.

    ``keys``: those of its pages, least recently used first.  ``expected``: how many requests are about to compute the
    page of a key.  ``has_reported``: ``keys`` are what the replica reported, and not an estimate.
    """

    def __init__(self, max_keys: int) -> None:
        self.max_keys = max_keys
        self.keys: OrderedDict[bytes, None] = OrderedDict()
        self.expected: dict[bytes, int] = {}
        self.has_reported = False


class ReplicaRouter:
    """Chooses replicas, which have places: small numbers, used again after ``remove``.

    ``policy``: "prefix" (least cost), "least-loaded" (fewest open requests) or "round-robin".  The caller reports what
    becomes of each request, with ``begin``, ``prefilled`` and ``end``, and what replicas report.  Not thread-safe.
    """

    def __init__(self, policy: str = "prefix") -> None:
        self.policy = check_choice("policy", policy, POLICIES)
        self.answer_tokens = 64.0
        """The expected tokens of an answer: the mean of the last answers."""
        self._replicas: list[_Replica | None] = []
        self._holders: dict[bytes, int] = {}  # a bit for each place
        self._sessions: OrderedDict[str, int] = OrderedDict()
        self._num_added = self._next = 0
        self._every = np.zeros(0, np.int64)
        # For each place: queued prefill tokens, open requests, places of a step, requests so far, order, speed, and the
        # tokens that the blank pages hold
        self._queued, self._open, self._places, self._sent, self._added = (np.zeros(0) for _ in range(5))
        self._prefill_s, self._step_s, self._row_s, self._token_s = (np.zeros(0) for _ in range(4))
        self._blank = np.zeros(0)

    def add(self, figures: Figures, max_requests: int, max_keys: int = MAX_KEYS) -> int:
        """Add a replica and return its place.

        ``max_requests``: the places of a step; 0 is no limit.  ``max_keys``: the number of its pages, at most 16,384.
        """
        check_integer("max_requests", max_requests, 0, 2**31 - 1)
        replica = _Replica(min(max_keys, MAX_KEYS))
        place = next((at for at, other in enumerate(self._replicas) if other is None), len(self._replicas))
        if place == len(self._replicas):
            self._replicas.append(replica)
            for name in (
                "_queued",
                "_open",
                "_places",
                "_sent",
                "_added",
                "_prefill_s",
                "_step_s",
                "_row_s",
                "_token_s",
                "_blank",
            ):
                setattr(self, name, np.append(getattr(self, name), 0.0))
        self._replicas[place] = replica
        self._every = self._all()
        self._queued[place] = self._open[place] = self._sent[place] = 0
        self._blank[place] = np.inf
        self._added[place] = self._num_added
        self._num_added += 1
        self._places[place] = max_requests or np.inf
        self.measure(place, figures)
        return place

    def remove(self, place: int) -> None:
        """Forget a replica, its keys and its sessions."""
        replica = self._replica(place)
        for key in replica.keys | replica.expected:
            self._drop(key, place)
        self._replicas[place] = None
        self._every = self._all()
        for session in [name for name, at in self._sessions.items() if at == place]:
            del self._sessions[session]

    def report(self, place: int, report: PageReport) -> None:
        """Note what a replica reports of its pages, in place of what was known or estimated.

        The limit ``max_keys`` holds here, too: the keys that were not in use for longest are forgotten.
        """
        replica, bit = self._replica(place), 1 << place
        own, expected, holders = replica.keys, replica.expected, self._holders
        if report.is_full:
            for key in own:
                if key not in expected:
                    self._drop(key, place)
            own.clear()
            replica.has_reported = True
        for key in report.dropped:
            if key in own:
                del own[key]
                if key not in expected:
                    self._drop(key, place)
        for key in report.gained:
            if key not in own:
                own[key] = None
                if key not in expected:
                    holders[key] = holders.get(key, 0) | bit
        self._bound(place, replica)
        self._blank[place] = report.num_blank * PAGE_TOKENS

    def measure(self, place: int, figures: Figures) -> None:
        """Set the speed of a replica."""
        self._prefill_s[place] = figures.prefill_token_s
        self._step_s[place], self._row_s[place] = figures.decode_step_s, figures.decode_row_s
        self._set_open(place, float(self._open[place]))

    def measure_prefill(self, places: np.ndarray, figures: Figures) -> None:
        """Set the time per prefill token of many replicas."""
        self._prefill_s[places] = figures.prefill_token_s

    def measure_decode(self, places: np.ndarray, figures: Figures) -> None:
        """Set the times of the decode steps of many replicas."""
        self._step_s[places], self._row_s[places] = figures.decode_step_s, figures.decode_row_s
        max_requests = self._places[places]
        num_open = self._open[places] + 1
        waits = np.maximum(num_open - max_requests, 0.0) / max_requests
        batch = np.minimum(num_open, max_requests)
        self._token_s[places] = (figures.decode_step_s + batch * figures.decode_row_s) * (1 + waits)

    def route(
        self, num_tokens: int, keys: Sequence[bytes], session: str = "", places: Sequence[int] | None = None
    ) -> ReplicaChoice:
        """Return the choice for a prompt of ``num_tokens`` tokens whose leading pages have these keys.

        ``session`` prefers, among equals, the replica of the session's last request.  ``places``: those that may be
        chosen; None is all.  Changes nothing but whose turn it is: ``begin`` notes the request.
        """
        allowed = self._every if places is None else np.array(places, np.int64)
        if not len(allowed):
            raise InternalError("routing: expected at least one replica to choose from, got none")
        if self.policy == "round-robin":
            later = allowed[allowed >= self._next]
            place = int(later.min() if len(later) else allowed.min())
            self._next = place + 1
            return ReplicaChoice(place, self._num_known(place, keys))
        if self.policy == "least-loaded":
            cost = self._open[allowed]
            place = self._first(allowed[cost == cost.min()], session)
            return ReplicaChoice(place, self._num_known(place, keys))
        known = self.matches(keys)
        cost = np.rint(self._costs(num_tokens, known)[allowed] / TIE_S)
        best = allowed[cost == cost.min()]
        longest = known[best]
        place = self._first(best[longest == longest.max()], session)
        return ReplicaChoice(place, int(known[place]))

    def _first(self, places: np.ndarray, session: str) -> int:
        """Return the first of equals: the session's, the one with fewest requests so far, the one added first."""
        of_session = self._sessions.get(session, -1) if session else -1
        if len(places) == 1 or of_session in places:
            return of_session if of_session in places else int(places[0])
        sent = self._sent[places]
        fewest = places[sent == sent.min()]
        return int(fewest[self._added[fewest].argmin()])

    def _costs(self, num_tokens: int, known: np.ndarray) -> np.ndarray:
        """Return the cost in seconds of a prompt on the replica of each place, which knows ``known`` pages of it."""
        missing = num_tokens - np.minimum(known * PAGE_TOKENS, num_tokens - 1)
        prefill = self._queued + missing + np.maximum(missing - self._blank, 0)
        cost: np.ndarray = prefill * self._prefill_s + self.answer_tokens * self._token_s
        return cost

    def _set_open(self, place: int, num_open: float) -> None:
        """Set the number of open requests, and the seconds per token of one more answer, its wait included."""
        self._open[place] = num_open
        max_requests = float(self._places[place])
        batch = min(num_open + 1, max_requests)
        waits = max(num_open + 1 - max_requests, 0.0) / max_requests
        self._token_s[place] = (float(self._step_s[place]) + batch * float(self._row_s[place])) * (1 + waits)

    def matches(self, keys: Sequence[bytes]) -> np.ndarray:
        """Return how many leading pages of a prompt each replica knows, by place."""
        known = np.zeros(len(self._replicas), np.int64)
        alive = (1 << len(self._replicas)) - 1
        for index, key in enumerate(keys):
            now = alive & self._holders.get(key, 0)
            if now != alive:
                if index:
                    known[self._bits(alive & ~now)] = index
                alive = now
                if not alive:
                    return known
        known[self._bits(alive)] = len(keys)
        return known

    def _bits(self, mask: int) -> np.ndarray:
        """Return for each place whether its bit is set."""
        count = len(self._replicas)
        data = np.frombuffer(mask.to_bytes(-(-count // 8), "little"), np.uint8)
        return np.unpackbits(data, count=count, bitorder="little").astype(bool)

    def _num_known(self, place: int, keys: Sequence[bytes]) -> int:
        holders, bit = self._holders, 1 << place
        return next((index for index, key in enumerate(keys) if not holders.get(key, 0) & bit), len(keys))

    def begin(self, place: int, num_queued: int, keys: Sequence[bytes], session: str = "") -> list[bytes]:
        """Note that a replica was sent a request with ``num_queued`` tokens to compute and these page keys.

        Returns the keys that it is expected to compute, for ``prefilled``.
        """
        self._queued[place] += num_queued
        self._set_open(place, float(self._open[place]) + 1)
        self._sent[place] += 1
        if session:
            self._sessions[session] = place
            self._sessions.move_to_end(session)
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        replica, bit = self._replica(place), 1 << place
        own, expected, holders = replica.keys, replica.expected, self._holders
        missing: list[bytes] = []
        for key in reversed(keys):  # the first pages stay longest, as in the replica
            if key in own:
                own.move_to_end(key)
                continue
            missing.append(key)
            count = expected.get(key, 0)
            expected[key] = count + 1
            if not count:
                holders[key] = holders.get(key, 0) | bit
            if not replica.has_reported:
                own[key] = None
        if not replica.has_reported:
            self._blank[place] = 0 if len(own) >= replica.max_keys else np.inf
            self._bound(place, replica)
        return missing

    def prefilled(self, place: int, num_queued: int, expected: Sequence[bytes] = ()) -> None:
        """Note that ``num_queued`` tokens that ``begin`` counted are computed, or need not be.

        ``expected``: the keys that ``begin`` returned.  From now on only what the replica reports of them counts.
        """
        self._queued[place] = max(0.0, self._queued[place] - num_queued)
        replica = self._replica(place)
        for key in expected:
            count = replica.expected.get(key, 0)
            if count > 1:
                replica.expected[key] = count - 1
            elif count:
                del replica.expected[key]
                if key not in replica.keys:
                    self._drop(key, place)

    def end(self, place: int, num_tokens: int = 0) -> None:
        """Note the end of a request; ``num_tokens`` of its answer, 0 if it was not complete."""
        self._set_open(place, max(0.0, float(self._open[place]) - 1))
        if num_tokens:
            self.answer_tokens += (num_tokens - self.answer_tokens) * (1 - _DECAY)

    def correct(self, place: int, num_open: int) -> None:
        """Set the number of open requests of a replica; with none, nothing is queued."""
        self._set_open(place, num_open)
        if not num_open:
            self._queued[place] = 0

    def correct_all(self, places: Sequence[int], num_open: Sequence[int]) -> None:
        """Set the numbers of open requests of many replicas, as ``correct`` does for one."""
        at, counts = np.array(places, np.int64), np.array(num_open, np.float64)
        self._queued[at[counts == 0]] = 0
        for index in np.flatnonzero(self._open[at] != counts):
            self._set_open(places[int(index)], float(counts[index]))

    def queued_s(self, place: int) -> float:
        """Return the seconds of prefill that wait in a replica."""
        return float(self._queued[place] * self._prefill_s[place])

    @property
    def places(self) -> list[int]:
        """The places of all replicas."""
        return [int(place) for place in self._every]

    @property
    def num_keys(self) -> int:
        """The number of different page keys that are remembered."""
        return len(self._holders)

    def _all(self) -> np.ndarray:
        return np.array([place for place, replica in enumerate(self._replicas) if replica is not None], np.int64)

    def _replica(self, place: int) -> _Replica:
        replica = self._replicas[place] if 0 <= place < len(self._replicas) else None
        if replica is None:
            raise InternalError(f"routing: expected the place of a replica, got {place}")
        return replica

    def _bound(self, place: int, replica: _Replica) -> None:
        """Forget the least recently used keys beyond the limit."""
        while len(replica.keys) > replica.max_keys:
            key, _ = replica.keys.popitem(last=False)
            if key not in replica.expected:
                self._drop(key, place)

    def _drop(self, key: bytes, place: int) -> None:
        left = self._holders[key] & ~(1 << place)
        if left:
            self._holders[key] = left
        else:
            del self._holders[key]
