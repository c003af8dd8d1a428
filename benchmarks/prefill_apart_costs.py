"""Simulates prefill and decode in replicas apart against chunked prefill, by what steps cost: no model, no clock.

    python -m benchmarks.prefill_apart_costs [--replicas 8] [--apart 2,3,4] [--chunks 32,128,512] [--gb-s 1]

``prefill_apart.py`` measures the same with workers, for a model that this machine runs.  Here the scheduler and the
pages of each replica are the engine's, as in ``penstock simulate``, so the result is the same on every machine.

The trace has prompts of 3,000 tokens on average and answers of 128, which arrive at random (Poisson).  "chunks of N":
every replica does both, and a step that decodes has at most N tokens of prompts.  "N + M": N replicas compute prompts
and first tokens; the pages then take their bytes over ``--gb-s`` to get to one of M others, which computes the tokens
of the last page again and goes on.  A transfer takes no time of the replicas.  The columns are those of
``prefill_apart.py``; the limits are 2 s to a first token, and a pause of 50 ms in all of an answer but its hand-over.
"""

from __future__ import annotations

import argparse
import heapq
import random
import sys
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path

from benchmarks.prefill_apart import HEAD, Taken, row
from penstock.cluster.costs import COSTS_348M, StepCosts, read_costs
from penstock.cluster.replica import NS, Arrived, Replica, ReplicaLimits, StepTable, new_request
from penstock.cluster.routing import ReplicaRouter
from penstock.cluster.trace import SegmentKeys, TraceRequest
from penstock.runtime.program import PAGE_TOKENS

KV_BYTES = 2 * 24 * 8 * 64 * 2
"""Keys and values of a token of 348M, in bf16."""
NUM_PAGES = 4816


@dataclass(eq=False)
class Ask:
    """A request of the trace, the keys of its prompt's pages, and the times of its tokens in ns."""

    line: TraceRequest
    keys: list[bytes]
    times_ns: list[int] = field(default_factory=list)

    @property
    def num_prompt(self) -> int:
        return self.line.prompt_tokens


class Pool:
    """Replicas that do the same, and their router."""

    def __init__(self, num_replicas: int, costs: StepCosts, limits: ReplicaLimits, keys: SegmentKeys) -> None:
        table, figures = StepTable(costs, limits), costs.figures(limits.max_requests)
        self.router = ReplicaRouter("prefix")
        self.replicas = [Replica(limits, table, keys, is_stepwise=True) for _ in range(num_replicas)]
        for _ in self.replicas:
            self.router.add(figures, limits.max_requests, limits.num_pages)


class Cluster:
    """One pool, or one for prompts and one for answers; ``transfer_s``: seconds of the pages of a token."""

    def __init__(self, pools: list[Pool], transfer_s: float) -> None:
        self.pools, self._transfer_s = pools, transfer_s
        self._events: list[tuple[int, int, int, Ask | tuple[int, int]]] = []  # time, order, pool; what arrives or steps
        self._order, self._ids = count(), count(1)
        self._asks: dict[int, Ask] = {}

    def run(self, asks: list[Ask]) -> None:
        """Run all requests to their ends."""
        for ask in asks:
            self._plan(round(ask.line.time * NS), 0, ask)
        while self._events:
            now_ns, _, pool, what = heapq.heappop(self._events)
            if isinstance(what, Ask):
                self._send(now_ns, pool, what)
            elif self.pools[pool].replicas[what[0]].end_ns == now_ns:
                self._step(now_ns, pool, what[0])

    def _plan(self, at_ns: int, pool: int, what: Ask | tuple[int, int]) -> None:
        heapq.heappush(self._events, (at_ns, next(self._order), pool, what))

    def _send(self, now_ns: int, pool: int, ask: Ask) -> None:
        """Send a request to a replica of a pool; in the second one its pages come with it."""
        router, num_begun = self.pools[pool].router, len(ask.times_ns)
        num_left = 1 if len(self.pools) > pool + 1 else ask.line.output_tokens - num_begun
        queued = ask.num_prompt % PAGE_TOKENS + 1 if num_begun else ask.num_prompt
        place = router.route(queued, []).place
        router.begin(place, queued, [])
        replica = self.pools[pool].replicas[place]
        if num_begun:
            ledger, pages = replica.scheduler.ledger, replica.scheduler.ledger.open()
            if ledger.reserve(pages, len(ask.keys) * PAGE_TOKENS, len(replica.scheduler.running)):
                ledger.name(pages, ask.keys)
                ledger.close(pages)  # they keep their names until their memory is needed
        number, before = next(self._ids), replica.end_ns
        request = new_request(number, ask.num_prompt + num_begun, num_left, [*ask.keys], ask.line.time)
        self._asks[number] = ask
        replica.submit(Arrived(request, ask.line, place, now_ns, queued, []), now_ns)
        self._plan_step(pool, place, before)

    def _plan_step(self, pool: int, place: int, before: int | None) -> None:
        end_ns = self.pools[pool].replicas[place].end_ns
        if end_ns is not None and end_ns != before:
            self._plan(end_ns, pool, (place, 0))

    def _step(self, now_ns: int, pool: int, place: int) -> None:
        """End the step of a replica: its requests get their tokens, and those of prompts leave."""
        router, replica = self.pools[pool].router, self.pools[pool].replicas[place]
        for chunk in replica._chunks:
            if chunk.samples:
                self._asks[chunk.request.id].times_ns.append(now_ns)
        first, ended, _ = replica.finish_steps()
        replica.journal.take()
        for arrived in first:
            router.prefilled(place, arrived.queued)
        for arrived in ended:
            ask = self._asks.pop(arrived.request.id)
            router.end(place, len(ask.times_ns))
            if len(ask.times_ns) < ask.line.output_tokens:
                self._plan(now_ns + round(ask.num_prompt * self._transfer_s * NS), pool + 1, ask)
        self._plan_step(pool, place, now_ns)


