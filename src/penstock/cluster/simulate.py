"""Simulates many replicas of a model that serve a trace.

The scheduler, the pages, the prefix cache and the router are those of the engine and of the service; only the step is
replaced, by what it costs.  Nothing is computed and no time passes: the clock is virtual.
"""

from __future__ import annotations

import gc
import heapq
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count, starmap
from random import Random
from typing import Any, Final

import numpy as np

from penstock.cluster.autoscale import SAMPLE_S, Autoscaler, Load, ScalePolicy
from penstock.cluster.costs import COSTS_348M, StepCosts
from penstock.cluster.handovers import CopyCosts, Handover, Handovers
from penstock.cluster.replica import NS, Arrived, Replica, ReplicaLimits, StepTable, new_request
from penstock.cluster.roles import WorkerRoles
from penstock.cluster.routing import POLICIES, ROUTED_PAGES, ReplicaRouter
from penstock.cluster.trace import SegmentKeys, TraceRequest
from penstock.config import check_choice, check_integer, check_number
from penstock.errors import InvalidArgumentError, InvalidFileError
from penstock.runtime.program import PAGE_TOKENS

__all__ = ["Simulation", "SimulationReport", "simulate"]

MAX_REPLICAS: Final = 100_000
_PERCENTILES: Final = (50, 90, 99)
_REPORT_EVERY: Final = 1000
_LOOK: Final = -1
"""In the place of an event: no failure, a look at the load."""


@dataclass(frozen=True)
class Simulation:
    """The subject of a simulation: ``replicas`` of ``tp`` ranks each, with costs, limits and a policy of the router.

    ``mtbf_s``: the mean time between failures of a replica, in seconds; 0 is never.  The times are exponentially
    distributed and follow from ``seed``.  A failed replica loses its cache and is back ``restart_s`` seconds later.
    Its requests start again on others, as if their clients had tried again; their times count from the first arrival.
    ``scale``: how the number of replicas follows the load, from ``replicas`` at first; a new one takes ``start_s``
    seconds until it serves.  It cannot be combined with failures.  ``is_stepwise``: simulate each step as an event of
    its own, even while the batch does not change.  The result is the same.  ``roles``: so many of the replicas compute
    prompts, and the others go on with the answers; copying pages between them takes ``copies``.
    """

    replicas: int = 1
    policy: str = "prefix"
    costs: StepCosts = COSTS_348M
    tp: int = 1
    limits: ReplicaLimits = field(default_factory=ReplicaLimits)
    mtbf_s: float = 0.0
    restart_s: float = 10.0
    seed: int = 0
    scale: ScalePolicy | None = None
    start_s: float = 1.0
    is_stepwise: bool = False
    roles: WorkerRoles = field(default_factory=WorkerRoles)
    copies: CopyCosts = field(default_factory=CopyCosts)

    def __post_init__(self) -> None:
        """Check every field."""
        check_integer("replicas", self.replicas, 1, MAX_REPLICAS)
        check_choice("policy", self.policy, POLICIES)
        for name in ("mtbf_s", "restart_s", "start_s"):
            check_number(name, getattr(self, name), 1e9, may_be_zero=True)
        check_integer("seed", self.seed, 0, 2**63 - 1)
        self.costs.on_ranks(self.tp)
        if self.scale is not None and self.mtbf_s:
            raise InvalidArgumentError("mtbf_s: expected 0 if the number of replicas follows the load", param="mtbf_s")
        if self.roles.num_workers and (self.scale is not None or self.roles.num_workers != self.replicas):
            raise InvalidArgumentError(
                f"replicas: expected {self.roles.num_workers}, which have the roles, got {self.replicas}"
                f"{'' if self.scale is None else ' at first'}",
                param="replicas",
            )


