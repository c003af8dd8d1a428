"""Simulates many replicas of a model that serve a trace.

The scheduler, the pages, the prefix cache and the router are those of the engine and of the service; only the step is
replaced, by what it costs.  Nothing is computed and no time passes: the clock is virtual.
"""

from __future__ import annotations

import gc
import heapq
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from penstock.cluster.costs import COSTS_348M, StepCosts
from penstock.cluster.replica import NS, Arrived, Replica, ReplicaLimits, StepTable, new_request
from penstock.cluster.routing import POLICIES, Router
from penstock.cluster.trace import SegmentKeys, TraceRequest
from penstock.config import check_choice, check_integer
from penstock.errors import InvalidFileError
from penstock.runtime.program import PAGE_TOKENS

__all__ = ["Report", "Simulation", "simulate"]

MAX_REPLICAS: Final = 100_000
_PERCENTILES: Final = (50, 90, 99)
_REPORT_EVERY: Final = 1000


@dataclass(frozen=True)
class Simulation:
    """What is simulated: ``replicas`` of ``tp`` ranks each, with these costs and limits, under a policy of the router.

    ``is_stepwise``: simulate each step as an event of its own, even while the batch does not change.  The result is
    the same.
    """

    replicas: int = 1
    policy: str = "prefix"
    costs: StepCosts = COSTS_348M
    tp: int = 1
    limits: ReplicaLimits = field(default_factory=ReplicaLimits)
    is_stepwise: bool = False

    def __post_init__(self) -> None:
        """Check every field."""
        check_integer("replicas", self.replicas, 1, MAX_REPLICAS)
        check_choice("policy", self.policy, POLICIES)
        self.costs.on_ranks(self.tp)