def trace_of(rate: float, num_requests: int, keys: SegmentKeys) -> list[Ask]:
    """Return requests that arrive at ``rate`` per second, all at once if it is infinite."""
    draw, now, asks = random.Random(1), 0.0, []
    for number in range(num_requests):
        now += draw.expovariate(1.0) / rate
        line = TraceRequest(now, [(f"user {number}", draw.randint(1500, 4500))], draw.randint(32, 224))
        asks.append(Ask(line, keys.of_prompt(line.segments)))
    return asks


def play(args: argparse.Namespace, numbers: list[int], chunk: int, rate: float) -> tuple[Taken, float]:
    """Return the times of the trace with so many replicas in each pool, and the seconds that it took."""
    costs = COSTS_348M if args.costs is None else read_costs(args.costs)
    keys, limits = SegmentKeys(), ReplicaLimits(NUM_PAGES, 32, max_mixed_tokens=chunk)
    asks = trace_of(rate, args.requests, keys)
    transfer_s = args.kv_bytes / (1e9 * args.gb_s) if args.gb_s else 0.0
    Cluster([Pool(number, costs, limits, keys) for number in numbers], transfer_s).run(asks)
    taken = Taken()
    for ask in asks:
        times = ask.times_ns
        if len(times) != ask.line.output_tokens:
            raise SystemExit(f"an answer has {len(times)} tokens of {ask.line.output_tokens}")
        pauses = [(after - before) / NS for before, after in pairwise(times)]
        if len(numbers) > 1:
            taken.handed_s.append(pauses.pop(0))
        taken.firsts_s.append(times[0] / NS - ask.line.time)
        taken.pauses_s.append(pauses)
    return taken, max(ask.times_ns[-1] for ask in asks) / NS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=8, help="replicas in all (default: 8)")
    parser.add_argument("--apart", default="2,3,4,5", help="replicas for prompts, several ways (default: 2,3,4,5)")
    parser.add_argument(
        "--chunks", default="32,64,128,512", help="prompt tokens beside decodes (default: 32,64,128,512)"
    )
    parser.add_argument(
        "--shares", default="0.5,0.7,0.9", help="rates, as shares of the capacity (default: 0.5,0.7,0.9)"
    )
    parser.add_argument("--requests", type=int, default=2000, help="requests of a trace (default: 2000)")
    parser.add_argument("--gb-s", type=float, default=1.0, help="GB/s of a transfer; 0: it takes no time (default: 1)")
    parser.add_argument("--kv-bytes", type=int, default=KV_BYTES, help=f"of a token (default: {KV_BYTES}, of 348M)")
    parser.add_argument("--costs", type=Path, help="file of penstock bench --costs (default: 348M on two Zen 4 cores)")
    parser.add_argument("--first-ms", type=float, default=2000.0, help="limit of a first token (default: 2000)")
    parser.add_argument("--between-ms", type=float, default=50.0, help="limit of a pause (default: 50)")
    args = parser.parse_args()
    capacity = args.requests / play(args, [args.replicas], 128, float("inf"))[1]
    print(f"{args.replicas} replicas; capacity with chunks of 128: {capacity:.2f} requests/s\n{HEAD}")
    for share in map(float, args.shares.split(",")):
        print(f"at {share:.0%} of the capacity")
        for chunk in map(int, args.chunks.split(",")):
            taken, _ = play(args, [args.replicas], chunk, share * capacity)
            print(row(args, f"chunks {chunk}", taken), flush=True)
        for number in map(int, args.apart.split(",")):
            taken, _ = play(args, [number, args.replicas - number], 128, share * capacity)
            print(row(args, f"{number} + {args.replicas - number}", taken), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