@dataclass
class SimulationReport:
    """The result.  Times in seconds, of the virtual clock.

    ``ttft``, ``tpot`` and ``e2e`` have the mean and the percentiles "p50", "p90" and "p99" of the time to the first
    token, per further token, and to the end.  ``prefilled_tokens`` of the prompts were computed, also those that were
    computed again after a preemption, and ``cached_tokens`` were shared.  ``utilisation``: the share of the time in
    which replicas ran steps.  ``load_imbalance``: how much longer than the mean the busiest replica ran, as a share.
    ``seconds``: from the first arrival to the last end.  ``replica_seconds``: the sum over replicas of the time in
    which they ran, their start included.  ``failures`` of replicas; ``retries`` counts the requests that began anew
    after one.  If the number of replicas follows the load, ``replica_range`` is "MIN..MAX", ``replicas`` is the most
    that ran at once, and ``scalings`` counts the changes.  With roles ``roles`` is "PREFILL+DECODE", and ``handovers``
    of requests had ``copied_pages``.
    """

    policy: str
    replicas: int
    tp: int
    costs: dict[str, str]
    requests: int = 0
    prefilled_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    failures: int = 0
    retries: int = 0
    scalings: int = 0
    steps: int = 0
    hit_rate: float = 0.0
    ttft: dict[str, float] = field(default_factory=dict)
    tpot: dict[str, float] = field(default_factory=dict)
    e2e: dict[str, float] = field(default_factory=dict)
    utilisation: float = 0.0
    load_imbalance: float = 0.0
    seconds: float = 0.0
    replica_seconds: float = 0.0
    replica_range: str = ""
    roles: str = ""
    handovers: int = 0
    copied_pages: int = 0


def simulate(
    requests: Iterable[TraceRequest], settings: Simulation, progress: Callable[[int, float], None] | None = None
) -> SimulationReport:
    """Run the requests, which are in order of time.

    ``progress`` is called now and then with the number of requests that arrived and the virtual time in seconds.
    Raises InvalidFileError for a request that no replica has pages for.
    """
    with _without_collections():
        return _Cluster(settings).run(requests, progress or (lambda number, seconds: None))


