"""Runs many short requests with random aborts, and checks that memory is stable and that every page is free at the end.

    python benchmarks/soak.py demo/demo.psm --requests 100000

Resident memory is read at every hundredth of the run.  The growth of a line through the last three quarters of the
readings must be under 1 % of their mean.  The exit status is 1 if it is not, if a page is held at the end, or if a
request ended with an error other than its deadline.  Errors are printed with kind and message.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from penstock import LLM, ProgramLimits, RequestOptions, SamplingParams
from penstock.engine.request import Request
from penstock.errors import DeadlineError
from penstock.llm.stream import Stream

MAX_LIVE = 24


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def one(llm: LLM, random: np.random.Generator, shared: list[int]) -> Stream:
    """Return a request of a few tokens; some share a beginning, or have a deadline or a stop string."""
    prompt = random.integers(0, llm.info.vocab_size, int(random.integers(1, 60))).tolist()
    if random.random() < 0.5:
        prompt = shared[: int(random.integers(1, len(shared)))] + prompt
    params = SamplingParams(
        max_tokens=int(random.integers(1, 9)),
        temperature=float(random.random()),
        stop=["x"] if random.random() < 0.1 else [],
    )
    options = RequestOptions(priority=int(random.integers(0, 3)), deadline_s=60.0 if random.random() < 0.1 else None)
    return llm.stream(prompt, params, options)


class Errors:
    """Observes an engine and collects the errors of requests."""

    def __init__(self) -> None:
        self.found: list[Exception] = []

    def __call__(self, news: Sequence[Request]) -> None:
        self.found += [request.error for request in news if request.error is not None]

    @property
    def unexpected(self) -> list[Exception]:
        """Return the errors that are not of a deadline."""
        return [error for error in self.found if not isinstance(error, DeadlineError)]

    def __str__(self) -> str:
        return "".join(f"\n  {type(error).__name__}: {error}" for error in self.found[:20])


def soak(llm: LLM, num_requests: int) -> list[int]:
    """Run the requests; return resident bytes at a hundred points."""
    random = np.random.default_rng(0)
    shared = random.integers(0, llm.info.vocab_size, 100).tolist()
    live: list[Stream] = []
    readings = []
    for count in range(1, num_requests + 1):
        live.append(one(llm, random, shared))
        if random.random() < 0.1:
            live.pop(int(random.integers(0, len(live)))).abort()
        while len(live) >= MAX_LIVE:
            llm.engine.step()
            live = [stream for stream in live if not stream.is_finished]
        if count % max(1, num_requests // 100) == 0:
            readings.append(resident_bytes())
    while llm.engine.has_work:
        llm.engine.step()
    return readings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--requests", type=int, default=100_000)
    args = parser.parse_args()
    start, errors = time.perf_counter(), Errors()
    with LLM(args.model, limits=ProgramLimits(max_requests=16, num_pages=96, context_len=512)) as llm:
        llm.engine.observer = errors
        readings = soak(llm, args.requests)
        llm.engine.check_integrity()
        figures = llm.engine.figures()
        held = [pool.num_pages - pool.num_free for pool in llm.engine.scheduler.ledger.pools]
    tail = np.array(readings[len(readings) // 4 :], float)
    slope = float(np.polyfit(np.arange(len(tail)), tail, 1)[0])
    growth = slope * len(tail) / tail.mean()
    print(
        f"{args.requests} requests in {time.perf_counter() - start:.0f} s: {dict(figures.num_finished)}, "
        f"{figures.num_preemptions} preemptions, {figures.hit_rate:.0%} of prompt tokens from cache; "
        f"resident {readings[0] / 1e6:.1f} to {readings[-1] / 1e6:.1f} MB, slope {growth:+.2%}; pages held {held}; "
        f"{len(errors.found)} errors{errors}"
    )
    missing = sum(figures.num_finished.values()) != args.requests
    return int(growth > 0.01 or any(held) or missing or bool(errors.unexpected))


if __name__ == "__main__":
    sys.exit(main())
