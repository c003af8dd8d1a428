"""Measures prefill and decode in workers apart against chunked prefill in all workers, on the same cores.

    python -m benchmarks.prefill_apart [BUNDLE] [--workers 4] [--apart 1,2] [--threads 1] [--shares 0.5,0.8]

The trace has long prompts (three quarters of the context) and short answers, which arrive at random (Poisson).  In
"together" every worker does both: a step that decodes has at most 128 tokens of prompts.  In "N + M" new requests go to
N workers; after the first token of an answer its pages are copied to one of the M others, which goes on with it.  The
transfer is that of a drained worker (``moving.py``), so the first worker goes on until the pages are there, and the
answer stays there while no other worker has a free place.

The capacity is the rate at which "together" answers requests that come at once; then they arrive at each share of it,
and all ways get the same trace.  "Between tokens" has every pause of every answer, and "longest" the longest pause of
each answer.  "Met" is the share of answers with a first token within ``--first-ms`` and no pause above
``--between-ms``.  "Moved" counts the answers that were handed over, and "after" is the median time from the first token
to the first one of the other worker.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np

from penstock import ProgramLimits, SamplingParams
from penstock.engine.options import RequestOptions, check_options
from penstock.llm.answer import EventAnswer
from penstock.runtime.program import pages_for
from penstock.serving.proto import wire_pb2 as pb
from penstock.serving.workers.failover import Failover
from penstock.serving.workers.primary import Primary
from penstock.serving.workers.remote_model import RemoteBackend
from penstock.serving.workers.worker_config import WorkerModelOptions
from penstock.serving.workers.worker_connection import WorkerConnection

LOOK_S = 0.01
"""Pause after which an answer looks again for a worker with a free place."""
HEAD = (
    f"{'':10} {'first token, ms':>17} {'between tokens, ms':>19} {'longest':>8}\n"
    f"{'':10} {'p50':>8} {'p99':>8} {'p50':>10} {'p99':>8} {'p99':>8} {'met':>7} {'moved':>6} {'after':>8}"
)


@dataclass(frozen=True)
class Ask:
    """A request of the trace: when it is due in seconds, its prompt and the tokens of its answer."""

    due_s: float
    prompt: list[int]
    num_new: int


@dataclass
class Taken:
    """The times of the answers: first tokens, pauses by answer, and seconds from first token to the other worker."""

    firsts_s: list[float] = field(default_factory=list)
    pauses_s: list[list[float]] = field(default_factory=list)
    handed_s: list[float] = field(default_factory=list)
    num_tokens: int = 0


class Leaving(Failover):
    """A request that leaves the worker of its prompt after the first token."""

    def __init__(self, backend: Apart, prompt_ids: Sequence[int], options: RequestOptions, make: Callable) -> None:
        super().__init__(backend, prompt_ids, options, make)
        self._backend = backend
        self._leaving: asyncio.Task[None] | None = None

    async def start(self) -> EventAnswer:
        """Return the answer after its first event."""
        answer = await super().start()
        self._leaving = asyncio.ensure_future(self._leave())
        return answer

    async def _leave(self) -> None:
        start, prefill = time.perf_counter(), self._backend.prefill_workers
        while not self.answer.is_over:
            moving = self._move()
            if moving is not None:
                await moving
            if self._connection not in prefill:
                self._backend.handed_s.append(time.perf_counter() - start)
                return
            await asyncio.sleep(LOOK_S)


class Apart(RemoteBackend):
    """A model whose first ``num_prefill`` workers compute prompts, and the others answers; 0: all do both."""

    num_prefill = 0

    def __init__(self, primary: Primary, options: WorkerModelOptions, num_workers: int, num_prefill: int) -> None:
        super().__init__("bench", primary, options, num_workers)
        self.num_prefill = num_prefill
        self.handed_s: list[float] = []

    @property
    def prefill_workers(self) -> list[WorkerConnection]:
        return self._connections[: self.num_prefill]

    def _with_state(self, state_id: str) -> list[WorkerConnection]:
        if not self.num_prefill:
            return super()._with_state(state_id)
        return self._connections[self.num_prefill :] if state_id else self.prefill_workers

    async def _start(
        self, ids: Sequence[int], options: RequestOptions | None, make: Callable[[pb.Options], pb.ToWorker]
    ) -> EventAnswer:
        if not self.num_prefill:
            return await super()._start(ids, options, make)
        return await Leaving(self, ids, check_options(options), make).start()


def trace_of(args: argparse.Namespace, rate: float, num_requests: int) -> list[Ask]:
    """Return requests that arrive at ``rate`` per second, all at once if it is infinite."""
    draw, now, trace = random.Random(1), 0.0, []
    for _ in range(num_requests):
        now += draw.expovariate(1.0) / rate
        num_prompt = draw.randint(args.context * 5 // 8, args.context * 7 // 8 - args.new_tokens // 2)
        prompt = [draw.randrange(300, 4000) for _ in range(num_prompt)]
        trace.append(Ask(now, prompt, draw.randint(args.new_tokens // 2, args.new_tokens)))
    return trace


async def answer(backend: RemoteBackend, ask: Ask, start_s: float, taken: Taken) -> None:
    """Send a request when it is due, and note its times."""
    due_s, times = start_s + ask.due_s, []
    await asyncio.sleep(due_s - time.perf_counter())
    params = SamplingParams(max_tokens=ask.num_new, temperature=0, ignore_eos=True)
    num_tokens = 0
    async with await backend.submit(ask.prompt, params) as answers:
        async for delta in answers:
            times.append(time.perf_counter())
            num_tokens += len(delta.token_ids)
    if num_tokens != ask.num_new:
        raise SystemExit(f"an answer has {num_tokens} tokens of {ask.num_new}")
    taken.firsts_s.append(times[0] - due_s)
    taken.pauses_s.append([after - before for before, after in pairwise(times)] or [0.0])
    taken.num_tokens += num_tokens


async def play(args: argparse.Namespace, num_prefill: int, trace: list[Ask]) -> tuple[Taken, float]:
    """Return the times of a trace at fresh workers, and the seconds that it took."""
    limits = ProgramLimits(
        context_len=args.context, max_requests=args.max_requests, num_pages=args.max_requests * pages_for(args.context)
    )
    primary = Primary()
    backend = Apart(primary, WorkerModelOptions(threads=args.threads, limits=limits), args.workers, num_prefill)
    taken = Taken(handed_s=backend.handed_s)
    await primary.open()
    try:
        await backend.load(str(args.bundle))
        while sum(one.status == "ready" for one in backend.workers()) < args.workers:
            await asyncio.sleep(0.05)
        start_s = time.perf_counter() + 0.5
        await asyncio.gather(*(answer(backend, ask, start_s, taken) for ask in trace))
        return taken, time.perf_counter() - start_s
    finally:
        await backend.close()
        await primary.close()


def row(args: argparse.Namespace, name: str, taken: Taken) -> str:
    """Return a line of the table."""
    pauses = np.concatenate([np.array(one) for one in taken.pauses_s])
    longest = np.array([max(one) for one in taken.pauses_s])
    firsts = np.array(taken.firsts_s)
    met = (1000 * firsts <= args.first_ms) & (1000 * longest <= args.between_ms)
    cells = [f"{1000 * value:8.1f}" for one in (firsts, pauses) for value in np.percentile(one, (50, 99))]
    cells.append(f"{1000 * np.percentile(longest, 99):8.1f}")
    handed = f"{1000 * np.median(taken.handed_s):8.1f}" if taken.handed_s else f"{'-':>8}"
    cells[2] = f"{cells[2]:>10}"
    return f"{name:10} {' '.join(cells)} {met.mean():7.1%} {len(taken.handed_s):6} {handed}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path, nargs="?", default=Path("demo/demo.psm"), help="default: demo/demo.psm")
    parser.add_argument("--workers", type=int, default=4, help="workers in all (default: 4)")
    parser.add_argument("--apart", default="1,2", help="workers for prompts, several ways (default: 1,2)")
    parser.add_argument("--threads", type=int, default=1, help="threads of each worker (default: 1)")
    parser.add_argument("--context", type=int, default=1024, help="context of a request (default: 1024)")
    parser.add_argument("--new-tokens", type=int, default=96, help="most tokens of an answer (default: 96)")
    parser.add_argument("--max-requests", type=int, default=16, help="requests per step of a worker (default: 16)")
    parser.add_argument("--requests", type=int, default=400, help="requests of a trace (default: 400)")
    parser.add_argument("--shares", default="0.5,0.8", help="rates, as shares of the capacity (default: 0.5,0.8)")
    parser.add_argument("--first-ms", type=float, default=500.0, help="limit of a first token (default: 500)")
    parser.add_argument("--between-ms", type=float, default=50.0, help="limit of a pause (default: 50)")
    args = parser.parse_args()
    at_once = trace_of(args, float("inf"), max(args.requests // 4, 4 * args.workers))
    taken, seconds = asyncio.run(play(args, 0, at_once))
    capacity = len(at_once) / seconds
    print(f"{args.bundle.name}, {args.workers} workers of {args.threads} threads, prompts of about ", end="")
    print(f"{args.context * 3 // 4} tokens; capacity {capacity:.1f} requests/s, load {os.getloadavg()[0]:.1f}")
    print(HEAD)
    for share in map(float, args.shares.split(",")):
        print(f"at {share:.0%} of the capacity")
        trace = trace_of(args, share * capacity, args.requests)
        for num_prefill in [0, *map(int, args.apart.split(","))]:
            name = f"{num_prefill} + {args.workers - num_prefill}" if num_prefill else "together"
            taken, _ = asyncio.run(play(args, num_prefill, trace))
            print(row(args, name, taken), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