@contextmanager
def _without_collections() -> Iterator[None]:
    """Stop the cyclic garbage collector, which would look at millions of page keys again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Cluster:
    """Replicas, their router, and the events to come: the ends of steps, in order of time and of replica."""

    def __init__(self, settings: Simulation) -> None:
        costs, limits = settings.costs.on_ranks(settings.tp), settings.limits
        self._settings, self._costs = settings, costs
        self._keys = SegmentKeys()
        self._router = ReplicaRouter(settings.policy)
        self._table, self._figures = StepTable(costs, limits), costs.figures(limits.max_requests)
        self._replicas: list[Replica] = []
        self._ended: list[_Totals] = []  # of replicas that failed
        self._ends: list[tuple[int, int]] = []
        self._faults = _Faults(settings)
        self._handovers = Handovers(settings.roles, settings.copies) if settings.roles.num_workers else None
        self._unplaced: list[tuple[TraceRequest, int]] = []  # while all replicas are down
        self._num_up = self._num_failures = 0
        self._scaling = None if settings.scale is None else _Scaling(settings.scale, settings.replicas)
        self._ttft, self._tpot, self._e2e = array("d"), array("d"), array("d")
        self._num_requests = self._num_open = self._num_sent = self._output_tokens = 0
        self._first_ns: int | None = None
        self._last_ns = 0

    def run(self, requests: Iterable[TraceRequest], progress: Callable[[int, float], None]) -> SimulationReport:
        for request in requests:
            now_ns = round(request.time * NS)
            if self._first_ns is None:
                self._first_ns = now_ns
                for _ in range(self._settings.replicas):
                    self._start_replica(now_ns)
                if self._scaling is not None:
                    self._scaling.begin(now_ns, self._settings.replicas)
                    self._faults.plan_look(now_ns)
            self._run_until(now_ns)
            self._arrive(request, now_ns)
            if self._num_requests % _REPORT_EVERY == 0:
                progress(self._num_requests, request.time)
        self._run_until(None)
        progress(self._num_requests, self._last_ns / NS)
        return self._report()

    def _start_replica(self, now_ns: int) -> None:
        """Add a replica with an empty cache, at a place of its own or of one that failed."""
        limits = self._settings.limits
        place = self._router.add(self._figures, limits.max_requests, limits.num_pages)
        replica = Replica(limits, self._table, self._keys, is_stepwise=self._settings.is_stepwise)
        self._replicas[place : place + 1] = [replica]
        self._report_pages(place, replica)
        self._num_up += 1
        self._faults.started(place, now_ns)
        if self._scaling is not None:
            self._scaling.started(place)

    def _stop_replica(self, place: int, now_ns: int) -> None:
        """End a replica, and send its requests to others."""
        self._num_failures += 1
        if self._handovers is not None:
            for replica in self._replicas:
                replica.keep_from(place)
        for arrived in self._remove(place, now_ns):
            self._send(arrived.line, arrived.arrival_ns, now_ns)

    def _remove(self, place: int, now_ns: int) -> list[Arrived]:
        """Remove a replica and return its requests."""
        replica = self._replicas[place]
        self._router.remove(place)
        self._num_up -= 1
        lost = replica.stop(now_ns)
        self._ended.append(_Totals.of(place, replica))
        # Until another one starts here: it gets no requests, and its totals are 0.
        self._replicas[place] = Replica(self._settings.limits, self._table, self._keys)
        return lost

    def _look(self, now_ns: int) -> None:
        """Start or end replicas as the load wants it."""
        scaling = self._scaling
        if scaling is None:
            return
        num_new, surplus = scaling.look(now_ns, self._load(scaling.active, now_ns), self._num_open_at)
        for _ in range(num_new):
            self._faults.plan_start(now_ns + round(self._settings.start_s * NS))
        for place in surplus:
            self._end_if_idle(place, now_ns)

    def _load(self, places: Iterable[int], now_ns: int) -> Load:
        max_requests = self._settings.limits.max_requests
        queued_s, busy, held = 0.0, len(self._unplaced) / max_requests, 0.0
        for place in places:
            replica = self._replicas[place]
            queued_s += self._router.queued_s(place)
            busy += replica.num_open / max_requests
            held += replica.page_share(now_ns)
        return Load(queued_s, max(busy, held))

    def _num_open_at(self, place: int) -> int:
        return self._replicas[place].num_open

    def _end_if_idle(self, place: int, now_ns: int) -> None:
        """End a replica that is no longer wanted, if its requests have ended."""
        scaling = self._scaling
        if scaling is not None and place in scaling.leaving and not self._replicas[place].num_open:
            self._remove(place, now_ns)
            scaling.ended(place, now_ns)

    def _run_until(self, now_ns: int | None) -> None:
        """Run what happens before ``now_ns``; None is until every request has ended."""
        faults = self._faults
        while True:
            self._run_steps(now_ns)
            at_ns = faults.next_ns
            if at_ns is None or not (self._num_open if now_ns is None else at_ns < now_ns):
                return
            self._happen(*faults.pop())

    def _happen(self, at_ns: int, event: int | Handover | None) -> None:
        if isinstance(event, Handover):
            self._end_copy(event, at_ns)
        elif event == _LOOK:
            self._look(at_ns)
            self._faults.plan_look(at_ns + round(SAMPLE_S * NS))
        elif event is not None:
            self._stop_replica(event, at_ns)
        else:
            self._start_replica(at_ns)
            unplaced, self._unplaced = self._unplaced, []
            for request, arrival_ns in unplaced:
                self._send(request, arrival_ns, at_ns)

    def _run_steps(self, now_ns: int | None) -> None:
        """Run the steps that end before ``now_ns`` and before the next event; None is all.

        A step that ends right then sees the arrival.
        """
        ends, replicas, faults = self._ends, self._replicas, self._faults
        while ends and (now_ns is None or ends[0][0] < now_ns) and not faults.is_due(ends[0][0]):
            end_ns, place = heapq.heappop(ends)
            replica = replicas[place]
            if replica.end_ns != end_ns:
                continue  # an arrival has ended these steps earlier, or the replica failed
            first, ended, left = replica.finish_steps()
            if first or ended or left:  # moments that do not depend on how many steps are one event
                self._report_pages(place, replica)
            for arrived in first:
                self._note_first(arrived, end_ns)
            for arrived in ended:
                self._note_end(arrived, end_ns)
            for arrived in left:
                self._hand_over(arrived, end_ns)
            if replica.end_ns is not None:
                heapq.heappush(ends, (replica.end_ns, place))
            elif ended:
                self._end_if_idle(place, end_ns)

    def _note_first(self, arrived: Arrived, now_ns: int) -> None:
        """Note that a replica computed the text of a request; one for decode may go on with the answer."""
        self._router.prefilled(arrived.place, arrived.queued, arrived.expected)
        handovers, source = self._handovers, self._replicas[arrived.place]
        if handovers is None:
            return
        handovers.note_first(arrived)
        limit = self._settings.limits.max_requests
        places = handovers.targets(arrived, self._router.places, lambda place: self._replicas[place].num_open < limit)
        if not places or not source.holds(arrived):
            return
        prompt_len, keys = len(arrived.request.prompt_ids), arrived.request.page_keys[:ROUTED_PAGES]
        route = self._router.route(prompt_len, keys, places=places)
        receiver = self._replicas[route.place]
        copy, time_ns = handovers.begin(arrived, source, route.place, receiver, route.num_known)
        self._faults.plan_copy(now_ns + time_ns, copy)

    def _end_copy(self, copy: Handover, now_ns: int) -> None:
        """Let a request leave for the replica that has its pages now, unless one of both failed or it has no place."""
        arrived, source, receiver = copy.arrived, copy.source, copy.receiver
        is_up = self._replicas[copy.target] is receiver and self._replicas[arrived.place] is source
        if not is_up or not source.holds(arrived) or receiver.num_open >= self._settings.limits.max_requests:
            return
        for place, replica in ((copy.target, receiver), (arrived.place, source)):
            before = replica.end_ns
            if replica is receiver:
                replica.store(copy.keys, now_ns)
            else:
                replica.release(arrived, copy.target, now_ns)
            self._note_steps(place, before)

    def _hand_over(self, arrived: Arrived, now_ns: int) -> None:
        """Go on with a request in the replica that has copies of its pages."""
        if self._handovers is None:
            return
        self._router.end(arrived.place)
        self._handovers.num_done += 1
        place, before = arrived.target, arrived.request
        keys, num_tokens = before.page_keys, before.num_tokens
        num_keys = min(len(keys), ROUTED_PAGES)
        known = self._router.matches(keys[:num_keys])[place]
        queued = max(0, num_tokens - int(known) * PAGE_TOKENS)
        expected = self._router.begin(place, queued, keys[:num_keys])
        request = new_request(before.id, len(before.prompt_ids), before.max_tokens, keys, arrived.line.time)
        request.resume(before.output_ids)
        moved = Arrived(request, arrived.line, place, arrived.arrival_ns, queued, expected, arrived.first_ns)
        self._submit(moved, now_ns)

    def _report_pages(self, place: int, replica: Replica) -> None:
        """Report what a replica gained and dropped.  A worker does so after each step."""
        report = replica.journal.take()
        if report is not None:
            self._router.report(place, report)

    def _arrive(self, request: TraceRequest, now_ns: int) -> None:
        num_tokens = request.prompt_tokens + request.output_tokens
        num_held = self._settings.limits.num_pages * PAGE_TOKENS
        if num_tokens > num_held:
            raise InvalidFileError(
                f"{request.source or 'trace'}: segments: expected at most {num_held} tokens with those of the answer, "
                f"which a replica has pages for, got {num_tokens}",
                param="segments",
            )
        self._num_requests += 1
        self._num_open += 1
        self._send(request, now_ns, now_ns)

    def _send(self, request: TraceRequest, arrival_ns: int, now_ns: int) -> None:
        """Send a request to a replica, or keep it while all of them are down."""
        scaling = self._scaling
        if not (self._num_up if scaling is None else scaling.active):
            self._unplaced.append((request, arrival_ns))
            self._look(now_ns)
            return
        prompt_len, keys = request.prompt_tokens, self._keys.of_prompt(request.segments)
        allowed: Sequence[int] | None = [*scaling.active] if scaling is not None and scaling.leaving else None
        if self._handovers is not None:
            allowed = self._handovers.suited(prompt_len, self._router.places)
        leading = keys[:ROUTED_PAGES]  # as the service does
        route = self._router.route(prompt_len, leading, places=allowed)
        place, queued = route.place, max(0, prompt_len - route.num_known * PAGE_TOKENS)
        expected = self._router.begin(place, queued, leading)
        self._num_sent += 1
        engine_request = new_request(self._num_sent, prompt_len, request.output_tokens, keys, request.time)
        self._submit(Arrived(engine_request, request, place, arrival_ns, queued, expected), now_ns)

    def _submit(self, arrived: Arrived, now_ns: int) -> None:
        place = arrived.place
        replica = self._replicas[place]
        before = replica.end_ns
        replica.submit(arrived, now_ns)
        self._note_steps(place, before)

    def _note_steps(self, place: int, before: int | None) -> None:
        """Note the end of a replica's present steps, if it was another one before."""
        end_ns = self._replicas[place].end_ns
        if end_ns is not None and end_ns != before:
            heapq.heappush(self._ends, (end_ns, place))

    def _note_end(self, arrived: Arrived, now_ns: int) -> None:
        num_tokens = arrived.request.max_tokens
        self._router.end(arrived.place, num_tokens)
        self._num_open -= 1
        self._output_tokens += num_tokens
        self._ttft.append((arrived.first_ns - arrived.arrival_ns) / NS)
        self._e2e.append((now_ns - arrived.arrival_ns) / NS)
        if num_tokens > 1:
            self._tpot.append((now_ns - arrived.first_ns) / NS / (num_tokens - 1))
        self._last_ns = now_ns

    def _report(self) -> SimulationReport:
        settings, costs = self._settings, self._costs
        source = {"model": costs.model, "machine": costs.machine, "source": costs.source}
        report = SimulationReport(settings.policy, settings.replicas, settings.tp, source, self._num_requests)
        totals = [*self._ended, *starmap(_Totals.of, enumerate(self._replicas))]
        busy_ns: Counter[int] = Counter()
        for total in totals:
            busy_ns[total.place] += total.busy_ns
        report.prefilled_tokens = sum(total.num_prefilled for total in totals)
        report.cached_tokens = sum(total.num_cached for total in totals)
        report.preemptions = sum(total.num_preemptions for total in totals)
        report.steps = sum(total.num_steps for total in totals)
        report.failures = self._num_failures
        report.retries = self._num_sent - self._num_requests
        report.output_tokens = self._output_tokens
        num_prompt = sum(total.num_prompt for total in totals)
        if self._handovers is not None:
            roles, moved = settings.roles, self._handovers
            report.roles = f"{roles.num_prefill}+{roles.num_decode}"
            report.handovers, report.copied_pages = moved.num_done, moved.num_pages
            report.cached_tokens -= moved.num_cached_tokens
            num_prompt -= moved.num_prompt_tokens
        report.hit_rate = report.cached_tokens / num_prompt if num_prompt else 0.0
        report.ttft, report.tpot, report.e2e = map(_summary, (self._ttft, self._tpot, self._e2e))
        whole_ns = self._last_ns - (self._first_ns or 0)
        report.seconds = whole_ns / NS
        report.replica_seconds = report.seconds * settings.replicas
        if settings.scale is not None and self._scaling is not None:
            report.replicas, report.scalings = self._scaling.most, self._scaling.num_changes
            report.replica_seconds = self._scaling.replica_ns(self._last_ns) / NS
            report.replica_range = f"{settings.scale.min_replicas}..{settings.scale.max_replicas}"
        if whole_ns:
            report.utilisation = busy_ns.total() / NS / report.replica_seconds
        if busy_ns.total():
            report.load_imbalance = max(busy_ns.values()) * len(busy_ns) / busy_ns.total() - 1
        return report