@dataclass
class Report:
    """The result.  Times in seconds, of the virtual clock.

    ``ttft``, ``tpot`` and ``e2e`` have the mean and the percentiles "p50", "p90" and "p99" of the time to the first
    token, per further token, and to the end.  ``prefilled_tokens`` of the prompts were computed, also those that were
    computed again after a preemption, and ``cached_tokens`` were shared.  ``utilisation``: the share of the time in
    which replicas ran steps.  ``load_imbalance``: how much longer than the mean the busiest replica ran, as a share.
    ``replica_seconds``: replicas times ``seconds``, the time from the first arrival to the last end.
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
    steps: int = 0
    hit_rate: float = 0.0
    ttft: dict[str, float] = field(default_factory=dict)
    tpot: dict[str, float] = field(default_factory=dict)
    e2e: dict[str, float] = field(default_factory=dict)
    utilisation: float = 0.0
    load_imbalance: float = 0.0
    seconds: float = 0.0
    replica_seconds: float = 0.0


def simulate(
    requests: Iterable[TraceRequest], settings: Simulation, progress: Callable[[int, float], None] | None = None
) -> Report:
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
        self._router = Router(settings.policy)
        table, figures = StepTable(costs, limits), costs.figures(limits.max_requests)
        self._replicas: list[Replica] = []
        for _ in range(settings.replicas):
            self._router.add(figures, limits.max_requests, limits.num_pages)
            self._replicas.append(Replica(limits, table, self._keys, is_stepwise=settings.is_stepwise))
        self._ends: list[tuple[int, int]] = []
        self._ttft, self._tpot, self._e2e = array("d"), array("d"), array("d")
        self._num_requests = self._output_tokens = 0
        self._first_ns: int | None = None
        self._last_ns = 0

    def run(self, requests: Iterable[TraceRequest], progress: Callable[[int, float], None]) -> Report:
        for request in requests:
            now_ns = round(request.time * NS)
            self._run_until(now_ns)
            self._arrive(request, now_ns)
            if self._num_requests % _REPORT_EVERY == 0:
                progress(self._num_requests, request.time)
        self._run_until(None)
        progress(self._num_requests, self._last_ns / NS)
        return self._report()

    def _run_until(self, now_ns: int | None) -> None:
        """Run the steps that end before ``now_ns``; None is all.  A step that ends right then sees the arrival."""
        ends, replicas = self._ends, self._replicas
        while ends and (now_ns is None or ends[0][0] < now_ns):
            end_ns, place = heapq.heappop(ends)
            replica = replicas[place]
            if replica.end_ns != end_ns:
                continue  # an arrival has ended these steps earlier
            first, ended = replica.finish_steps()
            for arrived in first:
                self._router.prefilled(place, arrived.queued)
            for arrived in ended:
                self._note_end(arrived, end_ns)
            if replica.end_ns is not None:
                heapq.heappush(ends, (replica.end_ns, place))

    def _arrive(self, request: TraceRequest, now_ns: int) -> None:
        prompt_len = request.prompt_tokens
        num_held = self._settings.limits.num_pages * PAGE_TOKENS
        if prompt_len + request.output_tokens > num_held:
            raise InvalidFileError(
                f"{request.source or 'trace'}: segments: expected at most {num_held} tokens with those of the answer, "
                f"which a replica has pages for, got {prompt_len + request.output_tokens}",
                param="segments",
            )
        keys = self._keys.of_prompt(request.segments)
        route = self._router.route(prompt_len, keys)
        place, queued = route.place, max(0, prompt_len - route.num_known * PAGE_TOKENS)
        self._router.begin(place, queued, keys)
        self._num_requests += 1
        if self._first_ns is None:
            self._first_ns = now_ns
        engine_request = new_request(self._num_requests, prompt_len, request.output_tokens, keys, request.time)
        replica = self._replicas[place]
        before = replica.end_ns
        replica.submit(Arrived(engine_request, place, now_ns, queued), now_ns)
        if replica.end_ns is not None and replica.end_ns != before:
            heapq.heappush(self._ends, (replica.end_ns, place))

    def _note_end(self, arrived: Arrived, now_ns: int) -> None:
        num_tokens = arrived.request.max_tokens
        self._router.end(arrived.place, num_tokens)
        self._output_tokens += num_tokens
        self._ttft.append((arrived.first_ns - arrived.arrival_ns) / NS)
        self._e2e.append((now_ns - arrived.arrival_ns) / NS)
        if num_tokens > 1:
            self._tpot.append((now_ns - arrived.first_ns) / NS / (num_tokens - 1))
        self._last_ns = now_ns

    def _report(self) -> Report:
        settings, costs = self._settings, self._costs
        source = {"model": costs.model, "machine": costs.machine, "source": costs.source}
        report = Report(settings.policy, settings.replicas, settings.tp, source, self._num_requests)
        schedulers = [replica.scheduler for replica in self._replicas]
        busy_ns = [replica.busy_ns for replica in self._replicas]
        report.prefilled_tokens = sum(replica.num_prefilled for replica in self._replicas)
        report.cached_tokens = sum(scheduler.num_cached_tokens for scheduler in schedulers)
        report.preemptions = sum(scheduler.num_preemptions for scheduler in schedulers)
        report.steps = sum(replica.num_steps for replica in self._replicas)
        report.output_tokens = self._output_tokens
        num_prompt = sum(scheduler.num_prompt_tokens for scheduler in schedulers)
        report.hit_rate = report.cached_tokens / num_prompt if num_prompt else 0.0
        report.ttft, report.tpot, report.e2e = map(_summary, (self._ttft, self._tpot, self._e2e))
        whole_ns = self._last_ns - (self._first_ns or 0)
        report.seconds = whole_ns / NS
        report.replica_seconds = report.seconds * settings.replicas
        if whole_ns:
            report.utilisation = sum(busy_ns) / whole_ns / settings.replicas
        if any(busy_ns):
            report.load_imbalance = max(busy_ns) * settings.replicas / sum(busy_ns) - 1
        return report


def _summary(values: array[float]) -> dict[str, float]:
    """Return the mean and the percentiles of values, which are empty if there are none."""
    if not values:
        return {}
    numbers: Any = np.frombuffer(values, np.float64)
    percentiles = np.percentile(numbers, _PERCENTILES)
    by_name = {f"p{share}": float(value) for share, value in zip(_PERCENTILES, percentiles, strict=True)}
    return {"mean": float(numbers.mean()), **by_name}
