"""Measures latency and throughput of requests that arrive over time, at given rates.

A trace of prompts and answer lengths is made once (lognormal lengths, random tokens).  It first runs offline, with all
requests at once, which gives the capacity; then with Poisson arrivals at each rate.  A latency counts from the time at
which a request was due, so that a stall is not hidden (G. Tene's "coordinated omission").
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.bench.open_model import BenchModel
from penstock.config import check_integer
from penstock.engine.engine import Engine
from penstock.engine.options import EngineOptions
from penstock.engine.params import ResolvedSampling
from penstock.engine.request import Request, RequestStatus
from penstock.errors import InternalError, InvalidArgumentError
from penstock.runtime.build import Progress
from penstock.runtime.program import ProgramLimits
from penstock.validation import refusal

__all__ = ["OnlineBench", "OnlineReport", "RateReport", "SyntheticTrace", "bench_online"]

PERCENTILES = (50, 90, 99)
MAX_RATES = 32


@dataclass(frozen=True)
class SyntheticTrace:
    """The requests: ``num_requests`` prompts and answers with median lengths ``prompt_tokens`` and ``new_tokens``.

    Lengths have a lognormal distribution with sigma ``spread``; 0 gives equal lengths.  The first ``shared_tokens``
    tokens of all prompts are the same.
    """

    num_requests: int = 64
    prompt_tokens: int = 256
    new_tokens: int = 64
    spread: float = 0.6
    shared_tokens: int = 0

    def __post_init__(self) -> None:
        """Check the sizes."""
        for name in ("num_requests", "prompt_tokens", "new_tokens"):
            check_integer(name, getattr(self, name), 1, 1 << 20)
        if not 0 <= self.spread <= 2:
            raise refusal("spread", "a number from 0 to 2", self.spread)
        if not 0 <= self.shared_tokens < self.prompt_tokens:
            raise InvalidArgumentError(
                f"shared_tokens must be at least 0 and less than prompt_tokens {self.prompt_tokens}, "
                f"not {self.shared_tokens!r}",
                param="shared_tokens",
            )

    def lengths(self, seed: int = 0) -> tuple[list[int], list[int]]:
        """Return the prompt lengths and the answer lengths, at most four times their medians."""
        random = np.random.default_rng(seed)

        def draw(median: int) -> list[int]:
            samples = median * np.exp(self.spread * random.standard_normal(self.num_requests))
            return [int(length) for length in np.clip(np.rint(samples), 1, 4 * median)]

        return [max(length, self.shared_tokens + 1) for length in draw(self.prompt_tokens)], draw(self.new_tokens)


@dataclass(frozen=True)
class OnlineBench(BenchModel):
    """Settings of a measurement.

    ``rates`` in requests per second; ``shares`` are rates as shares of the measured capacity.  With neither, only the
    offline run is done.
    """

    trace: SyntheticTrace = field(default_factory=SyntheticTrace)
    rates: tuple[float, ...] = ()
    shares: tuple[float, ...] = (0.5, 0.8)
    limits: ProgramLimits = field(default_factory=ProgramLimits)
    options: EngineOptions = field(default_factory=EngineOptions)

    def __post_init__(self) -> None:
        """Check the rates."""
        if len(self.rates) + len(self.shares) > MAX_RATES:
            raise InvalidArgumentError(f"rate must have at most {MAX_RATES} entries", param="rate")
        for rate in self.rates + self.shares:
            if not 1e-3 <= rate <= 1e6:
                raise refusal("rate", "a number from 0.001 to 1000000", rate)


@dataclass
class RateReport:
    """The result of one run.  Latencies in seconds, by percentile.

    ``rate``: requests per second that were due, or 0 if all were due at once.  ``hit_rate``: share of prompt tokens
    that came from the prefix cache.
    """

    rate: float
    seconds: float
    first_token_s: dict[int, float]
    between_tokens_s: dict[int, float]
    request_s: dict[int, float]
    requests_per_s: float
    output_tokens_per_s: float
    hit_rate: float
    num_preemptions: int
    max_running: int
    max_waiting: int


@dataclass
class OnlineReport:
    """The results of all runs; the first run is offline."""

    network: str
    scheme: str
    cpu_level: str
    num_threads: int
    trace: SyntheticTrace
    prompt_tokens: int
    output_tokens: int
    runs: list[RateReport] = field(default_factory=list)
    num_ranks: int = 1


def bench_online(settings: OnlineBench, progress: Callable[[Any], None] = lambda _: None) -> OnlineReport:
    """Measure a bundle or a checkpoint folder; InvalidArgumentError if the trace does not fit the model."""
    opened = settings.open(settings.limits, progress)
    program, info = opened.program, opened.program.info
    try:
        engine = Engine(program, settings.options)
        prompt_lens, answer_lens = settings.trace.lengths()
        longest = max(p + a for p, a in zip(prompt_lens, answer_lens, strict=True))
        if longest > engine.max_len:
            raise InvalidArgumentError(
                f"prompt_tokens, new_tokens and spread give a request of {longest} tokens, but the context holds "
                f"{engine.max_len}",
                param="prompt_tokens",
            )
        random = np.random.default_rng(1)
        shared = random.integers(0, info.vocab_size, settings.trace.shared_tokens).tolist()
        prompts = [shared + random.integers(0, info.vocab_size, n - len(shared)).tolist() for n in prompt_lens]
        report = OnlineReport(
            info.network,
            info.scheme,
            info.cpu_level,
            info.num_threads,
            settings.trace,
            sum(prompt_lens),
            sum(answer_lens),
            num_ranks=info.num_ranks,
        )
        _Run(engine, prompts[:1], [1], 0.0).report()  # the first run loads pages into memory and raises clock speeds
        total = 1 + len(settings.rates) + len(settings.shares)
        progress(Progress("measure", 0, total, "rates", "all requests at once"))
        report.runs.append(_Run(engine, prompts, answer_lens, 0.0).report())
        capacity = report.runs[0].requests_per_s
        for rate in sorted([*settings.rates, *(share * capacity for share in settings.shares)]):
            progress(Progress("measure", len(report.runs), total, "rates", f"{rate:.2f} requests/s"))
            report.runs.append(_Run(engine, prompts, answer_lens, rate).report())
        return report
    finally:
        program.close()


class _Run:
    """One pass over the trace; with ``rate`` 0 all requests are due at once."""

    def __init__(self, engine: Engine, prompts: list[list[int]], answer_lens: list[int], rate: float) -> None:
        self.engine, self.prompts, self.answer_lens, self.rate = engine, prompts, answer_lens, rate
        count = len(prompts)
        gaps = np.random.default_rng(2).exponential(1 / rate, count) if rate else np.zeros(count)
        self.due: list[float] = (np.cumsum(gaps) - gaps[0]).tolist()
        self.last: dict[int, float] = {}
        self.first_token: list[float] = []
        self.between: list[float] = []
        self.whole: list[float] = []
        self.max_running = self.max_waiting = 0

    def report(self) -> RateReport:
        engine = self.engine
        engine.forget_prefixes()
        before = engine.figures()
        seconds = self._play()
        after = engine.figures()
        prompt_tokens = after.num_prompt_tokens - before.num_prompt_tokens
        return RateReport(
            rate=self.rate,
            seconds=seconds,
            first_token_s=_percentiles(self.first_token),
            between_tokens_s=_percentiles(self.between),
            request_s=_percentiles(self.whole),
            requests_per_s=len(self.prompts) / seconds,
            output_tokens_per_s=sum(self.answer_lens) / seconds,
            hit_rate=(after.num_cached_tokens - before.num_cached_tokens) / prompt_tokens,
            num_preemptions=after.num_preemptions - before.num_preemptions,
            max_running=self.max_running,
            max_waiting=self.max_waiting,
        )

    def _play(self) -> float:
        """Submit due requests and step until all are done; return the seconds that took."""
        engine, start = self.engine, time.perf_counter()
        due_at: dict[int, float] = {}
        num_submitted = 0
        while num_submitted < len(self.prompts) or engine.has_work:
            now = time.perf_counter() - start
            while num_submitted < len(self.prompts) and self.due[num_submitted] <= now:
                sampling = ResolvedSampling(max_tokens=self.answer_lens[num_submitted])
                request = engine.submit(self.prompts[num_submitted], sampling)
                due_at[request.id] = self.due[num_submitted]
                num_submitted += 1
            if not engine.has_work:
                time.sleep(max(0.0, self.due[num_submitted] - (time.perf_counter() - start)))
                continue
            events = engine.step()
            self._record(events, due_at, time.perf_counter() - start)
        return time.perf_counter() - start

    def _record(self, requests: list[Request], due_at: dict[int, float], now: float) -> None:
        for request in requests:
            if request.error is not None:
                raise request.error
            if request.id in self.last:
                self.between.append(now - self.last[request.id])
            else:
                self.first_token.append(now - due_at[request.id])
            self.last[request.id] = now
            if request.status is RequestStatus.FINISHED:
                if request.finish_reason != "length":
                    raise InternalError(f"bench: a request ended by {request.finish_reason}")
                self.whole.append(now - due_at[request.id])
        self.max_running = max(self.max_running, len(self.engine.scheduler.running))
        self.max_waiting = max(self.max_waiting, len(self.engine.scheduler.waiting))


def _percentiles(values: list[float]) -> dict[int, float]:
    return {p: float(np.percentile(values, p)) if values else 0.0 for p in PERCENTILES}