@dataclass(frozen=True)
class _Totals:
    """The totals of the replica at a place until it ended."""

    place: int
    busy_ns: int
    num_steps: int
    num_prefilled: int
    num_prompt: int
    num_cached: int
    num_preemptions: int

    @classmethod
    def of(cls, place: int, replica: Replica) -> _Totals:
        scheduler = replica.scheduler
        return cls(
            place,
            replica.busy_ns,
            replica.num_steps,
            replica.num_prefilled,
            scheduler.num_prompt_tokens,
            scheduler.num_cached_tokens,
            scheduler.num_preemptions,
        )


class _Scaling:
    """The number of replicas that follows the load, and the places of those that serve and that leave."""

    def __init__(self, policy: ScalePolicy, num_replicas: int) -> None:
        self._scaler = Autoscaler(policy, num_replicas)
        self.active: dict[int, None] = {}
        self.leaving: set[int] = set()
        self.num_changes = self.most = 0
        self._num_coming = 0
        self._count = self._since_ns = self._replica_ns = 0

    def begin(self, now_ns: int, num_replicas: int) -> None:
        """Begin with replicas that serve from the first moment."""
        self._num_coming, self._since_ns = 0, now_ns
        self._count = self.most = num_replicas

    def look(self, now_ns: int, load: Load, num_open: Callable[[int], int]) -> tuple[int, list[int]]:
        """Return how many replicas to start now, and the places of those that get no more requests."""
        before = self._scaler.wanted
        wanted = self._scaler.update(now_ns / NS, load)
        self.num_changes += wanted != before
        missing = wanted - len(self.active) - self._num_coming
        if missing > 0:
            self._num_coming += missing
            self._note_count(now_ns, missing)
            return missing, []
        surplus = sorted(self.active, key=lambda place: (num_open(place), -place))[: max(0, len(self.active) - wanted)]
        for place in surplus:
            del self.active[place]
            self.leaving.add(place)
        return 0, surplus

    def started(self, place: int) -> None:
        """Note that a replica serves."""
        self.active[place] = None
        self._num_coming -= 1

    def ended(self, place: int, now_ns: int) -> None:
        """Note the end of a replica that was leaving."""
        self.leaving.remove(place)
        self._note_count(now_ns, -1)

    def replica_ns(self, now_ns: int) -> int:
        """Return the nanoseconds that all replicas ran, up to now."""
        return self._replica_ns + self._count * max(0, now_ns - self._since_ns)

    def _note_count(self, now_ns: int, change: int) -> None:
        self._replica_ns, self._since_ns = self.replica_ns(now_ns), now_ns
        self._count += change
        self.most = max(self.most, self._count)


class _Faults:
    """The events of replicas, in order of time: failures, starts, copies of pages, and looks at the load."""

    def __init__(self, settings: Simulation) -> None:
        self._mtbf_s, self._restart_ns = settings.mtbf_s, round(settings.restart_s * NS)
        self._draw = Random(settings.seed)  # noqa: S311 - not a secret
        # time, number, and the place of the replica that fails, or what else happens
        self._events: list[tuple[int, int, int | Handover | None]] = []
        self._numbers = count()

    @property
    def next_ns(self) -> int | None:
        """The time of the next event; None if replicas do not fail."""
        return self._events[0][0] if self._events else None

    def started(self, place: int, now_ns: int) -> None:
        """Draw when a replica fails that starts now."""
        if self._mtbf_s:
            after_ns = round(self._draw.expovariate(1 / self._mtbf_s) * NS)
            heapq.heappush(self._events, (now_ns + after_ns, next(self._numbers), place))

    def plan_start(self, at_ns: int) -> None:
        """Plan that one more replica serves from ``at_ns`` on."""
        heapq.heappush(self._events, (at_ns, next(self._numbers), None))

    def plan_look(self, at_ns: int) -> None:
        """Plan a look at the load."""
        heapq.heappush(self._events, (at_ns, next(self._numbers), _LOOK))

    def plan_copy(self, at_ns: int, copy: Handover) -> None:
        """Plan that the pages of a request have been copied."""
        heapq.heappush(self._events, (at_ns, next(self._numbers), copy))

    def is_due(self, at_ns: int) -> bool:
        """Return True if something happens at that time or before it."""
        return bool(self._events) and self._events[0][0] <= at_ns

    def pop(self) -> tuple[int, int | Handover | None]:
        """Return the time and the place of the next failure, or the end of a copy.

        A place of None says that a replica starts or is back, and ``_LOOK`` that the load is to be looked at.
        """
        at_ns, _, place = heapq.heappop(self._events)
        if isinstance(place, int) and place != _LOOK:
            heapq.heappush(self._events, (at_ns + self._restart_ns, next(self._numbers), None))
        return at_ns, place


def _summary(values: array[float]) -> dict[str, float]:
    """Return the mean and the percentiles of values, which are empty if there are none."""
    if not values:
        return {}
    numbers: Any = np.frombuffer(values, np.float64)
    percentiles = np.percentile(numbers, _PERCENTILES)
    by_name = {f"p{share}": float(value) for share, value in zip(_PERCENTILES, percentiles, strict=True)}
    return {"mean": float(numbers.mean()), **by_name}
